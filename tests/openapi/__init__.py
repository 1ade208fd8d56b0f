"""Schemathesis against a real service, with requests made from docs/openapi.json: `make schemathesis`."""
