"""One call to the service: encode, send, retry, limit, poll, join."""
