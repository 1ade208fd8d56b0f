"""Shows a training loop while it runs: `tinkex.progress`, with step, loss, tokens, time left and cost.

`tally` adds up the SDK's events, `prices` turns tokens into money, `report` makes the text, `progress` connects them to
the screen in `tinkex.terminal`. The only request it may send to the service asks for the name of a base model.

Others import: progress.
"""
