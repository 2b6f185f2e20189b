"""Actions: their order, their execution in the sandbox, their observations."""
