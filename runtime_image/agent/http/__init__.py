"""The agent's HTTP side."""
