"""Makes the project's environment: `python3 scripts/install.py .venv local`. Whatever is missing is one sentence.

Runs on whatever Python the machine has, before anything is installed; so it is plain, and uses the library alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED_BYTES = 3_000_000_000
PINS = "pins.txt"
"""The releases that the tests passed with."""
LIMITS = "constraints.txt"
"""What must hold in any case."""


def main(venv: Path, extras: str) -> int:
    problem = missing(venv)
    if problem:
        print(f"Cannot set up {venv.name}: {problem}", file=sys.stderr)
        return 1
    print(
        f"Setting up {venv.name} with what PyPI has (a few minutes the first time; torch is the large part).",
        flush=True,
    )
    if not (venv / "bin" / "pip").exists():  # an environment whose making was interrupted has python and no pip
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
        if made.returncode:
            print(f"Cannot set up {venv.name}: {last_words(made.stdout + made.stderr)}", file=sys.stderr)
            return 1
    code, said = install(venv, extras, PINS)
    if code and "No matching distribution found for ziglang" in said:
        print("No C compiler here, and pip found none either: going on without the C kernels (slower).", flush=True)
        os.environ["TINKEX_KERNELS"] = "none"
        code, said = install(venv, extras, PINS)
    if code and "No matching distribution found" in said:  # for this kind of machine, or for this Python
        print(f"A release of {PINS} cannot be had here: taking the newest that fit instead.", flush=True)
        code, said = install(venv, extras, LIMITS)
    if code:
        print(f"Cannot set up {venv.name}: {explain(said)}\nThe last lines that pip wrote:", file=sys.stderr)
        print("\n".join(said.splitlines()[-8:]), file=sys.stderr)
    return code


def missing(venv: Path) -> str:
    """What this machine lacks; empty if nothing."""
    if sys.version_info < (3, 11):  # noqa: UP036 (it runs on whatever is there)
        found = ".".join(map(str, sys.version_info[:3]))
        return f"Python 3.11 or later is needed and this is {found}. Name another with `make PYTHON=python3.12 …`."
    try:
        import ensurepip  # noqa: F401
        import venv as _  # noqa: F401
    except ImportError:
        return "this Python has no `venv`. On Debian and Ubuntu: apt-get install python3-venv."
    free = shutil.disk_usage(venv.parent).free
    if free < NEEDED_BYTES and not venv.exists():
        return f"{free / 1e9:.1f} GB of disk are left and {NEEDED_BYTES / 1e9:.0f} GB are needed. Free some space."
    return ""


def install(venv: Path, extras: str, constraints: str) -> tuple[int, str]:
    """pip, with one line that says what it is at. Its exit code and all it wrote."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-color"]
    command += ["--progress-bar", "off", "--constraint", constraints, "--editable", f".[{extras}]"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    said, is_live = [], sys.stdout.isatty()
    for line in process.stdout:
        said.append(line)
        doing = step(line)
        if doing and is_live:
            print(f"\r  {doing[:70]:70}", end="", flush=True)
        elif doing and ("MB" in doing or "installing" in doing):
            print(f"  {doing}", flush=True)
    if is_live:
        print(f"\r{'':72}\r", end="", flush=True)
    return process.wait(), "".join(said)


def step(line: str) -> str:
    """What a line of pip's is about, in a few words; empty if it is nothing to show."""
    found = re.match(r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?(\S+?)(?:-\d\S*)?(?: \((.+)\))?\s*$", line)
    if found:
        return f"fetching {found[1]}" + (f" ({found[2]})" if found[2] else "")
    if line.startswith("Installing collected packages"):
        return f"installing {line.count(',') + 1} packages"
    return ""


def explain(said: str) -> str:
    """The cause, where pip's own words are known."""
    if "No space left on device" in said:
        return "the disk is full. Free some space and run the same command again."
    if re.search(r"NewConnectionError|Temporary failure in name resolution|Connection refused|timed out", said):
        return "PyPI cannot be reached. Check the network (or the proxy settings) and run the same command again."
    return "pip failed."


def last_words(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the environment could not be made."


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: install.py FOLDER EXTRAS")
    try:
        sys.exit(main(Path(os.path.abspath(sys.argv[1])), sys.argv[2]))
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run the same command again, and it goes on.")
