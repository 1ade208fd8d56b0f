"""Bounds the bytes of checkpoints, by tenant and in all, when a save, a copy or an import is accepted.

What is stored comes from the rows; what is being written is reserved here until its row is there or it has failed.
Weights of samplers without a name count too; the janitor removes old ones that are not used. A hard link counts like a
copy: its tenant has the files either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinkex.server.http.errors import RequestRejected
from tinkex.server.limits.ledger import Ledger
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import ServeConfig
from tinkex.store.records import RunRecord, lora_of
from tinkex.store.store import Store

MAX_SIZES = 10_000
"""Shapes of checkpoints whose size is remembered."""
MOST_READS = 5
"""How often the stored bytes are read again because a reservation became a row meanwhile, and may be in both sums."""


class QuotaExceeded(RequestRejected):
    """A checkpoint that would take more than its tenant, or all tenants together, may store."""


class Quotas:
    def __init__(self, config: ServeConfig, ledger: Ledger, store: Store, db: Db) -> None:
        self._config, self._ledger, self._store, self._db = config, ledger, store, db
        self._reserved: dict[object, tuple[str, int]] = {}
        """What is being written → its tenant and bytes."""
        self._releases = 0
        self._shape_bytes: dict[tuple[object, ...], int] = {}
        """Base model, rank, layers and kind → the size of such a checkpoint."""
        self._folder_bytes: dict[str, int] = {}
        """Folders of samplers → their size. Files in them never change."""
        self._checking = asyncio.Lock()

    @property
    def is_limited(self) -> bool:
        """Whether there is a quota. Without one nothing is counted."""
        return self._config.quota_gb is not None or self._config.tenant_quota_gb is not None

    async def reserve(self, key: object, tenant: str, size: int, *, replaced_path: str = "") -> None:
        """Reserve bytes until `release(key)`, in place of what the key had. Raises QuotaExceeded if it is too much.

        The checkpoint that the new one replaces is not counted.
        """
        if not self.is_limited:
            return
        async with self._checking:  # two that fit alone, but not together, are not both accepted
            for _ in range(MOST_READS):
                reservations, releases = dict(self._reserved), self._releases
                # After the reservations: what is stored meanwhile counts twice, never not at all.
                by_tenant = dict(await self._db(self._stored, replaced_path))
                if self._releases == releases:
                    break
            for other, (owner, reserved) in reservations.items():
                if other != key:
                    by_tenant[owner] = by_tenant.get(owner, 0) + reserved
            self._check(by_tenant, tenant, size)
            self._reserved[key] = (tenant, size)

    def release(self, key: object) -> None:
        self._releases += self._reserved.pop(key, None) is not None

    @asynccontextmanager
    async def reserving(self, key: object, tenant: str, size: int) -> AsyncIterator[None]:
        """Reserve bytes while the block stores them."""
        await self.reserve(key, tenant, size)
        try:
            yield
        finally:
            self.release(key)

    def expected_bytes(self, run: RunRecord, kind: str) -> int:
        """Return the size of a run's next checkpoint, or 0 if no run of its shape has saved one yet."""
        return self._shape_bytes.get(_shape(run, kind), 0)

    def note_bytes(self, run: RunRecord, kind: str, size: int) -> None:
        """Remember the size of a run's checkpoint: runs of the same shape have the same."""
        if len(self._shape_bytes) >= MAX_SIZES:
            self._shape_bytes.clear()
        self._shape_bytes[_shape(run, kind)] = size

    def _check(self, by_tenant: dict[str, int], tenant: str, size: int) -> None:
        own, total = by_tenant.get(tenant, 0) + size, sum(by_tenant.values()) + size
        if (most := self._config.tenant_quota_gb) is not None and own > most * 1e9:
            raise self._exceeded(
                "tenant_quota_gb", f"Checkpoints and unnamed samplers of this key would take {own / 1e9:.4g} GB"
            )
        most = self._config.quota_gb
        # As with every limit of the service: a tenant with less than an even share is let in.
        if most is not None and total > most * 1e9 and own > most * 1e9 / len({tenant, *by_tenant}):
            share = f"{own / 1e9:.4g} GB of them of this key"
            reason = f"All checkpoints and unnamed samplers would take {total / 1e9:.4g} GB, {share}"
            raise self._exceeded("quota_gb", reason)

    def _exceeded(self, name: str, reason: str) -> QuotaExceeded:
        error = self._ledger.rejection(name, reason)
        return QuotaExceeded(error.status, error.detail, error.code, error.category, error.headers)

    def _stored(self, replaced_path: str) -> dict[str, int]:
        """Return the bytes of each tenant's checkpoints and of its samplers' own weights."""
        by_tenant = self._store.bytes_by_tenant(without_path=replaced_path)
        folders: dict[str, int] = {}
        for sampler in self._store.samplers_with_files():
            folder = str(sampler.folder)
            if folder in folders:  # two samplers of one replaced checkpoint share its files
                continue
            size = self._folder_bytes.get(folder) if sampler.size_bytes is None else sampler.size_bytes
            folders[folder] = self._store.folders.size(folder) if size is None else size
            by_tenant[sampler.tenant] = by_tenant.get(sampler.tenant, 0) + folders[folder]
        self._folder_bytes = folders
        return by_tenant


def _shape(run: RunRecord, kind: str) -> tuple[object, ...]:
    return run.base_model, kind, *lora_of(run).values()
