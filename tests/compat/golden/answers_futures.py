"""Answers to submissions and polls: pending, failed, gone, refused, malformed, and both dialects of success."""

from __future__ import annotations

import math
from typing import Any

from . import protobuf as pb
from .canned import PROTOBUF, Answer, as_json, as_protobuf
from .case import BOTH, NEW, OLD
from .variant import poll, variant

SEQUENCE: dict[str, Any] = {"stop_reason": "length", "tokens": [7, 8]}
PENDING = as_json({"queue_state": "active"}, 408)
DONE = {"metrics": {"grad_norm:mean": 0.5}}


def text(body: str, status: int = 200, content_type: str = "text/plain") -> Answer:
    return Answer(status, body.encode(), {"Content-Type": content_type})


# Pending

PENDING_BODIES: dict[str, Answer] = {
    "active": as_json({"queue_state": "active"}, 408),
    "paused-rate-limit": as_json({"queue_state": "paused_rate_limit", "queue_state_reason": "too many"}, 408),
    "paused-capacity": as_json({"queue_state": "paused_capacity", "queue_state_reason": None}, 408),
    "unknown-state": as_json({"queue_state": "resting"}, 408),
    "state-null": as_json({"queue_state": None}, 408),
    "no-state": as_json({}, 408),
    "list-body": as_json([], 408),
    "text-body": text("later", 408),
    "empty-body": Answer(408, b""),
}
for name, answer in PENDING_BODIES.items():
    poll(f"pending/408-{name}", "optim-step", answer)
TRY_AGAIN = {"type": "try_again", "request_id": "optim_step-1", "queue_state": "active"}
poll("pending/try-again", "optim-step", TRY_AGAIN)
poll("pending/try-again-reason", "optim-step", TRY_AGAIN | {"queue_state_reason": "full"})
poll("pending/try-again-bare", "optim-step", {"type": "try_again"})
poll("pending/try-again-unknown-state", "optim-step", TRY_AGAIN | {"queue_state": "resting"})
poll("pending/try-again-sample", "sample", TRY_AGAIN)
poll("pending/metadata", "forward-backward", {"status": "complete_metadata", "response_payload_size": 100})
poll("pending/metadata-twice", "forward-backward", *[{"status": "complete_metadata", "response_payload_size": 100}] * 2)
poll("pending/metadata-without-size", "forward-backward", {"status": "complete_metadata"})
poll("pending/metadata-optim-step", "optim-step", {"status": "complete_metadata", "response_payload_size": 100})

# Failed

for category in ("user", "server", "unknown", "User", "USER", "Server", "billing", "", None, 5):
    poll(f"failed/category-{category}", "optim-step", {"error": "no more", "category": category})
poll("failed/category-missing", "optim-step", {"error": "no more"})
poll("failed/error-null", "optim-step", {"error": None, "category": "user"})
poll("failed/error-null-beside-a-result", "optim-step", DONE | {"error": None})
poll("failed/error-empty", "optim-step", {"error": "", "category": "user"})
poll("failed/error-object", "optim-step", {"error": {"code": 5}, "category": "user"})
poll("failed/extra-fields", "optim-step", {"error": "no more", "category": "user", "code": "x", "type": "failed"})
poll("failed/sample-user", "sample", {"error": "no more", "category": "user"})
poll("failed/sample-server", "sample", {"error": "no more", "category": "server"})
poll("failed/forward-backward", "forward-backward", {"error": "no more", "category": "user"})

# Statuses of polls and of submissions

for status in (400, 401, 403, 404, 409, 410, 418, 422, 429, 500, 503, 529):
    refused = as_json({"detail": "refused"}, status)
    poll(f"poll-status/{status}", "optim-step", refused)
    variant(f"submit-status/{status}", "optim-step", {"optim_step": [refused]})
    variant(f"rest-status/{status}", "training-run", {f"training_runs/{'session-0:train:0'}": [refused]})
