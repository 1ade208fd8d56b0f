"""Tenants share the rows of a decode batch and the tokens of a prefill. On the real sampler and the tiny model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.engine.sampling_oracle import Results, answer, finish, prompts, same, sampled, sampler, spec
from tinkex.engine.contract import Sampled, Tokens
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.fill_plan import FillPlan
from tinkex.engine.sampling.row_shares import HALF_LIFE_STEPS, Accounts, RowLimits, chunk_sizes, row_cost
from tinkex.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")


def rows_by_tenant(running: Sampler) -> Counter[str]:
    return Counter(row.spec.tenant for batch in running._batches.values() for row in batch.rows)


def steps_until(running: Sampler, number: int) -> int:
    for count in range(1, 1000):
        if any(done == number and isinstance(event, Sampled) for done, event in running.step()):
            return count
    raise AssertionError("never done")


def test_a_thousand_sequences_of_one_tenant_do_not_keep_another_tenants_token_waiting(tiny: Model) -> None:
    """Before: a 1-token sample beside 1024 x 256 waited 13 s, until all of them were done."""
    running = sampler(tiny, max_rows=8)
    running.add(1, spec(b"abc", tenant="bob", num_samples=1000, max_tokens=200))
    for _ in range(5):
        running.step()
    assert sum(rows_by_tenant(running).values()) == 7  # all rows but the one for the prompt
    running.add(2, spec(b"xyz", tenant="alice", max_tokens=1))
    assert steps_until(running, 2) <= 2


def test_every_tenant_that_comes_beside_a_full_batch_gets_a_row_at_once(tiny: Model) -> None:
    running = sampler(tiny, max_rows=64)
    running.add(1, spec(b"abc", tenant="bob", num_samples=500, max_tokens=200))
    running.step()
    for number, tenant in enumerate(("alice", "carol", "dave"), 2):
        running.add(number, spec(b"xyz", tenant=tenant, num_samples=50, max_tokens=200))
        running.step()
        running.step()
        assert rows_by_tenant(running)[tenant] >= 1
    assert sum(rows_by_tenant(running).values()) <= 64 + 3 * 8


def test_short_samples_beside_long_ones_do_not_wait_for_each_other(tiny: Model) -> None:
    """A tenant below its even part of the rows may use spare ones, also if it has a row already."""
    running = sampler(tiny, max_rows=32)
    running.add(0, spec(b"abc", tenant="bob", num_samples=1000, max_tokens=200))
    for _ in range(3):
        running.step()
    for number in range(1, 5):
        running.add(number, spec(b"xyz%d" % number, tenant="alice", max_tokens=4))
    done: set[int] = set()
    steps = 0
    while len(done) < 4:
        steps += 1
        done |= {number for number, event in running.step() if isinstance(event, Sampled)}
    assert steps <= 8  # each of them in turn would take some twenty


def waves(running: Sampler, count: int, max_tokens: int) -> int:
    """Let eight tenants send two samples each, at the same time, every thirty steps. Return the steps of the slowest
    sample of the later half."""
    slowest = 0
    for wave in range(count):
        numbers = {1000 * (wave + 1) + index for index in range(16)}
        for number in numbers:
            running.add(number, spec(b"xyz%d" % number, tenant=f"t{number % 8}", max_tokens=max_tokens))
        for step in range(1, 31):
            done = {number for number, event in running.step() if isinstance(event, Sampled)}
            if done & numbers and wave >= count // 2:
                slowest = max(slowest, step)
    return slowest


@pytest.mark.slow
def test_rows_that_short_samples_had_are_kept_free_of_long_ones(tiny: Model) -> None:
    """Before: 8 steps in place of 4, as they waited for each other, and a batch twice as wide."""
    running = sampler(tiny, max_rows=32)
    running.add(0, spec(b"abc", tenant="bob", num_samples=1000, max_tokens=200))
    running.step()
    assert waves(running, 30, max_tokens=4) <= 5
    assert 15 <= rows_by_tenant(running)["bob"] < 31  # half of the batch at least, with the row for the prompt
    for _ in range(HALF_LIFE_STEPS * 3 + 200):
        running.step()
    assert rows_by_tenant(running)["bob"] == 31  # the others have gone; one row is for the prompt


@pytest.mark.slow
def test_rows_are_kept_free_of_long_samples_also_if_each_is_a_request_of_its_own(tiny: Model) -> None:
    """Before: prompts that are computed were not counted, so a burst of requests took all rows at once."""
    running = sampler(tiny, max_rows=32)
    for number in range(200):
        running.add(10**6 + number, spec(b"abc", tenant="bob", max_tokens=200))
    running.step()
    assert waves(running, 30, max_tokens=4) <= 7
    assert rows_by_tenant(running)["bob"] <= 24


@pytest.mark.slow
def test_a_tenant_that_samples_next_to_nothing_keeps_few_rows_of_others(tiny: Model) -> None:
    """Before: 64 tokens in 256 steps kept a third of another tenant's rows free for good."""
    running = sampler(tiny, max_rows=64)
    running.add(0, spec(b"abc", tenant="bob", num_samples=1000, max_tokens=200))
    used = []
    for step in range(3 * HALF_LIFE_STEPS):
        if step % HALF_LIFE_STEPS == 0:
            running.add(1 + step, spec(b"xyz", tenant="alice", num_samples=64, max_tokens=1))
        running.step()
        used.append(rows_by_tenant(running)["bob"])
    late = used[HALF_LIFE_STEPS:]
    assert sum(late) / len(late) >= 54


