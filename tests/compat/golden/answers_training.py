"""Results of training operations: outputs and metrics in both dialects, joining of chunks, saves, loads, models."""

from __future__ import annotations

import math
from typing import Any

from . import protobuf as pb
from .canned import Answer, as_json, as_protobuf
from .case import BOTH, NEW, OLD
from .variant import poll, variant

LOGPROBS: dict[str, Any] = {"data": [-0.5, -0.25, -1.0], "dtype": "float32", "shape": [3]}
OUTPUT: dict[str, Any] = {
    "loss_fn_output_type": "ArrayRecord",
    "loss_fn_outputs": [{"logprobs": LOGPROBS}],
    "metrics": {"loss:sum": 1.5},
}


def tensor(**changes: Any) -> dict[str, Any]:
    changed = {key: value for key, value in (LOGPROBS | changes).items() if value != "left out"}
    return OUTPUT | {"loss_fn_outputs": [{"logprobs": changed}]}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in OUTPUT.items() if name != key}


OUTPUTS: dict[str, Any] = {
    "plain": OUTPUT,
    "extra-fields": OUTPUT | {"loss": 1.5, "type": "forward_backward"},
    "metrics-missing": without("metrics"),
    "metrics-null": OUTPUT | {"metrics": None},
    "metrics-empty": OUTPUT | {"metrics": {}},
    "metrics-integer": OUTPUT | {"metrics": {"loss:sum": 2}},
    "metrics-with-null": OUTPUT | {"metrics": {"loss:sum": None}},
    "metrics-with-text": OUTPUT | {"metrics": {"loss:sum": "1.5"}},
    "metrics-nan": OUTPUT | {"metrics": {"loss:sum": math.nan}},
    "metrics-without-reducer": OUTPUT | {"metrics": {"loss": 1.5}},
    "metrics-two-colons": OUTPUT | {"metrics": {"a:b:sum": 1.5}},
    "metrics-unknown-reducer": OUTPUT | {"metrics": {"loss:sum": 1.5, "loss:median": 2.5}},
    "mean-of-no-outputs": OUTPUT | {"loss_fn_outputs": [], "metrics": {"loss:mean": 1.5}},
    "sum-of-no-outputs": OUTPUT | {"loss_fn_outputs": [], "metrics": {"loss:sum": 1.5}},
    "output-type-missing": without("loss_fn_output_type"),
    "outputs-missing": without("loss_fn_outputs"),
    "outputs-null": OUTPUT | {"loss_fn_outputs": None},
    "empty-output": OUTPUT | {"loss_fn_outputs": [{}]},
    "shape-null": tensor(shape=None),
    "shape-missing": tensor(shape="left out"),
    "shape-of-another-size": tensor(shape=[2, 2]),
    "two-dimensions": tensor(data=[-0.5, -0.25, -1.0, -2.0], shape=[2, 2]),
    "integers": tensor(data=[1, 2, 3], dtype="int64"),
    "integers-as-float32": tensor(data=[0, -1, -2]),
    "fractions-as-int64": tensor(data=[1.5], dtype="int64", shape=[1]),
    "dtype-float64": tensor(dtype="float64"),
    "dtype-missing": tensor(dtype="left out"),
    "data-missing": tensor(data="left out"),
    "data-empty": tensor(data=[], shape=[0]),
    "data-nan": tensor(data=[-0.5, math.nan, -math.inf]),
    "data-with-null": tensor(data=[-0.5, None, -1.0]),
    "tensor-extra-field": tensor(colour="blue"),
    "sparse": tensor(shape=[2, 2], data=[-0.5], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[1]),
}
for name, body in OUTPUTS.items():
    poll(f"output-json/{name}", "forward-backward", body, versions=BOTH if name == "plain" else OLD)
poll("output-json/forward", "forward", OUTPUT, versions=OLD)

ROW = pb.pack("f", [-0.5, -0.25, -1.0])
METRICS = {"loss:sum": 1.5}


