"""Forward and backward passes: data, losses, micro-batches, runners."""
