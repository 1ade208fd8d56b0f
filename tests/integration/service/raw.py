"""Requests past any SDK: bytes as a stranger may send them, and what must hold of every refusal."""

from __future__ import annotations

import http.client
import json
import re
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.integration.service.live import LiveServer
from tinkex.wire import proto_codec
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.body import PROTOBUF

TOKENS, TARGETS = [10, 20, 30], [20, 30, 40]
NAN, INF = float("nan"), float("inf")
AT_ONCE_S = 6.0
"""Longer than a small operation takes on a busy machine, shorter than the 10 s that a missing number is awaited."""
SECRETIVE = re.compile(
    r"Traceback|File \"|\.py\b|site-packages|/home/|/tmp/|/usr/|pytest-|0x[0-9a-f]{6}|sqlalchemy|sqlite3?\.", re.I
)
"""What no answer may hold: a trace of the program, or where it lies."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def text(self) -> str:
        """What it says to a person."""
        said = self.json
        return str(said.get("detail", said.get("error")))


class Raw:
    """One key's way to a server."""

    def __init__(self, server: LiveServer, key: str | None = None) -> None:
        self.server, self.key = server, key

    def ask(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] = {}, timeout_s: float = 40
    ) -> Answer:
        """Bytes go as they are, anything else as JSON; NaN is written as such. A connection of its own each time."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**({"x-api-key": self.key} if self.key else {}), **headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=timeout_s)
        try:
            connection.request(method, path if path.startswith("/") else f"/api/v1/{path}", content, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body: object = None, **more: Any) -> Answer:
        return self.ask("POST", path, body, **more)

    def poll(self, request_id: object, *, proto: bool = False) -> Answer:
        """The result, however often it has to be asked for."""
        headers = {"accept": PROTOBUF} if proto else {}
        end = time.monotonic() + 180
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id}, headers=headers)
            if answer.status != 408 or time.monotonic() > end:
                return answer

    def done(self, path: str, body: object, **more: Any) -> Any:
        """Submit, wait, and read the result of something that is right."""
        submitted = self.post(path, body, **more)
        assert submitted.status == 200, submitted.content
        found = self.poll(submitted.json["request_id"])
        assert found.status == 200 and "error" not in found.json, found.content
        return found.json

    def session(self) -> str:
        answer = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})
        return str(answer.json["session_id"])

    def run(self, session: str | None = None, number: int = 0, *, rank: int = 4) -> Run:
        body = {
            "session_id": session or self.session(),
            "model_seq_id": number,
            "base_model": "tinkex/tiny",
            "lora_config": {"rank": rank, "seed": 1},
        }
        return Run(self, self.done("create_model", body)["model_id"])

    def sampler(self, session: str | None = None, number: int = 0, **source: str) -> str:
        named = source or {"base_model": "tinkex/tiny"}
        body = {"session_id": session or self.session(), "sampling_session_seq_id": number, **named}
        return str(self.post("create_sampling_session", body).json["sampling_session_id"])


class Run:
    """A run and the count of its operations."""

    def __init__(self, client: Raw, run_id: str) -> None:
        self.client, self.id, self.upcoming = client, run_id, 1
        self.first_loss: float | None = None

    def take(self) -> int:
        """The next number, used up."""
        self.upcoming += 1
        return self.upcoming - 1

    def named(self, **fields: Any) -> dict[str, Any]:
        """A body that carries the run's id and next number."""
        return {"model_id": self.id, "seq_id": self.take(), **fields}

    def done(self, call: str, **fields: Any) -> Any:
        return self.client.done(call, self.named(**fields))

    def submit_forward(self) -> str:
        answer = self.client.post("forward", self.named(forward_input=batch()))
        assert answer.status == 200, answer.content
        return str(answer.json["request_id"])

    def saved(self, kind: str, name: str) -> str:
        """A checkpoint: `save_weights`, `save_weights_for_sampler` or `save_weights_external`."""
        return str(self.done(kind, path=name)["path"])


