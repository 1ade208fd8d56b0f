"""HTTP for the service: reading requests, access, errors, files, metrics."""
