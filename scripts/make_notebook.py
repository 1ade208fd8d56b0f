"""Makes `examples/01_chat_fine_tune.ipynb` from the program beside it, so that the two never tell different things.

    python scripts/make_notebook.py          # write it anew, without outputs
    python scripts/make_notebook.py --run    # run it too and keep what it printed (a minute on a quiet laptop)
    python scripts/make_notebook.py --check  # fail if program and notebook differ

The program has cells in the way of many editors: `# %%` begins code, `# %% [markdown]` text. A cell that begins with
`# %% notebook: CODE` is CODE in the notebook, which has no arguments; a line that ends with `# not in the notebook` is
not there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAM = EXAMPLES / "01_chat_fine_tune.py"
NOTEBOOK = PROGRAM.with_suffix(".ipynb")
MARK, MARKDOWN, INSTEAD, LEFT_OUT = "# %%", "# %% [markdown]", "# %% notebook: ", "# not in the notebook"


class Cell(NamedTuple):
    kind: str
    """"code" or "markdown"."""
    source: str


def cells(program: str) -> list[Cell]:
    """The program's cells. What stands before the first, its docstring, is for those who read the file."""
    found: list[Cell] = []
    parts = ("\n" + program).split("\n" + MARK)
    for part in parts[1:]:
        head, _, body = (MARK + part).partition("\n")
        if head == MARKDOWN:
            found.append(
                Cell("markdown", "\n".join(line.removeprefix("#").strip() for line in body.strip().split("\n")))
            )
        elif head.startswith(INSTEAD):
            found.append(Cell("code", head.removeprefix(INSTEAD)))
        else:
            kept = [line for line in body.strip().split("\n") if not line.endswith(LEFT_OUT)]
            found.append(Cell("code", "\n".join(kept)))
    return found


def notebook(made: list[Cell], printed: list[str]) -> dict[str, Any]:
    """The notebook's content, in version 4.5 of its format. `printed`: what each cell wrote."""
    content: list[dict[str, Any]] = []
    ran = 0
    for number, (cell, text) in enumerate(zip(made, printed, strict=True)):
        entry: dict[str, Any] = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}}
        if cell.kind == "code":
            ran += 1
            outputs = [{"name": "stdout", "output_type": "stream", "text": lines(text)}] if text else []
            entry |= {"execution_count": ran if any(printed) else None, "outputs": outputs}
        content.append({**entry, "source": lines(cell.source)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": content, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def read(path: Path) -> list[Cell]:
    """The cells of a notebook."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Cell(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def run(made: list[Cell], folder: Path, timeout_s: float = 1800.0, **variables: str) -> list[str]:
    """What each cell writes to stdout, in a real kernel that works in `folder`. A cell that fails ends it."""
    from jupyter_client.manager import KernelManager

    with tempfile.TemporaryDirectory() as own:
        # "python3" is the Python that runs this; the kernel's files stay out of the user's folders.
        manager = KernelManager(kernel_name="python3", connection_file=str(Path(own) / "kernel.json"))
        manager.start_kernel(cwd=str(folder), env={**os.environ, "IPYTHONDIR": own, **variables})
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=120)
            return [_printed(client, cell.source, timeout_s) if cell.kind == "code" else "" for cell in made]
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def _printed(client: Any, source: str, timeout_s: float) -> str:
    asked = client.execute(source)
    end = time.monotonic() + timeout_s
    text = ""
    while True:
        message = client.get_iopub_msg(timeout=max(end - time.monotonic(), 0.1))
        content = message["content"]
        if message["parent_header"].get("msg_id") != asked:
            continue
        if message["msg_type"] == "error":
            raise RuntimeError(f"A cell failed with {content['ename']}: {content['evalue']}\n\n{source}")
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            text += content["text"]
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            # A line that was drawn over is what it was in the end.
            return "".join(line.rpartition("\r")[2].rstrip() + "\n" for line in text.split("\n")).rstrip("\n")


def main(words: list[str]) -> int:
    made = cells(PROGRAM.read_text(encoding="utf-8"))
    if "--check" in words:
        if read(NOTEBOOK) == made:
            return 0
        print(
            f"{NOTEBOOK.name} is not what {PROGRAM.name} says: run python scripts/make_notebook.py --run",
            file=sys.stderr,
        )
        return 1
    printed = run(made, EXAMPLES) if "--run" in words else [""] * len(made)
    NOTEBOOK.write_text(json.dumps(notebook(made, printed), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
