"""Lists the classes that one `forward_backward` passes through: client, service and engine.

    python scripts/trace_classes.py

A reader of the code has to learn these words, less those that the API and the field have taught already. Starts a
private service with the built-in model, warms it up, and notes every function of the package that runs during one
call, in all three processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from pathlib import Path
from subprocess import run

SOURCE = Path(__file__).parents[1] / "src"
HOOK = """
    import os, sys, threading
    OUT = os.environ.get("TRACE_OUT")
    seen = set()
    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and "/src/tinkex/" in code.co_filename and os.path.exists(OUT + "/on"):
            key = code.co_filename.rpartition("/src/")[2] + " " + code.co_qualname
            if key not in seen:
                seen.add(key)
                with open(f"{OUT}/{os.getpid()}.txt", "a") as file:
                    file.write(key + "\\n")
    if OUT:
        threading.setprofile(note)
        sys.setprofile(note)
"""
PROGRAM = """
    import os, time, tinkex
    from pathlib import Path
    training = tinkex.local("tinkex/tiny", ephemeral=True).create_lora_training_client(base_model="tinkex/tiny", rank=8)
    datum = tinkex.types.Datum(
        model_input=tinkex.types.ModelInput.from_ints(list(range(5, 24))),
        loss_fn_inputs={"target_tokens": list(range(6, 25)), "weights": [1.0] * 19},
    )
    training.forward_backward([datum], "cross_entropy").result()
    time.sleep(1)
    mark = Path(os.environ["TRACE_OUT"], "on")
    mark.touch()
    training.forward_backward([datum], "cross_entropy").result()
    mark.unlink()
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(textwrap.dedent(HOOK))
        environ = {**os.environ, "TRACE_OUT": folder, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
        run([sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environ, check=True, timeout=120)
        calls = {line for file in Path(folder).glob("*.txt") for line in file.read_text().splitlines()}
    classes = {(name.partition(".")[0], file) for file, _, name in (call.partition(" ") for call in calls)}
    classes = {(name, file) for name, file in classes if name.lstrip("_")[:1].isupper()}
    for name, file in sorted(classes, key=lambda entry: (entry[1], entry[0])):
        print(f"{name:30} {file}")
    print(f"{len(classes)} classes, {len(calls)} functions in {len({call.split()[0] for call in calls})} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
