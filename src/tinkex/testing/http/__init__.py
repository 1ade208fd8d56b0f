"""HTTP for the scripted service."""
