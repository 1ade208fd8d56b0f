"""Commands that talk to a service."""
