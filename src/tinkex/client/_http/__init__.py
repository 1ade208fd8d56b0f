"""HTTP/1.1 and HTTP/2 over asyncio: connection pools, TLS, proxies. About 1,200 lines that are ours to keep.

Why no HTTP library: docs/decisions/http-library.md compares five of them by measurement. Parsing is not ours: httptools
(llhttp, the parser of Node) reads HTTP/1.1, and h2 does the frames and the state of HTTP/2.

    transport.py   Transport: one pool per kind of traffic and host, redirects, errors as the SDK raises them
    pool.py        ConnectionPool: opens, reuses and closes connections, first come, first served; read timeouts
    exchange.py    Exchange: one request and its response, filled by a connection; flow control towards slow readers
    http1.py       Http1: one HTTP/1.1 connection
    http2.py       Http2: one HTTP/2 connection with many exchanges
    dial.py        dial: TCP, TLS, CONNECT through a proxy, ALPN

Rules of this package: it knows URLs, headers and bytes, and nothing of the service's API. It retries nothing; only a
request on a connection that the service had closed while it was idle is sent once more (see `ConnectionPool.exchange`).
A key never travels to another host. All code runs on the loop thread.

Others import: transport, dial.
"""
