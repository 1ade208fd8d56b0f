"""Takes training operations in: known run, right tenant, new number, then a line in the journal, then the request id.

The same number with the same content gives the same request id, however often it is sent: attempts of one operation are
one operation. A number that was refused may be sent again; otherwise another content under it is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any
from uuid import uuid4

import orjson

from tinkex.clock import Clock
from tinkex.server.http.errors import RequestRejected, bad_request, not_found, too_many_requests
from tinkex.server.training.run_queue import Lane, Pending, Taken
from tinkex.server.training.scheduler import cost_of
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.errors import Duplicate
from tinkex.store.records import OperationRecord, RunRecord
from tinkex.store.store import Store

KEPT_COMMAND_BYTES = 1 << 20
"""Commands up to this size stay in memory while they wait; larger ones are read back from the journal."""
MAX_SEQ = 2**31 - 1


class Intake:
    def __init__(self, config: ServeConfig, clock: Clock, store: Store, db: Db, worker: Worker) -> None:
        self._config, self._clock, self._store, self._db, self._worker = config, clock, store, db, worker
        self._arriving: dict[tuple[str, int], asyncio.Future[str]] = {}

    async def lane(self, tenant: str, run_id: object) -> Lane:
        """The lane of a run that this tenant owns."""
        if not isinstance(run_id, str) or not run_id:
            raise bad_request("model_id is missing: it must be the text that create_model answered.", "no_model_id")
        lane = await self._worker.lane(run_id)
        if lane is None or lane.run.tenant != tenant:
            raise not_found("model", run_id)
        return lane

    async def create(self, run: RunRecord, kind: str, options: dict[str, Any]) -> str:
        """A new run; asked for again, the same one."""
        creation = OperationRecord(
            request_id=new_id(),
            run_id=run.id,
            tenant=run.tenant,
            seq_id=0,
            kind=kind,
            digest=digest_of(kind, b"", {**options, **_asked(run)}),
            created_at=self._clock.wall(),
            options=options,
        )
        key = (run.id, 0)
        if (arriving := self._arriving.get(key)) is not None:
            return await asyncio.shield(arriving)
        arriving = self._arriving[key] = asyncio.get_running_loop().create_future()
        try:
            if (known := await self._worker.lane(run.id)) is not None:
                if known.run.tenant != run.tenant:
                    raise not_found("session", run.session_id)
                request_id = self._again(run.id, 0, known.taken[0], creation.digest)
            else:
                await self._db(self._store.add_run, run, creation, b"")
                await self._worker.adopt(run.id)
                request_id = creation.request_id
            arriving.set_result(request_id)
            return request_id
        except BaseException as problem:
            _reject(arriving, problem)
            raise
        finally:
            del self._arriving[key]

    async def submit(
        self,
        lane: Lane,
        seq_id: int | None,
        kind: str,
        command: bytes,
        *,
        options: dict[str, Any] | None = None,
        tokens: int = 0,
    ) -> str:
        """Into the journal, then into the lane. Returns the request id."""
        options = options or {}
        number = check_seq(seq_id, lane)
        while seq_id is None and (lane.run.id, number) in self._arriving:
            number += 1  # two that count nothing themselves are two operations
        digest = digest_of(kind, command, options)
        key = (lane.run.id, number)
        if (arriving := self._arriving.get(key)) is not None:
            await asyncio.shield(arriving)  # another attempt of it is on its way into the journal
        if (taken := lane.taken.get(number)) is not None and not taken.is_refused:
            return self._again(lane.run.id, number, taken, digest)
        self._check_open(lane)
        arriving = self._arriving[key] = asyncio.get_running_loop().create_future()
        try:
            request_id = await self._accept(lane, number, kind, command, digest, options, tokens)
            arriving.set_result(request_id)
            return request_id
        except BaseException as problem:
            _reject(arriving, problem)
            raise
        finally:
            del self._arriving[key]

    async def _accept(
        self, lane: Lane, number: int, kind: str, command: bytes, digest: str, options: dict[str, Any], tokens: int
    ) -> str:
        cost = cost_of(kind, tokens)
        row = OperationRecord(
            request_id=new_id(),
            run_id=lane.run.id,
            tenant=lane.run.tenant,
            seq_id=number,
            kind=kind,
            digest=digest,
            created_at=self._clock.wall(),
            cost_tokens=cost,
            tokens=tokens,
            options=options,
        )
        try:
            await self._db(self._store.add_operation, row, command)
        except Duplicate as problem:  # an earlier attempt stands although its confirmation was lost
            row = replace(row, request_id=self._again(row.run_id, number, _taken(problem.existing), digest))
            if problem.existing.state != "queued":
                return row.request_id  # it ended long ago: the lane has forgotten its number
        if lane.is_late(number):
            lane.taken[number] = Taken(row.request_id, digest)
            await self._worker.fail(row.request_id, row.tenant, lane.why_late(number), "user")
            return row.request_id
        pending = Pending(
            request_id=row.request_id,
            run_id=row.run_id,
            tenant=row.tenant,
            seq_id=number,
            kind=kind,
            arrived=self._clock.now(),
            cost=cost,
            tokens=tokens,
            options=options,
            command=command if len(command) <= KEPT_COMMAND_BYTES else None,
        )
        lane.add(pending, digest)
        self._worker.enqueue(pending)
        return row.request_id

    async def refuse(self, lane: Lane, seq_id: object, kind: str, problem: RequestRejected) -> None:
        """Note a number that came in with content that cannot run: the run does not wait for it."""
        if not isinstance(seq_id, int) or isinstance(seq_id, bool) or not 0 < seq_id <= MAX_SEQ:
            return
        if seq_id in lane.taken or lane.is_late(seq_id) or (lane.run.id, seq_id) in self._arriving:
            return
        now = self._clock.wall()
        row = OperationRecord(
            request_id=new_id(),
            run_id=lane.run.id,
            tenant=lane.run.tenant,
            seq_id=seq_id,
            kind=kind,
            digest="",
            state="refused",
            created_at=now,
            finished_at=now,
            error=problem.detail,
            category=problem.category,
        )
        lane.refuse(seq_id, row.request_id, "")
        await self._db(self._store.add_operation, row, None)
        self._worker.wake()

    def _check_open(self, lane: Lane) -> None:
        if lane.run.is_unloaded:
            raise bad_request(
                f"Model {lane.run.id} was unloaded. Create a new one, for example from a saved state.", "model_unloaded"
            )
        if reason := self._worker.why_not_served(lane):
            raise bad_request(f"Model {lane.run.id} cannot go on: {reason}.", "unknown_base_model")
        waiting = self._worker.waiting_of(lane.run.tenant)
        if waiting >= self._config.max_queued_operations:
            raise too_many_requests(
                f"{waiting} training operations are waiting already, which is the limit "
                "(--max-queued-operations). Await some results before sending more.",
                "too_many_operations",
            )

    @staticmethod
    def _again(run_id: str, number: int, taken: Taken, digest: str) -> str:
        if taken.digest != digest:
            raise bad_request(
                f"Model {run_id} already received operation {number} with another content. "
                "Use a new seq_id for new work; a repeated attempt must repeat the same content.",
                "conflict",
            )
        return taken.request_id


def check_seq(seq_id: object, lane: Lane) -> int:
    """The operation's number; without one it goes to the end."""
    if seq_id is None:
        return lane.next_number()
    if isinstance(seq_id, bool) or not isinstance(seq_id, int) or not 0 < seq_id <= MAX_SEQ:
        raise bad_request(f"seq_id must be a whole number from 1 on, got {str(seq_id)[:50]!r}.", "bad_seq_id")
    return seq_id


def digest_of(kind: str, command: bytes, options: dict[str, Any]) -> str:
    found = hashlib.blake2b(command, digest_size=16)
    found.update(orjson.dumps([kind, options], option=orjson.OPT_SORT_KEYS))
    return found.hexdigest()


def _asked(run: RunRecord) -> dict[str, Any]:
    """What makes a run another run. Not the seed: it is chosen here if the client names none."""
    names = ("base_model", "rank", "train_attn", "train_mlp", "train_unembed")
    return {name: getattr(run, name) for name in names}


def new_id() -> str:
    return f"op-{uuid4().hex}"


def _taken(row: OperationRecord) -> Taken:
    return Taken(row.request_id, row.digest)


def _reject(arriving: asyncio.Future[str], problem: BaseException) -> None:
    arriving.set_exception(problem if isinstance(problem, Exception) else RuntimeError(str(problem)))
    arriving.exception()  # looked at: nobody may be waiting for it
