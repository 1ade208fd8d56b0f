"""Sampling: batches requests, keeps their keys and values, and draws tokens.

Others import:
    sampler          `Sampler`, the one object that the engine's process drives
    decoder          the contract of a decoder (`Decoder`, `PromptChunk`, `RowInput`), which `packed` implements too;
                     `GeneralDecoder`
    kv_cache         `KVCache`, which a decoder fills

A request goes through `sampler` (waits for room), `decode_batch` (prefill and decode), `next_token` (logits to tokens)
and `stop_strings`. This package imports `adapters` and `models`. It never imports `packed` or `runner_choice`: the
process hands a function that chooses the decoder to `Sampler`.
"""