poll("poll-status/410-sample", "sample", as_json({"detail": "expired"}, 410))
poll("poll-status/404-sample", "sample", as_json({"detail": "unknown"}, 404))
poll("poll-status/400-four-times", "optim-step", *[as_json({"detail": "refused"}, 400)] * 4)
poll("poll-status/402", "optim-step", as_json({"detail": "unpaid"}, 402))
variant("submit-status/402", "optim-step", {"optim_step": [as_json({"detail": "unpaid"}, 402)]})
variant("submit-status/429-sample", "sample", {"asample": [as_json({"detail": "slow down"}, 429)]})
variant("submit-status/400-sample", "sample", {"asample": [as_json({"detail": "refused"}, 400)]})
variant("submit-status/500-create-model", "create-model", {"create_model": [as_json({"detail": "down"}, 500)]})

# How an error's body is read; a 400 without a body is taken for a proxy's by some releases

BODIES: dict[str, Answer] = {
    "detail": as_json({"detail": "refused", "code": "bad", "category": "user"}, 400),
    "error-object": as_json({"error": {"message": "refused"}}, 400),
    "list": as_json(["refused"], 400),
    "string": as_json("refused", 400),
    "text": text("refused", 400),
    "html": text("<h1>Bad Request</h1>", 400, "text/html"),
    "bad-json": text("{refused", 400, "application/json"),
    "empty": Answer(400, b""),
    "without-length": Answer(
        400, b'{"detail": "refused"}', {"Content-Type": "application/json", "Connection": "close"}
    ),
}
for name, answer in BODIES.items():
    variant(f"error-body/{name}", "get-info", {"get_info": [answer]})
RETRY_HEADERS: dict[str, tuple[int, dict[str, str]]] = {
    "should-retry-false": (500, {"x-should-retry": "false"}),
    "should-retry-true": (400, {"x-should-retry": "true"}),
    "after-ms": (429, {"retry-after-ms": "10"}),
    "after-seconds": (429, {"retry-after": "1"}),
    "after-fraction": (429, {"retry-after": "0.25"}),
    "after-nonsense": (429, {"retry-after": "soon"}),
}
for name, (status, headers) in RETRY_HEADERS.items():
    refused = Answer(status, b'{"detail": "refused"}', {"Content-Type": "application/json", **headers})
    variant(f"retry/{name}", "get-info", {"get_info": [refused]})

# Answers to a submission

SUBMISSIONS: dict[str, Any] = {
    "extra-fields": {"request_id": "optim_step-1", "model_id": "m", "colour": "blue", "type": "future"},
    "model-id-null": {"request_id": "optim_step-1", "model_id": None},
    "no-request-id": {"model_id": "m"},
    "request-id-number": {"request_id": 5},
    "request-id-null": {"request_id": None},
    "empty-object": {},
    "null": None,
}
for name, body in SUBMISSIONS.items():
    variant(f"submission/{name}", "optim-step", {"optim_step": [as_json(body)]})
variant("submission/not-json", "optim-step", {"optim_step": [text("fine")]})
variant("submission/json-as-text", "optim-step", {"optim_step": [text('{"request_id": "optim_step-1"}')]})
SEQUENCE_IDS: dict[str, dict[str, Any]] = {
    "missing": {},
    "null": {"sample_sequence_ids": None},
    "empty": {"sample_sequence_ids": []},
}
for name, ids in SEQUENCE_IDS.items():
    variant(f"submission/sequence-ids-{name}", "sample", {"asample": [as_json({"request_id": "asample-0", **ids})]})
variant(
    "submission/sequence-ids-too-many",
    "sample",
    {"asample": [as_json({"request_id": "asample-0", "sample_sequence_ids": ["a", "b"]})]},
)

# Samples as JSON: the answer of older services

