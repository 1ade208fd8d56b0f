"""`python -m tinkex` is the `tinkex` command."""

from __future__ import annotations

import sys

from tinkex.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
