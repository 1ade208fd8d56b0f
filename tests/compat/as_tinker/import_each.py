"""Runs inside the cookbook's environment: imports modules, each in a forked process, and prints the errors.

Reads {"modules": […], "limit_s": …} and writes [[module, ""] or [module, why not]]. Needs the standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

COMMON = ("numpy", "torch", "transformers", "datasets", "pydantic", "chz", "tinker", "tinker.types")


def main() -> None:
    task = json.load(sys.stdin)
    if os.environ.get("COOKBOOK_THROUGH_ALIAS"):
        from tinkex import as_tinker

        as_tinker.install()
    for name in COMMON:
        importlib.import_module(name)
    print(json.dumps([(name, attempt(name, task["limit_s"])) for name in task["modules"]]))


def attempt(name: str, limit_s: int) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        signal.alarm(limit_s)
        os.write(writer, outcome(name).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if status:
        number = os.WTERMSIG(status)
        return f"took more than {limit_s} s" if number == signal.SIGALRM else f"ended by signal {number}"
    return told


def outcome(name: str) -> str:
    try:
        importlib.import_module(name)
    except BaseException as problem:
        text = " ".join(str(problem).split())
        return f"{type(problem).__name__}: {text}"[:200]
    return ""


if __name__ == "__main__":
    main()
