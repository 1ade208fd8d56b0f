"""LoRA adapters: weights, optimizer state, checkpoints and exports."""
