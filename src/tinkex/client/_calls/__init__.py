"""Calls to the service: check, encode, send, retry, limit, poll, combine.

    send               one exchange, whole or streamed: headers, credential, statistics, events
    attempts           Attempts: the one loop that repeats a failed request; call: an ordinary call
    decode             reads a response, a large one in a worker thread
    retry              when to try again (pure)
    limits             Gate, Limiter: how much may be in flight
    handshake          ready: dialect, limits and tokens of a service
    poll               from a request id to a result
    submit             one training request
    passes             forward, forward_backward and custom losses over chunks of data
    sampling_session   the numbers of a sampler's samples, and the poll that they share
    sample_call        one sample
    chunks             cuts the data of one call into requests
    validate           checks arguments before anything is sent

Private to tinkex.client.
"""
