"""Samples of the service: their queue, their options, tokenizers and chat templates."""
