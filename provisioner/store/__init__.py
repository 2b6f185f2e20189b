"""State: a port and its adapters."""
