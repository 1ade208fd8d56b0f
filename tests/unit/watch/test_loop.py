"""`tinkex.progress` around a loop: what it counts, how it ends, what it costs. Real HTTP, a scripted service."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

import tinkex
from tests.unit.watch.conftest import MODEL, PRICES, TEACHER, batch, train
from tinkex.terminal import screen as screens
from tinkex.testing import FailFuture, Pending, ScriptedService, Work
from tinkex.watch.progress import Progress

PROMPT, FOUR = tinkex.ModelInput.from_ints([1, 2, 3, 4, 5]), tinkex.SamplingParams(max_tokens=4)


def quiet(training: tinkex.TrainingClient, steps: int | None = None, **options: object) -> Progress:
    return tinkex.progress(training, steps, **{"file": io.StringIO(), **options})  # type: ignore[arg-type]


def test_iterating_gives_the_steps_and_a_record_of_each(training: tinkex.TrainingClient) -> None:
    steps = []
    with quiet(training, 4) as progress:
        for step in progress:
            steps.append(step)
            train(training).result()
    assert steps == [0, 1, 2, 3]
    assert progress.stopped_by == "steps"
    assert [record.step for record in progress.history] == [1, 2, 3, 4]
    assert [record.tokens for record in progress.history] == [12] * 4
    assert {record.learning_rate for record in progress.history} == {1e-2}
    losses = [record.loss for record in progress.history]
    assert losses == sorted(losses, reverse=True)  # type: ignore[type-var]
    assert sum(record.seconds for record in progress.history) <= progress.seconds
    assert progress.tokens == 48
    assert progress.cost is None


def test_a_loop_that_never_waits_is_counted_to_its_end(training: tinkex.TrainingClient) -> None:
    with quiet(training, 20) as progress:
        for _ in progress:
            train(training)
    assert progress.step == 20
    assert len(progress.history) == 20


def test_without_iterating_the_optim_steps_are_counted(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with quiet(training, file=file) as progress:
        for _ in range(3):
            train(training)
    assert progress.step == len(progress.history) == 3
    assert file.getvalue().startswith("3 steps · loss ")


def test_several_optim_steps_or_none_in_a_step_of_the_loop_are_one_step(training: tinkex.TrainingClient) -> None:
    with quiet(training, 3) as progress:
        for step in progress:
            training.forward(batch(), "cross_entropy").result()
            for _ in range(2 * step):
                train(training)
    assert progress.step == 3
    assert len(progress.history) == 2 * 0 + 2 * 1 + 2 * 2


def test_a_resumed_loop_continues_where_it_was(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with quiet(training, 10, start=7, file=file) as progress:
        steps = []
        for step in progress:
            steps.append(step)
            train(training).result()
    assert steps == [7, 8, 9]
    assert [record.step for record in progress.history] == [8, 9, 10]
    assert file.getvalue().startswith("10 steps · ")


def test_a_for_loop_without_with_starts_and_ends_it(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    for _ in quiet(training, 2, file=file):
        train(training)
    assert file.getvalue().startswith("2 steps · loss ")


def test_a_for_loop_without_with_reports_where_it_failed(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    try:
        for step in quiet(training, 5, file=file):
            train(training).result()
            1 / (1 - step)
    except ZeroDivisionError:
        pass
    assert file.getvalue().startswith("stopped in step 2 of 5 · loss ")


def test_a_loop_left_early_reports_how_far_it_came(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with quiet(training, 5, file=file) as progress:
        for step in progress:
            train(training).result()
            if step == 1:
                break
    assert file.getvalue().startswith("2 of 5 steps · ")
    assert progress.stopped_by == ""


def test_an_exception_propagates_and_the_last_line_says_where_it_happened(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with pytest.raises(ZeroDivisionError), quiet(training, 5, file=file) as progress:
        for step in progress:
            train(training).result()
            1 / (2 - step)
    assert file.getvalue().startswith("stopped in step 3 of 5 by ZeroDivisionError · loss ")


def test_only_calls_of_this_client_after_the_start_count(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    other = service.create_lora_training_client(MODEL, rank=4)
    train(training)  # in flight while the progress begins
    with quiet(training) as progress:
        train(other).result()
        train(training).result()
    assert (progress.step, progress.tokens) == (1, 12)


def test_a_failed_operation_costs_nothing_and_its_step_says_why(
    scripted: ScriptedService, training: tinkex.TrainingClient
) -> None:
    scripted.script.on("forward_backward", nth=2, do=FailFuture("no memory"))
    scripted.script.on("optim_step", nth=3, do=FailFuture("too large"))
    file = io.StringIO()
    with quiet(training, prices=PRICES, file=file, on_failure="show") as progress:
        for _ in range(3):
            train(training)
    assert [record.failed for record in progress.history] == [0, 1, 1]
    assert progress.history[1].loss is None and "forward_backward: " in progress.history[1].failure
    assert "no memory" in progress.history[1].failure and "too large" in progress.history[2].failure
    assert len(progress.failures) == 2
    assert file.getvalue().startswith("3 steps · 2 failed: forward_backward: ")
    assert progress.tokens == 24
    assert progress.cost == pytest.approx(0.024)


def test_each_kind_of_tokens_has_its_price(service: tinkex.ServiceClient, training: tinkex.TrainingClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    with quiet(training, prices=PRICES) as progress:
        training.forward_backward(batch(), "cross_entropy")  # 12 × 1,000 per million
        training.forward(batch(), "cross_entropy")  # 12 × 100
        sampler.sample(PROMPT, 3, FOUR).result()  # 5 × 100 and 12 × 10,000
        training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
    assert progress.cost == pytest.approx(0.012 + 0.0012 + 0.0005 + 0.12)
    assert progress.history[0].cost == pytest.approx(progress.cost)
    assert progress.tokens == progress.history[0].tokens == 12 + 12 + 5 + 12


@pytest.mark.slow
def test_a_custom_loss_pays_for_both_of_its_passes(training: tinkex.TrainingClient) -> None:
    import torch

    def loss(data: list[tinkex.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.stack([lp.sum() for lp in logprobs]).sum(), {}

    with quiet(training, prices=PRICES) as progress:
        training.forward_backward_custom(batch(), loss)
        training.optim_step(tinkex.AdamParams(learning_rate=1e-2))
    assert progress.cost == pytest.approx(0.0012 + 0.012)
    assert progress.history[0].loss is not None


def test_samplers_of_the_same_service_count_and_a_list_narrows_them_down(
    scripted: ScriptedService, service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    first, second = (service.create_sampling_client(base_model=MODEL) for _ in range(2))
    with tinkex.ServiceClient(base_url=scripted.url, api_key="tml-progress", telemetry=False) as elsewhere:
        stranger = elsewhere.create_sampling_client(base_model=MODEL)
        with quiet(training) as everyone, quiet(training, samplers=[second]) as one, quiet(training, samplers=[]) as no:
            for sampler in (first, second, stranger):
                sampler.sample(PROMPT, 1, FOUR).result()
            trained = training.save_weights_and_get_sampling_client()
            trained.compute_logprobs(PROMPT).result()
    assert (everyone.tokens, one.tokens, no.tokens) == (9 + 9 + 6, 9, 0)


def test_a_streamed_sample_counts_once(service: tinkex.ServiceClient, training: tinkex.TrainingClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    with quiet(training) as progress:
        assert sum(len(chunk.tokens) for chunk in sampler.stream(PROMPT, FOUR)) == 4
    assert progress.tokens == 9


def test_a_model_without_a_price_is_reported_and_not_guessed(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    teacher = service.create_sampling_client(base_model=TEACHER)
    file = io.StringIO()
    with quiet(training, prices=PRICES, file=file) as progress:
        teacher.sample(PROMPT, 1, FOUR).result()
        train(training).result()
    assert progress.cost == pytest.approx(0.012)
    assert file.getvalue().endswith(" · ≥ $0.012 · 9 tokens of tinkex/teacher without a price\n")


def test_the_budget_ends_the_loop_before_the_step_that_would_exceed_it(
    scripted: ScriptedService, training: tinkex.TrainingClient
) -> None:
    file = io.StringIO()
    with quiet(training, 100, prices=PRICES, budget=0.05, file=file) as progress:
        for _ in progress:
            train(training)  # without waiting: calls without a result count too
    assert progress.stopped_by == "budget"
    assert progress.step == len(progress.history) == 4  # a fifth would cost 0.06
    assert progress.cost == pytest.approx(0.048)
    assert not progress.is_over_budget
    assert file.getvalue().startswith("4 of 100 steps, stopped by the budget of $0.050 · loss ")
    assert len(scripted.executed) == 8, "everything that was sent has ended"


def test_a_budget_is_used_up_to_the_last_step_that_fits(training: tinkex.TrainingClient) -> None:
    with quiet(training, 100, prices=PRICES, budget=0.12) as progress:
        for _ in progress:
            train(training)
    assert progress.step == 10


def test_steps_of_growing_cost_exceed_the_budget_by_less_than_one_step(training: tinkex.TrainingClient) -> None:
    costs = []
    with quiet(training, 100, prices=PRICES, budget=0.5) as progress:
        for step in progress:
            train(training, batch(size=1 + 3 * step)).result()
            costs.append(progress.cost or 0.0)
    assert progress.stopped_by == "budget"
    assert costs[-1] <= 0.5 + (costs[-1] - costs[-2])


def test_without_iterating_an_exceeded_budget_is_a_warning(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with quiet(training, prices=PRICES, budget=0.02, every_s=0.01, file=file) as progress:
        assert not progress.is_over_budget
        for _ in range(3):
            train(training).result()
        assert progress.is_over_budget
    said = [line for line in file.getvalue().splitlines() if "budget" in line]
    assert len(said) == 1
    assert said[0].startswith("The budget of $0.020 is exceeded: $0.0")


def test_the_estimated_cost_equals_the_final_cost(training: tinkex.TrainingClient) -> None:
    with quiet(training, 10, prices=PRICES) as progress:
        assert progress.expected_cost is None
        for step in progress:
            train(training)
            if step:
                assert progress.expected_cost == pytest.approx(0.12)
    assert progress.expected_cost == progress.cost == pytest.approx(0.12)


def test_invalid_arguments_are_rejected(training: tinkex.TrainingClient) -> None:
    with pytest.raises(tinkex.ConfigError, match=r"has no 'tinkex/tiny'. It has: a/b, c/d\."):
        tinkex.progress(training, prices=dict.fromkeys(("c/d", "a/b"), PRICES[MODEL]))
    with pytest.raises(tinkex.ConfigError, match="pass prices="):
        tinkex.progress(training, 10, budget=2.0)
    for budget in (0, -1, float("nan")):
        with pytest.raises(tinkex.ConfigError, match="above 0"):
            tinkex.progress(training, 10, prices=PRICES, budget=budget)
    for steps in (-1, 2.5):
        with pytest.raises(tinkex.ValidationError, match="steps is"):
            tinkex.progress(training, steps)  # type: ignore[arg-type]
    progress = quiet(training, 1)
    with progress:
        pass
    with pytest.raises(tinkex.ValidationError, match="used already"), progress:
        pass


def test_a_client_that_does_not_know_its_model_is_asked(training: tinkex.TrainingClient) -> None:
    training.base_model = None
    with quiet(training, prices=PRICES) as progress:
        train(training)
    assert progress.cost == pytest.approx(0.012)


def test_the_callers_notes_are_shown_and_drawn(training: tinkex.TrainingClient) -> None:
    file = io.StringIO()
    with quiet(training, 3, file=file) as progress:
        for step in progress:
            train(training).result()
            progress.note(reward=0.25 * step)
    assert [tuple(point) for point in progress.notes["reward"]] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    assert " · reward 0.00 → 0.500 · " in file.getvalue()
    assert "reward" in progress.curve("reward")
    with pytest.raises(tinkex.ValidationError, match="There are: loss, reward"):
        progress.curve("rewrad")


def test_an_async_program_is_not_blocked(scripted: ScriptedService, training: tinkex.TrainingClient) -> None:
    scripted.script.on("optim_step", nth=3, do=Work(0.4))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def main() -> Progress:
        ticking = asyncio.create_task(tick())
        async with quiet(training, 3) as progress:
            for _ in progress:
                await training.forward_backward_async(batch(), "cross_entropy")
                await training.optim_step_async(tinkex.AdamParams(learning_rate=1e-2))
        ticking.cancel()
        return progress

    progress = asyncio.run(main())
    assert len(progress.history) == 3
    assert ticks > 5


def test_ctrl_c_during_the_last_wait_still_prints_the_last_line(
    scripted: ScriptedService, training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.script.on("optim_step", do=Pending(times=10_000))
    file = io.StringIO()
    progress = quiet(training, 1, file=file)

    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(progress._tally, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), progress:
        for _ in progress:
            sent = train(training)
    sent.cancel()
    assert file.getvalue().startswith("stopped in step 1 of 1 by KeyboardInterrupt · ")


def test_listeners_and_thread_are_removed_at_the_end(training: tinkex.TrainingClient) -> None:
    before = dict(tinkex.events._listeners)
    with quiet(training, 1):
        assert dict(tinkex.events._listeners) != before
    assert dict(tinkex.events._listeners) == before
    for thread in threading.enumerate():
        if thread.name == "tinkex-progress":
            thread.join(5)
            assert not thread.is_alive()


def test_exit_in_the_middle_of_a_loop_is_immediate_and_silent(scripted: ScriptedService) -> None:
    program = f"""
