"""Base models: finds or fetches their files by name, and loads one into memory.

Others import:
    registry      `resolve` (a name → `ModelInfo` with a local folder) and `adapter_base`; no torch
    loaded_model  `Model` and `load`
    smollm2, tiny the names of the built-in models; no torch

`loaded_model` imports `adapters.lora`, because a loaded model has LoRA hooks. Nothing else here imports `adapters`.
"""
