"""What every HTTP handler needs: reading requests, access, errors, lookups, downloads, streams, counters.

Nothing here knows an endpoint. `errors`, `access` and `metrics` know no `Service` either: it is built from them.

Others import:
    requests       ApiRequest: tenant, body and named objects of a request; the wrapper that every handler runs in
    fields         the fields of a JSON body
    errors         errors as HTTP responses
    access         API keys and the tenant of a request
    protocol       connections: how many, and how long they may take
    views          records as the JSON that clients read
    downloads      files and archives with ranges and checksums
    event_stream   server-sent events
    large_response large responses in pieces
    links          signed links to files
    metrics        counters for Prometheus
"""
