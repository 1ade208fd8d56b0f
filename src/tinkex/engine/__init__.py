"""Models, adapters and their maths, in a process of their own. Knows no HTTP, no SQL and no client's request.

Others import (none of it loads torch):
    contract          Engine, EngineFault, EngineDied, ModelInfo, SampleSpec …: what server and engine agree on
    frames            Frame: the bytes of commands and replies, on the pipe and in the journal
    messages          pass_frame, read_outputs …: commands and replies as frames
    host              LocalEngine: starts the engine's process and talks to it
    models.registry   resolve: a model's name to its files
"""
