"""Adapters to what trainers use. Each module needs nothing but the SDK."""
