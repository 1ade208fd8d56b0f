"""The Ray actor of one server: started where Ray has room, it keeps one `tinkex serve` running until Ray ends it.

Ray decides on which machine; the database decides who works on a run. So an actor that Ray has started twice, because
a machine was cut off, does no harm: the fence of the store refuses what the former one writes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tinkex._version import __version__
from tinkex.launch.kept_server import KeptServer, ServerState
from tinkex.launch.settings_of_nodes import free_port, front_settings, node_settings
from tinkex.settings import ServeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """What an actor is to run. It travels as an argument through Ray: neither a command line nor a log has it."""

    name: str
    """`train-0`, `front-1` …"""
    version: str
    is_front: bool
    config: ServeConfig
    variables: Mapping[str, str] = field(repr=False)
    """How to reach the bucket."""


class RayNode:
    """`state` and `stop` are called by `tinkex cluster up` and `tinkex cluster down`."""

    def __init__(self, order: NodeOrder) -> None:
        import ray

        if order.version != __version__:
            raise RuntimeError(f"`cluster up` is tinkex {order.version}, and this Ray node has {__version__}.")
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._address = ray.util.get_node_ip_address()
        configure = partial(self._front if order.is_front else self._node, order)
        # Patient: the database may be away at the moment when Ray starts the actor again.
        self._server = KeptServer(order.name, configure, order.variables, is_patient=True)
        self._server.start()

    def _node(self, order: NodeOrder) -> ServeConfig:
        config = order.config
        # With a bucket the folder has copies of one server alone; without, the files of all nodes.
        folder = config.data_dir if config.blobs is None else config.data_dir / order.name
        return node_settings(config, self._address, Path(folder))

    def _front(self, order: NodeOrder) -> ServeConfig:
        # Another front may be on the same machine.
        port = free_port(self._address, order.config.port)
        return front_settings(order.config, self._address, port)

    def state(self) -> ServerState:
        return self._server.state

    def stop(self) -> None:
        """Return when the server has finished its work and ended."""
        self._server.request_stop()
        self._server.wait_stopped()
