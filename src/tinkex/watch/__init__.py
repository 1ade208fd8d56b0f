"""Shows a training loop while it runs: `tinkex.progress`, with step, loss, tokens, time left and cost.

`tally` adds up the SDK's events, `prices` turns tokens into money, `report` makes the text, `progress` connects them to
the screen in `tinkex.terminal`, `trackers` sends its numbers to W&B and others. What the caller logs goes through the
training client; the only request of its own asks for the name of a base model.

Others import: progress.
"""
