"""The OpenAI-compatible API."""
