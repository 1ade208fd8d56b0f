"""Base models: their names, their files, and one loaded into memory."""
