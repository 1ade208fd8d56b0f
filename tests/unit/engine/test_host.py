"""The engine as a process: commands get replies, a failing command fails alone, no process is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine import scripted_child
from tinkex.clock import REAL, Clock
from tinkex.engine import host
from tinkex.engine.contract import (
    EngineDied,
    EngineFault,
    ModelInfo,
    Sampled,
    SampleEvent,
    SampleSpec,
    Tokens,
    pass_frame,
    read_outputs,
)
from tinkex.engine.frames import Frame, packet_parts
from tinkex.engine.host import LocalEngine, describe_exit, restart_delay_s
from tinkex.engine.models.registry import resolve
from tinkex.testing.clock import FakeClock
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.tensor import TensorData

STREAM = SampleSpec(base="any", max_tokens=5, is_streamed=True)
ENDLESS = SampleSpec(base="any", max_tokens=10**9, is_streamed=True)

Test = Callable[[LocalEngine], Coroutine[Any, Any, None]]


async def collect(engine: LocalEngine, spec: SampleSpec) -> list[SampleEvent]:
    return [event async for event in engine.sample(spec)]


async def ping(engine: LocalEngine) -> dict[str, Any]:
    return (await engine.run(Frame({"op": "ping"}))).head


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z" if sys.platform == "linux" else True


# --- a scripted child: the real process, pipes and loop, without torch ---


def scripted(name: str = "model", *arguments: str, clock: Clock = REAL) -> LocalEngine:
    """Return an engine whose program is the scripted child."""
    program = (sys.executable, str(scripted_child.__file__), *arguments)
    return LocalEngine([ModelInfo(name=name, folder="")], program=program, clock=clock)


def with_engine(test: Test, name: str = "model", clock: FakeClock | None = None) -> None:
    """Run a test on a started engine, and close it."""

    async def run() -> None:
        engine = scripted(name, clock=clock or REAL)
        try:
            await engine.start()
            async with asyncio.timeout(20):
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(run())


class TestScripted:
    def test_a_reply_has_the_commands_tenant_and_buffers(self) -> None:
        async def test(engine: LocalEngine) -> None:
            for size in (0, 5, 3_000_000):
                reply = await engine.run(Frame({"op": "echo", "x": [1, None]}, [bytes(size), b"tail"]), tenant="ann")
                assert reply.head == {"heard": {"op": "echo", "x": [1, None], "tenant": "ann"}}
                assert [bytes(buffer) for buffer in reply.buffers] == [bytes(size), b"tail"]

        with_engine(test)

    def test_an_encoded_command_is_not_encoded_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A training body is encoded once, for the journal; nothing between journal and engine may do it again."""

        def encoding(frame: Frame) -> Any:
            raise AssertionError(f"encoded again: {frame.head}")

        async def test(engine: LocalEngine) -> None:
            stored = Frame({"op": "echo"}, [b"12345678" * 1000]).encode()
            with monkeypatch.context() as patch:
                patch.setattr(Frame, "parts", encoding)
                reply = await engine.run(stored, tenant="ann")
            assert reply.head == {"heard": {"op": "echo", "tenant": "ann"}}
            assert bytes(reply.buffers[0]) == b"12345678" * 1000

        with_engine(test)

    @pytest.mark.parametrize("damaged", [b"", Frame({"op": "echo"}, [b"12345678"]).encode()[:-3]])
    def test_a_damaged_command_fails_alone(self, damaged: bytes) -> None:
        """A power cut may leave a short file in the journal. The engine waited for the rest of it, for ever."""

        async def test(engine: LocalEngine) -> None:
            with pytest.raises(ValueError, match="A frame"):
                await engine.run(damaged, tenant="ann")
            assert (await engine.run(Frame({"op": "echo"}))).head == {"heard": {"op": "echo", "tenant": ""}}

        with_engine(test)

    def test_prints_in_the_child_do_not_corrupt_the_pipe(self, caplog: pytest.LogCaptureFixture) -> None:
        async def test(engine: LocalEngine) -> None:
            assert (await engine.run(Frame({"op": "print"}))).head == {"read": ""}
            assert (await engine.run(Frame({"op": "echo"}))).head == {"heard": {"op": "echo", "tenant": ""}}

        with caplog.at_level("INFO", "tinkex.engine"):
            with_engine(test)
        assert {"a print", "a write to fd 1", "a print of a child"} <= {record.message for record in caplog.records}

    def test_a_failing_command_leaves_the_next_one_working(self, caplog: pytest.LogCaptureFixture) -> None:
        async def test(engine: LocalEngine) -> None:
            for op, text, category in (
                ("fault", "This will not do.", "user"),
                ("explode", "failed in explode (KeyError)", "server"),
                ("unwritable", "failed in unwritable (", "server"),
            ):
                with pytest.raises(EngineFault) as failed:
                    await engine.run(Frame({"op": op}))
                assert text in str(failed.value) and "/some/path" not in str(failed.value)
                assert failed.value.category == category
                await engine.run(Frame({"op": "echo"}))

        with caplog.at_level("ERROR", "tinkex.engine"):  # an earlier test may have left another level
            with_engine(test)
        errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert "KeyError: 'a secret at /some/path'" in errors

    def test_commands_run_in_the_order_of_their_arrival(self) -> None:
        async def test(engine: LocalEngine) -> None:
            done: list[int] = []

            async def run(index: int) -> None:
                await engine.run(Frame({"op": "steps", "count": 5 - index}))
                done.append(index)

            await asyncio.gather(*map(run, range(5)))
            assert done == [0, 1, 2, 3, 4]

        with_engine(test)

    def test_a_stream_gives_every_token_and_then_the_whole(self) -> None:
        async def test(engine: LocalEngine) -> None:
            *tokens, whole = await collect(engine, STREAM)
            assert tokens == [Tokens(0, [index], [-0.5]) for index in range(5)]
            assert isinstance(whole, Sampled) and whole.sequences[0].tokens == [0, 1, 2, 3, 4]
            assert len(await collect(engine, SampleSpec(base="any", max_tokens=3))) == 1

        with_engine(test)

    def test_samples_and_a_long_training_command_share_the_time(self) -> None:
        async def test(engine: LocalEngine) -> None:
            training = asyncio.create_task(engine.run(Frame({"op": "steps", "count": 60})))
            await asyncio.gather(*(collect(engine, STREAM) for _ in range(3)))
            assert not training.done()
            drawing = asyncio.create_task(collect(engine, ENDLESS))
            await training
            assert not drawing.done()
            drawing.cancel()

        with_engine(test)

    def test_closing_a_sample_cancels_it_in_the_engine(self) -> None:
        async def test(engine: LocalEngine) -> None:
            closed = engine.sample(ENDLESS)
            await anext(closed)
            cancelled = asyncio.create_task(collect(engine, ENDLESS))
            while (await ping(engine))["samples_running"] < 2:
                pass
            await closed.aclose()  # type: ignore[attr-defined]
            cancelled.cancel()
            await asyncio.wait({cancelled})
            assert (await ping(engine))["samples_running"] == 0

        with_engine(test)

    def test_a_rejected_sample_and_a_failing_step_do_not_stop_the_sampler(self) -> None:
        async def test(engine: LocalEngine) -> None:
            with pytest.raises(EngineFault, match="There is no such base"):
                await collect(engine, SampleSpec(base="none"))
            with pytest.raises(EngineFault, match=r"failed in sample \(ZeroDivisionError\)"):
                await collect(engine, SampleSpec(base="any", temperature=13))
            assert len(await collect(engine, STREAM)) == 6

        with_engine(test)

    def test_a_killed_child_fails_what_it_had_and_is_followed_by_another(self) -> None:
        async def test(engine: LocalEngine) -> None:
            first = engine.state
            running = [asyncio.create_task(engine.run(Frame({"op": "steps", "count": 10**6}))) for _ in range(2)]
            sampling = asyncio.create_task(collect(engine, ENDLESS))
            while (await ping(engine))["samples_running"] < 1:
                pass
            os.kill(first.pid, signal.SIGKILL)
            for task in (*running, sampling):
                with pytest.raises(EngineDied, match="killed by signal 9"):
                    await task
            assert not engine.state.is_ready and "killed by signal 9" in engine.state.reason
            assert engine.state.generation == first.generation + 1  # already: what it held is gone
            with pytest.raises(EngineDied, match="takes no commands now"):
                await engine.run(Frame({"op": "echo"}))
            events = await collect(engine, STREAM)  # a sample waits for the next engine by itself
            assert len(events) == 6
            assert engine.state.is_ready and engine.state.generation == first.generation + 1
            assert engine.state.pid != first.pid
            await engine.run(Frame({"op": "echo"}))

        with_engine(test)

    def test_the_engine_ignores_signals_to_the_whole_group(self) -> None:
        async def test(engine: LocalEngine) -> None:
            os.kill(engine.state.pid, signal.SIGINT)
            os.kill(engine.state.pid, signal.SIGTERM)
            await engine.run(Frame({"op": "steps", "count": 3}))
            assert engine.state.generation == 1

        with_engine(test)

    def test_a_child_that_keeps_dying_is_started_less_and_less_often(self) -> None:
        clock = FakeClock()

        async def test(engine: LocalEngine) -> None:
            for expected_s in (0.0, 0.5, 1.0):
                before = engine.state.generation
                os.kill(engine.state.pid, signal.SIGKILL)
                if expected_s:
                    await until(lambda: clock.slept[-1] != 600, "a pause")
                    assert clock.slept[-1] == expected_s
                    clock.advance(expected_s)
                await until(lambda before=before: engine.state.generation > before, "a start")  # type: ignore[misc]
                await engine.ready()
            clock.advance(30)  # it has proved sound
            os.kill(engine.state.pid, signal.SIGKILL)
            await until(lambda: engine.state.generation == 5, "a start at once")
            await engine.ready()

        with_engine(test, clock=clock)

    def test_start_raises_if_a_model_cannot_be_loaded(self) -> None:
        async def test() -> None:
            engine = scripted("broken")
            for _ in range(2):
                with pytest.raises(EngineFault, match=r"could not start: it failed while loading broken: .*missing\.$"):
                    await engine.start()
            assert not engine.state.is_ready
            await engine.close()

        asyncio.run(test())

    def test_an_engine_that_is_killed_during_its_first_start_is_started_again(self) -> None:
        async def test() -> None:
            engine = scripted("endless")
            starting = asyncio.create_task(engine.start())
            for generation in (1, 2, 3):
                await until(lambda: engine.state.pid != 0 and "loading endless" in engine.state.reason, "loading")
                assert engine.state.generation == generation
                os.kill(engine.state.pid, signal.SIGKILL)
                await until(lambda: "loading" not in engine.state.reason, "its end")
            with pytest.raises(EngineFault, match="could not start: it was killed by signal 9"):
                await starting
            await engine.close()

        asyncio.run(test())

    def test_a_child_that_never_gets_ready_is_killed_after_ten_minutes(self) -> None:
        async def test() -> None:
            clock = FakeClock()
            engine = scripted("endless", clock=clock)
            starting = asyncio.create_task(engine.start())
            await until(lambda: engine.state.reason == "loading endless", "loading")
            pid = engine.state.pid
            clock.advance(600)
            with pytest.raises(EngineFault, match=r"was not ready within 600 s \(loading endless\)"):
                await starting
            assert not is_alive(pid)
            await engine.close()

        asyncio.run(test())

    def test_a_child_that_sends_no_valid_packet_is_killed(self) -> None:
        async def test() -> None:
            engine = scripted("garbage")
            with pytest.raises(EngineFault, match="not a packet"):
                await engine.start()
            await engine.close()

        asyncio.run(test())

    def test_closing_leaves_no_process_and_fails_what_was_running(self) -> None:
        async def test(engine: LocalEngine) -> None:
            pid = engine.state.pid
            running = asyncio.create_task(engine.run(Frame({"op": "steps", "count": 10**6})))
            await ping(engine)
            await asyncio.gather(engine.close(), engine.close())
            with pytest.raises(EngineDied):
                await running
            assert not is_alive(pid) and not engine.state.is_ready and engine.state.reason == "closed"
            for late in (engine.ready(), engine.start(), engine.run(Frame({"op": "echo"})), collect(engine, STREAM)):
                with pytest.raises(EngineDied, match="closed"):
                    await late

        with_engine(test)

    def test_closing_works_before_the_start_and_in_the_middle_of_it(self) -> None:
        async def test() -> None:
            never = scripted("model")
            await never.close()
            with pytest.raises(EngineDied, match="closed"):
                await never.start()
            for name in ("model", "endless"):
                engine = scripted(name)
                starting = asyncio.create_task(engine.start())
                await until(lambda engine=engine: engine.state.pid > 0, "a start")  # type: ignore[misc]
                await engine.close()
                with pytest.raises(EngineDied, match="closed"):
                    await starting

        asyncio.run(test())

    def test_closing_kills_a_child_that_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "CLOSE_WITHIN_S", 0.1)

        async def test(engine: LocalEngine) -> None:
            pid = engine.state.pid
            os.kill(pid, signal.SIGSTOP)
            await engine.close()
            assert not is_alive(pid)

        with_engine(test)

    def test_statistics_are_sent_without_a_request(self) -> None:
        async def test(engine: LocalEngine) -> None:
            await collect(engine, STREAM)
            await until(lambda: engine.state.extras.get("tokens_sampled") == 5, "statistics")
            assert engine.state.rss_bytes > 1_000_000 and engine.state.extras["samples_running"] == 0

        with_engine(test)