def record(dtype: str, rows: list[bytes], trailing: list[int], count: int | None = None) -> bytes:
    return pb.array_record(
        {"logprobs": pb.batched_tensor(dtype, rows, trailing)}, len(rows) if count is None else count
    )


def output(*records: bytes, metrics: dict[str, float] | None = None, kind: str = "ArrayRecord") -> bytes:
    return pb.forward_backward_output(list(records), METRICS if metrics is None else metrics, kind)


PLAIN = record("float32", [ROW], [])
PROTO_OUTPUTS: dict[str, bytes] = {
    "plain": output(PLAIN),
    "two-dimensions": output(record("float32", [pb.pack("f", [-0.5, -0.25, -1.0, -2.0])], [2])),
    "two-datums": output(record("float32", [ROW, ROW[:4]], [])),
    "two-records": output(PLAIN, record("float32", [pb.pack("f", [-0.5, -0.25])], [2])),
    "int64": output(record("int64", [pb.pack("q", [1, 2, 3])], [])),
    "int32": output(record("int32", [pb.pack("i", [1, 2, 3])], [])),
    "bfloat16": output(record("bfloat16", [b"\x00\xbf\x80\xbe"], [])),
    "dtype-unspecified": output(record("unspecified", [ROW], [])),
    "datums-not-counted": output(record("float32", [ROW, ROW], [], 0)),
    "datums-without-fields": output(pb.array_record({}, 2)),
    "empty-datum": output(record("float32", [b""], [])),
    "no-outputs": output(),
    "no-metrics": output(PLAIN, metrics={}),
    "mean-of-no-outputs": output(metrics={"loss:mean": 1.5}),
    "metrics-without-reducer": output(PLAIN, metrics={"loss": 1.5}),
    "metrics-two-colons": output(PLAIN, metrics={"a:b:sum": 1.5}),
    "metrics-unknown-reducer": output(PLAIN, metrics={"loss:sum": 1.5, "loss:median": 2.5}),
    "metrics-nan": output(PLAIN, metrics={"loss:sum": math.nan}),
    "output-type-qualified": output(PLAIN, kind="some.module:ArrayRecord"),
    "output-type-empty": output(PLAIN, kind=""),
    "unknown-field": output(PLAIN) + pb.field(15, b"blue"),
    "no-bytes": b"",
}
for name, message in PROTO_OUTPUTS.items():
    poll(f"output-protobuf/{name}", "forward-backward", message, versions=NEW)
poll("output-protobuf/forward", "forward", output(PLAIN), versions=NEW)
poll("output-protobuf/not-protobuf", "forward-backward", b"fine", versions=NEW)

# How two chunks become one result. The first answers for three datums, the second for one.

PAIRS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "mean": ({"x:mean": 1.0}, {"x:mean": 3.0}),
    "sum": ({"x:sum": 1.0}, {"x:sum": 3.0}),
    "min": ({"x:min": 1.0}, {"x:min": 3.0}),
    "max": ({"x:max": 1.0}, {"x:max": 3.0}),
    "slack": ({"x:slack": 1.0}, {"x:slack": 3.0}),
    "unique": ({"x:unique": 1.0}, {"x:unique": 3.0}),
    "unique-equal": ({"x:unique": 1.0}, {"x:unique": 1.0}),
    "hash-unordered": ({"x:hash_unordered": 5.0}, {"x:hash_unordered": 7.0}),
    "hash2": ({"x:hash2": 5.0}, {"x:hash2": 7.0}),
    "hash2-large": ({"x:hash2": 2.0**63}, {"x:hash2": 2.0**63 + 4096.0}),
    "several": ({"x:sum": 1.0, "y:max": 2.0}, {"x:sum": 3.0, "y:max": 1.0}),
    "missing-in-second": ({"x:sum": 1.0, "y:sum": 2.0}, {"x:sum": 3.0}),
    "missing-in-first": ({"x:sum": 1.0}, {"x:sum": 3.0, "y:sum": 2.0}),
    "second-empty": ({"x:sum": 1.0}, {}),
}


