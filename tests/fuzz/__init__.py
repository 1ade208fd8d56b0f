"""Coverage-guided fuzzing of every codec that reads bytes of others: `make fuzz CODEC=… RUNS=…`."""
