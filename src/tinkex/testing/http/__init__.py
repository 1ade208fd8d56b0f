"""HTTP for the scripted service: a server on 127.0.0.1, its connections, messages and codec.

Others import: server, messages, codec.
"""
