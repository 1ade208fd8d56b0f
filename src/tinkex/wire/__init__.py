"""How values become bytes and bytes become values: shared by the client and the service, free of I/O."""
