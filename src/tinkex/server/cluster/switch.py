"""Decides where a request is served: here, or at another node.

A run's at its home. A sample's where it is drawn, which its id says. A new sample's at a node that its weights and the
beginning of its prompt choose. Everything else is served here; by a front, at any node.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from itertools import count

from tinkex.rules.run_names import LATEST
from tinkex.server.cluster.concern import Concern
from tinkex.server.cluster.homes import Homes
from tinkex.server.cluster.node_lease import Node
from tinkex.server.cluster.peers import Peers
from tinkex.server.cluster.placement import engines_text
from tinkex.server.http.errors import RequestRejected
from tinkex.server.service import Service
from tinkex.store.errors import Unavailable

MOST_OPERATIONS = 20_000
"""Operations whose run is remembered. The run of another one is read from the journal."""


RETRY = {"retry-after": "1"}


class NoNodeForRun(RequestRejected):
    """A run that is at home nowhere, because no living node may have it: those with its model are draining, or gone."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, f"{reason}. It goes on when there is one.", "no_node", "server", RETRY)


class Switch:
    """Finds the node that serves a request. `node` is None on a front."""

    def __init__(self, service: Service, node: Node | None, homes: Homes, peers: Peers) -> None:
        self._service, self._node, self._homes, self._peers = service, node, homes, peers
        self._runs: OrderedDict[str, str] = OrderedDict()
        """Operation → its run."""
        self._turns = count()

    async def find(self, tenant: str | None, concern: Concern, *, is_hop: bool = False) -> str:
        """Return the address of the node that is to serve a request; "" is here. Raises 503 if none can.

        `is_hop`: another server sent it here, by what it knows.
        """
        match concern.kind:
            case "run" if concern.is_read:
                return await self._homes.find(concern.name) or await self._any()
            case "run":
                url = await self._home(tenant, concern.name)
                return await self._any() if url is None else url
            case "new_run":
                model = await self._model_of_new(tenant, concern)
                url = None if model is None else await self._homes.find(concern.name, model)
                return await self._any() if url is None else url
            case "operation":
                return await self._of_operation(tenant, concern.name, is_hop)
            case "sample":
                return await self._of_sample(concern.name)
            case "sampler":
                return await self._of_sampler(tenant, concern)
        return await self._any(await self._model_of(tenant, concern))

    async def engines(self, without: str) -> str:
        """Say what the engines do, other than the one at an address that does not respond."""
        with suppress(Unavailable):
            await self._peers.living()
        return engines_text([node for node in self._peers.known if node.url != without])

    async def lives(self, url: str) -> bool:
        """Whether the node at an address lives, as far as the database says."""
        try:
            return any(node.url == url for node in await self._peers.living())
        except Unavailable:  # it may
            return True

    def remember(self, request_id: str, run_id: str) -> None:
        """Note whose an operation is, so that its polls need not ask the journal."""
        self._runs[request_id] = run_id
        if len(self._runs) > MOST_OPERATIONS:
            self._runs.popitem(last=False)

    async def _home(self, tenant: str | None, run_id: str) -> str | None:
        """Return where a run is at home; None if the tenant has no such run. Raises NoNodeForRun."""
        if (url := await self._homes.find(run_id, "")) is not None:
            return url
        run = await self._service.db(self._service.store.get_run, run_id)
        if run is None or run.tenant != tenant:
            return None
        engines = engines_text([node for node in await self._peers.living() if node.serves(run.base_model)])
        raise NoNodeForRun(f"{run_id} waits for an engine with {run.base_model}: {engines}")

    async def _model_of_new(self, tenant: str | None, concern: Concern) -> str | None:
        """Return the base model of a new run; None if it cannot be created. Only sessions that exist get homes."""
        service, model = self._service, concern.model
        session = await service.db(service.store.get_session, concern.session_id)
        if session is None or session.tenant != tenant:
            return None
        if model is None and concern.checkpoint is not None:
            saved = await service.db(service.store.get_checkpoint, concern.checkpoint)
            model = None if saved is None else saved.base_model
        return model or None

    async def _of_operation(self, tenant: str | None, request_id: str, is_hop: bool) -> str:
        service = self._service
        if service.worker.pending(request_id) is not None or service.waiters.recent(request_id) is not None:
            return ""
        # The other server may have read that it is finished, so that any node will do: what is remembered is older.
        if (run_id := None if is_hop else self._runs.get(request_id)) is None:
            row = await service.db(service.store.get_operation, request_id)
            if row is None or row.state != "queued":  # its result is in the store, which all nodes share
                return await self._any()
            run_id = row.run_id
            self.remember(request_id, run_id)
        url = await self._home(tenant, run_id)
        if url is None:
            return await self._any()
        if not url and self._node is not None:
            await service.worker.run_queue(run_id)  # the operation waits here from now on
        return url

    async def _of_sample(self, node_id: str) -> str:
        if self._node is not None and node_id in (self._node.id, *self._node.former_ids):
            return ""
        # One that was drawn by a node that is gone is lost: the handler says so, and the client asks for another.
        return await self._peers.url_of(node_id) or ""

    async def _of_sampler(self, tenant: str | None, concern: Concern) -> str:
        model = await self._model_of(tenant, concern)
        node = await self._peers.choose(concern.name, model, sequences=concern.sequences)
        if node is None or (self._node is not None and node.id == self._node.id):
            return await self._any(model)
        return node.url

    async def _model_of(self, tenant: str | None, concern: Concern) -> str | None:
        """Return the base model that a request needs, if it matters: nodes may serve different ones."""
        service, living = self._service, await self._peers.living()
        if concern.model is not None:
            if tenant is None or any(node.serves(concern.model) for node in living):
                return concern.model
            return await self._model_of_run(tenant, concern.model)
        if len({node.models for node in living}) < 2:
            return None
        if concern.checkpoint is not None:
            saved = await service.db(service.store.get_checkpoint, concern.checkpoint)
            return None if saved is None else saved.base_model
        if not concern.session_id:
            return None
        sampler = await service.db(service.store.get_sampler, concern.session_id)
        return None if sampler is None else sampler.base_model

    async def _model_of_run(self, tenant: str, name: str) -> str:
        """Return the base model of the run that the OpenAI interface's `model` names; the name itself if of none."""
        store = self._service.store
        if name == LATEST:
            newest = await self._service.db(store.newest_sampler_weights, tenant, self._service.clock.wall())
            return name if newest is None else newest.base_model
        runs = await self._service.db(store.find_runs, tenant, name)
        return runs[0].base_model if runs else name

    async def _any(self, model: str | None = None) -> str:
        """Return this node, if it has the model; else any other, in turn."""
        if self._node is not None and (model is None or model in self._service.catalog.names):
            return ""
        node = await self._peers.choose(str(next(self._turns)), model)
        if node is None and self._node is None:
            node = await self._peers.choose(str(next(self._turns)), None)
        if node is None and self._node is None:
            raise RequestRejected(503, "No node of this service lives. Try again.", "no_node", "server", RETRY)
        return "" if node is None else node.url
