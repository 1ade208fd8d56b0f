"""Sampling: decode batches, KV and prefix caches, the choice of a token, stops."""
