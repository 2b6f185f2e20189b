"""Bytes that outlive hosts: a port and its adapters."""
