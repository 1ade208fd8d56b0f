"""One file per kind of call; every function here is one endpoint and has the endpoint's name."""
