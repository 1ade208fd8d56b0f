"""What must survive a restart: rows and payloads. Knows no HTTP and sees no tensor: commands and results are bytes."""
