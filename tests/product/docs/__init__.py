"""What the documents promise is run."""
