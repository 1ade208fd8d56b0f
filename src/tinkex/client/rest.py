"""`RestClient`: reads and deletes runs, checkpoints and sessions. `AdminClient`: the audit log and the bill.

Methods return an `APIFuture`; the `_async` names are coroutines that give the value. No session is opened.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from tinkex._version import PROTOCOL_VERSION
from tinkex.client._calls import validate
from tinkex.client._calls.handshake import ready
from tinkex.client._http.transport import HTTPResponse
from tinkex.client._runtime.account_client import AccountClient
from tinkex.client._runtime.base_client import BaseClient
from tinkex.client._runtime.operation import Operation
from tinkex.client.future import APIFuture
from tinkex.client.run_records import RunRecords
from tinkex.errors import APIResponseValidationError, RequestFailedError, ValidationError
from tinkex.types import (
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CopyWeightsRequest,
    ExternalWeightsUrlsResponse,
    FailedOperationsResponse,
    GetSamplerResponse,
    GetSessionResponse,
    ListSessionsResponse,
    OfferedModel,
    ParsedCheckpointTinkerPath,
    ServiceState,
    SessionSearchRequest,
    SessionSearchResponse,
    WeightsInfoResponse,
    WhoamiResponse,
)
from tinkex.wire import endpoints, json_codec, requests
from tinkex.wire.dialect import Dialect
from tinkex.wire.endpoints import Endpoint

ARCHIVE_VALID = dt.timedelta(minutes=15)
TRACE_POLL_S = 5.0


class RestClient(RunRecords):
    """Reads and changes what is stored on the service. Starts no training and no sampling."""

    # -- the service ------------------------------------------------------------------------------------------------

    def get_service_state(self) -> APIFuture[ServiceState]:
        """Return whether the service works, and what waits. Only our service has it."""
        return self._call("get_service_state", endpoints.SERVICE_STATE)

    async def get_service_state_async(self) -> ServiceState:
        return await self.get_service_state()

    def list_failed_operations(self, limit: int = 50, offset: int = 0) -> APIFuture[FailedOperationsResponse]:
        """List your operations that failed or were rejected, the latest first. Only our service has it."""
        query = {"limit": limit, "offset": offset}
        return self._call("list_failed_operations", endpoints.FAILED_OPERATIONS, query)

    async def list_failed_operations_async(self, limit: int = 50, offset: int = 0) -> FailedOperationsResponse:
        return await self.list_failed_operations(limit, offset)

    def offer_model(self, name: str) -> APIFuture[OfferedModel]:
        """Offer another base model: a built-in, the path of a folder, or a model in the service's cache. Needs a key of
        the service's owner; only our service has it."""
        return self._call("offer_model", endpoints.OFFER_MODEL, body=requests.offer_model(name))

    async def offer_model_async(self, name: str) -> OfferedModel:
        return await self.offer_model(name)

    def withdraw_model(self, name: str) -> APIFuture[None]:
        """Offer a base model no longer, and unload it. Fails while something uses it."""
        return self._call("withdraw_model", endpoints.WITHDRAW_MODEL, base_model=name)

    async def withdraw_model_async(self, name: str) -> None:
        return await self.withdraw_model(name)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Return base model, rank and trained parts of a saved checkpoint."""
        _parsed(tinker_path)
        body = requests.weights_info(tinker_path)
        return self._call("get_weights_info_by_tinker_path", endpoints.WEIGHTS_INFO, body=body)

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        return self._call("list_checkpoints", endpoints.LIST_CHECKPOINTS, run_id=training_run_id)

    async def list_checkpoints_async(self, training_run_id: str) -> CheckpointsListResponse:
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        query = {"limit": limit, "offset": offset}
        return self._call("list_user_checkpoints", endpoints.LIST_USER_CHECKPOINTS, query)

    async def list_user_checkpoints_async(self, limit: int = 100, offset: int = 0) -> CheckpointsListResponse:
        return await self.list_user_checkpoints(limit, offset)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        return self._call(
            "delete_checkpoint", endpoints.DELETE_CHECKPOINT, run_id=training_run_id, checkpoint_id=checkpoint_id
        )

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return self._on_checkpoint("delete_checkpoint_from_tinker_path", endpoints.DELETE_CHECKPOINT, tinker_path)

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let others read the checkpoint."""
        return self._on_checkpoint("publish_checkpoint_from_tinker_path", endpoints.PUBLISH_CHECKPOINT, tinker_path)

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return self._on_checkpoint("unpublish_checkpoint_from_tinker_path", endpoints.UNPUBLISH_CHECKPOINT, tinker_path)

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Let the checkpoint expire in so many seconds; None keeps it without an end."""
        validate.check_ttl(ttl_seconds)
        body = requests.set_checkpoint_ttl(ttl_seconds)
        return self._on_checkpoint(
            "set_checkpoint_ttl_from_tinker_path", endpoints.SET_CHECKPOINT_TTL, tinker_path, body
        )

    async def set_checkpoint_ttl_from_tinker_path_async(self, tinker_path: str, ttl_seconds: int | None) -> None:
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Return a short-lived address of a tar archive of the checkpoint (`tinkex checkpoint download` fetches it)."""
        path = endpoints.CHECKPOINT_ARCHIVE.url(run_id=training_run_id, checkpoint_id=checkpoint_id)
        link = self._session.link()

        def read(response: HTTPResponse) -> CheckpointArchiveUrlResponse:
            location = response.headers.get("location")
            if not location:
                raise APIResponseValidationError(
                    None, None, f"The archive of {checkpoint_id} was answered with {response.status} and no address."
                )
            now = dt.datetime.fromtimestamp(link.clock.wall(), dt.UTC)
            return CheckpointArchiveUrlResponse(url=location, expires=_expires(response.headers.get("expires"), now))

        # The address is in the redirect itself: it leads to another host, where our key must not go.
        return self._ask(endpoints.CHECKPOINT_ARCHIVE, path=path, read=read, follow=False)

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str
    ) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url(training_run_id, checkpoint_id)

    def get_checkpoint_archive_url_from_tinker_path(self, tinker_path: str) -> APIFuture[CheckpointArchiveUrlResponse]:
        parsed = _parsed(tinker_path)
        return self.get_checkpoint_archive_url(parsed.training_run_id, parsed.checkpoint_id)

    async def get_checkpoint_archive_url_from_tinker_path_async(self, tinker_path: str) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url_from_tinker_path(tinker_path)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Return the addresses of the files written by `TrainingClient.save_weights_external`."""
        if _parsed(tinker_path).checkpoint_type != "external":
            raise ValidationError(
                f"{tinker_path} has no files to download. TrainingClient.save_weights_external(name) writes some: "
                "tinker://…/external_weights/…"
            )
        return self._on_checkpoint("get_external_weights_urls", endpoints.EXTERNAL_WEIGHTS_URLS, tinker_path)

    async def get_external_weights_urls_async(self, tinker_path: str) -> ExternalWeightsUrlsResponse:
        return await self.get_external_weights_urls(tinker_path)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint (also a published one of others) to your own; returns the new path."""
        return copy_weights(
            self,
            path,
            destination_project_id=destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        return await self.copy_weights(
            path, destination_project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    # -- sessions and samplers --------------------------------------------------------------------------------------

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: str = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._call("list_sessions", endpoints.LIST_SESSIONS, query)

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: str = "owned"
    ) -> ListSessionsResponse:
        return await self.list_sessions(limit, offset, access_scope)

    def get_session(self, session_id: str, access_scope: str = "owned") -> APIFuture[GetSessionResponse]:
        query = {"access_scope": access_scope}
        return self._call("get_session", endpoints.GET_SESSION, query, session_id=session_id)

    async def get_session_async(self, session_id: str, access_scope: str = "owned") -> GetSessionResponse:
        return await self.get_session(session_id, access_scope)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        return self._call(
            "search_sessions", endpoints.SEARCH_SESSIONS, body=lambda _: requests.request(request, Dialect.PROTO)
        )

    async def search_sessions_async(self, request: SessionSearchRequest) -> SessionSearchResponse:
        return await self.search_sessions(request)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        body = requests.set_session_project(project_id)
        return self._call("assign_session_project", endpoints.SET_SESSION_PROJECT, body=body, session_id=session_id)

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        await self.assign_session_project(session_id, project_id)

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """Have the service write a trace of the session; returns its address when it is there."""
        clock = self._session.link().clock

        def read(response: HTTPResponse) -> Any:
            return json_codec.read_object(response.content)

        async def work(operation: Operation) -> str:
            path = endpoints.SESSION_TRACE_EXPORT.url(session_id=session_id)
            while True:
                export = await self._ask(endpoints.SESSION_TRACE_EXPORT, path=path, read=read)
                if export.get("url"):
                    return str(export["url"])
                if export.get("error") or export.get("status") == "failed":
                    raise RequestFailedError(f"The trace of session {session_id} failed: {export.get('error')}")
                await clock.sleep(TRACE_POLL_S)

        return self._session.run("export_session_trace", work)

    async def export_session_trace_async(self, session_id: str) -> str:
        return await self.export_session_trace(session_id)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        return self._call("get_sampler", endpoints.GET_SAMPLER, sampler_id=sampler_id)

    async def get_sampler_async(self, sampler_id: str) -> GetSamplerResponse:
        return await self.get_sampler(sampler_id)

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Return whose key this is."""
        link = self._session.link()

        async def work(operation: Operation) -> WhoamiResponse:
            await ready(link)
            claims = link.auth.claims()
            if claims.get("sub"):  # a token says it all
                return WhoamiResponse(
                    user_urn=str(claims["sub"]), org_urn=str(claims.get("org_id") or ""), email=claims.get("email")
                )
            return await self._call("whoami", endpoints.WHOAMI)  # type: ignore[no-any-return]

        return self._session.run("whoami", work)

    def _on_checkpoint(self, method: str, endpoint: Endpoint, tinker_path: str, body: Any = None) -> APIFuture[Any]:
        parsed = _parsed(tinker_path)
        return self._call(
            method, endpoint, body=body, run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id
        )


class AdminClient(AccountClient):
    """The audit log and the bill of an organisation."""


def copy_weights(
    client: BaseClient,
    path: str,
    *,
    destination_project_id: str | None = None,
    ttl_seconds: int | None = None,
    weights_access_token: str | None = None,
    into_session: bool = False,
) -> APIFuture[str]:
    """Start a copy for either client that can copy."""
    _parsed(path)
    validate.check_ttl(ttl_seconds)
    session = client._session
    project_id = destination_project_id or (session.project_id if into_session else None)

    async def work(operation: Operation) -> str:
        # Without a project of its own the copy belongs to the session.
        joins = into_session and project_id is None
        session_id = await session.id() if joins else None
        seq = next(session.model_seqs) if joins else None
        headers = {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": "copy_weights"}
        if weights_access_token:
            headers["x-tinker-weights-access-token"] = weights_access_token
        request = CopyWeightsRequest(
            source_path=path,
            destination_project_id=project_id,
            session_id=session_id,
            model_seq_id=seq,
            ttl_seconds=ttl_seconds,
        )
        body = requests.request(request, Dialect.PROTO)
        copy = await client._ask(endpoints.COPY_WEIGHTS, lambda _: body, headers=headers)
        return str(copy.tinker_path)

    return session.run("copy_weights", work)


def _parsed(tinker_path: str) -> ParsedCheckpointTinkerPath:
    return ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)


def _expires(text: str | None, now: dt.datetime) -> dt.datetime:
    """Return an aware time; an absent or unreadable header means the usual quarter of an hour."""
    try:
        from email.utils import parsedate_to_datetime  # loads eight modules, for one method

        expires = parsedate_to_datetime(text or "")
    except (TypeError, ValueError):
        return now + ARCHIVE_VALID
    return expires if expires.tzinfo else expires.replace(tzinfo=dt.UTC)
