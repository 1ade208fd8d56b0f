"""Files from a service: downloads, archives, tokenizers."""
