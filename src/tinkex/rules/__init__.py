"""Every rule about values, written once: ranges, what a loss takes, how metrics combine.

The client checks a call before it sends it, the server before it journals it, and the engine before it computes: all
three call the functions here, so that they agree and use the same words. No I/O, no torch, no numpy.

A `check_*` function returns nothing or the checked value. It raises ValidationError with the place, the value, what is
allowed, and the `code` that the service puts into its error response.

Others import:
    checkpoint_names  what a checkpoint may be called, and how long it may be kept
    losses            which inputs and settings every loss takes, and whether a datum has them
    metrics           how `name:reducer` metrics of several parts combine, and the loss of a step
    ranges            optimizer settings, LoRA rank, sampling parameters, lengths and counts
"""