def test_the_pause_before_a_restart_doubles_up_to_half_a_minute() -> None:
    assert [restart_delay_s(deaths) for deaths in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay_s(10**6) == 30


def test_exit_codes_are_described() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-11) == "was killed by signal 11"
    assert "out of memory" in describe_exit(-9)


def test_a_missing_device_is_rejected_with_the_usable_ones() -> None:
    import torch

    from tinkex.engine.process.main import pick_device

    missing = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(EngineFault, match=f"--device {missing}.*Usable: .*cpu"):
        pick_device(missing)


# --- without anyone to work for ---

SERVER = """
import subprocess, sys
command = [sys.executable, "-m", "tinkex.engine.process.main"]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def test_the_child_ends_when_its_pipe_does_even_while_it_loads() -> None:
    start = {"op": "start", "models": [], "threads": 1, "device": "cpu", "dtype": "float32"}
    with subprocess.Popen(
        [sys.executable, "-m", "tinkex.engine.process.main"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"".join(packet_parts(0, "", Frame(start))))
        child.stdin.flush()
        assert child.stdout.read(1)  # it says that it is loading
        child.stdin.close()
        assert child.wait(timeout=2) == 0


def test_the_child_ends_with_a_server_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
        server.wait()

    async def gone() -> None:
        async with asyncio.timeout(2):
            while is_alive(pid):
                await asyncio.sleep(0.01)

    asyncio.run(gone())


# --- the real one: torch, `tinkex/tiny` and a pipe ---


def datums(count: int, length: int) -> list[Datum]:
    rows = [[(3 * row + 7 * place) % 250 for place in range(length + 1)] for row in range(count)]
    return [
        Datum(
            model_input=ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(data=row[1:], dtype="int64", shape=[length]),
                "weights": TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
            },
        )
        for row in rows
    ]


SMALL = pass_frame("forward_backward", "a", datums(3, 17), "cross_entropy", None)
LONG = pass_frame("forward_backward", "a", datums(200, 64), "cross_entropy", None)
CREATE = Frame({"op": "create", "adapter": "a", "base": "tinkex/tiny", "rank": 8, "seed": 3})
STEP = Frame(
    {
        "op": "optim_step", "adapter": "a", "learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12,
        "weight_decay": 0.0, "grad_clip_norm": 0.0,
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    engine = LocalEngine([resolve("tinkex/tiny", tmp_path_factory.mktemp("cache"))], device="cpu", token_budget=256)
    runner.run(engine.start())
    yield engine
    runner.run(engine.close())


async def train(engine: LocalEngine) -> tuple[list[float], list[bytes]]:
    """A few steps from the beginning: the losses, and the bits of the last log-probabilities."""
    await engine.run(CREATE)
    losses = []
    for _ in range(4):
        reply = await engine.run(SMALL)
        losses.append(reply.head["metrics"]["loss:sum"])
        await engine.run(STEP)
    outputs = read_outputs(reply)
    return losses, [bytes(output["logprobs"].buffer) for output in outputs]


def test_training_through_the_pipe_lowers_the_loss(runner: asyncio.Runner, engine: LocalEngine) -> None:
    losses, logprobs = runner.run(train(engine))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert [len(row) for row in logprobs] == [17 * 4] * 3


def test_after_a_crash_the_models_are_there_that_were_loaded_and_whose_files_still_are(
    runner: asyncio.Runner, engine: LocalEngine, tmp_path: Path
) -> None:
    source = resolve("tinkex/tiny", tmp_path).folder
    infos = [resolve(str(shutil.copytree(source, tmp_path / name)), tmp_path) for name in ("kept", "deleted", "left")]

    async def crash() -> None:
        for info in infos:
            await engine.run(Frame({"op": "load_model", "model": asdict(info)}))
        await engine.run(Frame({"op": "unload_model", "base": "left"}))
        shutil.rmtree(tmp_path / "deleted")
        os.kill(engine.state.pid, signal.SIGKILL)
        await until(lambda: not engine.state.is_ready, "the engine to end")
        await engine.ready()

    runner.run(crash())
    models = engine.state.models
    assert models is not None and models.keys() == {"tinkex/tiny", "kept"}
    assert len(set(models.values())) == 1 and 0 not in models.values()
    runner.run(engine.run(Frame({"op": "unload_model", "base": "kept"})))


# Frames as a journal of commit bb05b41 has them, written as bytes: before the pipe had a header of its own.
OLD_PASS = (
    b'\xec\x00\x00\x00\x40\x00\x00\x00\x00\x00\x00\x00{"op":"forward_backward","adapter":"a","loss_fn":"cross_entropy",'
    b'"config":{},"data":[{"tokens":2,"inputs":{"target_tokens":{"dtype":"int64","shape":[4],"data":0},'
    b'"weights":{"dtype":"float32","shape":[4],"data":1}}}],"_sizes":[32,16,16]}'
    b"\x4d\x00\x00\x00\x00\x00\x00\x00\xb1\x00\x00\x00\x00\x00\x00\x00"
    b"\x21\x00\x00\x00\x00\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\x80\x3f\x00\x00\x80\x3f\x00\x00\x00\x3f"
    b"\x07\x00\x00\x00\x4d\x00\x00\x00\xb1\x00\x00\x00\x21\x00\x00\x00"
)
OLD_STEP = (
    b'\x8f\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00{"op":"optim_step","adapter":"a","learning_rate":0.01,"beta1":0.9,'
    b'"beta2":0.95,"eps":1e-12,"weight_decay":0.0,"grad_clip_norm":0.0,"_sizes":[]}'
)


def test_frames_of_an_older_journal_replay_to_the_same_bits(runner: asyncio.Runner, engine: LocalEngine) -> None:
    row = [7, 77, 177, 33, 9]
    inputs = {
        "target_tokens": TensorData(data=row[1:], dtype="int64", shape=[4]),
        "weights": TensorData(data=[0.0, 1.0, 1.0, 0.5], dtype="float32", shape=[4]),
    }
    datum = Datum(model_input=ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)
    today = pass_frame("forward_backward", "a", [datum], "cross_entropy", None)

    async def replay(*commands: Frame | bytes) -> list[bytes]:
        await engine.run(CREATE)
        for command in commands:
            await engine.run(command, tenant="ann")
        reply = await engine.run(today)
        return [bytes(output["logprobs"].buffer) for output in read_outputs(reply)]

    assert runner.run(replay(OLD_PASS, OLD_STEP)) == runner.run(replay(today, STEP)) != runner.run(replay())


def test_samples_stream_while_a_long_training_command_runs(runner: asyncio.Runner, engine: LocalEngine) -> None:
    async def test() -> None:
        await engine.run(CREATE)
        training = asyncio.create_task(engine.run(LONG))
        spec = SampleSpec(
            base="tinkex/tiny", prompt=(1, 2, 3), max_tokens=8, num_samples=2, seed=1, is_streamed=True, stop_tokens=()
        )
        *tokens, whole = await collect(engine, spec)
        assert not training.done()
        assert isinstance(whole, Sampled) and [len(row.tokens) for row in whole.sequences] == [8, 8]
        for index, row in enumerate(whole.sequences):
            events = [event for event in tokens if isinstance(event, Tokens) and event.index == index]
            assert [token for event in events for token in event.tokens] == row.tokens
        await training
        while engine.state.extras["tokens_trained"] < 200 * 64:
            await asyncio.sleep(0.05)
        assert engine.state.extras["adapters"] == 1

    runner.run(test())


def test_bad_data_fail_alone(runner: asyncio.Runner, engine: LocalEngine) -> None:
    async def test() -> None:
        await engine.run(CREATE)
        for wrong in (
            pass_frame("forward_backward", "a", [], "cross_entropy", None),
            pass_frame("forward_backward", "a", datums(1, 3), "no_such_loss", None),
            pass_frame("forward", "nobody", datums(1, 3), "cross_entropy", None),
            Frame({"op": "nonsense", "adapter": "a"}),
        ):
            with pytest.raises(EngineFault):
                await engine.run(wrong)
        await engine.run(SMALL)

    runner.run(test())


def test_after_kill_9_the_next_engine_computes_the_same_bits(runner: asyncio.Runner, engine: LocalEngine) -> None:
    async def test() -> None:
        before, generation = await train(engine), engine.state.generation
        running = asyncio.create_task(engine.run(LONG))
        await ping(engine)  # the command before it has arrived
        os.kill(engine.state.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="killed by signal 9"):
            await running
        await engine.ready()
        assert engine.state.generation == generation + 1
        with pytest.raises(EngineFault, match="not in this engine"):
            await engine.run(STEP)
        assert await train(engine) == before

    runner.run(test())
