"""Runs what the documents promise."""
