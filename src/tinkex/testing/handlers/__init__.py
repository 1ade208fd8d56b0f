"""Responses of the scripted service, by the subject of their endpoints: one function each, of the endpoint's name.

A function gets the service's state and the request, and returns a response, or what JSON shall say with status 200.

Others import: account, files, futures, sampling, training.
"""
