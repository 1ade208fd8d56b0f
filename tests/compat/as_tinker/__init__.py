"""`import tinker` through this package."""
