"""A training loop under the eyes of its user: `tinkex.progress`, what it counts, what it costs, how it is shown.

`tally` counts events, `prices` turns tokens into money, `report`, `line` and `curve` make text, `screen` writes it,
`progress` puts them together. Nothing here asks the service for anything but the name of a base model.
"""

from __future__ import annotations
