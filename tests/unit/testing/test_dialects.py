"""One service, two dialects: what goes in and comes out as JSON, and what as protobuf."""

from __future__ import annotations

import math
import struct

import zstandard

from tinkex.testing import FailFuture, Pending, ScriptedService
from tinkex.wire import endpoints
from tinkex.wire import tinkex_pb2 as pb

from .http_client import PROTOBUF, Client, sample_body, training_body, training_message


def floats(packed: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def test_every_endpoint_of_the_table_is_served(service: ScriptedService) -> None:
    assert service._routes.keys() == {row.name for row in endpoints.ALL} | {"file"}


def test_an_old_service_does_not_know_client_config(old_service: ScriptedService) -> None:
    client = Client(old_service)
    assert [client.post(f"client/{name}").status for name in ("config", "dynamic_config")] == [404, 404]
    assert client.post("sample_stream").status == 404


def test_a_new_service_announces_what_it_can_do(client: Client) -> None:
    config = client.post("client/config", {"sdk_version": "0.36.0"}).json
    assert config["parallel_fwdbwd_chunks"] is False and config["tinkex"]["stream"] is True


def test_the_configuration_is_the_tests_to_choose() -> None:
    with ScriptedService(client_config={"proto_compress_fwdbwd": True}, dynamic_config={"x": 1}) as service:
        client = Client(service)
        assert client.post("client/config").json["proto_compress_fwdbwd"] is True
        assert client.post("client/dynamic_config").json == {"x": 1}


def test_an_old_service_neither_reads_nor_writes_protobuf(old_service: ScriptedService) -> None:
    client = Client(old_service)
    model = client.model()
    refused = client.ask("POST", "/api/v1/forward_backward", training_message(model, 1), {"Content-Type": PROTOBUF})
    assert refused.status == 415 and refused.json["category"] == "user"
    accepted = client.post("forward_backward", training_body(model, 1)).json
    got = client.poll(accepted["request_id"], accept=PROTOBUF)
    assert got.headers["content-type"] == "application/json" and got.json["metrics"].keys() == {"loss:sum"}


def test_both_dialects_compute_the_same(client: Client, service: ScriptedService) -> None:
    model = client.model()
    as_json = client.post("forward_backward", training_body(model, 1)).json["request_id"]
    message = training_message(model, 2)
    packed = zstandard.ZstdCompressor().compress(message)
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    as_protobuf = client.ask("POST", "/api/v1/forward_backward", packed, headers).json["request_id"]

    plain = client.poll(as_json).json
    answer = client.poll(as_protobuf, accept=PROTOBUF)
    assert answer.headers["content-type"] == PROTOBUF
    output = pb.ForwardBackwardOutput.FromString(answer.body)
    assert floats(output.loss_fn_outputs[0].fields["logprobs"].data) == plain["loss_fn_outputs"][0]["logprobs"]["data"]
    assert output.metrics["loss:sum"] == plain["metrics"]["loss:sum"] > 0
    assert plain["metrics"]["loss:sum"] == -sum(plain["loss_fn_outputs"][0]["logprobs"]["data"])
    first, second = service.requests_to("forward_backward")
    assert (
        first.summary
        == {**second.summary, "seq_id": 1}
        == {"model_id": model, "seq_id": 1, "loss_fn": "cross_entropy", "forward_only": False, "datums": 1}
    )


def test_forward_is_an_endpoint_in_one_dialect_and_a_flag_in_the_other(
    client: Client, service: ScriptedService
) -> None:
    model = client.model()
    client.post("forward", training_body(model, 1, key="forward_input"))
    message = training_message(model, 2, forward_only=True)
    client.ask("POST", "/api/v1/forward_backward", message, {"Content-Type": PROTOBUF})
    assert service.executed == [(model, 1, "forward"), (model, 2, "forward")]


def test_pending_and_failed_stay_json_when_protobuf_is_accepted(client: Client, service: ScriptedService) -> None:
    service.script.on("asample", do=[Pending("paused_capacity", "full"), FailFuture("no luck", "server")])
    request_id = client.post("asample", sample_body(client.sampler())).json["request_id"]
    pending, failed = (client.poll(request_id, accept=PROTOBUF) for _ in range(2))
    assert (pending.status, pending.json) == (408, {"queue_state": "paused_capacity", "queue_state_reason": "full"})
    assert (failed.status, failed.json) == (200, {"error": "no luck", "category": "server"})


def test_two_dimensional_targets_come_dense_or_sparse(client: Client) -> None:
    model = client.model()

    def logprobs(seq_id: int, targets: dict[str, object], weights: dict[str, object]) -> tuple[object, float]:
        body = training_body(model, seq_id)
        inputs = {"target_tokens": targets, "weights": weights}
        body["forward_backward_input"]["data"][0]["loss_fn_inputs"] = inputs
        body["forward_backward_input"]["data"][0]["model_input"] = {"chunks": [{"tokens": [3]}, {"tokens": [8]}]}
        found = client.result("forward_backward", body)
        return found["loss_fn_outputs"][0]["logprobs"], found["metrics"]["loss:sum"]

    dense = logprobs(
        1,
        {"data": [1, 2, 3, 0], "dtype": "int64", "shape": [2, 2]},
        {"data": [0.5, 0.25, 1.0, 0.0], "dtype": "float32", "shape": [2, 2]},
    )
    layout = {"sparse_crow_indices": [0, 2, 3], "sparse_col_indices": [0, 1, 0], "shape": [2, 2]}
    sparse = logprobs(
        2,
        {"data": [1, 2, 3], "dtype": "int64", **layout},
        {"data": [0.5, 0.25, 1.0], "dtype": "float32", **layout},
    )
    assert dense == sparse and dense[0]["shape"] == [2, 2]  # type: ignore[index]


def test_datums_of_different_widths_share_one_protobuf_answer(client: Client) -> None:
    message = pb.ForwardBackwardRequest(model_id=client.model(), seq_id=1, loss_fn="cross_entropy")
    shapes = [(2,), (2, 2), (2, 2), (2,)]
    for shape in shapes:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = struct.pack("<2i", 3, 8)
        targets = range(math.prod(shape))
        datum.loss_fn_inputs["target_tokens"].CopyFrom(
            pb.Tensor(dense=struct.pack(f"<{len(targets)}q", *targets), dtype=pb.DTYPE_INT64, shape=shape)
        )
    accepted = client.ask(
        "POST", "/api/v1/forward_backward", message.SerializeToString(), {"Content-Type": PROTOBUF}
    ).json
    answer = client.poll(accepted["request_id"], accept=PROTOBUF)
    records = pb.ForwardBackwardOutput.FromString(answer.body).loss_fn_outputs
    found = [(record.num_datums, list(record.fields["logprobs"].trailing_shape)) for record in records]
    assert found == [(1, []), (2, [2]), (1, [])]
    offsets = struct.unpack("<3q", records[1].fields["logprobs"].offsets)
    assert offsets == (0, 16, 32) and len(records[1].fields["logprobs"].data) == 32


def test_samples_follow_from_prompt_and_seed(any_service: ScriptedService) -> None:
    client = Client(any_service)
    sampler = client.sampler()

    def tokens(seq_id: int, seed: int, count: int = 1) -> list[list[int]]:
        body = sample_body(sampler, seq_id, num_samples=count, sampling_params={"max_tokens": 8, "seed": seed})
        return [sequence["tokens"] for sequence in client.result("asample", body)["sequences"]]

    assert tokens(0, 1) == tokens(1, 1) != tokens(2, 2)
    first, second = tokens(3, 1, count=2)
    assert first != second and len(first) == len(second) == 8


def test_a_stop_token_ends_a_sequence_and_is_part_of_it(client: Client) -> None:
    sampler = client.sampler()
    greedy = {"max_tokens": 8, "temperature": 0}
    whole = client.result("asample", sample_body(sampler, 0, sampling_params=greedy))["sequences"][0]
    body = sample_body(sampler, 1, sampling_params={**greedy, "stop": [whole["tokens"][2]]})
    stopped = client.result("asample", body)["sequences"][0]
    assert whole["stop_reason"] == "length" and stopped["stop_reason"] == "stop"
    assert stopped["tokens"] == whole["tokens"][:3] and stopped["logprobs"] == whole["logprobs"][:3]


def test_a_sample_answers_all_that_was_asked_in_both_dialects(client: Client) -> None:
    targets = {"data": [1, -1], "dtype": "int64", "shape": [2, 1]}
    more = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 2}
    body = sample_body(client.sampler(), 0, **more, target_prompt_logprobs=targets)
    accepted = client.post("asample", body).json
    assert accepted["sample_sequence_ids"] == [f"{accepted['request_id']}:0"]
    plain = client.poll(accepted["request_id"]).json
    packed = pb.SampleResponse.FromString(client.poll(accepted["request_id"], accept=PROTOBUF).body)

    sequence = plain["sequences"][0]
    assert floats(packed.sequences[0].logprobs) == sequence["logprobs"]
    assert list(struct.unpack("<4i", packed.sequences[0].tokens)) == sequence["tokens"]
    assert packed.sequences[0].topk_sampled_logprobs.length == len(sequence["topk_logprobs"]) == 4
    prompt = floats(packed.prompt_logprobs)
    assert math.isnan(prompt[0]) and plain["prompt_logprobs"] == [None, *prompt[1:]]
    assert plain["topk_prompt_logprobs"][0] is None
    assert floats(packed.topk_prompt_logprobs.logprobs)[:2] == [-99999.0, -99999.0]
    assert floats(packed.target_prompt_logprobs.dense) == plain["target_prompt_logprobs"]["data"]
    assert plain["target_prompt_logprobs"]["data"][1] == 0.0
    assert list(packed.prompt_alt_tokens.tokens.shape) == plain["prompt_alt_tokens"]["tokens"]["shape"] == [2, 2]


def test_a_large_result_is_announced_before_it_is_sent() -> None:
    with ScriptedService(metadata_over_bytes=50) as service:
        client = Client(service)
        request_id = client.post("asample", sample_body(client.sampler())).json["request_id"]
        announced = client.poll(request_id, allow_metadata_only=True).json
        whole = client.poll(request_id, allow_metadata_only=False)
        assert announced == {"status": "complete_metadata", "response_payload_size": len(whole.body)}


def test_a_prompt_beyond_the_context_is_refused_by_name(client: Client) -> None:
    body = sample_body(client.sampler(), sampling_params={"max_tokens": 40_000})
    refused = client.post("asample", body)
    assert refused.status == 400 and "3 prompt tokens + 40000 max_tokens > 32768" in refused.json["detail"]
