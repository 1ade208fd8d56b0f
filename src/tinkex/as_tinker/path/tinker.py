"""Found by processes that inherit the path of a program which runs as `tinkex.as_tinker`: installs the alias there too.

The module that is being imported gives way to the alias; the import system hands out what it finds under the name.
"""

from __future__ import annotations

import importlib
import sys

from tinkex import as_tinker

del sys.modules["tinker"]
as_tinker.install()
importlib.import_module("tinker")
