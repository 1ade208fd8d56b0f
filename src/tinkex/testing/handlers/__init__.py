"""What the scripted service responds to each endpoint."""
