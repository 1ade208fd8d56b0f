"""Several nodes on one PostgreSQL: which of them live, where a run is at home, and what the others may not write."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from tests.faults import broken
from tests.unit.store.conftest import Place, operation, run
from tinkex.errors import ConfigError, ValidationError
from tinkex.server.cluster.homes import Homes
from tinkex.server.cluster.own_counters import ClusterCounters
from tinkex.server.cluster.placement import node_for_run
from tinkex.store.cluster.cluster_store import Claim, ClusterStore, NodeFacts, NodeRecord
from tinkex.store.errors import HomeLost, LeaseLost
from tinkex.store.journal import Journal
from tinkex.store.records import AuditEntry, Home
from tinkex.testing.clock import FakeClock

RUN = "s:train:0"


def node(name: str, **given: Any) -> NodeRecord:
    return replace(NodeRecord(id=name, url=f"http://{name}", models=("tinkex/tiny", "tiny"), version="1"), **given)


@pytest.fixture
def shared(postgres_place: Place) -> Iterator[Callable[[], ClusterStore]]:
    """Opens the store as one node does; each has its own connection."""
    opened: list[ClusterStore] = []

    def open_one() -> ClusterStore:
        opened.append(ClusterStore.open(postgres_place.url, postgres_place.data_dir))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(shared: Callable[[], ClusterStore]) -> ClusterStore:
    """Two nodes that live for a minute."""
    store = shared()
    store.join(node("a"), 60)
    store.join(node("b"), 60)
    return store


def end_lease(place: Place, name: str) -> None:
    """What time does to a node that does not renew."""
    with psycopg.connect(place.url) as connection:
        connection.execute("UPDATE nodes SET until = 0 WHERE id = %s", (name,))


def claimed(store: ClusterStore, run_id: str, own: str = "a") -> Claim:
    claim = store.claim(run_id, "tinkex/tiny", partial(node_for_run, own=own))
    assert claim is not None
    return claim


def create(store: ClusterStore) -> Home:
    """A run that is at home on the node a."""
    home = claimed(store, RUN).home
    store.add_run(run(), operation(0), b"create", home)
    return home


def test_runs_go_to_the_node_with_the_fewest_and_stay_there(store: ClusterStore) -> None:
    homes = [claimed(store, f"s:train:{number}", own="b") for number in range(4)]
    assert [claim.home.node for claim in homes] == ["b", "a", "b", "a"], "the asking node among equals"
    assert all(claim.is_new and claim.home.epoch == 1 for claim in homes)
    again = claimed(store, "s:train:1", own="b")
    assert (again.home, again.url, again.is_new) == (homes[1].home, "http://a", False)
    assert {entry.id: entry.runs for entry in store.list_nodes()} == {"a": 2, "b": 2}


def test_a_run_goes_to_a_node_that_has_its_model_and_is_not_draining(store: ClusterStore) -> None:
    store.join(node("c", models=("other",)), 60)
    claim = store.claim(RUN, "other", node_for_run)
    assert claim is not None and claim.home.node == "c"
    assert store.claim("s:train:1", "unknown", node_for_run) is None
    assert store.set_draining("c", True) and store.claim("s:train:2", "other", node_for_run) is None
    assert store.set_draining("c", False) and store.claim("s:train:2", "other", node_for_run) is not None
    assert not store.set_draining("gone", True)


def test_a_run_whose_node_does_not_live_gets_another_home_in_a_new_epoch(
    store: ClusterStore, postgres_place: Place
) -> None:
    first = claimed(store, RUN)
    end_lease(postgres_place, "a")
    assert store.find_home(RUN) is None
    second = claimed(store, RUN)
    assert (first.home.node, first.home.epoch, second.home.node, second.home.epoch) == ("a", 1, "b", 2)
    assert store.find_home(RUN) == second._replace(is_new=False)


def test_a_run_that_was_released_gets_a_new_epoch_even_on_the_same_node(store: ClusterStore) -> None:
    first = claimed(store, RUN)
    store.release(replace(first.home, epoch=7))
    assert store.find_home(RUN) == first._replace(is_new=False), "another epoch releases nothing"
    store.release(first.home)
    assert store.find_home(RUN) is None
    assert claimed(store, RUN).home == replace(first.home, epoch=2)


def test_a_run_moves_when_its_home_hands_it_over(store: ClusterStore) -> None:
    create(store)
    store.join(node("c"), 60)
    claimed(store, "s:train:1", own="b")
    first = store.find_home(RUN)
    assert first is not None and first.home.node == "a"
    assert store.ask_to_move(RUN).id == "c", "the one with the fewest runs among the others"
    assert store.ask_to_move(RUN, "b").id == "b"
    assert store.find_home(RUN) == first, "until its home gives it up"
    assert store.moves("a") == [(first.home, "b")] and store.moves("b") == []
    assert store.ask_to_move(RUN, "a").id == "a" and store.moves("a") == [], "it is to stay after all"
    store.ask_to_move(RUN, "b")
    assert store.hand_over(first.home, "b")
    assert store.find_home(RUN) == Claim(Home(run_id=RUN, node="b", epoch=2), "http://b")
    assert store.moves("a") == store.moves("b") == []
    assert not store.hand_over(first.home, "c"), "it is at home elsewhere by now"
    with pytest.raises(HomeLost):
        store.set_snapshot(RUN, "folder", 1, home=first.home)


def test_a_draining_node_gives_up_a_run_that_was_handed_to_it_and_nobody_asked_for(store: ClusterStore) -> None:
    """Before: it knew only runs that a request had asked for, and its drain never ended."""

    async def db(call: Callable[..., Any], *args: object) -> Any:
        return call(*args)

    async def forget(run_id: str) -> None:
        forgotten.append(run_id)

    async def drain() -> list[Home]:
        counters = ClusterCounters(CollectorRegistry(), "b")
        homes = Homes(cast(Any, SimpleNamespace(id="b", is_sure=True)), FakeClock(), store, db, counters, forget)  # type: ignore[arg-type]
        assert homes.held == []
        await homes.look()
        held = homes.held
        for home in held:
            await homes.release(home)
        return held

    forgotten: list[str] = []
    assert store.hand_over(create(store), "b")
    assert asyncio.run(drain()) == [Home(run_id=RUN, node="b", epoch=2)]
    assert forgotten == [RUN] and store.find_home(RUN) is None


@pytest.mark.parametrize("way", ["release", "hand over"])
def test_a_run_that_a_poll_finds_while_it_leaves_has_left(way: str, store: ClusterStore) -> None:
    """Before: the poll took it back. Until a write was refused the node believed to have it, and drained for ever."""
    home, forgotten = create(store), list[str]()

    async def db(call: Callable[..., Any], *args: object) -> Any:
        return call(*args)

    async def forget(run_id: str) -> None:
        forgotten.append(run_id)
        if len(forgotten) == 1:
            assert await homes.find(run_id) == "", "the database still says so"

    async def leave() -> None:
        await homes.look()
        if way == "release":
            await homes.release(home)
        else:
            assert await homes.hand_over(home, "b")
        await asyncio.sleep(0)  # what was found again is forgotten in a task

    node = cast(Any, SimpleNamespace(id="a", is_sure=True))
    counters = ClusterCounters(CollectorRegistry(), "a")
    homes = Homes(node, FakeClock(), store, db, counters, forget)  # type: ignore[arg-type]
    asyncio.run(leave())
    assert homes.held == [] and forgotten == [RUN, RUN]


def test_a_run_stays_if_the_node_that_was_to_have_it_takes_no_more(store: ClusterStore, postgres_place: Place) -> None:
    create(store)
    for end in (lambda: store.set_draining("b", True), lambda: end_lease(postgres_place, "b")):
        store.set_draining("b", False)
        store.ask_to_move(RUN, "b")
        [(home, target)] = store.moves("a")
        end()
        assert not store.hand_over(home, target)
        assert store.moves("a") == []
        assert store.find_home(RUN) == Claim(home, "http://a")
        with pytest.raises(ValidationError, match="No other node that lives"):
            store.ask_to_move(RUN)
    with pytest.raises(ValidationError, match="The node b does not live"):
        store.ask_to_move(RUN, "b")
    with pytest.raises(ValidationError, match="There is no run 'unknown'"):
        store.ask_to_move("unknown")
    store.join(node("c", models=("other",)), 60)
    with pytest.raises(ValidationError, match="serves other, and not tinkex/tiny"):
        store.ask_to_move(RUN, "c")
    store.join(node("d", kind="sample"), 60)
    with pytest.raises(ValidationError, match="only samples: it takes no runs"):
        store.ask_to_move(RUN, "d")


def test_a_run_whose_home_dies_on_the_way_goes_where_it_was_to_go(store: ClusterStore, postgres_place: Place) -> None:
    create(store)
    store.join(node("c"), 60)
    claimed(store, "s:train:1", own="c")
    assert store.ask_to_move(RUN, "c").id == "c"
    end_lease(postgres_place, "a")
    assert claimed(store, RUN, own="b").home == Home(run_id=RUN, node="c", epoch=2), "not b, which has fewer"
    end_lease(postgres_place, "c")
    assert store.ask_to_move(RUN, "b").id == "b"
    assert store.find_home(RUN) == Claim(Home(run_id=RUN, node="b", epoch=3), "http://b"), "nobody has to give it up"


def test_a_node_whose_lease_has_run_out_cannot_renew_it(store: ClusterStore, postgres_place: Place) -> None:
    """Its runs may be elsewhere by then; it has to notice."""
    assert store.renew("a", 60, NodeFacts(operations=3)) is False
    assert {entry.id: entry.load for entry in store.list_nodes()} == {"a": 3, "b": 0}
    end_lease(postgres_place, "a")
    assert store.renew("a", 60, NodeFacts()) is None
    assert [entry.id for entry in store.list_nodes()] == ["b"]
    assert sorted(entry.id for entry in store.list_nodes(only_living=False)) == ["a", "b"]
    store.set_draining("b", True)
    assert store.renew("b", 60, NodeFacts()) is True


def test_what_a_node_says_of_itself_comes_with_its_lease(store: ClusterStore, postgres_place: Place) -> None:
    """And a node of another release says less, or more."""
    facts = NodeFacts(operations=7, busy=2, samples=5, is_ready=False, capabilities=({"model_name": "tinkex/tiny"},))
    assert store.renew("a", 60, facts) is False
    shown = {entry.id: entry for entry in store.list_nodes()}
    assert (shown["a"].facts, shown["a"].load, shown["b"].facts) == (facts, 7, NodeFacts())
    with psycopg.connect(postgres_place.url) as connection:
        connection.execute("""UPDATE nodes SET facts = '{"samples": 3, "colour": "red"}' WHERE id = 'a'""")
        connection.execute("UPDATE nodes SET facts = NULL WHERE id = 'b'")
    shown = {entry.id: entry for entry in store.list_nodes()}
    assert (shown["a"].facts, shown["b"].facts) == (NodeFacts(samples=3), NodeFacts())


def test_the_nodes_of_runs_are_found_by_their_addresses(store: ClusterStore, postgres_place: Place) -> None:
    runs = [f"s:train:{number}" for number in range(3)]
    for run_id, own in zip(runs[:2], "ab", strict=True):
        claimed(store, run_id, own)
    assert store.urls_of(runs) == {runs[0]: "http://a", runs[1]: "http://b"}
    end_lease(postgres_place, "b")
    assert store.urls_of(runs) == {runs[0]: "http://a"}


def test_the_node_of_a_claim_is_chosen_among_those_that_live_at_that_moment(
    store: ClusterStore, postgres_place: Place
) -> None:
    seen: list[tuple[list[str], str]] = []

    def choose(nodes: Sequence[NodeRecord], model: str) -> NodeRecord:
        seen.append(([entry.id for entry in nodes], model))
        return nodes[-1]

    assert claimed(store, RUN).home.node == "a"
    end_lease(postgres_place, "a")
    claim = store.claim(RUN, "tinkex/tiny", choose)
    assert claim is not None and claim.home.node == "b" and seen == [(["b"], "tinkex/tiny")]
    assert store.claim(RUN, "tinkex/tiny", lambda nodes, model: nodes[0]) == claim._replace(is_new=False)
    assert store.claim("s:train:7", "tinkex/tiny", lambda nodes, model: None) is None


def test_a_node_that_leaves_leaves_its_runs_to_the_others_at_once(store: ClusterStore) -> None:
    assert claimed(store, RUN).home.node == "a"
    store.leave("a")
    assert claimed(store, RUN).home == Home(run_id=RUN, node="b", epoch=2)


def test_claims_of_one_run_at_once_agree(shared: Callable[[], ClusterStore], store: ClusterStore) -> None:
    stores = [shared() for _ in range(4)]
    gate, found = threading.Barrier(4), []

    def claim(index: int) -> None:
        for number in range(20):
            gate.wait(30)
            found.append((number, claimed(stores[index], f"s:train:{number}", own="ab"[index % 2]).home))

    threads = [threading.Thread(target=claim, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 80
    assert len(set(found)) == 20, "one home each"


def test_a_claim_that_waited_for_another_one_agrees_with_it(
    shared: Callable[[], ClusterStore], store: ClusterStore, postgres_place: Place
) -> None:
    """All nodes look for the runs of a dead one at the same time; each would take them from the one before."""
    store.join(node("c"), 60)
    assert claimed(store, RUN).home.node == "a"
    end_lease(postgres_place, "a")
    other, found = shared(), list[Claim]()
    thread = threading.Thread(target=lambda: found.append(claimed(other, RUN, own="c")))
    with psycopg.connect(postgres_place.url) as connection:
        connection.execute("UPDATE homes SET node = 'b', epoch = 2 WHERE run_id = %s", (RUN,))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive(), "it waits for the claim that is not committed yet"
    thread.join(10)
    assert found == [Claim(Home(run_id=RUN, node="b", epoch=2), "http://b")]


def test_what_waits_without_a_living_home_is_found(store: ClusterStore, postgres_place: Place) -> None:
    for number, home_node in enumerate("ab"):
        run_id = f"s:train:{number}"
        home = claimed(store, run_id, own=home_node).home
        assert home.node == home_node
        store.add_run(run(run_id), operation(0, run_id), b"create", home)
    assert store.waiting_runs("a") == ["s:train:0"]
    end_lease(postgres_place, "b")
    assert sorted(store.waiting_runs("a")) == ["s:train:0", "s:train:1"]


# ── The fence

WRITES: dict[str, Callable[[ClusterStore, Home], object]] = {
    "finish": lambda store, home: store.finish(
        f"{RUN}/1", at=1.0, result=b"x" * 100_000, result_type="json", home=home
    ),
    "fail": lambda store, home: store.fail(f"{RUN}/1", at=1.0, error="no", category="server", home=home),
    "snapshot": lambda store, home: store.set_snapshot(RUN, "journal/snapshots/a", 0, home),
    "accept": lambda store, home: store.add_operation(operation(2), b"x" * 100_000, home),
    "reject": lambda store, home: store.add_rejected(operation(2, state="refused"), [], home),
    "unload": lambda store, home: store.set_unloaded(RUN, home),
    "delete": lambda store, home: store.delete_run(
        RUN, AuditEntry(id="a", at=1.0, tenant="ann", action="run.delete", target=RUN), home
    ),
    "delete a part": lambda store, home: store.delete_ended_operations(RUN, 10, home),
    "create": lambda store, home: store.add_run(
        run("s:train:1"), operation(0, "s:train:1"), b"", replace(home, run_id="s:train:1")
    ),
}


def test_every_method_that_changes_a_run_is_tested_here() -> None:
    source = Path(Journal.add_run.__code__.co_filename).read_text()
    fenced = set(re.findall(r"    def (\w+)\([^)]*home: Home \| None(?: = None)?,?\s*\)", source, re.S))
    assert fenced == {
        "add_run", "set_unloaded", "set_snapshot", "add_operation", "add_rejected", "finish", "fail", "_check_home",
    }  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_node_writes_nothing_about_a_run_that_is_at_home_elsewhere(
    write: str, store: ClusterStore, postgres_place: Place
) -> None:
    home = claimed(store, RUN).home
    assert home.node == "a"
    store.add_run(run(), operation(0), b"create", home)
    store.add_operation(operation(1), b"command", home)
    claimed(store, "s:train:1")
    end_lease(postgres_place, "a")
    assert claimed(store, RUN).home == Home(run_id=RUN, node="b", epoch=2)
    claimed(store, "s:train:1", own="b")
    before = (store.get_run(RUN), store.get_run("s:train:1"), store.operations_of(RUN), postgres_place.files())
    with pytest.raises(HomeLost, match="Another server works on"):
        WRITES[write](store, home)
    assert (store.get_run(RUN), store.get_run("s:train:1"), store.operations_of(RUN), postgres_place.files()) == before


@pytest.mark.parametrize("write", WRITES)
def test_a_node_writes_about_a_run_that_is_at_home_there(write: str, store: ClusterStore) -> None:
    home = claimed(store, RUN).home
    store.add_run(run(), operation(0), b"create", home)
    store.add_operation(operation(1), b"command", home)
    claimed(store, "s:train:9")  # so that the next one is for a again
    claimed(store, "s:train:1")
    WRITES[write](store, home)


def test_what_a_proof_takes_away_of_a_cluster_is_gone_and_nothing_else(
    store: ClusterStore, postgres_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the patch of the renewal wrote what PostgreSQL refuses. No node renewed at all, noticed or not."""
    monkeypatch.setattr(broken, "_replace", monkeypatch.setattr)
    home = create(store)
    broken.take_away("renewal", "server")
    end_lease(postgres_place, "a")
    assert store.renew("a", 60, NodeFacts(operations=3)) is False
    assert {entry.id: entry.load for entry in store.list_nodes()} == {"a": 3, "b": 0}
    end_lease(postgres_place, "a")
    assert claimed(store, RUN).home.node == "b"
    with pytest.raises(HomeLost):
        store.set_snapshot(RUN, "late", 0, home)
    broken.take_away("fence", "server")
    store.set_snapshot(RUN, "late", 0, home)
    record = store.get_run(RUN)
    assert record is not None and record.snapshot == "late"


