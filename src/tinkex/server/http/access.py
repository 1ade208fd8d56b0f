"""Checks the API key of every request and finds the tenant it belongs to; without a valid key, 401.

Keys come from the configuration and from the store (`tinkex key create`). Only hashes are kept and compared; no key is
logged. A service without keys, which is allowed on loopback only, has one tenant, `local`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection, Iterable
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.clock import Clock
from tinkex.server.http.errors import RequestRejected, bad_request, error_response
from tinkex.server.http.rejected_keys import RejectedKeys
from tinkex.server.limits.ledger import Ledger
from tinkex.server.upkeep.database_thread import Db
from tinkex.settings import KEYLESS, ServeConfig, is_loopback_host
from tinkex.store.access import hash_key
from tinkex.store.records import KeyRecord
from tinkex.store.store import Store
from tinkex.wire import endpoints

LOCAL_TENANT = "local"
NO_KEY = "No API key. Send it as X-API-Key or Authorization: Bearer; with the SDK, set TINKER_API_KEY."
CACHE_S = 3.0
"""How long a key that was looked up is cached: a revoked one stops working after at most this time."""
_MAX_CACHED_KEYS = 4096
"""Keys that do not exist are cached too; somebody who guesses keys must not fill the memory."""
_MAX_KEY_CHARACTERS = 512
_MAX_LOOKUPS = 500
"""Keys that one query looks up."""
_PATHS_WITH_KEY = ("/api/v1/", "/v1/", "/oai/api/v1/")
_OPENAI_PATHS = ("/v1/", "/oai/")
_PATHS_WITHOUT_KEY = ("/api/v1/healthz", "/api/v1/files/")
"""Load balancers ask for health without a key; links to files carry their own signature."""
_PROXY_HEADERS = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
_POLLS = frozenset(
    endpoint.path for endpoint in (endpoints.RETRIEVE_FUTURE, endpoints.RETRIEVE_FUTURES, endpoints.SESSION_HEARTBEAT)
)


class AccessControl:
    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        db: Db,
        clock: Clock,
        *,
        owner_key: str | None = None,
        is_private: bool = False,
    ) -> None:
        """`owner_key`: of the data folder's owner, the tenant `local`. `is_private`: a request needs it or another."""
        self._store, self._db, self._clock = store, db, clock
        self.rejected_keys = RejectedKeys(clock)
        # One tenant per key, with a name that survives restarts and reveals no key.
        self._configured = {digest: tenant_of(digest) for digest in map(hash_key, config.api_keys)}
        self._may_be_open = is_loopback_host(config.host)
        self._has_keys = bool(self._configured) or is_private
        if owner_key is not None:
            self._configured[hash_key(owner_key)] = LOCAL_TENANT
        self.last_request_at = clock.now()
        self._own_hosts = {config.host, (urlsplit(config.public_url or "").hostname or config.host).lower()}
        self._public_origin = _authority_of(config.public_url or "")
        self._counted_at: float | None = None
        self._cache: dict[str, tuple[KeyRecord | None, float]] = {}
        """Hash → the key if there is one, and until when that is believed."""
        self._lookups: dict[str, asyncio.Future[KeyRecord | None]] = {}
        """Hash → the future of the key, for hashes that the next query will look up."""
        self._lookup_task: asyncio.Task[None] | None = None

    async def admit(self, scope: Scope) -> str:
        """Return the tenant of a request, or raise 401, which is counted.

        A service without keys raises 403 for a request that a web page from elsewhere made a browser send.
        """
        headers = scope["headers"]
        self.last_request_at = self._clock.now()
        if not await self.uses_keys():
            check_local(headers, self._own_hosts, self._public_origin)
            return LOCAL_TENANT
        key = api_key_in(headers)
        try:
            return await self.tenant(key)
        except RequestRejected:
            address = scope["client"][0] if scope.get("client") else ""
            self.rejected_keys.note(has_key=bool(key), address=address)
            raise

    async def tenant(self, key: str | None) -> str:
        """Return the tenant that owns the key. Raises 401 for a key that is missing, unknown or revoked."""
        if not await self.uses_keys():
            return LOCAL_TENANT
        if not key:
            raise _unauthorised(NO_KEY)
        if len(key) <= _MAX_KEY_CHARACTERS:
            digest = hash_key(key)
            if (tenant := self._configured_tenant(digest)) is not None:
                return tenant
            if (stored := await self._stored(digest)) is not None:
                return stored.tenant
        if key == KEYLESS:  # what our client sends if none is set
            raise _unauthorised(NO_KEY)
        raise _unauthorised(
            "This API key is unknown or was revoked. Create one with `tinkex key create` on the server."
        )

    async def check_owner(self, scope: Scope, tenant: str) -> None:
        """Raise 403 unless a request is from the service's owner: the tenant `local`.

        Without keys everybody is that tenant. Then it is a program on this machine that comes here directly: behind a
        proxy, whoever the proxy lets in would come from this machine.
        """
        if await self.uses_keys():
            if tenant != LOCAL_TENANT:
                raise _not_owner("a key of the tenant `local`, which `tinkex key create NAME --tenant local` makes")
            return
        address = scope["client"][0] if scope.get("client") else ""
        is_proxied = any(name.lower() in _PROXY_HEADERS for name, _ in scope["headers"]) or self._public_origin
        if is_proxied or not is_loopback_host(address):
            raise _not_owner("a program on the service's machine, not through a proxy; or a key of the tenant `local`")

    async def uses_keys(self) -> bool:
        """Return whether a key is required. Once it is, it stays so: revoking the last key opens nothing."""
        if self._has_keys or not self._may_be_open:
            return True
        now = self._clock.now()
        if self._counted_at is None or now - self._counted_at >= CACHE_S:
            self._has_keys = await self._db(lambda: bool(self._store.list_keys()))
            self._counted_at = now
        return self._has_keys

    async def stored_key(self, key: str | None) -> KeyRecord | None:
        """Return the row of a key that is stored and not revoked."""
        return await self._stored(hash_key(key)) if key and len(key) <= _MAX_KEY_CHARACTERS else None

    async def revoke(self, key: str | None) -> KeyRecord:
        """Revoke the key that a request carries. It is rejected from the next request on."""
        stored = await self.stored_key(key)
        if stored is None:
            raise bad_request(
                "This key cannot be revoked here: it is part of the server's configuration, or no keys are in use. "
                "Remove it from --api-key or the keys file and restart the server.",
                "key_not_stored",
            )
        await self._db(self._store.revoke_key, stored.id, self._clock.wall())
        self._cache.pop(stored.sha256, None)
        return stored

    def _configured_tenant(self, digest: str) -> str | None:
        tenant = None
        for known, name in self._configured.items():  # all of them, each in constant time
            if hmac.compare_digest(known, digest):
                tenant = name
        return tenant

    async def _stored(self, digest: str) -> KeyRecord | None:
        now = self._clock.now()
        key, until = self._cache.get(digest, (None, now))
        if until <= now:
            key = await self._look_up(digest)
            if key is not None and (key.revoked_at is not None or not hmac.compare_digest(key.sha256, digest)):
                key = None
            if len(self._cache) >= _MAX_CACHED_KEYS:
                self._cache.clear()
            self._cache[digest] = key, now + CACHE_S
        return key

    async def _look_up(self, digest: str) -> KeyRecord | None:
        """Return the row of a key. All that wait share one query: guessed keys cannot fill the store's queue."""
        if (waiting := self._lookups.get(digest)) is None:
            waiting = self._lookups[digest] = asyncio.get_running_loop().create_future()
        if self._lookup_task is None:
            self._lookup_task = asyncio.create_task(self._run_lookups())
        return await asyncio.shield(waiting)

    async def _run_lookups(self) -> None:
        try:
            while self._lookups:
                batch = {digest: self._lookups.pop(digest) for digest in list(self._lookups)[:_MAX_LOOKUPS]}
                try:
                    rows = {row.sha256: row for row in await self._db(self._store.get_keys_by_hash, list(batch))}
                except Exception as error:  # an edge: every request that waits reports it
                    for waiting in batch.values():
                        waiting.set_exception(error)
                else:
                    for digest, waiting in batch.items():
                        waiting.set_result(rows.get(digest))
        finally:
            self._lookup_task = None


