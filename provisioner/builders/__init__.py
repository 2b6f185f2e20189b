"""What makes images' layers: a port and its adapters."""
