"""The service: between HTTP, the store and the engine. Never imports the client; the two meet in `wire`."""
