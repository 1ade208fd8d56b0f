"""Adapters: the low-rank weights that a run trains, their files, and the optimizer that updates them.

Others import:
    adapter     `Adapter`: weights, pending gradient and optimizer moments of one run
    lora        the layer maths (`LoraWeights`, `Segment`, `segments_of`); at the bottom: `models` imports it too
    checkpoint  saves and loads PEFT folders, writes and restores snapshots
    optimizer   `AdamW` and `step_adapters`
    export      merges an adapter into its base model, for `tinkex export`
"""