def chunk_json(metrics: dict[str, float], count: int) -> Answer:
    return as_json(OUTPUT | {"loss_fn_outputs": [{"logprobs": LOGPROBS}] * count, "metrics": metrics})


def chunk_protobuf(metrics: dict[str, float], count: int) -> Answer:
    return as_protobuf(output(record("float32", [ROW] * count, []), metrics=metrics))


for name, (first, second) in PAIRS.items():
    for dialect, chunk, version in (("json", chunk_json, OLD), ("protobuf", chunk_protobuf, NEW)):
        script = {
            "retrieve_future:forward_backward-1": [chunk(first, 3)],
            "retrieve_future:forward_backward-2": [chunk(second, 1)],
        }
        # 130 datums make two chunks in 0.4.1; the later release is told to cut at the same place.
        limits: dict[str, Any] = (
            {} if version == OLD else {"fwdbwd_max_chunk_len": 128, "parallel_fwdbwd_chunks": False}
        )
        variant(f"chunks-{dialect}/{name}", "two-chunks", script, version, **limits)

# The other operations

STEPS: dict[str, Any] = {
    "plain": {"metrics": {"grad_norm:mean": 0.5}},
    "metrics-null": {"metrics": None},
    "metrics-empty": {"metrics": {}},
    "metrics-with-null": {"metrics": {"x": None}},
    "metrics-integer": {"metrics": {"x": 2}},
    "metrics-text": {"metrics": {"x": "2"}},
    "metrics-nan": {"metrics": {"x": math.nan}},
    "empty-object": {},
    "extra-fields": {"metrics": {}, "type": "optim_step", "colour": "blue"},
    "null": None,
}
for name, body in STEPS.items():
    poll(f"optim-step/{name}", "optim-step", body)
PATH = "tinker://session-1:train:0/weights/a"
RESULTS: dict[str, tuple[str, Any]] = {
    "save/plain": ("save-state", {"path": PATH}),
    "save/extra-fields": ("save-state", {"path": PATH, "type": "save_weights", "size_bytes": 5}),
    "save/type-null": ("save-state", {"path": PATH, "type": None}),
    "save/path-null": ("save-state", {"path": None}),
    "save/empty-object": ("save-state", {}),
    "load/plain": ("load-state", {"path": PATH}),
    "load/path-null": ("load-state", {"path": None}),
    "load/empty-object": ("load-state", {}),
    "load/model-id": ("load-state", {"path": PATH, "model_id": "m", "type": "load_weights"}),
    "save-for-sampler/plain": ("save-for-sampler", {"path": PATH}),
    "save-for-sampler/session-too": ("save-for-sampler", {"path": PATH, "sampling_session_id": "s"}),
    "save-for-sampler/path-null": ("save-for-sampler", {"path": None, "sampling_session_id": "s"}),
    "save-ephemeral/plain": ("save-ephemeral", {"sampling_session_id": "s"}),
    "save-ephemeral/path-null": ("save-ephemeral", {"path": None, "sampling_session_id": "s"}),
    "save-ephemeral/path-too": ("save-ephemeral", {"path": PATH, "sampling_session_id": "s"}),
    "save-ephemeral/session-null": ("save-ephemeral", {"path": PATH, "sampling_session_id": None}),
    "create-model/plain": ("create-model", {"model_id": "any id"}),
    "create-model/extra-fields": ("create-model", {"model_id": "m", "type": "create_model", "colour": "blue"}),
    "create-model/type-null": ("create-model", {"model_id": "m", "type": None}),
    "create-model/type-other": ("create-model", {"model_id": "m", "type": "model"}),
    "create-model/empty-object": ("create-model", {}),
    "create-model/id-number": ("create-model", {"model_id": 5}),
}
for name, (operation, body) in RESULTS.items():
    poll(name, operation, body)
