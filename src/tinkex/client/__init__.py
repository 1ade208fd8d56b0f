"""The client of the API. Files and folders whose name begins with `_` are private to this package.

Others import:

    service        ServiceClient: makes all other clients
    training       TrainingClient
    sampling       SamplingClient
    stream         SampleStream, StreamChunk
    chat_stream    stream_chat, ChatDelta: a model's reply from the OpenAI-compatible endpoint
    rest           RestClient, AdminClient
    future         APIFuture, and resolve, reject, follow_up, finished for code that makes futures
    download       download_checkpoint, download, Progress
    tokenizer      Tokenizer, load, tokenizer_id
    diagnose       ServiceProbe, fetch_json, tls_context: for tools that look at the way to a service
    custom_loss    the arithmetic of forward_backward_custom

The way of a request, from the inside out; there are no import cycles:

    _http      bytes over connections
    _runtime   the loop thread, the link to a service, operations
    _calls     send (one exchange) → attempts (the one retry loop) → call, poll, sample_call, submit
    _runtime   session, base_client, operation_queue: what the clients are made of
    clients    service, training, sampling, stream, rest, download
"""
