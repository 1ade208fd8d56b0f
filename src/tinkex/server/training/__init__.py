"""Training operations of the service: from intake to a stored result."""