def test_an_old_epoch_of_the_same_node_writes_nothing(store: ClusterStore) -> None:
    """The run left and came back: what was under way before it left belongs to an adapter that is gone."""
    first = claimed(store, RUN).home
    store.add_run(run(), operation(0), b"create", first)
    store.release(first)
    second = claimed(store, RUN).home
    assert second.node == first.node
    with pytest.raises(HomeLost):
        store.finish(f"{RUN}/0", at=1.0, result=b"{}", result_type="json", home=first)
    store.finish(f"{RUN}/0", at=1.0, result=b"{}", result_type="json", home=second)


def test_a_write_without_a_home_is_a_mistake_of_ours(store: ClusterStore) -> None:
    with pytest.raises(AssertionError, match="without its home"):
        store.add_run(run(), operation(0), b"create")


def test_a_claim_waits_for_a_write_that_is_under_way(
    shared: Callable[[], ClusterStore], store: ClusterStore, postgres_place: Place
) -> None:
    """Otherwise the new home would read the journal without the last result of the old one."""
    home = claimed(store, RUN).home
    store.add_run(run(), operation(0), b"create", home)
    other, done = shared(), threading.Event()

    def claim() -> None:
        claimed(other, RUN, own="b")
        done.set()

    thread = threading.Thread(target=claim)
    with store._write() as connection:
        store._check_home(connection, RUN, home)
        end_lease(postgres_place, "a")
        thread.start()
        assert not done.wait(0.3)
    assert done.wait(10)
    thread.join(10)


