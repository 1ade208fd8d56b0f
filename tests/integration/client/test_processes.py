"""Forks, DataLoader workers and pickles: a client works in another process, or refuses there at once and says why."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex.testing import ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]
ONE_TOKEN = tinkex.SamplingParams(max_tokens=1)


def in_fork(work: Callable[[], object]) -> Any:
    """What `work()` gives in a forked child; its error is raised here."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is exactly what is tested
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is a failure, not a test run that never ends
        try:
            os.close(reader)
            answer = (True, work())
        except BaseException as problem:
            traceback.print_exc()
            answer = (False, problem)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        is_good, value = pickle.load(pipe)
    os.waitpid(child, 0)
    if not is_good:
        raise value
    return value


def draw(sampler: tinkex.SamplingClient, count: int = 1) -> list[list[int]]:
    futures = [sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=3)) for _ in range(count)]
    return [list(future.result(20).sequences[0].tokens) for future in futures]


# -- fork -------------------------------------------------------------------------------------------------------------


def test_a_sampler_made_in_the_parent_works_in_a_forked_child(
    service: ScriptedService, sampler: tinkex.SamplingClient
) -> None:
    tokens = draw(sampler)  # the parent's connections, loop and numbers are in use
    assert in_fork(lambda: draw(sampler, 5)) == tokens * 5
    assert in_fork(lambda: draw(sampler, 5)) == tokens * 5
    assert draw(sampler, 5) == tokens * 5  # and the parent goes on as before
    numbers = [seq_id for _, seq_id in service.sampled]
    assert len(numbers) == 16
    assert len(set(numbers)) == 16, "two processes used the same seq_id"


@pytest.mark.timing
def test_a_forked_child_has_limits_and_connections_of_its_own(proto_service: ScriptedService, connect: Connect) -> None:
    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    proto_service.script.on("asample", nth=1, do=Status(429, headers={"retry-after": "5"}))
    backed_off = sampler.sample(prompt(), 1, ONE_TOKEN)
    while not sampler._session.link().limiter.dispatch.waiting:
        time.sleep(0.01)
    before = proto_service.accepted_connections
    started = time.monotonic()
    assert in_fork(lambda: draw(sampler)) == draw(connect(proto_service).create_sampling_client(base_model=MODEL))
    assert time.monotonic() - started < 4, "the parent's back-off reached the child"
    assert proto_service.accepted_connections > before
    backed_off.cancel()


def test_a_forked_child_awaits_in_a_loop_of_its_own(service: ScriptedService, sampler: tinkex.SamplingClient) -> None:
    async def several() -> list[list[int]]:
        answers = await asyncio.gather(
            *(sampler.sample_async(prompt(), 1, tinkex.SamplingParams(max_tokens=3)) for _ in range(8))
        )
        return [list(answer.sequences[0].tokens) for answer in answers]

    expected = asyncio.run(several())
    assert in_fork(lambda: asyncio.run(several())) == expected
    assert len(set(service.sampled)) == 16


