"""Responses of the scripted service, by the subject of their endpoints.

Others import: account, files, futures, sampling, training.
"""
