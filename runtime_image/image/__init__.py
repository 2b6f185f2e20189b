"""What only the agent's container image has: how it starts, its health check, its bill of materials."""
