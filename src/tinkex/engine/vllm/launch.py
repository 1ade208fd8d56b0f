"""The server's side of a process that samples with vLLM: which Python runs it, and what it is told at its start."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tinkex.engine.contract import ModelInfo
from tinkex.engine.host import LocalEngine

MODULE = "tinkex.engine.vllm.main"
MOST_ADAPTERS = 64
"""Adapters that vLLM keeps in the machine's memory, in use or not."""


def program(python: str | None = None) -> Sequence[str]:
    """Return the command that runs the process.

    An environment with vLLM need not have tinkex: the packages of this one come after its own.
    """
    ours = str(Path(__file__).parents[3])
    run = f"runpy.run_module({MODULE!r}, run_name='__main__', alter_sys=True)"
    return (python or sys.executable, "-P", "-c", f"import runpy, sys; sys.path.append({ours!r}); {run}")


def vllm_engine(
    model: ModelInfo,
    *,
    python: str | None,
    links: Path,
    max_rank: int,
    slots: int,
    cache_gb: float,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
    max_rows: int = 64,
) -> LocalEngine:
    """Return the engine that samples one base model. `links`: a folder for links to files of adapters in use."""
    options = {
        "max_rank": max_rank,
        "slots": slots,
        "adapters": MOST_ADAPTERS,
        "cache_gb": cache_gb,
        "links": str(links),
    }
    return LocalEngine(
        [model],
        device=device,
        dtype=dtype,
        threads=threads,
        max_rows=max_rows,
        program=program(python),
        options={"vllm": options},
    )