def check_unharmed(*runs: Run) -> None:
    """Every run still works, at once, and its weights are what they were when this was first asked."""
    began = time.monotonic()
    submitted = [(run, run.submit_forward()) for run in runs]
    for run, request_id in submitted:
        found = run.client.poll(request_id)
        assert found.status == 200 and "error" not in found.json, found.content
        loss = found.json["metrics"]["loss:sum"]
        if run.first_loss is None:
            run.first_loss = loss
        assert loss == run.first_loss
    assert time.monotonic() - began < AT_ONCE_S


def check_no_gradient(run: Run) -> None:
    """Nothing of what failed is left for the next step."""
    metrics = run.done("optim_step", adam_params={"learning_rate": 0.0})["metrics"]
    assert metrics["no_gradient:max"] == 1.0, metrics


def check_refused(client: Raw, answer: Answer, says: str) -> Answer:
    """Refused at once, or by a failed future; either way as the user's mistake, in words that name it."""
    if answer.status == 200:
        assert "request_id" in answer.json, f"accepted: {answer.content[:300]!r}"
        answer = client.poll(answer.json["request_id"])
        assert answer.status == 200 and "error" in answer.json, f"it ran: {answer.content[:300]!r}"
        assert set(answer.json) == {"error", "category"}
    else:
        assert 400 <= answer.status < 500 and answer.status != 409, (answer.status, answer.content[:500])
        assert set(answer.json) == {"detail", "code", "category"}, answer.content[:500]
        assert re.fullmatch(r"[a-z][a-z0-9_]*", answer.json["code"])
    check_told(answer, says)
    assert answer.json["category"] == "user"
    return answer


def check_told(answer: Answer, says: str) -> None:
    """A sentence of a sensible length that says what it should and nothing of the server's inside."""
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    assert re.search(says, answer.text, re.I), f"{says!r} is not in {answer.text!r}"
    assert not SECRETIVE.search(answer.text), answer.text
    assert 15 < len(answer.text) < 1000, answer.text


# ── Training data, right unless something is given


def tensor(data: object, dtype: object = "int64", **more: object) -> dict[str, object]:
    return {"data": data, "dtype": dtype, **more}


def floats(*values: object) -> dict[str, object]:
    return tensor(list(values), "float32")


def text(tokens: object) -> dict[str, object]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def datum(model_input: object = None, **inputs: object) -> dict[str, object]:
    """A datum for cross_entropy; an input given as None is left out."""
    given = {"target_tokens": tensor(TARGETS), "weights": floats(1.0, 1.0, 0.5), **inputs}
    kept = {name: value for name, value in given.items() if value is not None}
    return {"model_input": text(TOKENS) if model_input is None else model_input, "loss_fn_inputs": kept}


def policy_datum(**inputs: object) -> dict[str, object]:
    """A datum for importance_sampling and its kin."""
    policy = {"weights": None, "logprobs": floats(-1.0, -2.0, -3.0), "advantages": floats(1.0, 1.0, 1.0)}
    return datum(**{**policy, **inputs})


def batch(data: object = None, loss_fn: object = "cross_entropy", config: object = None) -> dict[str, object]:
    return {"data": [datum()] if data is None else data, "loss_fn": loss_fn, "loss_fn_config": config}


def packed(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def message(run: Run, seq_id: int, **changes: Any) -> Any:
    """The protobuf request of `batch()`, ready to be spoiled."""
    request = pb.ForwardBackwardRequest(model_id=run.id, seq_id=seq_id, loss_fn="cross_entropy")
    row = request.data.add()
    row.model_input.add().encoded_text.tokens = packed("i", TOKENS)
    row.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=packed("q", TARGETS), dtype=pb.DTYPE_INT64))
    row.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=packed("f", [1, 1, 0.5]), dtype=pb.DTYPE_FLOAT32))
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def post_message(client: Raw, request: Any, **headers: str) -> Answer:
    content = request if isinstance(request, bytes) else request.SerializeToString()
    return client.post("forward_backward", content, headers={"content-type": PROTOBUF, **headers})


def read_output(answer: Answer) -> Any:
    return proto_codec.decode_forward_backward_output(answer.content)
