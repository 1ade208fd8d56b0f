"""Every public method of the official client, and whether it works here: with that client, and with ours.

python -m tests.compat.conformance.methods            # compare with docs/compatibility.md
python -m tests.compat.conformance.methods --write    # write the page anew
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.compat.conformance.environments import ROOT, bare_environ, python_of
from tests.integration.service.live import LiveServer

PAGE = ROOT / "docs" / "compatibility.md"
RELEASE = "0.36.0"
OFFICIAL, OURS = "tinker", "tinkex"
MODEL = "tinkex/tiny"
TWIN = "_async"
Found = dict[str, dict[str, str | None]]
"""By kind (methods, arguments, commands, functions) and name: what went wrong, or None."""


class Excuse(NamedTuple):
    """Why something is known not to work. `says` must be in what the caller is told."""

    outcome: str
    says: str
    why: str


_NO_BILLING = Excuse("refused", "has no billing", "There is no billing here; /metrics counts tokens and requests.")
_NO_TRACE = Excuse("refused", "keeps no trace", "No traces are kept; the log and /metrics tell what a session did.")
_NO_TOKEN = Excuse(
    "stopped",
    "requires JWT auth",
    "The official client reads this out of a signed token, and here keys are sent as they are. Ours asks the service.",
)
_WRONG_LOOP = Excuse(
    "stopped",
    "called from incorrect event loop",
    "A defect of the official client: from a program's own event loop it stops before it sends anything.",
)
_NO_DIMUON = Excuse("refused", "'dimuon' is not offered", "Only AdamW is offered.")
_BY_THE_SERVICE = {
    "RestClient.get_billing_usage": _NO_BILLING,
    "AdminClient.get_billing_usage": _NO_BILLING,
    "RestClient.export_session_trace": _NO_TRACE,
    'forward_backward(loss_fn="stable_reinforce")': Excuse(
        "refused", "its formula is not public", "Its formula is not public; importance_sampling and ppo are close."
    ),
    "create_lora_training_client(optimizer=DimuonOptimizerConfig())": _NO_DIMUON,
    "optim_step(DimuonParams(...))": _NO_DIMUON,
    "save_weights_external(age_encryption_recipients=[...])": Excuse(
        "refused", "age encryption is not offered", "Encrypt the files after the download."
    ),
    "sample(prompt with an ImageChunk)": Excuse("refused", "is a text model", "The models served here read text."),
}
EXCUSES: dict[str, dict[str, Excuse]] = {
    OFFICIAL: {
        **_BY_THE_SERVICE,
        "RestClient.whoami": _NO_TOKEN,
        "RestClient.get_audit_log_async": _WRONG_LOOP,
        "AdminClient.get_audit_log_async": _WRONG_LOOP,
        "auth whoami": _NO_TOKEN,
        "billing usage": _NO_BILLING,
        "session export-trace": _NO_TRACE,
    },
    OURS: {
        **_BY_THE_SERVICE,
        "ServiceClient.create_custom_loss": Excuse(
            "stopped",
            "are not offered",
            "`tinker` runs the loss on its own side; with ours, pass the function to `forward_backward_custom`.",
        ),
    },
}
"""By client: all that is known not to work, and why."""

NOTES = {
    "ServiceClient.get_console_url": "`tinker` names the hosted console, whatever the service.",
    "TrainingClient.get_console_url": "`tinker` names the hosted console, whatever the service.",
    "TrainingClient.get_tokenizer": "`tinker` asks transformers for the model by name: in a folder of that name, or on "
    "the hub. Ours fetches the files from the service.",
    "SamplingClient.get_tokenizer": "As with `TrainingClient`.",
    "ServiceClient.get_telemetry": "Ours gives `None`: `tinkex.on` tells of its events.",
    "checkpoint push-hf": "Tried up to the hub's own API, for which the test puts a stand-in.",
}


# -- finding out -----------------------------------------------------------------------------------------------------


def probe(client: str, url: str, folder: Path, *, seconds: float = 600) -> Found:
    """What went wrong with which method. `folder` is the client's home and working folder."""
    folder.mkdir(parents=True, exist_ok=True)
    python, packages = Path(sys.executable), []
    if client == OFFICIAL:
        python, packages = python_of(RELEASE), [sysconfig.get_paths()["purelib"]]
        _give_tokenizer(url, folder)
    words = [str(python), "-m", "tests.compat.conformance.probes", client, url, MODEL, *packages]
    done = subprocess.run(words, cwd=folder, env=_environ(url, folder), capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise AssertionError(f"the probes of {client} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: Found = json.loads(done.stdout)
    return found


def _give_tokenizer(url: str, folder: Path) -> None:
    """The official client wants a folder with the model's name, or the hub."""
    place = folder / MODEL
    place.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        with urllib.request.urlopen(f"{url}/api/v1/tokenizers/{MODEL}/{file}", timeout=30) as answer:
            (place / file).write_bytes(answer.read())


def _environ(url: str, folder: Path) -> dict[str, str]:
    return bare_environ(
        HOME=str(folder),  # where `auth login` puts the key
        HF_HUB_OFFLINE="1",
        OMP_WAIT_POLICY="PASSIVE",
        PYTHONPATH=str(ROOT),
        TINKER_API_KEY="tml-methods",
        TINKER_BASE_URL=url,
        TINKER_TELEMETRY="1",
    )


# -- judging ---------------------------------------------------------------------------------------------------------


def excuse_of(client: str, name: str) -> Excuse | None:
    known = EXCUSES[client]
    return known.get(name) or known.get(name.removesuffix(TWIN))


def outcome(client: str, name: str, problem: str | None) -> str:
    if problem is None:
        return "works"
    excuse = excuse_of(client, name)
    if excuse is not None and excuse.says in problem:
        return excuse.outcome
    return "fails: " + " ".join(problem.replace("|", "/").split())[:160]


def outcomes(found: dict[str, Found]) -> Iterator[tuple[str, str, str]]:
    """Client, name and outcome of everything that was tried."""
    for client, kinds in found.items():
        for name, problem in itertools.chain.from_iterable(tried.items() for tried in kinds.values()):
            yield client, name, outcome(client, name, problem)


# -- the page --------------------------------------------------------------------------------------------------------

_HEAD = f"""# Compatibility

Every public method of the official client {RELEASE} was called against a running service with `{MODEL}`, by that client
and by ours, and its answer checked. This page is made by `python -m tests.compat.conformance.methods --write`, and
a test holds it against what the service does.

*refused*: the service says no, and why. *stopped*: the client itself does not send it.
"""


def page(found: dict[str, Found]) -> str:
    official, ours = found[OFFICIAL], found[OURS]
    names = list(official["methods"])
    parts = [_HEAD, _counts(found, names)]
    for kind, of_kind in itertools.groupby(names, lambda name: name.partition(".")[0]):
        parts += [f"## {kind}", _table(list(of_kind), "method", official["methods"], ours["methods"])]
    parts += ["## Arguments", "Losses, and what only some services take."]
    parts += [_table(list(official["arguments"]), "argument", official["arguments"], ours["arguments"])]
    parts += ["## The official command line", _table(list(official["commands"]), "command", official["commands"], None)]
    added = {name: problem for name, problem in ours["methods"].items() if name not in official["methods"]}
    parts += ["## Only in `tinkex`", _additions({**added, **ours["functions"]})]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _counts(found: dict[str, Found], names: list[str]) -> str:
    rows = ["| client | methods | work | refused | stopped | fail |", "|---|---|---|---|---|---|"]
    for client, title in ((OFFICIAL, f"`tinker` {RELEASE}"), (OURS, "`tinkex`")):
        tried = found[client]["methods"]
        sums = Counter(outcome(client, name, _problem(tried, name)).partition(":")[0] for name in names)
        cells = [sums["works"], sums["refused"], sums["stopped"], sums["fails"]]
        rows.append(f"| {title} | {len(names)} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def _problem(tried: dict[str, str | None], name: str) -> str | None:
    return tried.get(name, "it does not exist")


def _table(names: list[str], title: str, official: dict[str, str | None], ours: dict[str, str | None] | None) -> str:
    """A row per name; a method and its twin share one if they fared alike."""
    clients = {OFFICIAL: official, **({} if ours is None else {OURS: ours})}
    heads = [title, *(f"`{client}`" for client in clients), "note"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows += [f"| {_shown(name)} | {' | '.join(rest)} |" for name, rest in _merged(names, clients).items()]
    return "\n".join(rows)


def _merged(names: list[str], clients: dict[str, dict[str, str | None]]) -> dict[str, list[str]]:
    cells = {
        name: [
            *(outcome(client, name, _problem(tried, name)) for client, tried in clients.items()),
            _note(name, clients),
        ]
        for name in names
    }
    merged: dict[str, list[str]] = {}
    for name, row in cells.items():
        twin = name + TWIN
        if name.endswith(TWIN) and cells.get(name.removesuffix(TWIN)) == row:
            continue
        merged[f"{name}|{twin}" if cells.get(twin) == row else name] = row
    return merged


def _note(name: str, clients: dict[str, dict[str, str | None]]) -> str:
    for client, tried in clients.items():
        excuse = excuse_of(client, name)
        if excuse is not None and _problem(tried, name) is not None:
            return excuse.why
    return NOTES.get(name, "")


def _shown(names: str) -> str:
    """`Class.method` without its class; an argument or a command as it is."""
    return ", ".join(
        f"`{name if ' ' in name or '(' in name else name.rpartition('.')[2]}`" for name in names.split("|")
    )


def _additions(tried: dict[str, str | None]) -> str:
    rows = ["| where | what | outcome |", "|---|---|---|"]
    for kind, names in itertools.groupby(tried, lambda name: name.rpartition(".")[0]):
        by_outcome: dict[str, list[str]] = {}
        for name in names:
            by_outcome.setdefault(outcome(OURS, name, tried[name]), []).append(f"`{name.rpartition('.')[2]}`")
        rows += [f"| `{kind}` | {', '.join(known)} | {result} |" for result, known in by_outcome.items()]
    return "\n".join(rows)


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder) / "data") as server:
        found = {client: probe(client, server.url, Path(folder) / client) for client in (OFFICIAL, OURS)}
    text = page(found)
    bad = [f"{client} {name}: {result}" for client, name, result in outcomes(found) if result.startswith("fails")]
    print("\n".join(bad) or "nothing fails")
    if "--write" in words:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} says something else: write it anew with --write")
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
