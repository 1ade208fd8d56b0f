"""Accepts training operations: known run, right tenant, new number, then a row in the journal, then the request id.

The same number with the same content gives the same request id, however often it is sent: retries of one operation are
one operation. A number whose content was rejected may be sent again; otherwise different content under it is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeGuard
from uuid import uuid4

from tinkex.clock import Clock
from tinkex.server.http.errors import RequestRejected, bad_request, not_found
from tinkex.server.limits.ledger import Ledger
from tinkex.server.limits.quotas import QuotaExceeded, Quotas
from tinkex.server.training.operation_runner import CHECKPOINT_KINDS
from tinkex.server.training.residency import digest_of
from tinkex.server.training.run_queue import PendingOperation, RunQueue, Taken
from tinkex.server.training.scheduler import cost_of
from tinkex.server.training.worker import Worker
from tinkex.server.upkeep.blob_calls import kept_payload
from tinkex.server.upkeep.database_thread import Db
from tinkex.store.errors import Duplicate, HomeLost
from tinkex.store.records import OperationRecord, RunRecord, lora_of
from tinkex.store.store import Store

MAX_LOOP_BYTES = 4 << 20
"""Commands up to this size are hashed on the event loop: that takes a few milliseconds."""
MODEL_DAY_S = 86_400.0
"""A run counts among those of its tenant if it was used within this time. Most clients never unload a run."""
MAX_SEQ = 2**31 - 1
CONFLICT = "conflict"
"""The code of the error for a number that came in before with different content."""


class Intake:
    def __init__(
        self,
        clock: Clock,
        store: Store,
        db: Db,
        worker: Worker,
        ledger: Ledger,
        quotas: Quotas,
    ) -> None:
        self._clock, self._store, self._db, self._worker = clock, store, db, worker
        self._ledger, self._quotas = ledger, quotas
        self._arriving: dict[tuple[str, int], asyncio.Future[str]] = {}
        """(run, number) → the request id, for operations that are being written to the journal."""

    async def run_queue(self, tenant: str, run_id: object) -> RunQueue:
        """Return the queue of a run that this tenant owns."""
        if not isinstance(run_id, str) or not run_id:
            raise bad_request("model_id is missing: send the text that create_model returned.", "no_model_id")
        queue = await self._worker.run_queue(run_id)
        if queue is None or queue.run.tenant != tenant:
            raise not_found("model", run_id)
        return queue

    async def create(self, run: RunRecord, kind: str, options: dict[str, Any]) -> str:
        """Create a run; a repeated request returns the same one."""
        # Not the seed: the service chooses one if the client sends none.
        digest = digest_of(kind, b"", {**options, "base_model": run.base_model, **lora_of(run)})
        creation = self._row(run, 0, kind, digest, options=options)
        if (arriving := self._arriving.get((run.id, 0))) is not None:
            return await asyncio.shield(arriving)
        with self._arrival(creation) as arriving:
            if (known := await self._worker.run_queue(run.id)) is not None:
                if known.run.tenant != run.tenant:
                    raise not_found("session", run.session_id)
                request_id = self._repeated(creation, known.taken[0])
            else:
                await self._check_room(run)
                await self._db(self._store.add_run, run, creation, b"", await self._worker.home(run.id))
                await self._worker.run_queue(run.id)
                request_id = creation.request_id
            arriving.set_result(request_id)
            return request_id

    async def submit(
        self,
        queue: RunQueue,
        seq_id: int | None,
        kind: str,
        command: bytes,
        *,
        options: dict[str, Any] | None = None,
        tokens: int = 0,
        targets: int = 0,
    ) -> str:
        """Write an operation to the journal, then put it into its queue. Return the request id."""
        options = options or {}
        if seq_id is not None and not is_seq(seq_id):
            raise bad_request(f"seq_id must be a whole number from 1 on, got {str(seq_id)[:50]!r}.", "bad_seq_id")
        digest = await self._digest(kind, command, options)
        number = queue.next_number() if seq_id is None else seq_id
        while seq_id is None and (queue.run.id, number) in self._arriving:
            number += 1  # two requests without numbers of their own are two operations
        cost = cost_of(kind, tokens, targets)
        row = self._row(queue.run, number, kind, digest, cost_tokens=cost, tokens=tokens, options=options)
        if (arriving := self._arriving.get((row.run_id, number))) is not None:
            await asyncio.shield(arriving)  # another attempt of it is on its way into the journal
        if (taken := queue.taken.get(number)) is not None and not taken.is_rejected:
            return self._repeated(row, taken)
        self._check_open(queue)
        self._worker.queued_work.take(row.tenant, len(command))
        try:
            with self._arrival(row) as arriving:
                if kind in CHECKPOINT_KINDS:
                    await self._reserve(queue, row)
                request_id = await self._accept(queue, row, command)
                arriving.set_result(request_id)
                return request_id
        except QuotaExceeded as error:
            await self.reject(queue, seq_id, kind, error)
            raise
        except RequestRejected as error:
            if seq_id is not None or error.code != CONFLICT:
                raise
        finally:
            if not queue.has(number):  # it will not run: it failed, came before, or came too late
                self._quotas.release((row.run_id, number))
                self._worker.queued_work.give_back(row.tenant, len(command))
        # The journal had an operation under this number, of whose confirmation we did not hear: take the next one.
        return await self.submit(queue, None, kind, command, options=options, tokens=tokens, targets=targets)

    @staticmethod
    async def _digest(kind: str, command: bytes, options: dict[str, Any]) -> str:
        if len(command) <= MAX_LOOP_BYTES:
            return digest_of(kind, command, options)
        return await asyncio.to_thread(digest_of, kind, command, options)

    async def _reserve(self, queue: RunQueue, row: OperationRecord) -> None:
        """Reserve what a checkpoint will take, as far as its size is known. Raises QuotaExceeded if it is too much."""
        kind, name = CHECKPOINT_KINDS[row.kind], row.options.get("name")
        path = "" if name is None else f"tinker://{row.run_id}/{kind}/{name}"
        size = self._quotas.expected_bytes(queue.run, kind)
        await self._quotas.reserve((row.run_id, row.seq_id), row.tenant, size, replaced_path=path)

    @contextmanager
    def _arrival(self, row: OperationRecord) -> Iterator[asyncio.Future[str]]:
        """Let other attempts of an operation wait until this one is in the journal; its error is theirs too."""
        key = (row.run_id, row.seq_id)
        arriving = self._arriving[key] = asyncio.get_running_loop().create_future()
        try:
            yield arriving
        except BaseException as error:
            arriving.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
            arriving.exception()  # read once: asyncio logs exceptions that nothing awaited, and nothing may await this
            raise
        finally:
            del self._arriving[key]

    async def _accept(self, queue: RunQueue, row: OperationRecord, command: bytes) -> str:
        try:
            content = await kept_payload(self._db, self._store, command)
            await self._db(self._store.add_operation, row, content, queue.home)
        except Duplicate as duplicate:  # an earlier attempt was stored, only its confirmation was lost
            existing = duplicate.existing
            taken = queue.taken[row.seq_id] = Taken(existing.request_id, existing.digest)
            if existing.state == "queued":  # whatever this attempt is: that one was accepted, and the run waits for it
                is_same = existing.digest == row.digest
                await self._enqueue(queue, existing, command if is_same else None, len(command))
            return self._repeated(row, taken)
        except HomeLost:
            self._worker.lose(queue)
            raise
        await self._enqueue(queue, row, command, len(command))
        return row.request_id

    async def _enqueue(self, queue: RunQueue, row: OperationRecord, command: bytes | None, size: int) -> None:
        """Put an operation of the journal into its queue, or fail it if it came too late. `size` was counted for it."""
        if queue.is_late(row.seq_id):
            queue.taken[row.seq_id] = Taken(row.request_id, row.digest)
            await self._worker.fail(queue, row, queue.late_reason(row.seq_id), "user")
            return
        if not self._worker.knows(queue):  # another server has the run by now, and finds the operation in the journal
            return
        pending = PendingOperation(row, self._clock.now(), size, context=copy_context())
        if command is not None:
            self._worker.queued_work.keep(pending, command)
        queue.add(pending)
        self._worker.enqueue(pending)

    async def reject(self, queue: RunQueue, seq_id: object, kind: str, error: RequestRejected) -> None:
        """Note a number that came in with content that cannot run: the run does not wait for it."""
        if (
            not is_seq(seq_id)
            or seq_id in queue.taken
            or queue.is_late(seq_id)
            or (queue.run.id, seq_id) in self._arriving
        ):
            return
        row = self._row(queue.run, seq_id, kind, "", state="refused", error=error.detail, category=error.category)
        forgotten = queue.reject(row)
        await self._db(self._store.add_rejected, replace(row, finished_at=row.created_at), forgotten, queue.home)
        self._worker.wake()

    async def _check_room(self, run: RunRecord) -> None:
        """Reject a run that is one too many of its tenant, or whose adapter is larger than the memory for all."""
        since = run.created_at - MODEL_DAY_S
        models = await self._db(self._store.count_open_runs, run.tenant, since) + 1
        self._ledger.check("max_models", models, f"This key would have {models} training runs")
        size = self._worker.adapter_size(run)
        self._worker.memory.check_size(self._ledger, size, f"An adapter of rank {run.rank} on {run.base_model}")

    def _row(self, run: RunRecord, seq_id: int, kind: str, digest: str, **rest: Any) -> OperationRecord:
        return OperationRecord(
            request_id=f"op-{uuid4().hex}",
            run_id=run.id,
            tenant=run.tenant,
            seq_id=seq_id,
            kind=kind,
            digest=digest,
            created_at=self._clock.wall(),
            **rest,
        )

    def _check_open(self, queue: RunQueue) -> None:
        run = queue.run
        if run.is_unloaded:
            raise bad_request(
                f"Model {run.id} was unloaded. Create a new one, for example from a saved state.", "model_unloaded"
            )
        if (reason := self._worker.reasons.unserved(queue)) is not None:
            raise bad_request(f"Model {run.id} cannot go on: {reason}.", "unknown_base_model")

    @staticmethod
    def _repeated(row: OperationRecord, taken: Taken) -> str:
        """Return the request id of an earlier attempt, if that had the same content."""
        if taken.digest != row.digest:
            raise bad_request(
                f"Model {row.run_id} already received operation {row.seq_id} with different content. "
                "Use a new seq_id for new work; a repeated attempt must repeat the same content.",
                CONFLICT,
            )
        return taken.request_id


def is_seq(seq_id: object) -> TypeGuard[int]:
    return isinstance(seq_id, int) and not isinstance(seq_id, bool) and 0 < seq_id <= MAX_SEQ
