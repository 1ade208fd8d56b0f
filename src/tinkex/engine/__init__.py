"""Models, adapters and their maths, in a process of their own. Knows no HTTP, no SQL and no client's request.

Others import (none of it loads torch):
    contract          Engine, EngineFault, ModelInfo, SampleSpec, pass_frame …: what server and engine agree on
    frames            Frame: the bytes of commands and replies, on the pipe and in the journal
    host              LocalEngine: starts the engine's process and talks to it
    models.registry   resolve: a model's name to its files
    split             SplitEngine: one engine trains, others sample
    vllm.launch       vllm_engine: an engine that samples with vLLM
"""
