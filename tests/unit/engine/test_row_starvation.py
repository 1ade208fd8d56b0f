"""No tenant is left without rows, and choosing who gets them costs little. On the real sampler and the tiny model."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.engine.sampling_oracle import finish, sampler, spec
from tinkex.engine.contract import OutOfMemory, Sampled
from tinkex.engine.models.loaded_model import Model
from tinkex.engine.sampling.adapter_cache import AdapterCache
from tinkex.engine.sampling.decode_batch import DecodeBatch
from tinkex.engine.sampling.row_shares import Accounts
from tinkex.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")


def raise_memory_error() -> None:
    raise MemoryError


class Clients:
    """Every tenant sends its next request as soon as one of its own is done."""

    def __init__(self, running: Sampler) -> None:
        self.running, self.done, self.rows = running, Counter[str](), Counter[str]()
        self._sent: list[tuple[str, int, int]] = []

    def send(self, tenant: str, prompt: int, max_tokens: int) -> None:
        self.running.add(len(self._sent), spec([1] * prompt, tenant=tenant, max_tokens=max_tokens))
        self._sent.append((tenant, prompt, max_tokens))

    def steps(self, count: int) -> None:
        for _ in range(count):
            for number, event in self.running.step():
                assert isinstance(event, Sampled)
                self.done[self._sent[number][0]] += 1
                self.send(*self._sent[number])
            for batch in self.running._batches.values():
                self.rows.update(row.spec.tenant for row in batch.rows)


def test_more_tenants_than_rows_all_progress(tiny: Model) -> None:
    """Before: ties were broken by hash, and half of ten tenants got nothing for ever."""
    clients = Clients(sampler(tiny, max_rows=4))
    tenants = [f"t{index}" for index in range(10)]
    for tenant in tenants * 2:
        clients.send(tenant, 3, 4)
    clients.steps(150)
    done = [clients.done[tenant] for tenant in tenants]
    assert min(done) > 0
    assert max(done) <= min(done) + 3


def test_long_prompts_of_one_tenant_leave_the_others_their_rows(tiny: Model) -> None:
    """Before: a tenth of them, because a tenant whose long request had ended was first again."""
    clients = Clients(sampler(tiny, max_rows=16, max_cache_tokens=800))
    for tenant in "abcd" * 8:
        clients.send(tenant, 3, 9 + len(clients._sent) % 20)
    clients.steps(20)
    for _ in range(2):
        clients.send("long", 190, 4)
    clients.rows.clear()
    clients.steps(300)
    assert clients.done["long"] >= 2
    assert sum(clients.rows[tenant] for tenant in "abcd") / 300 >= 5


def test_a_step_without_a_free_row_does_not_look_at_every_request_that_waits(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: half a second per step with 50 tenants and 128 requests of each."""
    running = sampler(tiny, max_rows=8)
    for number in range(50 * 128):
        running.add(number, spec(b"abc", tenant=f"t{number % 50}", max_tokens=40))
    for _ in range(4):
        running.step()
    reads: Counter[str] = Counter()
    load, charged = vars(DecodeBatch)["load"].fget, Accounts.charged
    monkeypatch.setattr(DecodeBatch, "load", property(lambda batch: (reads.update(["load"]), load(batch))[1]))
    monkeypatch.setattr(Accounts, "charged", lambda *args: (reads.update(["charged"]), charged(*args))[1])
    running.step()
    assert not reads
    running._changes += 1
    running._fill()
    assert reads["load"] <= 2
    assert reads["charged"] <= 2 * (50 + 9)


def test_an_adapter_without_room_does_not_stop_the_others(tiny: Model, adapter_folders: list[str]) -> None:
    """A request that waits for room for its adapter gets its turn, although others keep coming."""
    running = sampler(tiny, max_rows=8)
    running._adapters = AdapterCache(1)
    for number in range(20):
        running.add(number, spec(b"abc", tenant="bob", weights=adapter_folders[0], max_tokens=3 + number % 5))
    running.step()
    running.add(100, spec(b"abc", tenant="alice", weights=adapter_folders[1], max_tokens=2))
    for number in range(200, 240):
        running.add(number, spec(b"abc", tenant="carol", max_tokens=4))
    order: list[int] = []
    for step in range(80):
        running.add(1000 + step, spec(b"abc", tenant="bob", weights=adapter_folders[0], max_tokens=5))
        order += [number for number, event in running.step() if isinstance(event, Sampled)]
    assert 100 in order
    assert sum(200 <= number < 240 for number in order) >= 20
    finish(running)


