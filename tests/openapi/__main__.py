"""Starts a service on the tiny model, makes something of every kind, and lets schemathesis loose on it.

Fails on any 5xx but 503, and on every response that docs/openapi.json does not describe: status, content type, schema.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import tools
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import TOKENS, Raw, text

ROOT = Path(__file__).parents[2]
KEY = "tml-schemathesis-0123"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
"""Not `negative_data_rejection`: what is unknown is ignored on purpose, and a number may come as text."""


def make_ids(client: Raw) -> dict[str, object]:
    """Make a session, a run, checkpoints, a sampler and results; and others for the calls that end them."""
    run, doomed = client.run(), client.run()
    run.saved("save_weights", "state")
    run.saved("save_weights_for_sampler", "lean")
    run.saved("save_weights_external", "external")
    for number in range(20):
        doomed.saved("save_weights", f"w{number}")
    session = run.id.split(":")[0]
    sampler = client.sampler(session, model_path=f"tinker://{run.id}/sampler_weights/lean")
    prompt = {"prompt": text(TOKENS), "num_samples": 1, "sampling_params": {"max_tokens": 2}}
    sample = client.post("asample", {**prompt, "sampling_session_id": sampler}).json["request_id"]
    operation = run.submit_forward()
    client.poll(operation)
    lean = f"tinker://{run.id}/sampler_weights/lean"
    return {
        "common": {
            "session_id": session,
            "model_id": run.id,
            "run_id": run.id,
            "sampler_id": sampler,
            "sampling_session_id": sampler,
            "request_id": operation,
            "checkpoint_id": "weights/state",
            "base_model": "tinkex/tiny",
            "model": "tinkex/tiny",
            "model_path": None,
            "path": "named",
            "source_path": lean,
            "tinker_path": lean,
            "tokenizer": "tinkex/tiny",
            "file": "tokenizer.json",
            "num_samples": 2,
            "sampling_params": {"max_tokens": 2},
            "prompt": text(TOKENS),
            "loss_fn": "cross_entropy",
        },
        "by_operation": {
            "finish_session": {"session_id": client.session()},
            "unload_model": {"model_id": doomed.id},
            "delete_checkpoint": {"run_id": doomed.id, "checkpoint_id": "weights/w1"},
            "external_weights_urls": {"checkpoint_id": "external_weights/external"},
            "retrieve_future": {"request_id": sample},
            "cancel_future": {"request_id": sample},
            "load_weights": {"path": f"tinker://{run.id}/weights/state"},
            "openai_completions": {"prompt": "a", "max_tokens": 2, "n": 1, "stop": None},
            "openai_chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "n": 1, "stop": None},
            "openai_model": {"name": "tinkex/tiny"},
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=50, help="requests of each phase for each operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    python = tools.make("schemathesis")
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveServer(Path(folder) / "data", "--api-key", KEY, "--poll-hold-s", "0.2") as server,
    ):
        ids = make_ids(Raw(server, KEY))
        words = [str(python.with_name("st")), "run", str(ROOT / "docs" / "openapi.json"), "--url", server.url]
        words += ["--checks", ",".join(CHECKS), "--max-examples", str(options.examples), "--seed", str(options.seed)]
        words += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--continue-on-failure"]
        words += ["--suppress-health-check", "all", "--warnings", "off", "-H", f"X-API-Key: {KEY}"]
        environ = {**os.environ, "TINKEX_IDS": json.dumps(ids), "SCHEMATHESIS_HOOKS": "tests.openapi.hooks"}
        environ["PYTHONPATH"] = str(ROOT)
        code = subprocess.run(words, env=environ, cwd=folder).returncode
        faults = server.log().count("a request failed")
        print(f"Requests that failed in the server's log: {faults}")
        if faults:
            print(server.log()[-6000:])
    return code or bool(faults)


if __name__ == "__main__":
    sys.exit(main())
