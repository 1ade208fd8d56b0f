"""Bounds: a full queue, hung connections, many polls, a stop with work in hand. Nobody else waits, nothing is lost."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.service.conftest import ALICE, BOB
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import (
    TOKENS,
    Answer,
    Raw,
    batch,
    check_told,
    check_unharmed,
    datum,
    floats,
    tensor,
    text,
)

pytestmark = pytest.mark.slow

MOST_SAMPLES, MOST_OPERATIONS, GAP_S = 8, 20, 3.0
LENGTH = 80
"""Tokens of a sample that is at work for a while: some 0.1 s, while a request takes 5 ms."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ["--api-key", ALICE, "--api-key", BOB, "--max-rows", "2", "--gap-s", str(GAP_S)]
    flags += ["--max-queued-samples", str(MOST_SAMPLES), "--max-queued-operations", str(MOST_OPERATIONS)]
    with LiveServer(tmp_path_factory.mktemp("narrow") / "data", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def anna(narrow: LiveServer) -> Raw:
    return Raw(narrow, ALICE)


@pytest.fixture(scope="module")
def ben(narrow: LiveServer) -> Raw:
    return Raw(narrow, BOB)


def long_sample(sampler: str, **changes: Any) -> dict[str, Any]:
    params = {"max_tokens": LENGTH, "stop": [], "seed": 1}
    return {
        "prompt": text(TOKENS),
        "num_samples": 1,
        "sampling_params": params,
        "sampling_session_id": sampler,
        **changes,
    }


def all_at_once(count: int, ask: Callable[[int], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


def check_busy(answer: Answer, says: str) -> None:
    assert (answer.status, answer.json["category"]) == (429, "server")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    check_told(answer, says)


def check_healthy(client: Raw, within_s: float = 1.0) -> None:
    began = time.monotonic()
    assert client.get("healthz").status == 200
    assert time.monotonic() - began < within_s


def test_samples_beyond_the_limit_are_told_to_come_again_and_the_others_are_answered(anna: Raw) -> None:
    sampler = anna.sampler()
    answers = all_at_once(24, lambda n: anna.post("asample", long_sample(sampler, seq_id=n)))
    accepted = [answer.json["request_id"] for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(accepted) >= MOST_SAMPLES and refused
    for answer in refused:
        check_busy(answer, r"8.*--max-queued-samples.*again")
    for request_id in accepted:
        assert [len(row["tokens"]) for row in anna.poll(request_id).json["sequences"]] == [LENGTH]
    again = anna.done("asample", long_sample(sampler, seq_id=99))
    assert len(again["sequences"]) == 1


def test_a_stream_and_a_completion_are_told_so_before_they_begin(anna: Raw) -> None:
    sampler = anna.sampler()
    many = anna.post("asample", long_sample(sampler, num_samples=MOST_SAMPLES)).json["request_id"]
    check_busy(anna.post("sample_stream", long_sample(sampler)), r"--max-queued-samples")
    answer = anna.post("/v1/completions", {"model": "tinkex/tiny", "prompt": "a", "stream": True})
    assert answer.status == 429 and "--max-queued-samples" in answer.json["error"]["message"]
    assert len(anna.poll(many).json["sequences"]) == MOST_SAMPLES


def test_a_tenant_that_fills_the_queue_does_not_shut_out_another(anna: Raw, ben: Raw) -> None:
    hers, his = anna.sampler(), ben.sampler()
    filling = anna.post("asample", long_sample(hers, num_samples=MOST_SAMPLES)).json["request_id"]
    assert anna.post("asample", long_sample(hers)).status == 429
    answer = ben.post("asample", long_sample(his, sampling_params={"max_tokens": 2}))
    assert answer.status == 200
    assert "sequences" in ben.poll(answer.json["request_id"]).json
    assert len(anna.poll(filling).json["sequences"]) == MOST_SAMPLES


def test_a_cancelled_sample_makes_room(anna: Raw) -> None:
    sampler = anna.sampler()
    many = anna.post("asample", long_sample(sampler, num_samples=MOST_SAMPLES)).json["request_id"]
    assert anna.post("asample", long_sample(sampler)).status == 429
    assert anna.post("cancel_future", {"request_id": many}).status == 200
    assert anna.poll(many).json == {"error": "Cancelled by the client.", "category": "user"}
    assert "sequences" in anna.done("asample", long_sample(sampler, num_samples=MOST_SAMPLES, seq_id=2))


def test_operations_beyond_the_limit_are_told_to_wait_and_the_others_run(anna: Raw, ben: Raw) -> None:
    run, other = anna.run(), ben.run()
    first = run.take()  # held back, so that the rest waits
    accepted = [run.submit_forward() for _ in range(MOST_OPERATIONS)]
    answer = anna.post("forward", {"model_id": run.id, "seq_id": run.upcoming, "forward_input": batch()})
    check_busy(answer, r"20.*--max-queued-operations")
    check_unharmed(other)
    for request_id in accepted:
        assert "metrics" in anna.poll(request_id).json
    late = anna.post("forward", {"model_id": run.id, "seq_id": first, "forward_input": batch()})
    assert "arrived after" in anna.poll(late.json["request_id"]).json["error"]


def test_a_client_waits_a_full_queue_out_and_trains_what_it_would_have_trained_without_the_limit(
    live: LiveServer, tmp_path: Path
) -> None:
    """Before: the client gave a call up after `max_retries` attempts, and the run went on without it."""

    def train(server: LiveServer) -> tuple[list[float | None], list[float], int]:
        row = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints([7] * 400),
            loss_fn_inputs={"target_tokens": [8] * 400, "weights": [1.0] * 400},
        )
        with tinkex.ServiceClient(base_url=server.url, api_key="tml-pairs", max_retries=1) as client:
            training = client.create_lora_training_client("tinkex/tiny", rank=8, seed=3)
            adam = tinkex.AdamParams(learning_rate=1e-3)
            pairs = [
                (training.forward_backward([row] * 4, "cross_entropy"), training.optim_step(adam)) for _ in range(10)
            ]
            losses = [passed.result(120).loss for passed, _ in pairs]
            steps = [(stepped.result(120).metrics or {})["step:max"] for _, stepped in pairs]
            return losses, steps, training.stats()["rate_limited"]

    with LiveServer(tmp_path / "full", "--max-queued-operations", "2") as full:
        losses, steps, rejections = train(full)
    expected, _, rejections_without = train(live)
    assert rejections > 0 and rejections_without == 0
    assert steps == [float(number) for number in range(1, 11)]
    assert losses == expected and len(set(losses)) == 10


def open_post(client: Raw, path: str, body: bytes, announced: int | None = None) -> socket.socket:
    """A request under way on a connection of its own. `announced` is the length it claims to have."""
    sock = socket.create_connection(("127.0.0.1", client.server.port), timeout=40)
    length = len(body) if announced is None else announced
    head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: x\r\nx-api-key: {client.key}\r\ncontent-length: {length}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def read_answer(sock: socket.socket) -> Answer:
    with sock.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(stream.readline, b"\r\n"))
        return Answer(status, headers, stream.read(int(headers["content-length"])))


@pytest.mark.timing
def test_connections_that_hang_hold_up_nobody(anna: Raw, ben: Raw) -> None:
    run, other = anna.run(), ben.run()
    check_unharmed(run, other)
    body = json.dumps(run.named(forward_input=batch())).encode()
    with ExitStack() as stack:
        hung = [stack.enter_context(open_post(anna, "forward", body[:40], len(body))) for _ in range(50)]
        for _ in range(50):
            half_head = stack.enter_context(socket.create_connection(("127.0.0.1", anna.server.port), timeout=10))
            half_head.sendall(b"POST /api/v1/forward HTTP/1.1\r\nhost: x\r\nx-api-")
        check_healthy(ben)
        check_unharmed(other)
        # One of them goes on after all, and its number was not lost.
        hung[0].sendall(body[40:])
        request_id = read_answer(hung[0]).json["request_id"]
        assert anna.poll(request_id).json["metrics"]["loss:sum"] == run.first_loss
    check_unharmed(run, other)
    check_healthy(ben)


@pytest.mark.timing
def test_three_hundred_polls_slow_nothing_down_and_are_all_answered(anna: Raw, ben: Raw) -> None:
    run, other = anna.run(), ben.run()
    check_unharmed(run, other)
    missing = run.take()
    awaited = run.submit_forward()
    with ExitStack() as stack:
        body = json.dumps({"request_id": awaited}).encode()
        polls = [stack.enter_context(open_post(anna, "retrieve_future", body)) for _ in range(300)]
        for _ in range(5):
            check_healthy(ben)
        check_unharmed(other)
        anna.post("forward", {"model_id": run.id, "seq_id": missing, "forward_input": batch()})
        answers = [read_answer(poll) for poll in polls]
    assert {answer.status for answer in answers} == {200}
    assert {answer.json["metrics"]["loss:sum"] for answer in answers} == {run.first_loss}


def busy_batch() -> dict[str, object]:
    """Some 50 ms of work."""
    length = 1500
    row = datum(text([7] * length), target_tokens=tensor([8] * length), weights=floats(*[1.0] * length))
    return batch([row] * 4)


@pytest.mark.timing
def test_a_stop_with_work_queued_ends_in_time_and_the_work_goes_on_after_the_next_start(
    narrow: LiveServer, anna: Raw
) -> None:
    run = anna.run()
    sampler = anna.sampler()
    sample = anna.post("asample", long_sample(sampler)).json["request_id"]
    submitted = []
    for _ in range(MOST_OPERATIONS // 2):
        for call, fields in (
            ("forward_backward", {"forward_backward_input": busy_batch()}),
            ("optim_step", {"adam_params": {"learning_rate": 1e-4}}),
        ):
            submitted.append(anna.post(call, run.named(**fields)).json["request_id"])
    held = open_post(anna, "retrieve_future", json.dumps({"request_id": submitted[-1]}).encode())
    told: list[Answer] = []
    reader = threading.Thread(target=lambda: told.append(read_answer(held)))
    reader.start()
    began = time.monotonic()
    assert narrow.stop(seconds=15) == 0
    assert time.monotonic() - began < 12  # 5 s to drain, 3 s for connections, the rest is the machine's
    reader.join(10)
    held.close()
    assert [answer.status for answer in told] == [408]  # whoever waited was not left in the air
    narrow.start()
    assert re.search(r"resumed \d+ queued operations", narrow.log())
    results = [anna.poll(request_id) for request_id in submitted]
    assert all(result.status == 200 and "error" not in result.json for result in results)
    steps = [result.json["metrics"]["step:max"] for result in results[1::2]]
    assert steps == [float(n) for n in range(1, len(steps) + 1)]
    lost = anna.poll(sample)
    assert lost.status == 410
    check_told(lost, "request it again")
