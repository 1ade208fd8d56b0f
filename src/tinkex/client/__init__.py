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

Private: `_http` moves bytes over connections, `_calls` makes one call over them, `_runtime` is what every client object
runs on, `_files` downloads. ARCHITECTURE.md follows one call through them; there are no import cycles.
"""
