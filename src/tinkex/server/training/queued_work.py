"""Counts what accepted, unfinished operations take, by tenant: their number, their bytes, and the bytes in memory."""

from __future__ import annotations

from tinkex.server.limits.ledger import Ledger
from tinkex.server.training.run_queue import PendingOperation

MAX_KEPT_BYTES = 1 << 20
"""Commands up to this size stay in memory while they wait; larger ones are read back from the journal."""
MAX_TENANT_KEPT_BYTES = 16 << 20
MAX_ALL_KEPT_BYTES = 128 << 20
"""Beyond these sums of a tenant and of all, smaller ones are read back too: a wait costs disk, not memory."""


class QueuedWork:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def take(self, tenant: str, size: int) -> None:
        """Count an operation before it is written to the journal. Rejects it if its tenant has too many waiting."""
        self._ledger.take("queued_operations", tenant, 1, "training operations that wait")
        try:
            self._ledger.take("queued_bytes", tenant, size, "bytes of training operations that wait")
        except BaseException:
            self._ledger.give_back("queued_operations", tenant, 1)
            raise

    def give_back(self, tenant: str, size: int) -> None:
        """Forget an operation that will not wait after all."""
        self._ledger.give_back("queued_operations", tenant, 1)
        self._ledger.give_back("queued_bytes", tenant, size)

    def restore(self, tenant: str) -> None:
        """Count an operation that the journal had at the start. Its bytes are not counted: they were when it came."""
        self._ledger.count("queued_operations", tenant, 1)

    def keep(self, pending: PendingOperation, command: bytes) -> None:
        """Keep a command in memory until it runs, if there is room."""
        tenant, size = pending.row.tenant, len(command)
        own, total = self._ledger.used("kept_bytes", tenant) + size, self._ledger.total("kept_bytes") + size
        if size <= MAX_KEPT_BYTES and own <= MAX_TENANT_KEPT_BYTES and total <= MAX_ALL_KEPT_BYTES:
            self._ledger.count("kept_bytes", tenant, size)
            pending.command, pending.kept_bytes = command, size

    def finished(self, pending: PendingOperation) -> None:
        self.give_back(pending.row.tenant, pending.size)
        self._ledger.give_back("kept_bytes", pending.row.tenant, pending.kept_bytes)
        pending.command, pending.kept_bytes = None, 0

    def waiting_of(self, tenant: str) -> int:
        return self._ledger.used("queued_operations", tenant)