def test_an_adapter_that_came_in_when_the_batch_was_empty_keeps_no_other_out(
    tiny: Model, adapter_folders: list[str]
) -> None:
    """Before: the request that had waited for room was still taken for waiting, and others never got in."""
    running = sampler(tiny, adapters_bytes=1)  # room for one adapter at a time
    first, second = adapter_folders[:2]
    running.add(1, spec([1, 2], tenant="a", weights=first, max_tokens=3))
    running.step()
    running.add(2, spec([1, 2], tenant="b", weights=second, max_tokens=3))
    finish(running)
    assert running._without_weights is None and running._retiring is None
    running.add(3, spec([1, 2], tenant="b", weights=second, max_tokens=2))
    running.step()
    running.add(4, spec([1, 2], tenant="a", weights=first, max_tokens=1))
    done: set[int] = set()
    for number in range(5, 60):  # b goes on without a pause
        running.add(number, spec([1, 2], tenant="b", weights=second, max_tokens=2))
        for _ in range(2):
            done |= {done_number for done_number, event in running.step() if isinstance(event, Sampled)}
    assert 4 in done


def test_rows_are_filled_again_while_a_request_waits_for_room_for_its_adapter(
    tiny: Model, adapter_folders: list[str]
) -> None:
    running = sampler(tiny, max_rows=8)
    running._adapters = AdapterCache(1)
    running.add(1, spec(b"abc", tenant="dave", max_tokens=60))
    running.add(2, spec(b"abc", tenant="bob", weights=adapter_folders[0], num_samples=300, max_tokens=3))
    running.step()
    running.add(3, spec(b"abc", tenant="alice", weights=adapter_folders[1], max_tokens=2))
    for _ in range(30):
        running.step()
    assert max(sample.started for batch in running._batches.values() for sample in batch.samples) >= 40


def test_a_batch_that_outgrows_memory_loses_a_request_of_the_tenant_with_the_most(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the newcomer failed, and its error did not say that memory was the cause."""
    running = sampler(tiny, max_rows=8)
    running.add(1, spec(b"abc", tenant="bob", num_samples=6, max_tokens=9))
    running.step()
    running.add(2, spec(b"xyz", tenant="alice", max_tokens=9))
    running.step()
    decoder, step = running._decoders[tiny], running._decoders[tiny].step
    monkeypatch.setattr(
        decoder, "step", lambda cache, rows: step(cache, rows) if len(rows) < 6 else raise_memory_error()
    )
    results = finish(running)
    assert isinstance(results[1], OutOfMemory)
    assert isinstance(results[2], Sampled)


def test_a_long_request_gets_in_although_short_ones_keep_the_spare_rows(tiny: Model) -> None:
    """It lacks memory, and rows above the limit must not keep it from its turn for as long as short ones come."""
    running = sampler(tiny, max_rows=16, max_cache_tokens=1600)
    running.add(0, spec([7] * 10, tenant="bob", num_samples=1000, max_tokens=90))
    number, owners, waiting = 0, dict[int, str](), Counter[str]()
    for step in range(200):
        for tenant in "abc":
            while waiting[tenant] < 6:
                number += 1
                running.add(number, spec([7] * 10, tenant=tenant, max_tokens=5 + number % 7))
                waiting[tenant] += 1
                owners[number] = tenant
        if step == 40:
            running.add(10_000, spec([9] * 190, tenant="dora", max_tokens=8))
        for done, event in running.step():
            if done == 10_000 and isinstance(event, Sampled):
                return
            if isinstance(event, Sampled) and done in owners:
                waiting[owners.pop(done)] -= 1
    raise AssertionError("the long request never got in")
