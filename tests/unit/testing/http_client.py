"""A bare HTTP client for these tests: one connection, JSON in and out, nothing retried."""

from __future__ import annotations

import http.client
import json
import struct
from typing import Any, NamedTuple

from tinkex.testing import ScriptedService
from tinkex.wire import tinkex_pb2 as pb

BASE = "tinkex/tiny"
PROTOBUF = "application/x-protobuf"


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Speaks to one service, over one kept-alive connection."""

    def __init__(self, service: ScriptedService) -> None:
        self.connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=10)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Got:
        self.connection.request(method, path, body, headers or {})
        answer = self.connection.getresponse()
        return Got(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def get(self, path: str, **headers: str) -> Got:
        return self.ask("GET", f"/api/v1/{path}", headers=headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Got:
        headers = {"Content-Type": "application/json", **headers}
        return self.ask("POST", f"/api/v1/{path}", json.dumps(body or {}).encode(), headers)

    def poll(self, request_id: str, accept: str = "application/json", **more: Any) -> Got:
        return self.post("retrieve_future", {"request_id": request_id, **more}, Accept=accept)

    def result(self, path: str, body: Any) -> Any:
        """Submit, and wait for what comes of it."""
        return self.wait(self.post(path, body).json["request_id"]).json

    def wait(self, request_id: str) -> Got:
        """Poll until the answer is not 408."""
        for _ in range(100):
            got = self.poll(request_id)
            if got.status != 408:
                return got
        raise TimeoutError(f"{request_id} is still pending after 100 polls")

    def session(self) -> str:
        return str(
            self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.4.1"}).json["session_id"]
        )

    def model(self) -> str:
        body = {"session_id": self.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        return str(self.result("create_model", body)["model_id"])

    def sampler(self) -> str:
        body = {"session_id": self.session(), "sampling_session_seq_id": 0, "base_model": BASE, "model_path": None}
        return str(self.post("create_sampling_session", body).json["sampling_session_id"])

    def close(self) -> None:
        self.connection.close()


TOKENS = [3, 1, 4, 1, 5]
TARGETS = [1, 4, 1, 5, 9]


def training_body(model_id: str, seq_id: int, key: str = "forward_backward_input", **inputs: Any) -> dict[str, Any]:
    given = {"target_tokens": TARGETS, "weights": [1.0] * 5, **inputs}
    tensors = {
        name: {"data": values, "dtype": "int64" if name == "target_tokens" else "float32", "shape": [len(values)]}
        for name, values in given.items()
    }
    datum = {"model_input": {"chunks": [{"tokens": TOKENS}]}, "loss_fn_inputs": tensors}
    return {
        key: {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None},
        "model_id": model_id,
        "seq_id": seq_id,
    }


def training_message(model_id: str, seq_id: int, forward_only: bool = False) -> bytes:
    message = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = struct.pack("<5i", *TOKENS)
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = struct.pack("<5q", *TARGETS), pb.DTYPE_INT64
    weights.dense, weights.dtype = struct.pack("<5f", *[1.0] * 5), pb.DTYPE_FLOAT32
    return bytes(message.SerializeToString())


def optim_body(model_id: str, seq_id: int, **params: float) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": params}


def sample_body(sampler_id: str, seq_id: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1},
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        **more,
    }
