"""Installs the alias in processes that inherit `sys.path` from a program which runs under `tinkex.as_tinker`.

This module removes itself from `sys.modules` in favour of the alias; the import system returns what it finds there.
"""

from __future__ import annotations

import importlib
import sys

from tinkex import as_tinker

del sys.modules["tinker"]
as_tinker.install()
importlib.import_module("tinker")
