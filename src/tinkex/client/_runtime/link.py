"""`ServiceLink`: the state that all clients of one (base URL, key) share.

Obtained by `link_for(config)` and in no other way. Pools and limits are keyed by (base URL, key): clients whose
settings differ only in, say, a timeout still share them. Lives as long as the process; a forked child makes its own.

The link is state and knows no requests: `_calls/handshake.py` fills in what the service announces, `_calls/send.py`
sends over it, and `operations` runs what the clients ask for.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import Any

from tinkex._version import __version__
from tinkex.client._calls.limits import limiter_for
from tinkex.client._http.transport import transport_for
from tinkex.client._runtime.auth import Auth
from tinkex.client._runtime.fork import ProcessRegistry
from tinkex.client._runtime.loop import LoopThread, loop_thread
from tinkex.client._runtime.operation_tracker import OperationTracker
from tinkex.client._runtime.reachability import Reachability
from tinkex.client._runtime.stats import Stats
from tinkex.clock import REAL, Clock
from tinkex.errors import TinkexError
from tinkex.settings import Config
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire.dialect import Dialect


class ServiceLink:
    """Shared state towards one service. Attributes are written on the loop thread only."""

    def __init__(self, config: Config, clock: Clock = REAL) -> None:
        self.config = config
        self.clock = clock
        self.loop: LoopThread = loop_thread()
        self.transport = transport_for(config)
        self.auth = Auth(config)
        self.limiter = limiter_for(*config.key)
        self.stats = Stats()
        self.reachability = Reachability(config.base_url, clock)
        self.operations = OperationTracker(config, self.loop, clock, self.stats)
        # What the service announces (`_calls/handshake.py`).
        self.server = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self.dialect: Dialect | None = None
        self.handshake: asyncio.Task[TinkexError | None] | None = None
        self.is_proto_proven = False
        """Whether the service has taken a protobuf body; until then a rejection may mean it cannot read them."""
        self.context_lengths: dict[str, int] = {}
        """Model name → longest context in tokens, once the service has said so."""
        self._idempotency_prefix = f"tinkex-{uuid.uuid4().hex}"
        self._idempotency_numbers = itertools.count()
        self.base_headers = {
            "accept": "application/json",
            "user-agent": f"tinkex/{__version__}",
            **{name.lower(): value for name, value in config.headers.items()},
        }
        if config.cf_client_id and config.cf_client_secret:
            self.base_headers["cf-access-client-id"] = config.cf_client_id
            self.base_headers["cf-access-client-secret"] = config.cf_client_secret

    def idempotency_key(self) -> str:
        """Return a new key: all attempts at one request carry the same one."""
        return f"{self._idempotency_prefix}-{next(self._idempotency_numbers)}"

    @property
    def extensions(self) -> dict[str, Any]:
        """What our own service announces beyond the protocol ({} elsewhere)."""
        return self.server.tinkex or {}


_links: ProcessRegistry[Config, ServiceLink] = ProcessRegistry()


def link_for(config: Config) -> ServiceLink:
    """Return the one link of this configuration in this process."""
    return _links.get(config, lambda: ServiceLink(config))
