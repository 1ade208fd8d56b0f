"""The packed runner: Llama-shaped models by hand, forward and backward, over tokens that stand end to end."""
