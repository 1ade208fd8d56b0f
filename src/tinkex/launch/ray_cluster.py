"""Has Ray run as many nodes and fronts as are asked for, one actor each; called by `tinkex cluster up` and `down`.

The actors are named and detached: they outlive the command, Ray starts them again wherever it has room, and the next
command finds them by their names. An actor that Ray has no room for is a demand that its autoscaler sees.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tinkex._version import __version__
from tinkex.clock import REAL
from tinkex.errors import ConfigError, MissingExtra
from tinkex.launch.emptying import wait_until_empty
from tinkex.launch.kept_server import STOP_S, ServerState
from tinkex.launch.ray_node import NodeOrder, RayNode
from tinkex.settings import ServeConfig, bucket_variables, check_keys, check_postgres, is_loopback_host

if TYPE_CHECKING:
    from tinkex.store.cluster.cluster_store import ClusterStore

NAMESPACE = "tinkex"
SECRET_NAME = "cluster"
LOOK_S = 0.5
STATE_S = 10.0
"""How long an actor that is to be stopped may take to say where it is. One that has no room yet never does."""
_SHAPE = re.compile(r"(\d+)x(CPU|GPU):(\d+)", re.IGNORECASE)
_NAME = re.compile(r"(train|sample|front)-(\d+)")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """So many nodes, each with so many CPUs or GPUs of one machine."""

    count: int
    kind: Literal["CPU", "GPU"] = "CPU"
    each: int = 1

    @property
    def resources(self) -> dict[str, float]:
        """What one node reserves. The server beside the engine needs a CPU where the engine computes on GPUs."""
        return {"CPU": self.each} if self.kind == "CPU" else {"CPU": 1, "GPU": self.each}


def read_shape(text: str) -> Shape:
    """Read `2xCPU:1` (two nodes, one CPU each), `4xGPU:1`, or `0`. Raises ValueError."""
    if text.strip() == "0":
        return Shape(count=0)
    match = _SHAPE.fullmatch(text.strip())
    if match is None or int(match[3]) < 1:
        raise ValueError("COUNTxCPU:EACH or COUNTxGPU:EACH, for example 2xCPU:4 or 4xGPU:1, or 0")
    return Shape(count=int(match[1]), kind="GPU" if match[2].upper() == "GPU" else "CPU", each=int(match[3]))


def scale(
    address: str, config: ServeConfig, train: Shape, sample: Shape, fronts: int, *, wait_s: float, report: Report
) -> list[ServerState]:
    """Have as many nodes and fronts as asked for: start those that are missing, drain and stop those beyond.

    Nodes of `sample` only sample.
    Return what each is doing once all are ready, or after at most so many seconds.
    """
    check_postgres(config, "`tinkex cluster up`")
    counts = {"train": train.count, "sample": sample.count, "front": fronts}
    names = [f"{kind}-{number}" for kind, count in counts.items() for number in range(count)]
    with _connected(address, report) as ray, _store(config) as store:
        config = _shared_settings(ray, config, store)
        orders = {
            "train": (of_training_node(config, has_samplers=sample.count > 0), train),
            "sample": (replace(config, samples_only=True), sample),
            "front": (config, None),
        }
        fleet = _Fleet(ray, report)
        busy = fleet.retire(store, sorted(fleet.names - set(names)), wait_s)
        for name in names:
            if name not in fleet.names:
                fleet.launch(name, *orders[name.partition("-")[0]])
        states = fleet.wait_until_ready(names, wait_s)
        _let_take_runs(store, states)
    return [*states, *(ServerState(name=name, failure="it still has runs, and drains") for name in busy)]


def of_training_node(config: ServeConfig, *, has_samplers: bool) -> ServeConfig:
    """Return the settings of a node that trains. Where others sample with vLLM, it samples with its own engine, in case
    there is none of them, and saves what they compare."""
    if not has_samplers or config.sampler == "own":
        return config
    return replace(config, sampler="own", proofs=True)


def stop(address: str, config: ServeConfig, *, wait_s: float, report: Report) -> list[str]:
    """Drain and stop all nodes, then the fronts. Return the names of those that still have runs, and go on."""
    check_postgres(config, "`tinkex cluster down`")
    with _connected(address, report) as ray, _store(config) as store:
        fleet = _Fleet(ray, report)
        return fleet.retire(store, sorted(fleet.names, reverse=True), wait_s)


@contextmanager
def _connected(address: str, report: Report) -> Iterator[Any]:
    try:
        import ray
    except ImportError:
        raise MissingExtra("`tinkex cluster up` and `down`", "ray") from None
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="error", configure_logging=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"No Ray cluster can be used at {address}: {str(error).splitlines()[0]} Run this on a machine of the "
            "cluster (`ray start`), with the same RAY_AUTH_MODE and token."
        ) from None
    try:
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":  # border: Ray's own, which it also sets itself
            report(
                "Warning: Ray's authentication is off. Whoever reaches its ports can run programs and read the secrets "
                "of this cluster. Set RAY_AUTH_MODE=token on all its machines."
            )
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _store(config: ServeConfig) -> Iterator[ClusterStore]:
    from tinkex.store.cluster.cluster_store import ClusterStore

    with ClusterStore.open(config.database_url, config.data_dir, durability=config.durability) as store:
        yield store


def _shared_settings(ray: Any, config: ServeConfig, store: ClusterStore) -> ServeConfig:
    """Return the settings for servers on other machines. Raises ConfigError if they would be open to everybody."""
    addresses = [row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]]
    reached = next((address for address in addresses if not is_loopback_host(address)), "127.0.0.1")
    check_keys(replace(config, host=reached), has_stored_keys=store.has_keys())
    if config.cluster_secret is None:  # whoever may read the database may do everything anyway
        config = replace(config, cluster_secret=store.shared_secret(SECRET_NAME, secrets.token_hex(32)))
    return config


def _let_take_runs(store: ClusterStore, states: Sequence[ServerState]) -> None:
    """End the draining of nodes that were to stop, had not, and are wanted again."""
    urls = {state.url for state in states}
    for node in store.list_nodes():
        if node.is_draining and node.url in urls:
            store.set_draining(node.id, False)


class _Fleet:
    """The actors of this cluster."""

    def __init__(self, ray: Any, report: Report) -> None:
        self._ray, self._report = ray, report
        self.names = {name for name in ray.util.list_named_actors() if _NAME.fullmatch(name)}

    def launch(self, name: str, config: ServeConfig, shape: Shape | None) -> None:
        """Ask Ray for an actor, a front without a shape. Returns at once: it waits for room as long as it takes."""
        options: dict[str, Any] = {
            "name": name,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": 4,  # `state` responds while `stop` waits
            "num_cpus": 0,
            "scheduling_strategy": "SPREAD",
        }
        if shape is not None:
            options |= {"num_cpus": shape.resources["CPU"], "num_gpus": shape.resources.get("GPU", 0)}
            if shape.kind == "CPU":
                device = "cpu" if config.device == "auto" else config.device
                config = replace(config, threads=config.threads or shape.each, device=device)
            elif shape.each > 1:
                options["scheduling_strategy"] = self._reserved(name, shape)
                config = replace(config, devices_per_engine=shape.each)
        order = NodeOrder(
            name=name, version=__version__, is_front=shape is None, config=config, variables=bucket_variables()
        )
        self._ray.remote(RayNode).options(**options).remote(order)
        self.names.add(name)

    def _reserved(self, name: str, shape: Shape) -> Any:
        """Reserve the devices of a node together: they stay its own while Ray starts its actor again."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([shape.resources], strategy="STRICT_PACK", name=name, lifetime="detached")
        return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)

    def wait_until_ready(self, names: Sequence[str], wait_s: float) -> list[ServerState]:
        end = REAL.now() + wait_s
        calls: dict[str, Any] = {}
        states = {name: ServerState(name=name, failure="Ray has no room for it yet") for name in names}
        told: dict[str, str] = {}
        while not all(state.is_ready for state in states.values()) and REAL.now() < end:
            for name in names:
                if name not in calls and not states[name].is_ready:
                    calls[name] = self._actor(name).state.remote()
            done = self._ray.wait(list(calls.values()), num_returns=len(calls), timeout=LOOK_S)[0] if calls else []
            for name in [name for name, call in calls.items() if call in done]:
                states[name] = self._result(name, calls.pop(name))
            for name, state in states.items():
                if (line := _line(state)) != told.get(name):
                    told[name] = line
                    self._report(f"{name} {line}")
            if done:
                REAL.pause(LOOK_S)
        return [states[name] for name in names]

    def _actor(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            raise ConfigError(f"Ray has no actor {name} any more: another command may have stopped it.") from None

    def _result(self, name: str, call: Any) -> ServerState:
        """Return what an actor says, or why it does not. Raises ConfigError if it will never."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        try:
            state: ServerState = self._ray.get(call)
        except ActorUnavailableError:
            return ServerState(name=name, failure="Ray is starting it again")
        except RayActorError as error:
            self._forget(name)
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"The Ray actor {name} cannot start: {reason}") from None
        return state

    def retire(self, store: ClusterStore, names: Sequence[str], wait_s: float) -> list[str]:
        """Drain nodes and stop them; fronts stop last. Return the names of those that have runs and go on."""
        handles = {name: self._actor(name) for name in names}
        urls = self._urls(handles)
        nodes = {node.url: node.id for node in store.list_nodes()}
        draining = {name: nodes[url] for name, url in urls.items() if url in nodes}
        for name, node_id in draining.items():
            self._report(f"{name} drains")
            store.set_draining(node_id, True)
        end = REAL.now() + wait_s
        busy = [
            name for name, node_id in draining.items() if wait_until_empty(store, node_id, max(end - REAL.now(), 0.0))
        ]
        stopped = [name for name in names if name not in busy]
        for group in ("train", "sample", "front"):
            self._stop({name: handles[name] for name in stopped if name.startswith(group)}, urls)
        return busy

    def _urls(self, handles: dict[str, Any]) -> dict[str, str]:
        """Return where the servers are, of those actors that run."""
        calls = {name: handle.state.remote() for name, handle in handles.items()}
        done = self._ray.wait(list(calls.values()), num_returns=len(calls), timeout=STATE_S)[0] if calls else []
        urls = {}
        for name, call in calls.items():
            with suppress(self._ray.exceptions.RayError):
                if call in done and (url := self._ray.get(call).url):
                    urls[name] = url
        return urls

    def _stop(self, handles: dict[str, Any], running: Iterable[str]) -> None:
        """Have servers end in order, all at once; then end their actors."""
        calls = [handle.stop.remote() for name, handle in handles.items() if name in running]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=4 * STOP_S)
        for name in handles:
            self._forget(name)
            self._report(f"{name} has stopped")

    def _forget(self, name: str) -> None:
        from ray.util.placement_group import get_placement_group, remove_placement_group

        with suppress(ValueError):  # it has ended by itself
            self._ray.kill(self._ray.get_actor(name), no_restart=True)
        with suppress(ValueError):  # it had none
            remove_placement_group(get_placement_group(name))
        self.names.discard(name)


def _line(state: ServerState) -> str:
    if state.is_ready:
        return f"is ready at {state.url}"
    if state.failure:
        return f"waits: {state.failure}"
    return "starts"
