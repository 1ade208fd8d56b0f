"""Base models: finds or fetches their files by name, and loads one into memory.

Others import:
    registry      `resolve` (a name → `ModelInfo` with a local folder) and `adapter_base`; no torch
    loaded_model  `Model` and `load`
    smollm2       the name and alias of a built-in model; no torch
    tiny          the name of the other built-in model; no torch

`loaded_model` imports `adapters.lora`, because a loaded model has LoRA hooks. Nothing else here imports `adapters`.
"""
