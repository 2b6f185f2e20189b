"""Hosts come and go: a port and its adapters."""