# ── Beside a server that is alone, and one janitor for all


def test_a_server_alone_and_nodes_exclude_each_other(
    shared: Callable[[], ClusterStore], postgres_place: Place, tmp_path: Path
) -> None:
    store, alone = shared(), postgres_place.open()
    store.join(node("a"), 60)
    with pytest.raises(ConfigError, match=r"server at http://a shares this database.*--node-url too"):
        alone.lease("http://alone", tmp_path).__enter__()
    store.leave("a")
    with alone.lease("http://alone", tmp_path):
        with pytest.raises(ConfigError, match=r"http://alone has this database for itself"):
            store.join(node("a"), 60)
        assert store.list_nodes() == []
    store.join(node("a"), 60)


def test_a_server_alone_whose_session_was_cut_writes_nothing_after_a_node_has_joined(
    shared: Callable[[], ClusterStore], postgres_place: Place, tmp_path: Path
) -> None:
    """It takes its lock again with the next renewal, and would go on beside the node."""
    store, alone = shared(), postgres_place.open()
    with alone.lease("http://alone", tmp_path) as lease:
        alone.add_run(run(), operation(0), b"create")
        with psycopg.connect(postgres_place.url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'")
        store.join(node("a"), 60)
        with pytest.raises(LeaseLost):
            alone.finish(f"{RUN}/0", at=1.0, result=b"{}", result_type="json")
        assert lease.is_lost


def test_a_frozen_node_writes_nothing_after_a_server_took_the_store_for_itself(
    store: ClusterStore, postgres_place: Place, tmp_path: Path
) -> None:
    home = claimed(store, RUN).home
    store.add_run(run(), operation(0), b"create", home)
    end_lease(postgres_place, "a")
    end_lease(postgres_place, "b")
    with postgres_place.open().lease("http://alone", tmp_path), pytest.raises(HomeLost):
        store.finish(f"{RUN}/0", at=1.0, result=b"{}", result_type="json", home=home)


def test_sqlite_has_one_server(sqlite_place: Place) -> None:
    store = ClusterStore.open(sqlite_place.url, sqlite_place.data_dir)
    assert isinstance(store, ClusterStore)
    with pytest.raises(ConfigError, match=r"needs a PostgreSQL"):
        store.join(node("a"), 60)
    store.close()


def test_one_node_cleans_up_for_all_until_it_stops_doing_so(store: ClusterStore, postgres_place: Place) -> None:
    assert store.lead("a", 60) and not store.lead("b", 60) and store.lead("a", 60)
    with psycopg.connect(postgres_place.url) as connection:
        connection.execute("UPDATE lease SET until = 0 WHERE name = 'janitor'")
    assert store.lead("b", 60) and not store.lead("a", 60)
