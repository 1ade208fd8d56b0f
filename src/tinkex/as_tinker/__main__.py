"""`python -m tinkex.as_tinker script.py …` or `… -m module …`: runs a program written for `tinker` on this package.

The program starts as Python would start it: as `__main__`, with its arguments and its folder first on the path.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NoReturn

from tinkex import as_tinker

USAGE = "usage: python -m tinkex.as_tinker (script.py | -m module) [arguments …]"


def main(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    is_module = arguments[:1] == ["-m"]
    program = arguments[1:] if is_module else arguments
    if not program or (not is_module and program[0].startswith("-")):
        _exit_misused(USAGE)
    if not is_module and not os.path.isfile(program[0]):
        _exit_misused(f"{sys.executable}: can't open file {os.path.abspath(program[0])!r}: no such file")
    if not is_module and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    as_tinker.install()
    _set_path_for_children()
    sys.argv[:] = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        _run_script(program[0])


def _run_script(path: str) -> None:
    # Not runpy.run_path: it removes `__main__` with the end of the script, and functions that run later (at exit, on
    # threads, from a pickle) still need it.
    main_module = ModuleType("__main__")
    main_module.__file__ = os.path.abspath(path)
    main_module.__loader__ = SourceFileLoader("__main__", main_module.__file__)
    with io.open_code(main_module.__file__) as file:
        code = compile(file.read(), main_module.__file__, "exec", dont_inherit=True)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def _set_path_for_children() -> None:
    """Let Python processes that the program starts find `tinker` too, as if it were installed."""
    environ = os.environ  # border: written for child processes; no setting of ours is read here
    inherited = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([as_tinker.SPAWNED, *([inherited] if inherited else [])])


def _exit_misused(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
