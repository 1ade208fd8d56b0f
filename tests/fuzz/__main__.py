"""Runs targets under atheris: `python -m tests.fuzz json --runs 1000000`, in the environment of `tests.tools`.

New inputs that reach new code are collected in build/fuzz/<codec>; an input that fails is written to
build/fuzz/<codec>-crash-…, and its bytes belong into corpus/<codec> together with the mend.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MAX_S = 1.0
"""Seconds of computing that one input may cost."""
MAX_RSS_MB = 512
MAX_BYTES = {"archive": 4096, "safetensors": 4096, "sse": 256, "json": 512}
"""Longest input; 1024 unless named here. A tar has blocks of 512, a nested header needs 2 KB; longer streams of events
only repeat shorter ones, at a tenth of the speed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("codec", nargs="?", choices=sorted(path.name for path in (HERE / "corpus").iterdir()))
    parser.add_argument("--runs", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.codec is None:
        for path in sorted((HERE / "corpus").iterdir()):
            print(f"== {path.name}", flush=True)
            words = [sys.executable, "-m", "tests.fuzz", path.name, "--runs", str(options.runs)]
            subprocess.run(words, check=True)
        return
    fuzz(options.codec, options.runs)


def fuzz(codec: str, runs: int) -> None:
    """Give a target inputs until one fails or all have run. Ends the process."""
    with atheris.instrument_imports(include=["tinkex"]):
        from tests.fuzz import targets
    logging.getLogger("tinkex").setLevel(logging.CRITICAL)  # a line for every damaged file
    target = targets.TARGETS[codec]

    def watched(content: bytes) -> None:
        began = time.process_time()
        target(content)
        took = time.process_time() - began
        assert took < MAX_S, f"an input of {len(content)} bytes took {took:.1f} s"

    found = ROOT / "build" / "fuzz" / codec
    found.mkdir(parents=True, exist_ok=True)
    words = [f"-runs={runs}", f"-rss_limit_mb={MAX_RSS_MB}", f"-max_len={MAX_BYTES.get(codec, 1024)}", "-timeout=30"]
    words += ["-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={found}-", str(found)]
    atheris.Setup([sys.argv[0], *words, str(HERE / "corpus" / codec)], watched)
    atheris.Fuzz()


main()