@pytest.mark.slow
def test_no_row_is_kept_for_sequences_of_one_token(tiny: Model) -> None:
    """They end as they start and never have a row. Before: rows were kept for them, and bob had 49 of 64; now 63."""
    running = sampler(tiny, max_rows=64)
    running.add(0, spec(b"abc", tenant="bob", num_samples=1000, max_tokens=200))
    used = []
    for step in range(HALF_LIFE_STEPS + 128):
        if step % 16 == 0:
            running.add(1 + step, spec(b"xyz", tenant="alice", num_samples=32, max_tokens=1))
        running.step()
        used.append(rows_by_tenant(running)["bob"])
    late = used[HALF_LIFE_STEPS:]
    assert sum(late) / len(late) >= 58


def test_no_row_is_kept_free_of_samples_as_long_as_the_others(tiny: Model) -> None:
    """Tenants that sample in turn, as training loops do, have the whole batch each time."""
    running = sampler(tiny, max_rows=16)
    for turn in range(6):
        running.add(turn, spec(b"abc", tenant=f"t{turn % 3}", num_samples=40, max_tokens=12))
        running.step()
        running.step()
        assert sum(rows_by_tenant(running).values()) == 15
        finish(running)


def test_a_request_that_fits_only_with_the_last_spare_rows_blocks_nobody(tiny: Model) -> None:
    """Where rows are free for it and memory is not, others would wait for the end of the longest samples (90 steps)."""
    running = sampler(tiny, max_rows=16, max_cache_tokens=1600)
    running.add(0, spec([7] * 10, tenant="bob", num_samples=1000, max_tokens=90))
    for _ in range(3):
        running.step()
    for number in (1, 2):
        running.add(number, spec([9, number, *[3] * 8], tenant="alice", max_tokens=90))
    for _ in range(2):
        running.step()
    running.add(3, spec([5] * 10, tenant="carol", max_tokens=4))
    assert steps_until(running, 3) <= 6


def test_freed_rows_go_to_the_tenant_with_fewer_until_both_have_an_even_part(tiny: Model) -> None:
    running = sampler(tiny, max_rows=16)
    running.add(1, spec(b"abc", tenant="bob", num_samples=200, max_tokens=12))
    running.step()
    running.add(2, spec(b"xyz", tenant="alice", num_samples=200, max_tokens=12))
    for _ in range(16):
        running.step()
    rows = rows_by_tenant(running)
    assert abs(rows["bob"] - rows["alice"]) <= 2
    assert sum(rows.values()) >= 13


def test_a_tenant_alone_has_all_rows(tiny: Model) -> None:
    running = sampler(tiny, max_rows=16)
    for number in range(40):
        running.add(number, spec(b"abc", tenant="bob", max_tokens=20))
    running.step()
    running.step()
    assert rows_by_tenant(running) == {"bob": 16}


def test_rows_with_ranked_tokens_cost_more(tiny: Model) -> None:
    running = sampler(tiny, max_rows=16)
    running.add(1, spec(b"abc", tenant="bob", num_samples=200, max_tokens=6, topk_sample=24))
    running.add(2, spec(b"xyz", tenant="alice", num_samples=200, max_tokens=6))
    for _ in range(20):
        running.step()
    rows = rows_by_tenant(running)
    assert row_cost(spec(b"", topk_sample=24)) == 4
    assert rows["alice"] >= 2 * rows["bob"] > 0


