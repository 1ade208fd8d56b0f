"""What `tinkex demo` shows: a small model that learns one thing from examples, or by trial and error.

It is a program like any user's: it knows the clients and `tinkex.local`, and nothing of the server or the engine.
"""
