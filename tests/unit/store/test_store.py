"""The contract of the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import replace

import pytest

from tests.unit.store.conftest import Add, Place, checkpoint, operation, run, sampler, session
from tinkex.errors import ValidationError
from tinkex.store.errors import Duplicate
from tinkex.store.records import AuditEntry, KeyRecord
from tinkex.store.store import Store

RUN = "s:train:0"


def test_a_session_comes_back_as_it_was(store: Store) -> None:
    given = session(
        created_at=1763258400.123456,
        tags=["a", "b"],
        user_metadata={"z": "1", "a": {"deep": [1, 2.5, None, "é"]}},
        sdk_version="0.36.0",
        project_id="p",
        display_name="My run",
    )
    store.add_session(given)
    found = store.get_session("s")
    assert found == given
    assert list(found.user_metadata) == ["z", "a"]
    assert store.get_session("other") is None


def test_a_session_is_touched_finished_and_given_to_a_project(store: Store) -> None:
    store.add_session(session())
    store.touch_session("s", 50.0)
    store.set_session_project("s", "p")
    store.finish_session("s", {"status": "completed"})
    assert store.get_session("s") == session(seen_at=50.0, project_id="p", finished={"status": "completed"})
    store.set_session_project("s", None)
    assert store.get_session("s") == session(seen_at=50.0, finished={"status": "completed"})


def test_sessions_are_listed_newest_first_and_only_to_their_tenant(store: Store) -> None:
    for number in range(5):
        store.add_session(session(f"s{number}", created_at=float(number)))
    store.add_session(session("other", tenant="bob", created_at=9.0))
    assert store.list_session_ids("ann", 1, 2) == ["s3", "s2"]
    assert store.list_session_ids("ann", 0, 100) == ["s4", "s3", "s2", "s1", "s0"]


def test_a_search_compares_metadata_pairs_and_names(store: Store) -> None:
    store.add_session(session("a", created_at=1.0, user_metadata={"team": "x", "n": "1"}, display_name="Big RL run"))
    store.add_session(session("b", created_at=2.0, user_metadata={"team": "x"}, project_id="p"))
    store.add_session(session("c", created_at=3.0, user_metadata={"team": "y"}, display_name="small"))
    store.add_session(session("d", tenant="bob", user_metadata={"team": "x"}))

    def ids(**filters: object) -> list[str]:
        return [found.id for found in store.search_sessions("ann", **filters).sessions]  # type: ignore[arg-type]

    assert ids() == ["c", "b", "a"]
    assert ids(user_metadata={"team": "x"}) == ["b", "a"]
    assert ids(user_metadata={"team": "x", "n": "1"}) == ["a"]
    assert ids(session_id="b") == ["b"]
    assert ids(session_id="d") == []
    assert ids(display_name="rl BIG") == ["a"]
    assert ids(display_name="small", session_id="b") == ["c", "b"]
    assert ids(limit=2) == ["c", "b"]


def test_pages_of_a_search_meet_exactly_when_their_cursor_travels_as_a_date(store: Store) -> None:
    start = 1763258400.1234567
    for number in range(40):
        store.add_session(session(f"s{number:02}", created_at=start + (number // 3) * 0.0000013))
    seen: list[str] = []
    before: tuple[float, str] | None = None
    while page := store.search_sessions("ann", limit=7, before=before).sessions:
        seen += [found.id for found in page]
        date = dt.datetime.fromtimestamp(page[-1].created_at, dt.UTC)
        before = (dt.datetime.fromisoformat(date.isoformat()).timestamp(), page[-1].id)
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == 40


def test_a_run_is_added_with_its_creating_operation(store: Store) -> None:
    given = run(seed=2**64 - 1, user_metadata={"renderer": "role_colon"})
    creation = operation(0, kind="create_model", options={"base": "tiny"}, cost_tokens=15, tokens=5)
    store.add_run(given, creation, b"frame")
    assert store.get_run(RUN) == given
    assert store.get_operation(f"{RUN}/0") == creation
    assert store.command(f"{RUN}/0") == b"frame"
    assert store.runs_of_session("s") == [RUN]


def test_adding_a_run_twice_raises_duplicate_with_the_first_creation(started: Store) -> None:
    with pytest.raises(Duplicate) as caught:
        started.add_run(run(rank=64), operation(0, request_id="again"), b"other")
    assert caught.value.existing.request_id == f"{RUN}/0"
    found = started.get_run(RUN)
    assert found is not None and found.rank == 8
    assert started.get_operation("again") is None


def test_runs_are_listed_newest_first_with_their_number(store: Store) -> None:
    for number in range(5):
        name = f"s:train:{number}"
        store.add_run(run(name, created_at=float(number)), operation(0, name), b"")
    store.add_run(run("t:train:0", tenant="bob"), operation(0, "t:train:0"), b"")
    page, total = store.list_runs("ann", 1, 2)
    assert [found.run.id for found in page] == ["s:train:3", "s:train:2"]
    assert total == 5
    store.set_unloaded("s:train:3")
    found = store.get_run("s:train:3")
    assert found is not None and found.is_unloaded


def test_a_sequence_number_is_accepted_once(started: Store, add: Add) -> None:
    first = add(1, b"first")
    with pytest.raises(Duplicate) as caught:
        add(1, b"second", request_id="second", digest="other")
    assert caught.value.existing == first
    assert started.command(first.request_id) == b"first"
    assert started.get_operation("second") is None


def test_a_request_id_is_accepted_once(started: Store, add: Add) -> None:
    add(1)
    with pytest.raises(Duplicate) as caught:
        add(2, request_id=f"{RUN}/1")
    assert caught.value.existing.seq_id == 1


def test_a_rejected_operation_can_be_replaced_under_its_number(started: Store, add: Add) -> None:
    add(1, None, request_id="refused", state="refused", error="bad shape", category="user", finished_at=11.0)
    assert started.last_seq(RUN) == 1
    add(1, b"good", request_id="good")
    assert started.get_operation("refused") is None
    assert [found.request_id for found in started.queued()] == ["good"]
    with pytest.raises(Duplicate):
        add(1, b"third", request_id="third")


def test_an_operation_moves_the_runs_last_request(started: Store, add: Add) -> None:
    add(1, created_at=77.0)
    found = started.get_run(RUN)
    assert found is not None and found.last_request_at == 77.0


def test_operations_are_read_by_number_whatever_their_arrival(started: Store, add: Add) -> None:
    for seq_id in (3, 1, 10, 2):
        add(seq_id)
    assert [found.seq_id for found in started.operations_of(RUN)] == [0, 1, 2, 3, 10]
    assert [found.seq_id for found in started.operations_of(RUN, after_seq=2)] == [3, 10]
    assert started.last_seq(RUN) == 10
    assert started.last_seq("unknown") == -1


def test_queued_operations_survive_a_restart(place: Place, started: Store, add: Add) -> None:
    for seq_id in (2, 1, 3):
        add(seq_id)
    started.finish(f"{RUN}/1", at=20.0, result=b"", result_type="json")
    started.add_run(run("a:train:0"), operation(0, "a:train:0"), b"")
    started.close()
    assert [(found.run_id, found.seq_id) for found in place.open().queued()] == [("a:train:0", 0), (RUN, 2), (RUN, 3)]


def test_a_finished_operation_has_its_result(started: Store, add: Add) -> None:
    given = add(1)
    assert started.result(given.request_id) is None
    started.finish(given.request_id, at=20.0, result=b"\x00\xff", result_type="proto")
    assert started.result(given.request_id) == b"\x00\xff"
    assert started.get_operation(given.request_id) == replace(
        given, state="done", finished_at=20.0, result_type="proto"
    )


def test_a_failed_operation_stores_any_error_text(started: Store, add: Add) -> None:
    started.fail(add(1).request_id, at=20.0, error="bad \0 byte \ud800 é", category="user")
    found = started.get_operation(f"{RUN}/1")
    assert found is not None and found.error is not None
    assert (found.state, found.category, found.finished_at) == ("failed", "user", 20.0)
    assert found.error.startswith("bad \ufffd byte") and found.error.endswith("é")


def test_an_operation_ends_once(started: Store, add: Add) -> None:
    add(1)
    started.fail(f"{RUN}/1", at=20.0, error="no", category="server")
    with pytest.raises(KeyError):
        started.finish(f"{RUN}/1", at=21.0, result=b"late", result_type="json")
    with pytest.raises(KeyError):
        started.fail("unknown", at=21.0, error="no", category="server")
    assert started.result(f"{RUN}/1") is None


def test_metrics_and_engine_time_are_stored_with_the_result(started: Store, add: Add) -> None:
    saved, made = checkpoint(), sampler()
    assert started.finish(add(1).request_id, at=20.0, result=b"", result_type="json", checkpoint=saved) is None
    newer = checkpoint(folder="checkpoints/newer", size_bytes=7)
    replaced = started.finish(
        add(2).request_id, at=20.0, result=b"", result_type="json", checkpoint=newer, sampler=made
    )
    assert replaced == saved
    assert started.get_checkpoint(saved.path) == newer
    assert started.get_sampler(made.id) == made
    assert started.usage() == (1, 7)


def test_finishing_an_operation_is_all_or_nothing(started: Store, add: Add) -> None:
    started.add_sampler(sampler())
    add(1)
    with pytest.raises(ValidationError, match=r"s:sample:0 exists already"):
        started.finish(f"{RUN}/1", at=20.0, result=b"r", result_type="json", checkpoint=checkpoint(), sampler=sampler())
    assert [found.seq_id for found in started.queued()] == [1]
    assert started.result(f"{RUN}/1") is None
    assert started.get_checkpoint(checkpoint().path) is None


def test_a_snapshot_replaces_the_commands_it_includes(started: Store, add: Add) -> None:
    for seq_id in (1, 2, 3):
        add(seq_id, b"c%d" % seq_id)
        if seq_id != 2:
            started.finish(f"{RUN}/{seq_id}", at=20.0, result=b"r", result_type="json")
    assert started.set_snapshot(RUN, "snapshots/one", 2) is None
    found = started.get_run(RUN)
    assert found is not None and (found.snapshot, found.snapshot_seq) == ("snapshots/one", 2)
    for gone in (0, 1):
        with pytest.raises(KeyError):
            started.command(f"{RUN}/{gone}")
    assert started.command(f"{RUN}/2") == b"c2", "it has not run yet"
    assert started.command(f"{RUN}/3") == b"c3"
    assert started.result(f"{RUN}/1") == b"r"
    assert started.set_snapshot(RUN, "snapshots/two", 3) == "snapshots/one"


def test_a_snapshot_of_one_run_leaves_the_others_alone(started: Store) -> None:
    started.add_run(run("s:train:1"), operation(0, "s:train:1"), b"other")
    started.finish("s:train:1/0", at=20.0, result=b"", result_type="json")
    started.set_snapshot(RUN, "snapshots/one", 100)
    assert started.command("s:train:1/0") == b"other"


def test_results_expire_and_their_operations_stay(started: Store, add: Add) -> None:
    for seq_id in (1, 2):
        started.finish(add(seq_id).request_id, at=seq_id * 100.0, result=b"r", result_type="json")
    assert started.expire_results(before=150.0) == 2, "the creation and the first"
    assert started.expire_results(before=150.0) == 0
    assert started.result(f"{RUN}/1") is None
    found = started.get_operation(f"{RUN}/1")
    assert found is not None and (found.state, found.result_type) == ("done", None)
    assert started.result(f"{RUN}/2") == b"r"
    assert started.command(f"{RUN}/1") == b"command", "replay needs it"


def test_many_results_expire_in_one_call(store: Store) -> None:
    store.add_run(run(), operation(0), b"")
    for seq_id in range(1, 13):
        store.add_operation(operation(seq_id), None)
        store.finish(f"{RUN}/{seq_id}", at=1.0, result=b"r", result_type="json")
    assert store.expire_results(before=2.0) == 12
    assert all(found.result_type is None for found in store.operations_of(RUN))


def test_a_sampler_is_made_once(store: Store) -> None:
    given = sampler(model_path="tinker://x/sampler_weights/a")
    assert store.add_sampler(given) == given
    assert store.add_sampler(sampler(base_model="other")) == given
    assert store.samplers_of_session("s") == [given]
    store.delete_sampler(given.id)
    assert store.get_sampler(given.id) is None


def test_every_client_that_joins_a_sampler_gets_a_number_of_its_own(place: Place, store: Store) -> None:
    store.add_sampler(sampler())
    other = place.open()
    assert [store.join_sampler("s:sample:0"), other.join_sampler("s:sample:0"), store.join_sampler("s:sample:0")] == [
        1,
        2,
        3,
    ]
    with pytest.raises(KeyError):
        store.join_sampler("unknown")


def test_a_checkpoint_is_added_changed_and_deleted(store: Store) -> None:
    given = checkpoint(has_optimizer=True, user_metadata={"k": "v"}, size_bytes=5_000_000_000)
    store.add_checkpoint(given)
    assert store.get_checkpoint(given.path) == given
    store.set_public(given.path, True)
    store.set_expiry(given.path, 99.0)
    assert store.get_checkpoint(given.path) == replace(given, is_public=True, expires_at=99.0)
    store.set_expiry(given.path, None)
    assert store.delete_checkpoint(given.path) == replace(given, is_public=True)
    assert store.delete_checkpoint(given.path) is None
    assert store.get_checkpoint(given.path) is None


def test_a_checkpoint_is_readable_by_its_tenant_or_if_published_until_it_expires(store: Store) -> None:
    saved = checkpoint(expires_at=50.0)
    store.add_checkpoint(saved)
    assert store.get_live_checkpoint(saved.path, 49.0) == saved
    assert store.get_readable_checkpoint(saved.path, "ann", 49.0) == saved
    assert store.get_readable_checkpoint(saved.path, "bob", 49.0) is None
    store.set_public(saved.path, True)
    assert store.get_readable_checkpoint(saved.path, "bob", 49.0) == replace(saved, is_public=True)
    for tenant in ("ann", "bob"):
        assert store.get_readable_checkpoint(saved.path, tenant, 50.0) is None
    assert store.get_live_checkpoint(saved.path, 50.0) is None
    store.set_expiry(saved.path, None)
    assert store.get_live_checkpoint(saved.path, 1e12) is not None


def test_expired_checkpoints_are_not_listed_and_are_found_for_deletion(store: Store) -> None:
    for number in range(4):
        store.add_checkpoint(checkpoint(f"c{number}", created_at=float(number)))
    store.add_checkpoint(checkpoint("old", created_at=0.5, expires_at=50.0))
    store.add_checkpoint(checkpoint("elsewhere", run_id="s:train:1", created_at=9.0))
    store.add_checkpoint(checkpoint("bobs", run_id="t:train:0", tenant="bob"))
    page, total = store.list_checkpoints("ann", RUN, 1, 2, now=50.0)
    assert ([found.name for found in page], total) == (["c2", "c1"], 4)
    page, total = store.list_checkpoints("ann", None, 0, 100, now=49.0)
    assert ([found.name for found in page], total) == (["elsewhere", "c3", "c2", "c1", "old", "c0"], 6)
    assert [found.name for found in store.expired_checkpoints(50.0)] == ["old"]
    assert store.expired_checkpoints(49.0) == []
    assert store.usage("ann") == (6, 600)
    assert store.usage() == (7, 700)
    assert store.usage("nobody") == (0, 0)


def test_a_resaved_checkpoint_survives_the_expiry_of_its_predecessor(store: Store) -> None:
    store.add_checkpoint(checkpoint("a", expires_at=50.0))
    [expired] = store.expired_checkpoints(50.0)
    store.add_checkpoint(checkpoint("a"))
    assert store.delete_checkpoint(expired.path, expired_by=50.0) is None
    assert store.get_checkpoint(expired.path) is not None
    store.set_expiry(expired.path, 40.0)
    assert store.delete_checkpoint(expired.path, expired_by=50.0) is not None


def test_every_folder_in_use_is_known(started: Store) -> None:
    started.add_checkpoint(checkpoint("a"))
    started.add_sampler(sampler(folder="samplers/1"))
    started.add_sampler(sampler("s:sample:1"))
    started.set_snapshot(RUN, "snapshots/1", 0)
    assert started.all_folders() == {"checkpoints/a", "samplers/1", "snapshots/1"}


def key(id: str, **values: object) -> KeyRecord:
    given = {"sha256": f"hash-{id}", "tenant": "ann", "name": "laptop", "hint": "tml-abcd…wxyz", "created_at": 1.0}
    return KeyRecord(id=id, **{**given, **values})  # type: ignore[arg-type]


def test_a_key_is_found_by_its_hash_and_revoked_by_id_or_hint(store: Store) -> None:
    assert not store.has_keys()
    one, two = key("one"), key("two", hint="tml-efgh…1234", created_at=2.0)
    store.add_key(one)
    store.add_key(two)
    assert store.get_key_by_hash("hash-one") == one
    assert store.get_key_by_hash("hash-none") is None
    assert store.revoke_key("tml-efgh…1234", 5.0) == replace(two, revoked_at=5.0)
    assert store.has_keys()
    assert store.revoke_key("one", 6.0) == replace(one, revoked_at=6.0)
    assert not store.has_keys()
    assert store.revoke_key("one", 7.0) is None, "it was revoked before"
    assert store.list_keys() == [replace(one, revoked_at=6.0), replace(two, revoked_at=5.0)]


def test_a_hint_that_fits_two_keys_revokes_neither(store: Store) -> None:
    store.add_key(key("one"))
    store.add_key(key("two"))
    with pytest.raises(ValidationError, match=r"2 keys look like .* by its id"):
        store.revoke_key("tml-abcd…wxyz", 5.0)
    assert all(found.revoked_at is None for found in store.list_keys())


def test_the_same_key_cannot_be_added_twice(store: Store) -> None:
    store.add_key(key("one"))
    with pytest.raises(ValidationError, match=r"already known"):
        store.add_key(key("two", sha256="hash-one", tenant="bob"))
    found = store.get_key_by_hash("hash-one")
    assert found is not None and found.tenant == "ann"


def test_the_audit_log_is_read_newest_first_by_its_tenant(store: Store) -> None:
    entries = [
        AuditEntry(id=f"e{n}", at=float(n), tenant="ann", action="delete", target="t", detail={"n": n})
        for n in range(5)
    ]
    for entry in entries:
        store.add_audit(entry)
    store.add_audit(AuditEntry(id="other", at=9.0, tenant="bob", action="delete", target="t"))
    assert store.list_audit("ann", limit=2) == [entries[4], entries[3]]
    assert store.list_audit("ann", limit=10, before=3.0) == [entries[2], entries[1], entries[0]]


def test_the_first_response_under_an_idempotency_key_is_kept_per_tenant(store: Store) -> None:
    assert store.recall("ann", "k") is None
    assert store.remember("ann", "k", b"first", 1.0) == b"first"
    assert store.remember("ann", "k", b"second", 2.0) == b"first"
    assert store.recall("ann", "k") == b"first"
    assert store.recall("bob", "k") is None
    store.expire_results(before=5.0)
    assert store.recall("ann", "k") is None


def test_any_text_as_an_id_is_just_not_found(started: Store) -> None:
    for odd in ("", "\0", "a\0b", "\ud800", "'; DROP TABLE runs; --", "%", "é" * 5000):
        assert started.get_session(odd) is None
        assert started.get_run(odd) is None
        assert started.get_operation(odd) is None
        assert started.get_sampler(odd) is None
        assert started.get_checkpoint(odd) is None
        assert started.recall(odd, odd) is None
        assert started.result(odd) is None
    assert started.get_run(RUN) is not None


def test_an_offset_or_limit_of_any_size_is_accepted(started: Store) -> None:
    assert started.list_runs("ann", 10**30, 10**30) == ([], 1)
    assert started.list_session_ids("ann", 10**30, 5) == []
    assert len(started.list_runs("ann", 0, 10**30)[0]) == 1
    assert started.list_checkpoints("ann", None, 10**30, 0, 0.0) == ([], 0)


def test_no_part_of_the_store_hides_a_method_of_another() -> None:
    """Before: two parts had a `session_usage`, and a mend of one of them would have changed nothing."""
    names = Counter(name for part in Store.__bases__ for name in vars(part) if not name.startswith("__"))
    assert [name for name, times in names.items() if times > 1] == []


def test_a_tenant_takes_over_all_that_another_one_has(started: Store) -> None:
    started.add_session(session())
    started.add_sampler(sampler())
    started.add_checkpoint(checkpoint())
    assert started.move_tenant("nobody", "local") == 0
    assert started.move_tenant("ann", "local") == 1
    assert started.list_session_ids("local", 0, 9) == ["s"]
    found = started.get_run(RUN)
    assert found is not None and found.tenant == "local"
    kept = started.get_checkpoint(checkpoint().path)
    assert kept is not None and kept.tenant == "local"
    assert started.move_tenant("ann", "local") == 0