def test_a_short_prompt_does_not_wait_for_the_long_prompts_of_another_tenant(tiny: Model) -> None:
    running = sampler(tiny, max_rows=64)
    for number in range(30):
        prompt = [number, *range(250)] * 6
        running.add(number, spec(prompt, tenant="bob", max_tokens=2, topk_prompt=5))
    running.step()
    running.add(99, spec(b"xyz", tenant="alice", max_tokens=1))
    assert steps_until(running, 99) <= 2


def test_a_chunk_is_shared_by_tenants_and_what_one_leaves_the_others_take() -> None:
    bob, alice = spec(b"", tenant="bob"), spec(b"", tenant="alice")
    assert chunk_sizes([(bob, 1000), (bob, 1000)], 512) == [512, 0]
    assert chunk_sizes([(bob, 1000), (bob, 1000), (alice, 3)], 128) == [125, 0, 3]
    assert chunk_sizes([(bob, 1000), (alice, 1000)], 128) == [64, 64]
    scoring = spec(b"", tenant="bob", topk_prompt=24)
    assert chunk_sizes([(scoring, 1000)], 128) == [128]
    assert chunk_sizes([(scoring, 1000), (alice, 1000)], 128) == [16, 64]


def test_a_long_request_gets_in_beside_a_tenant_that_refills_its_rows(tiny: Model) -> None:
    """It fits only once rows of the other tenant have ended, and those are not filled again before."""
    running = sampler(tiny, max_rows=16, max_cache_tokens=800)
    running.add(1, spec(b"ab", tenant="bob", num_samples=300, max_tokens=30))
    running.step()
    running.add(2, spec([1] * 200, tenant="alice", max_tokens=40))
    assert steps_until(running, 2) < 100
    finish(running)


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_tenants_ends_with_the_results_of_each_alone(tiny: Model, seed: int) -> None:
    """Also with limits so tight that some requests are larger than all of the memory."""
    source = random.Random(seed)
    max_rows, max_tokens = source.choice([(1, 100), (3, 150), (8, 400), (16, 100_000)])
    running, given = sampler(tiny, max_rows=max_rows, max_cache_tokens=max_tokens), {}
    for number, prompt in enumerate(prompts(24, seed=seed)):
        tenant = source.choice("abcd")
        count, most = source.choice([1, 1, 2, 7]), source.randint(1, 9)
        given[number] = spec(prompt, tenant=tenant, num_samples=count, max_tokens=most, seed=number)
    results: Results = {}
    for number, one in given.items():
        running.add(number, one)
        for done, event in running.step():
            assert not isinstance(event, Tokens)
            results[done] = event
        spare = 3 * max(max_rows // 8, 1)
        assert sum(rows_by_tenant(running).values()) <= max_rows + spare
    results |= finish(running)
    assert set(results) == set(given)
    for number in source.sample(sorted(given), 6):
        same(sampled(results, number), answer(tiny, given[number]))


def test_a_newcomer_on_another_base_model_may_use_the_spare_memory(tiny: Model) -> None:
    """Before: it waited for a sequence of the other model to end, and everybody behind it too."""
    other = sampler(tiny)
    other.add(1, spec([1] * 50, tenant="a", num_samples=8, max_tokens=50))
    other.step()
    (batch,) = other._batches.values()
    rows, width = batch.load
    plan = FillPlan("another", {"tinkex/tiny": batch}, RowLimits(8, rows * width), Accounts())
    running = sampler(tiny)
    running.add(2, spec([1] * 2, tenant="b", max_tokens=2))
    (sample,) = running._queues[tiny.info.name]["b"].values()
    assert plan.has_tokens_for(sample)


def test_a_prompt_in_the_prefix_cache_is_not_charged_again(tiny: Model) -> None:
    running = sampler(tiny)
    charged = []
    running.add(0, spec([2], tenant="b", max_tokens=500))  # the batch, and with it the accounts, stay
    for number in (1, 2):
        before = running._accounts[tiny.info.name].charged("a") if number > 1 else 0.0
        running.add(number, spec([1] * 640, tenant="a", max_tokens=1))
        steps_until(running, number)
        charged.append(running._accounts[tiny.info.name].charged("a") - before)
    assert charged[0] > 40 > 10 > charged[1]