class AccessMiddleware:
    """Sets `scope["state"]["tenant"]` for every path that needs a key, before the body is read. Counts the request."""

    def __init__(
        self,
        app: ASGIApp,
        access: AccessControl,
        ledger: Ledger,
        openai_error_response: Callable[[Exception], Response],
    ) -> None:
        self._app, self._access, self._ledger, self._openai_error_response = app, access, ledger, openai_error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_guarded(route_path(scope)):
            try:
                tenant = await self._access.admit(scope)
                if route_path(scope) in _POLLS:
                    await self._ledger.pace_poll(tenant)
                else:
                    self._ledger.spend_request(tenant)
            except Exception as error:  # an edge: middleware runs outside the wrapper of the handlers
                is_openai = route_path(scope).startswith(_OPENAI_PATHS)
                response = self._openai_error_response(error) if is_openai else error_response(error)
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def tenant_of(digest: str) -> str:
    """Return the tenant of a key from the configuration, by its hash."""
    return f"key-{digest[:12]}"


Authority = tuple[str, int]
"""Host and port of an address."""
_SENDERS = (b"host", b"origin")


def check_local(
    headers: Iterable[tuple[bytes, bytes]], own_hosts: Collection[str], public_origin: Authority | None = None
) -> None:
    """Raise 403 unless the request comes from a program on this machine. For a service without keys.

    A web page can make a browser on this machine send requests: directly to 127.0.0.1, which `Origin` shows, or to a
    host name of the page's owner that resolves to 127.0.0.1, which `Host` shows. Only the service's own pages may:
    those of another port of this machine belong to another program, or to another user.
    """
    listed = list(headers)
    hosts, origins = ([value.decode("latin-1") for name, value in listed if name == wanted] for wanted in _SENDERS)
    for text in hosts:
        host = _host_in(f"//{text}")
        if not is_loopback_host(host) and host not in own_hosts:
            raise RequestRejected(
                403,
                f"This service has no keys and serves this machine only, not {host[:100]!r}. If that is its "
                "name, start it with --public-url; better, create a key with `tinkex key create`.",
                "not_local",
            )
    for origin in origins:
        scheme, own = origin.partition(":")[0], _authority_of(origin)
        if own is None or own not in (public_origin, *(_authority_of(f"{scheme}://{host}") for host in hosts)):
            raise RequestRejected(
                403,
                f"This service has no keys and takes requests of its own pages only, not of {origin[:100]!r}. If that "
                "is its address, start it with --public-url; better, create a key with `tinkex key create`.",
                "not_local",
            )


def _authority_of(address: str) -> Authority | None:
    try:
        parts = urlsplit(address)
        return (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)) if parts.hostname else None
    except ValueError:
        return None


def _host_in(address: str) -> str:
    try:
        return urlsplit(address).hostname or address
    except ValueError:
        return address


def is_guarded(path: str) -> bool:
    return path.startswith(_PATHS_WITH_KEY) and not path.startswith(_PATHS_WITHOUT_KEY)


def route_path(scope: Scope) -> str:
    """Return the path without the prefix that a reverse proxy may add."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    if not prefix or not (path == prefix or path.startswith(prefix + "/")):
        return path
    return path[len(prefix) :]


def api_key_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the API key of a request: `X-API-Key`, or else a bearer token, as OpenAI clients send it."""
    bearer = None
    for name, value in headers:
        if name.lower() == b"x-api-key" and value.strip():
            return value.decode("latin-1").strip()
        if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].decode("latin-1").strip() or None
    return bearer


def _not_owner(what: str) -> RequestRejected:
    return RequestRejected(403, f"Only the owner of this service may do that. It takes {what}.", "not_owner")


def _unauthorised(detail: str) -> RequestRejected:
    return RequestRejected(401, detail, "unauthorised", headers={"www-authenticate": "Bearer"})
