"""vLLM as a sampler: an engine process that samples with it and speaks our frames.

Others import:
    launch    `vllm_engine`: the server's side of such a process; loads neither torch nor vLLM
    requests  `lack_reason`: what vLLM does not offer; loads neither

`launch` starts `main` by its name, with a Python that has vLLM.

main      the process: pipes, start, commands (`python -m tinkex.engine.vllm.main`)
sampler   runs requests on vLLM, and streams
adapters  loads adapters, proves each once, keeps its files for as long as vLLM may read them again
null_adapter  how the base model is served on a CPU
requests  a request in vLLM's words, and a result in ours; pure
"""
