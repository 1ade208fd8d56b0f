"""The engine's own process: its entry point, its loop, and whose turn it is."""
