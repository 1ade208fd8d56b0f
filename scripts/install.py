"""Makes the project's environment: `python3 scripts/install.py .venv local`. Says in one sentence what is missing.

It runs on any Python that the machine has, before anything is installed, so it uses the standard library alone.
Why pip and not uv: docs/decisions/dependencies.md.
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
    reason = missing_reason(venv)
    if reason:
        print(f"Cannot set up {venv.name}: {reason}", file=sys.stderr)
        return 1
    print(
        f"Setting up {venv.name} from PyPI (a few minutes the first time; torch is the large part).",
        flush=True,
    )
    if not (venv / "bin" / "pip").exists():  # an environment whose making was interrupted has python and no pip
        done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
        if done.returncode:
            print(f"Cannot set up {venv.name}: {last_line(done.stdout + done.stderr)}", file=sys.stderr)
            return 1
    code, output = install(venv, extras, PINS)
    if code and "No matching distribution found for ziglang" in output:
        print("No C compiler here, and pip found none either: installing without the C kernels (slower).", flush=True)
        os.environ["TINKEX_KERNELS"] = "none"
        code, output = install(venv, extras, PINS)
    if code and "No matching distribution found" in output:  # for this kind of machine, or for this Python
        print(f"A release of {PINS} is not available here: installing the newest that fit instead.", flush=True)
        code, output = install(venv, extras, LIMITS)
    if code:
        print(f"Cannot set up {venv.name}: {failure_reason(output)}\nThe last lines that pip wrote:", file=sys.stderr)
        print("\n".join(output.splitlines()[-8:]), file=sys.stderr)
    return code


def missing_reason(venv: Path) -> str:
    """Return what this machine lacks; empty if nothing."""
    if sys.version_info < (3, 11):  # noqa: UP036 (it runs on whatever is there)
        version = ".".join(map(str, sys.version_info[:3]))
        return f"Python 3.11 or later is needed and this is {version}. Name another with `make PYTHON=python3.12 …`."
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
    """Run pip and show what it does in one line. Returns its exit code and its output."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-color"]
    command += ["--progress-bar", "off", "--constraint", constraints, "--editable", f".[{extras}]"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines, is_live = [], sys.stdout.isatty()
    for line in process.stdout:
        lines.append(line)
        activity = read_activity(line)
        if activity and is_live:
            print(f"\r  {activity[:70]:70}", end="", flush=True)
        elif activity and ("MB" in activity or "installing" in activity):
            print(f"  {activity}", flush=True)
    if is_live:
        print(f"\r{'':72}\r", end="", flush=True)
    return process.wait(), "".join(lines)


def read_activity(line: str) -> str:
    """Return what a line of pip's output reports, in a few words; empty if it is not worth showing."""
    match = re.match(r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?(\S+?)(?:-\d\S*)?(?: \((.+)\))?\s*$", line)
    if match:
        return f"fetching {match[1]}" + (f" ({match[2]})" if match[2] else "")
    if line.startswith("Installing collected packages"):
        return f"installing {line.count(',') + 1} packages"
    return ""


def failure_reason(output: str) -> str:
    """Return why pip failed, if its output is a known one."""
    if "No space left on device" in output:
        return "the disk is full. Free some space and run the same command again."
    if re.search(r"NewConnectionError|Temporary failure in name resolution|Connection refused|timed out", output):
        return "PyPI cannot be reached. Check the network (or the proxy settings) and run the same command again."
    return "pip failed."


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the environment could not be created."


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: install.py FOLDER EXTRAS")
    try:
        sys.exit(main(Path(os.path.abspath(sys.argv[1])), sys.argv[2]))
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run the same command again to continue.")
