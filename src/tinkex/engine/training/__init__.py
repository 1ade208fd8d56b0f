"""Training: reads the data of a pass, batches passes, runs them forward and backward, and applies optimizer steps.

Others import:
    trainer     `Trainer`, the one object that the engine's process drives
    runner      the contract of a runner (`Runner`, `Item`, `DatumResult`) and what every runner needs (`compute_loss`,
                `loss_gradient`); `packed` implements it
    general_runner  `GeneralRunner`, for `runner_choice`; `gang` runs it in several processes
    losses      `find_loss`: `gang` sends items with the names of their losses

This package imports `adapters` and `models`. It never imports `packed` or `runner_choice`: the process hands a function
that chooses the runner to `Trainer`.
"""