def test_a_copy_asks_for_its_block_of_numbers_where_the_service_gives_them(connect: Connect) -> None:
    with (
        ScriptedService(base_models=[MODEL], client_config={"sample_join_sampling_session": True}) as service,
        connect(service) as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)
        draw(sampler, 2)
        in_fork(lambda: draw(sampler, 3))
        in_fork(lambda: draw(sampler, 3))
        assert len(service.requests_to("join_sampling_session")) == 2
        blocks = [(seq_id or 0) // 1_000_000_000 for _, seq_id in service.sampled]
        assert sorted(blocks) == [0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.timing
def test_a_future_submitted_before_the_fork_raises_at_once_in_the_child(
    service: ScriptedService, sampler: tinkex.SamplingClient
) -> None:
    finished = sampler.sample(prompt(), 1, ONE_TOKEN)
    finished.result(20)
    service.script.on("asample", do=Work(0.6))
    future = sampler.sample(prompt(), 1, ONE_TOKEN)

    def look() -> tuple[list[str], float, bool]:
        said = []
        started = time.monotonic()
        for wait in (future.result, future.exception, lambda: asyncio.run(future.result_async())):
            try:
                wait()
            except tinkex.ClosedError as problem:
                said.append(str(problem))
        return said, time.monotonic() - started, finished.result() is not None

    said, seconds, has_finished = in_fork(look)
    assert len(said) == 3
    assert all("before a fork" in text and "Make the call again in this process" in text for text in said)
    assert seconds < 0.5
    assert has_finished, "what was there before the fork can be read after it"
    assert future.result(20).sequences


def test_a_training_client_refuses_in_a_forked_child_where_its_numbers_would_clash(
    service: ScriptedService, training: tinkex.TrainingClient
) -> None:
    training.optim_step(step()).result(20)
    for call in (lambda: training.optim_step(step()), lambda: training.forward_backward([datum()], "cross_entropy")):
        with pytest.raises(tinkex.ClosedError, match=r"before a fork.*create_training_client_from_state"):
            in_fork(call)
    training.optim_step(step()).result(20)
    assert [seq_id for _, seq_id, _ in service.executed] == [1, 2]


def test_a_forked_child_trains_in_a_session_of_its_own(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    client.create_lora_training_client(MODEL)

    def train() -> str:
        training = client.create_lora_training_client(MODEL)
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(step()).result(20)
        return training.model_id

    model_id = in_fork(train)
    assert len(service.sessions) == 2
    assert [(model, op) for model, _, op in service.executed] == [
        (model_id, "forward_backward"),
        (model_id, "optim_step"),
    ]


def test_closing_in_a_forked_child_does_not_end_the_parents_session(service: ScriptedService, connect: Connect) -> None:
    client = connect(service)
    sampler = client.create_sampling_client(base_model=MODEL)
    in_fork(lambda: client.close().result(5))
    assert not service.requests_to("finish_session")
    assert draw(sampler)


@pytest.mark.timing
def test_a_forked_child_that_ends_like_any_program_is_quick_and_silent(proto_service: ScriptedService) -> None:
    code = f"""
import os, sys, time, tinkex
sampler = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-fork").create_sampling_client(base_model={MODEL!r})
prompt, params = tinkex.ModelInput.from_ints([1, 2]), tinkex.SamplingParams(max_tokens=1)
futures = [sampler.sample(prompt, 1, params) for _ in range(20)]
child = os.fork()
if child == 0:
    sampler.sample(prompt, 1, params).result(20)
    sys.exit(7)
started = time.monotonic()
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 7, status
for future in futures:
    future.result(20)
print(time.monotonic() - started)
"""
    proto_service.script.on("asample", do=Work(0.3))
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, proto_service.url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert float(done.stdout) < 4


@pytest.mark.slow
def test_a_sampler_works_in_forked_dataloader_workers(proto_service: ScriptedService, connect: Connect) -> None:
    import torch.utils.data

    class Rollouts(torch.utils.data.Dataset[list[int]]):
        def __init__(self, sampler: tinkex.SamplingClient) -> None:
            self.sampler = sampler

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> list[int]:
            answer = self.sampler.sample(tinkex.ModelInput.from_ints([index + 1]), 1, ONE_TOKEN).result(20)
            return [os.getpid(), *answer.sequences[0].tokens]

    sampler = connect(proto_service).create_sampling_client(base_model=MODEL)
    expected = [sampler.sample(tinkex.ModelInput.from_ints([n + 1]), 1, ONE_TOKEN).result(20) for n in range(12)]
    loader = torch.utils.data.DataLoader(
        Rollouts(sampler), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = list(loader)
    assert [row[1:] for row in found] == [list(answer.sequences[0].tokens) for answer in expected]
    assert len({row[0] for row in found}) == 2
    assert os.getpid() not in {row[0] for row in found}
    draw(sampler)
    numbers = [seq_id for _, seq_id in proto_service.sampled]
    assert len(numbers) == len(set(numbers)) == 25


# -- pickles ----------------------------------------------------------------------------------------------------------

KEY = "tml-secret-6f1b0c"
UNPICKLE = """
import pickle, sys, tinkex
client = pickle.load(sys.stdin.buffer)
if isinstance(client, tinkex.SamplingClient):
    client.sample(tinkex.ModelInput.from_ints([1]), 1, tinkex.SamplingParams(max_tokens=1)).result(20)
elif isinstance(client, tinkex.TrainingClient):
    client.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result(20)
elif isinstance(client, tinkex.ServiceClient):
    client.create_lora_training_client("tinkex/tiny")
else:
    client.list_training_runs().result(20)
print(type(client).__name__)
"""


@pytest.fixture
def clients(proto_service: ScriptedService) -> dict[str, tinkex.ServiceClient | Any]:
    client = tinkex.ServiceClient(base_url=proto_service.url, api_key=KEY, telemetry=False)
    return {
        "ServiceClient": client,
        "TrainingClient": client.create_lora_training_client(MODEL),
        "SamplingClient": client.create_sampling_client(base_model=MODEL),
        "RestClient": client.create_rest_client(),
    }


def unpickle(data: bytes, home: Path, key: str | None) -> subprocess.CompletedProcess[bytes]:
    environment = {"HOME": str(home), "PATH": os.environ.get("PATH", "")} | ({"TINKER_API_KEY": key} if key else {})
    return subprocess.run(
        [sys.executable, "-c", UNPICKLE], input=data, capture_output=True, timeout=60, env=environment
    )


@pytest.mark.slow
def test_every_client_travels_in_a_pickle_and_its_key_does_not(
    proto_service: ScriptedService, clients: dict[str, Any], tmp_path: Path
) -> None:
    draw(clients["SamplingClient"])
    clients["TrainingClient"].optim_step(step()).result(20)
    for name, client in clients.items():
        data = pickle.dumps(client)
        assert KEY.encode() not in data
        assert KEY.removeprefix("tml-").encode() not in data
        done = unpickle(data, tmp_path, KEY)
        assert (done.stdout.decode(), done.stderr.decode()) == (f"{name}\n", "")
    assert len(set(proto_service.sampled)) == 2
    assert [seq_id for _, seq_id, _ in proto_service.executed] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "tml-another"])
def test_a_pickled_client_refuses_where_its_key_is_not_set(
    proto_service: ScriptedService, clients: dict[str, Any], tmp_path: Path, key: str | None
) -> None:
    before = len(proto_service.requests)
    for client in clients.values():
        done = unpickle(pickle.dumps(client), tmp_path, key)
        assert done.returncode == 1
        assert b"ConfigError" in done.stderr
        assert b"set TINKER_API_KEY to the same key" in done.stderr
    assert len(proto_service.requests) == before


def test_a_pickle_of_a_pickle_and_a_handle_still_name_the_same_sampler(
    proto_service: ScriptedService, clients: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    sampler = clients["SamplingClient"]
    handle = sampler.get_sampler_handle()
    assert KEY not in handle
    copies = [
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sampler)))),
        tinkex.SamplingClient.from_sampler_handle(handle),
    ]
    for each in (sampler, *copies):
        draw(each)
    assert len({sampler_id for sampler_id, _ in proto_service.sampled}) == 1
    assert len(set(proto_service.sampled)) == 3


def test_a_future_cannot_be_pickled_and_says_what_can(service: ScriptedService, sampler: tinkex.SamplingClient) -> None:
    future = sampler.sample(prompt(), 1, ONE_TOKEN)
    with pytest.raises(TypeError, match=r"pickle its result\(\)"):
        pickle.dumps(future)
    answer = future.result(20)
    assert pickle.loads(pickle.dumps(answer)) == answer


@pytest.mark.slow
def test_a_sampler_works_in_spawned_pool_workers(
    proto_service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    client = tinkex.ServiceClient(base_url=proto_service.url, api_key=KEY, telemetry=False)
    sampler = client.create_sampling_client(base_model=MODEL)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(draw, [sampler] * 4, chunksize=1)
    assert found == [draw(sampler)] * 4
    assert len(set(proto_service.sampled)) == 5
