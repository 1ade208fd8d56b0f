"""`tinkex serve --engines N`: N nodes and one front on this machine, as children of this process.

The nodes listen on 127.0.0.1, share the data folder and the PostgreSQL, and share the cores or GPUs out among them. The
front listens where clients come. All of it is what a cluster of several machines runs.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tinkex.engine.models.registry import resolve
from tinkex.errors import ConfigError
from tinkex.launch.kept_server import KeptServer
from tinkex.launch.settings_of_nodes import free_port, front_settings, node_settings, own_secret
from tinkex.launch.shares import Share, share_out, usable_cores, usable_gpus
from tinkex.server.upkeep.machine import adapter_budget
from tinkex.settings import ServeConfig, check_postgres

logger = logging.getLogger("tinkex.launch")

NEAR = "127.0.0.1"
Progress = Callable[[str, int, int], None]


def serve_engines(
    config: ServeConfig, *, on_ready: Callable[[bool, str], None], progress: Progress | None = None
) -> int:
    """Run until SIGTERM or SIGINT. Return the exit code.

    Once all servers are ready, `on_ready` is told whether clients need a key, and the address.
    """
    servers = _servers(config)
    for name in config.base_models:  # once, before several servers would download it at the same time
        resolve(name, config.cache_dir, progress=progress)
    changed, stopping = threading.Event(), threading.Event()
    for server in servers:
        server.on_change = changed.set
    is_announced = False
    try:
        _on_signals(stopping, changed, servers)
        for server in servers:
            server.start()
        while not stopping.is_set():
            if given_up := [server for server in servers if server.has_given_up]:
                logger.error("%s could not start; its reason is above. Stopping the others.", given_up[0].name)
                return 1
            if not is_announced and all(server.state.is_ready for server in servers):
                is_announced = True
                on_ready(servers[-1].state.needs_key, servers[-1].url)
            changed.wait()
            changed.clear()
        logger.info("stopping: the engines finish the work in progress; queued operations stay in the journal")
        return 0
    finally:
        # The front last: until the nodes have ended, clients poll results through it.
        for group in (servers[:-1], servers[-1:]):
            for server in group:
                server.request_stop()
            for server in group:
                server.wait_stopped()


def _servers(config: ServeConfig) -> list[KeptServer]:
    """Return the nodes and, as the last one, the front."""
    flag = f"--engines {config.engines}"
    if config.is_clustered:
        raise ConfigError(
            f"{flag} starts nodes and a front by itself, so it does not go with --node-url or --no-engine. On another "
            "machine of the same cluster, start one `tinkex serve --node-url URL` for each engine."
        )
    check_postgres(config, flag)
    if config.cluster_secret is None:
        config = replace(config, cluster_secret=own_secret(config.data_dir))
    cores, gpus = usable_cores(), usable_gpus()
    shares = share_out(config.engines, config.device, config.threads, cores, gpus, config.devices_per_engine)
    if config.adapter_memory_mb is None:  # each would take a quarter of the machine's memory
        config = replace(config, adapter_memory_mb=adapter_budget(None) // config.engines // 10**6)
    nodes = [_node(config, number, share) for number, share in enumerate(shares, 1)]
    port = config.port or free_port(config.host)  # settled once: a front that is started again has the same
    return [*nodes, KeptServer("front", partial(front_settings, config, config.host, port))]


def _node(config: ServeConfig, number: int, share: Share) -> KeptServer:
    # With a bucket the folder has copies of one server alone; without, all files of all nodes.
    folder = config.data_dir if config.blobs is None else config.data_dir / f"engine-{number}"
    configure = partial(node_settings, config, NEAR, folder, threads=share.threads)
    return KeptServer(f"engine {number}", configure, share.variables)


def _on_signals(stopping: threading.Event, changed: threading.Event, servers: Sequence[KeptServer]) -> None:
    def stop(*_: object) -> None:
        if stopping.is_set():  # a second signal: do not wait any longer
            for server in servers:
                server.kill()
        stopping.set()
        changed.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
