"""Sampling requests: from a request to the engine and back; tokenizers and chat templates.

Others import:
    sample_queue      Sampling, SampleTarget, PolledSample: the queue, and what to sample from
    sample_spec       spec_of, stops_of, response_of: requests and responses
    tokenizer_cache   Tokenizers, ModelTokenizer, Detokenizer: text and tokens
"""
