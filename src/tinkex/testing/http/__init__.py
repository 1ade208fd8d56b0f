"""HTTP for the scripted service: server, connections, messages, and its own codec. Only `testing` imports it."""
