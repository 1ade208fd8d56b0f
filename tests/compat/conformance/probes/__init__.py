"""One probe per public method of the clients: it calls the method and checks the answer. Run with `-m`."""