SAMPLES: dict[str, Any] = {
    "minimal": {"sequences": [SEQUENCE]},
    "with-type": {"type": "sample", "sequences": [SEQUENCE]},
    "two-sequences": {"sequences": [SEQUENCE, SEQUENCE]},
    "logprobs": {"sequences": [SEQUENCE | {"logprobs": [-0.5, -0.25]}]},
    "logprobs-null": {
        "sequences": [SEQUENCE | {"logprobs": None}],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
    },
    "logprobs-with-null": {"sequences": [SEQUENCE | {"logprobs": [-0.5, None]}]},
    "logprobs-nan": {"sequences": [SEQUENCE | {"logprobs": [-0.5, math.nan]}]},
    "logprobs-infinite": {"sequences": [SEQUENCE | {"logprobs": [-0.5, -math.inf]}]},
    "logprobs-integers": {"sequences": [SEQUENCE | {"logprobs": [0, -1]}]},
    "logprobs-of-another-length": {"sequences": [SEQUENCE | {"logprobs": [-0.5]}]},
    "extra-fields": {"sequences": [SEQUENCE | {"colour": "blue"}], "colour": "blue"},
    "no-sequences": {"sequences": []},
    "sequences-missing": {"prompt_logprobs": None},
    "tokens-empty": {"sequences": [SEQUENCE | {"tokens": []}]},
    "tokens-missing": {"sequences": [{"stop_reason": "stop"}]},
    "tokens-whole-floats": {"sequences": [SEQUENCE | {"tokens": [7.0, 8.0]}]},
    "tokens-fractions": {"sequences": [SEQUENCE | {"tokens": [7.5]}]},
    "tokens-text": {"sequences": [SEQUENCE | {"tokens": ["7"]}]},
    "stop-reason-missing": {"sequences": [{"tokens": [7, 8]}]},
    "prompt-logprobs": {"sequences": [SEQUENCE], "prompt_logprobs": [None, -0.5, -0.25]},
    "prompt-logprobs-nan": {"sequences": [SEQUENCE], "prompt_logprobs": [math.nan, -0.5, -0.25]},
    "prompt-logprobs-empty": {"sequences": [SEQUENCE], "prompt_logprobs": []},
    "topk": {"sequences": [SEQUENCE], "topk_prompt_logprobs": [None, [[5, -0.5], [6, -1.5]], [[7, -0.25]]]},
    "topk-fillers": {
        "sequences": [SEQUENCE],
        "topk_prompt_logprobs": [[[0, -99999.0], [0, -99999.0]], [[5, -0.5], [0, -99999.0]]],
    },
    "topk-empty-rows": {"sequences": [SEQUENCE], "topk_prompt_logprobs": [[], []]},
    "topk-triples": {"sequences": [SEQUENCE], "topk_prompt_logprobs": [[[5, -0.5, "a"]]]},
}
for word in ("length", "stop", "max_tokens", "stop_sequence", "eos", "STOP", "Length", "", None):
    SAMPLES[f"stop-reason-{word}"] = {"sequences": [{"stop_reason": word, "tokens": [7, 8]}]}
for name, body in SAMPLES.items():
    # 0.36 refuses every JSON success here; two of them prove it.
    poll(f"sample-json/{name}", "sample", body, versions=BOTH if name in ("minimal", "logprobs") else OLD)
poll("sample-json/empty-object", "sample", {})
poll("sample-json/null", "sample", None)
poll("sample-json/list", "sample", [])
poll("sample-json/string", "sample", "fine")
poll("sample-json/number", "sample", 5)
poll("sample-json/not-json", "sample", text("fine"))
poll("sample-json/cut-off", "sample", text('{"sequences": [', 200, "application/json"))
poll("sample-json/no-body", "sample", Answer(200, b""))
poll("sample-json/json-as-text", "sample", text('{"sequences": []}'), versions=OLD)
poll("sample-json/compute-logprobs", "compute-logprobs", SAMPLES["prompt-logprobs"], versions=OLD)
poll("sample-json/compute-logprobs-null", "compute-logprobs", SAMPLES["minimal"], versions=OLD)

# Samples as protobuf

