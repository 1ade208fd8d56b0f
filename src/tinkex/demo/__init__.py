"""The two demos of `tinkex demo`: a small model learns from examples, or from rewards (reinforcement learning).

A demo is a program like any user's: it uses the clients and `tinkex.local`, and nothing of the server or the engine.

Others import: supervised, reinforced (one demo each), stage (the folder, the service and the saved state of a demo).
"""