import sys, tinkex
service = tinkex.ServiceClient(base_url={scripted.url!r}, api_key="tml-progress", telemetry=False)
training = service.create_lora_training_client({MODEL!r})
kept = iter(tinkex.progress(training, 5, every_s=0.001, live=True))
next(kept)
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "Fatal" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timing
def test_interpreter_exit_does_not_wait_for_a_stopped_terminal(training: tinkex.TrainingClient) -> None:
    """A thread that is caught in the middle keeps its lock for ever; one that a stopped terminal holds up, too."""

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            writing.set()
            assert goes_on.wait(30)
            return len(text)

    writing, goes_on = threading.Event(), threading.Event()
    steps = iter(tinkex.progress(training, 5, every_s=0.001, live=True, file=Stopped()))
    next(steps)
    assert writing.wait(10)
    (screen,) = [screen for screen in screens._screens.values() if not screen.is_empty]
    begun = time.monotonic()
    screen.stop()
    del steps  # as the interpreter does: the loop left open ends here
    assert time.monotonic() - begun < screens.EXIT_WAIT_S + 2
    goes_on.set()


def test_a_forked_child_neither_draws_nor_waits_for_its_parents_work(
    scripted: ScriptedService, training: tinkex.TrainingClient
) -> None:
    scripted.script.on("optim_step", nth=1, do=Work(0.5))
    file = io.StringIO()
    with quiet(training, 1, file=file) as progress:
        train(training)
        child = os.fork()
        if child == 0:
            progress.__exit__(None, None, None)
            os._exit(0 if file.getvalue() == "" else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert file.getvalue().startswith("1 step · ")


def test_tinkex_progress_is_a_function_that_pickles() -> None:
    import tinkex.watch.progress

    assert callable(tinkex.progress)
    assert pickle.loads(pickle.dumps(tinkex.progress)) is tinkex.progress
    assert "progress" in tinkex.__all__


def test_tokens_are_counted_only_while_there_are_listeners(training: tinkex.TrainingClient) -> None:
    seen: list[tinkex.events.StepEvent] = []
    future = training.forward_backward(batch(), "cross_entropy")
    stop = tinkex.on("step", seen.append)
    try:
        future.result()
        training.forward_backward(batch(), "cross_entropy").result()
    finally:
        stop()
    assert seen[-1].usage == tinkex.events.Usage(train_tokens=12, base_model=MODEL)
    assert "loss:sum" in seen[-1].metrics
    assert all(not event.usage.train_tokens for event in seen[:-1])


def test_a_failure_that_nobody_read_ends_the_loop_at_the_next_step(
    scripted: ScriptedService, training: tinkex.TrainingClient
) -> None:
    """All steps of a loop failed, and the program said "8 steps" and ended with exit code 0."""
    scripted.script.on("forward_backward", nth=2, do=FailFuture("no memory"))
    file, steps = io.StringIO(), []
    with pytest.raises(tinkex.TinkexError, match="no memory") as caught, quiet(training, 8, file=file) as progress:
        for step in progress:
            steps.append(step)
            train(training).result()  # only the future of the optim_step is read
    assert steps == [0, 1]
    assert progress.stopped_by == "failed"
    assert file.getvalue().startswith("stopped in step 2 of 8 by ")
    assert "1 failed: forward_backward: " in file.getvalue()
    assert "on_failure='show'" in "".join(caught.value.__notes__)


def test_a_loop_that_never_reads_fails_at_its_end(scripted: ScriptedService, training: tinkex.TrainingClient) -> None:
    scripted.script.on("optim_step", nth=3, do=FailFuture("no memory"))
    with pytest.raises(tinkex.TinkexError, match="no memory"), quiet(training) as progress:
        for _ in range(3):
            train(training)
    assert progress.stopped_by == "failed"


def test_a_failure_that_the_loop_has_read_is_its_own_affair(
    scripted: ScriptedService, training: tinkex.TrainingClient
) -> None:
    scripted.script.on("optim_step", nth=1, do=FailFuture("no memory"))
    with quiet(training, 3) as progress:
        for _ in progress:
            try:
                train(training).result()
            except tinkex.TinkexError:
                continue
    assert progress.stopped_by == "steps"
    assert [record.failed for record in progress.history] == [1, 0, 0]


def test_what_was_cancelled_has_not_failed(scripted: ScriptedService, training: tinkex.TrainingClient) -> None:
    with quiet(training) as progress:
        train(training).result()
        training.forward_backward(batch(), "cross_entropy").cancel()
    assert progress.failures == []


def test_async_for_yields_the_steps_inside_and_outside_of_async_with(training: tinkex.TrainingClient) -> None:
    async def loop() -> list[int]:
        steps = []
        async with quiet(training, 2) as progress:
            async for step in progress:
                await train(training)
                steps.append(step)
        assert progress.stopped_by == "steps" and len(progress.history) == 2
        async for step in quiet(training, 3):
            await train(training)
            steps.append(step)
        return steps

    assert asyncio.run(loop()) == [0, 1, 0, 1, 2]
