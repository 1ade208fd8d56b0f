"""The engine's process: reads commands from a pipe, computes, writes replies.

Others import: main, loop.

`engine.host` starts `main` by its name, in a process of its own. `gang.member`, the program of the other processes of
an engine with several devices, imports what every such program does at its start.

main   starts the process: pipes, threads, loading the models (`python -m tinkex.engine.process.main`)
loop   takes commands, gives turns, sends replies
turns  decides between training and sampling
loaded_models  loads and unloads base models
"""
