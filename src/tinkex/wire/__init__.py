"""Turns values into bytes and bytes into values; shared by the client and the service. No I/O.

Others import:
    endpoints    every call of the API: method, path, type of its response
    requests     the body of every request
    envelope     what a response of `retrieve_future` means
    json_codec   values as JSON
    json_pieces  large results as JSON, a piece at a time
    proto_codec  training and sampling messages as protobuf
    sse          server-sent events
    body         bytes with their content type and encoding
    scan         how many elements a body has, before it is decoded
    dialect      JSON or protobuf
"""