ONE = pb.field(1, pb.sampled_sequence(1, [7, 8], [-0.5, -0.25]))
NAN = math.nan
TOPK = pb.topk_logprobs([[(0, -99999.0), (0, -99999.0)], [(5, -0.5), (0, -99999.0)], [(5, -0.5), (6, -1.5)]])
CSR = pb.field(
    2, pb.field(1, pb.pack("f", [-0.5])) + pb.field(2, pb.pack("q", [0, 1, 1])) + pb.field(3, pb.pack("q", [1]))
)
PROTO_SAMPLES: dict[str, bytes] = {
    "plain": ONE,
    "stop": pb.field(1, pb.sampled_sequence(0, [7, 8], [-0.5, -0.25])),
    "stop-reason-left-out": pb.field(1, pb.field(2, pb.pack("i", [7, 8]))),
    "stop-reason-unknown": pb.field(1, pb.sampled_sequence(2, [7, 8], None)),
    "without-logprobs": pb.field(1, pb.sampled_sequence(1, [7, 8], None)),
    "logprobs-empty": pb.field(1, pb.sampled_sequence(1, [], [])),
    "logprobs-nan": pb.field(1, pb.sampled_sequence(1, [7, 8], [-0.5, NAN])),
    "tokens-left-out": pb.field(1, pb.integer(1, 1)),
    "tokens-cut-off": pb.field(1, pb.integer(1, 1) + pb.field(2, b"\x01\x02\x03")),
    "sampled-topk": pb.field(
        1, pb.sampled_sequence(1, [7, 8], [-0.5, -0.25], pb.topk_logprobs([[(7, -0.5)], [(8, -0.25)]]))
    ),
    "prompt-logprobs": ONE + pb.field(2, pb.pack("f", [NAN, -0.5, -0.25])),
    "prompt-logprobs-all-nan": ONE + pb.field(2, pb.pack("f", [NAN, NAN])),
    "prompt-logprobs-empty": ONE + pb.field(2, b""),
    "topk": ONE + pb.field(3, TOPK),
    "topk-of-zero": ONE + pb.field(3, pb.integer(4, 3)),
    "cache-hits": ONE + pb.integer(4, 2),
    "target-dense": ONE + pb.field(5, pb.tensor("float32", [2, 2], pb.pack("f", [-0.5, 0.0, -1.5, -0.25]))),
    "target-csr": ONE + pb.field(5, CSR + pb.integer(3, 1) + pb.field(4, b"\x02\x02")),
    "target-bfloat16": ONE + pb.field(5, pb.tensor("bfloat16", [1, 1], b"\x00\xbf")),
    "alternatives": ONE
    + pb.field(
        6,
        pb.field(1, pb.tensor("int32", [2, 1], pb.pack("i", [5, 6])))
        + pb.field(2, pb.tensor("float32", [2, 1], pb.pack("f", [-0.5, -0.25]))),
    ),
    "unknown-field": ONE + pb.field(15, b"blue"),
    "two-for-one": ONE + ONE,
    "no-bytes": b"",
    "not-protobuf": b'{"sequences": []}',
}
for name, message in PROTO_SAMPLES.items():
    poll(f"sample-protobuf/{name}", "sample", message, versions=BOTH if name == "plain" else NEW)
poll("sample-protobuf/two", "sample-two", ONE + ONE, versions=NEW)
poll(
    "sample-protobuf/charset", "sample", Answer(200, ONE, {"Content-Type": f"{PROTOBUF}; charset=binary"}), versions=NEW
)
poll(
    "sample-protobuf/octet-stream",
    "sample",
    Answer(200, ONE, {"Content-Type": "application/octet-stream"}),
    versions=NEW,
)
poll("sample-protobuf/compute-logprobs", "compute-logprobs", PROTO_SAMPLES["prompt-logprobs"], versions=NEW)
poll("sample-protobuf/compute-logprobs-missing", "compute-logprobs", ONE, versions=NEW)
poll("sample-protobuf/for-an-optim-step", "optim-step", as_protobuf(ONE))
