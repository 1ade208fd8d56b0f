"""Work behind the requests: the database thread, clean-up, adapter files, the catalog of models."""
