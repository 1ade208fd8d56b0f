"""`AccountClient`: calls that need no session, with a query; and what both REST clients have of the account."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from tinkex import settings
from tinkex._version import PROTOCOL_VERSION
from tinkex.client._runtime.base_client import BaseClient
from tinkex.client._runtime.session import Session
from tinkex.client.future import APIFuture
from tinkex.errors import ValidationError
from tinkex.types import (
    AuditLogResponse,
    BillingUsageResponse,
    ClientConfigResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.wire import endpoints
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint


def keeps_records(server: ClientConfigResponse) -> bool:
    """Whether a service keeps names, tags and a status of runs, and finds runs by them."""
    return bool((server.tinkex or {}).get("run_records"))


class AccountClient(BaseClient):
    """What both clients have: programs from before there was an AdminClient call it on the RestClient.

    They reach their service through a session, or by settings alone.
    """

    def __init__(
        self,
        _session: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: settings.Config | None = None,
    ) -> None:
        super().__init__(_session or Session(config or settings.resolve(base_url=base_url, api_key=api_key)))

    def _call(
        self,
        method: str,
        endpoint: Endpoint,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        needs_records: bool = False,
        **parts: str,
    ) -> APIFuture[Any]:
        """Start a call. `needs_records`: it fails if the service keeps no names of runs."""
        base_path, link = endpoint.url(**parts), self._session.link()

        def path(dialect: Dialect) -> str:
            if needs_records and not keeps_records(link.server):
                raise ValidationError(
                    "This service keeps no names, tags or status of runs, so it cannot do that; `tinkex serve` can."
                )
            fields = {name: value for name, value in (query or {}).items() if value is not None}
            if dialect is Dialect.JSON and fields.get("access_scope") == "owned":
                del fields["access_scope"]  # unknown to services of that age, which know of no other
            return base_path + (f"?{urlencode(fields)}" if fields else "")

        headers = {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}
        return self._ask(endpoint, body, path=path, headers=headers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), *self._pickled())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._session.config.base_url}>"

    def get_audit_log(self, event_type: str = "all", day: dt.date | None = None) -> APIFuture[AuditLogResponse]:
        query = {"event_type": event_type, "day": day.isoformat() if day else None}
        return self._call("get_audit_log", endpoints.AUDIT_LOG, query)

    async def get_audit_log_async(self, event_type: str = "all", day: dt.date | None = None) -> AuditLogResponse:
        return await self.get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        query = {"starting_on": _iso(starting_on), "ending_before": _iso(ending_before)}
        return self._call("get_billing_usage", endpoints.BILLING_USAGE, query)

    async def get_billing_usage_async(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> BillingUsageResponse:
        return await self.get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        query = {"project_id": project_id}
        return self._call("get_current_checkpoint_storage_usage", endpoints.CHECKPOINT_STORAGE_USAGE, query)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        return await self.get_current_checkpoint_storage_usage(project_id)


def _unpickle(kind: type[AccountClient], address: dict[str, Any], session_id: str | None) -> AccountClient:
    return kind(BaseClient._session_from(address, None))


def _iso(moment: dt.datetime | str) -> str:
    return moment if isinstance(moment, str) else moment.isoformat().replace("+00:00", "Z")
