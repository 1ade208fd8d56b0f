"""The handlers of the API, one file per kind of call. A handler has the name of its endpoint.

Others import:
    table     api_routes: the routes of the API, from the table of all handlers
    console   the web page
    health    /livez and /readyz
    metrics   /metrics with its gauges
"""
