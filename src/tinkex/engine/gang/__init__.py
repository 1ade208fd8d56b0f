"""One engine in several processes, each with a part of every weight of the base models: a gang (FSDP2).

Others import:
    lead       `Gang`: what the engine's process does as the first of them; gives runners and decoders
    processes  `Processes`: starts the others and talks with them; no torch

`member` is the program of the other processes. They do as the lead says, and keep no state that is not the lead's: an
adapter, its moments, and every file are the lead's alone. Nothing here is imported with one device per engine.

lead       splits micro-batches, joins results and gradients, reports the end of the gang
member     the program of each other process (`python -m tinkex.engine.gang.member`)
processes  the sockets between them, deadlines, the end of a process
passes     micro-batches as frames, and how their rows are divided
sharding   shards a base model, and runs forward and backward passes that every process takes part in
"""
