"""HTTP/1.1 and HTTP/2 over sockets: connection pools, one exchange, proxies and TLS."""
