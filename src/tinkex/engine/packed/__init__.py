"""The packed runner and decoder: Llama-shaped models in float32 on a CPU, forward and backward written by hand.

Packed means that the tokens of all sequences of a micro-batch are concatenated [N, …], without padding. The products
go to torch; what torch has no fast call for goes to C kernels (`kernels`), or to torch where there are none.

Others import:
    weights       `unsupported_reason` and `fuse`: can a model run packed, and its weights laid out for it
    runner        `PackedRunner`: training passes
    decoder       `PackedDecoder`: sampling
    selfcheck     `run_selfcheck`: every kernel once, to compare with torch
    quantized     `divergence`: how far weights of fewer bits are off
    kernels.binding  `find`: the C kernels for this machine
"""
