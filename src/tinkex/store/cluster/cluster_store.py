"""The store of a server that shares its PostgreSQL with others: leases of nodes, and the homes of runs.

A node lives while its row says so, by the database's clock, and renews it. A run is at home on one node. The first
request about a run whose node does not live gives it a new home: the epoch grows, and what the former home still writes
about the run is rolled back (`Journal`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from tinkex.clock import REAL
from tinkex.errors import ConfigError, ValidationError
from tinkex.store.lease import NOTICED_PAUSE_S, NOTICED_WITHIN_S, NOW, end_lease, holder_address
from tinkex.store.records import Home
from tinkex.store.store import Store
from tinkex.store.tables import homes, lease, nodes, operations, runs

MOST_CLAIMS = 5
"""How often a claim looks again because another node was faster."""
FORGOTTEN_AFTER_S = 3600.0
"""How long `tinkex cluster status` still shows a node that does not live."""
_JANITOR = "janitor"
_LIVES = nodes.c.until > NOW
_HOME = (
    select(homes.c.epoch, homes.c.node, homes.c.target, nodes.c.url, func.coalesce(_LIVES, False).label("lives"))
    .select_from(homes.outerjoin(nodes, nodes.c.id == homes.c.node))
    .where(homes.c.run_id == bindparam("run"))
)
_LOCK = select(homes.c.epoch).where(homes.c.run_id == bindparam("run")).with_for_update()
_RUNS = select(func.count()).where(homes.c.node == nodes.c.id).scalar_subquery()
_NODES = select(nodes, _RUNS.label("runs"), (nodes.c.until - NOW).label("left_s")).order_by(nodes.c.url, nodes.c.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself with each renewal. A node of another release may leave out some, or say more."""

    operations: int = 0
    """Operations that are not finished."""
    runs: int = 0
    """Runs that were at home there."""
    busy: int = 0
    """Runs that had operations which are not finished."""
    samples: int = 0
    """Sequences that wait or are being drawn."""
    is_ready: bool = True
    """Whether its engine takes commands; that of a new node does when it has loaded its models."""
    capabilities: Sequence[Mapping[str, Any]] = ()
    """What `get_server_capabilities` says of each of its models."""


NO_FACTS = NodeFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A server that shares this store."""

    id: str
    url: str
    models: tuple[str, ...]
    version: str
    kind: str = "train"
    load: int = 0
    """Operations that are not finished, as of the last renewal."""
    is_draining: bool = False
    facts: NodeFacts = NO_FACTS
    runs: int = 0
    """Runs that are at home there."""
    left_s: float = 0.0
    """How long it lives unless it renews its lease; negative: since when it does not."""

    @property
    def trains(self) -> bool:
        """Whether runs can be at home there."""
        return self.kind == "train"

    def serves(self, model: str) -> bool:
        """Whether it has a base model; "" is any."""
        return not model or model in self.models


class Claim(NamedTuple):
    """Where a run is at home."""

    home: Home
    url: str
    is_new: bool = False
    """Whether this call gave it that home."""


Choose = Callable[[Sequence[NodeRecord], str], NodeRecord | None]
"""Decides which of the living nodes gets a run of a base model (`server.cluster.placement`)."""


class ClusterStore(Store):
    """`join` first, then `renew` every third of the lease. All times are those of the database."""

    needs_homes = True

    # ── Nodes

    def join(self, node: NodeRecord, lease_s: float) -> None:
        """Be a node of the cluster. Raises ConfigError if one server has the store to itself."""
        if self._engine.dialect.name != "postgresql":
            raise ConfigError(
                "A node needs a PostgreSQL that all nodes share. Set TINKEX_DATABASE_URL to postgresql://USER:PASSWORD@"
                "HOST/NAME, or leave out --node-url to serve alone."
            )
        values = {name: getattr(node, name) for name in ("id", "url", "kind", "load", "version", "is_draining")}
        values |= {"models": list(node.models), "facts": asdict(node.facts), "until": NOW + lease_s}
        with self._write() as connection:
            connection.execute(insert(nodes).values(**values))
        # After the row is there: a server that wants the store for itself takes its lock first, then looks for nodes.
        give_up_s = REAL.now() + NOTICED_WITHIN_S
        while True:
            is_last_look = REAL.now() >= give_up_s
            address = self._holder(node.id, is_last_look=is_last_look)
            if address is None:
                return
            if is_last_look:
                raise ConfigError(
                    f"The server at {address} has this database for itself: it was started without --node-url. Stop it "
                    "first, or give this one another database."
                )
            REAL.pause(NOTICED_PAUSE_S)  # one that was killed a moment ago has it until PostgreSQL has noticed

    def _holder(self, node_id: str, *, is_last_look: bool) -> str | None:
        """Return the address of the server that has the store to itself. If there is none, nobody has it any more."""
        with self._write() as connection:
            address = holder_address(connection)
            if address is None:
                end_lease(connection)
            elif is_last_look:
                connection.execute(delete(nodes).where(nodes.c.id == node_id))
        return address

    def renew(self, node_id: str, lease_s: float, facts: NodeFacts) -> bool | None:
        """Renew a node's lease. Return whether it is to drain, or None if it has lost the lease: it was given up."""
        renewed = (
            update(nodes)
            .where(nodes.c.id == node_id, _LIVES)
            .values(until=NOW + lease_s, load=facts.operations, facts=asdict(facts))
            .returning(nodes.c.is_draining)
        )
        with self._write() as connection:
            is_draining: bool | None = connection.scalar(renewed)
        return is_draining

    def leave(self, node_id: str) -> None:
        """Give up a node: its runs are at home nowhere, and the next request about one finds another home."""
        with self._write() as connection:
            connection.execute(delete(nodes).where(nodes.c.id == node_id))
            connection.execute(update(homes).where(homes.c.node == node_id).values(node=""))

    def list_nodes(self, *, only_living: bool = True) -> list[NodeRecord]:
        with self._read() as connection:
            return [_node(row) for row in connection.execute(_NODES.where(_LIVES) if only_living else _NODES)]

    def set_draining(self, node_id: str, is_draining: bool) -> bool:
        """Have a node give up its runs and take no more, or take runs again. Return whether it lives."""
        change = update(nodes).where(nodes.c.id == node_id, _LIVES).values(is_draining=is_draining)
        with self._write() as connection:
            return bool(connection.execute(change).rowcount)

    def forget_nodes(self) -> None:
        """Delete the rows of nodes that have not lived for a while. A home that names one is nobody's anyway."""
        self._run_write(delete(nodes).where(nodes.c.until < NOW - FORGOTTEN_AFTER_S))

    def lead(self, node_id: str, seconds: float) -> bool:
        """Return whether this node is the one that cleans up for all, for so many seconds from now."""
        values = {"node": node_id, "epoch": 0, "address": "", "data_dir": "", "until": NOW + seconds}
        taken = insert(lease).values(name=_JANITOR, **values)
        free = or_(lease.c.until < NOW, lease.c.node == node_id)
        with self._write() as connection:
            statement = taken.on_conflict_do_update(index_elements=[lease.c.name], set_=values, where=free)
            return connection.scalar(statement.returning(lease.c.node)) is not None

    # ── Homes

    def find_home(self, run_id: str) -> Claim | None:
        """Return where a run is at home, or None if nowhere that lives."""
        with self._read() as connection:
            row = connection.execute(_HOME, {"run": run_id}).first()
        return _claim(run_id, row) if row is not None and row.lives else None

    def claim(self, run_id: str, model: str, choose: Choose) -> Claim | None:
        """Return a run's home, after giving it one if it has none that lives; None if no node is chosen.

        `choose` gets the nodes that live, as this transaction sees them, and the model. With "" as the model the run
        must exist and has one: ids that nobody has made get no homes.
        """
        for _ in range(MOST_CLAIMS):
            with self._write() as connection:
                model = model or connection.scalar(select(runs.c.base_model).where(runs.c.id == run_id)) or ""
                if not model:
                    return None
                # In two statements: one that had to wait for the lock would join the new home with the former node.
                connection.execute(_LOCK, {"run": run_id})
                row = connection.execute(_HOME, {"run": run_id}).first()
                if row is not None and row.lives:
                    return _claim(run_id, row)
                living = [_node(row) for row in connection.execute(_NODES.where(_LIVES))]
                if (node := self._on_its_way(connection, row) or choose(living, model)) is None:
                    return None
                if (claim := self._settle(connection, run_id, row, node)) is not None:
                    return claim
        return None

    @staticmethod
    def _on_its_way(connection: Connection, row: Row[Any] | None) -> NodeRecord | None:
        """Return the node that a run was to move to when its home ended, if it lives and takes runs."""
        if row is None or row.target is None:
            return None
        living = _NODES.where(_LIVES, nodes.c.id == row.target, nodes.c.is_draining.is_(False))
        found = connection.execute(living).first()
        return None if found is None else _node(found)

    @staticmethod
    def _settle(connection: Connection, run_id: str, row: Row[Any] | None, node: NodeRecord) -> Claim | None:
        """Give a run without a home that lives a home, in a new epoch. None: another claim was the first."""
        home = Home(run_id=run_id, node=node.id, epoch=1 if row is None else row.epoch + 1)
        if row is not None:
            change = update(homes).where(homes.c.run_id == run_id)
            connection.execute(change.values(node=home.node, epoch=home.epoch, target=None))
            return Claim(home, node.url, is_new=True)
        new = insert(homes).values(run_id=run_id, node=home.node, epoch=home.epoch)
        is_first = connection.scalar(new.on_conflict_do_nothing().returning(homes.c.epoch)) is not None
        return Claim(home, node.url, is_new=True) if is_first else None

    def release(self, home: Home) -> None:
        """Let a run be at home nowhere, if it still is in this epoch."""
        is_ours = (homes.c.run_id == home.run_id, homes.c.node == home.node, homes.c.epoch == home.epoch)
        self._run_write(update(homes).where(*is_ours).values(node=""))

    def homes_of(self, node_id: str) -> list[Home]:
        """Return the runs that are at home on a node, whether it knows of them or not."""
        with self._read() as connection:
            rows = connection.execute(select(homes.c.run_id, homes.c.epoch).where(homes.c.node == node_id)).all()
        return [Home(run_id=row.run_id, node=node_id, epoch=row.epoch) for row in rows]

    def urls_of(self, run_ids: Sequence[str]) -> dict[str, str]:
        """Return the address of the node of each run that is at home on one that lives."""
        query = select(homes.c.run_id, nodes.c.url).join(nodes, nodes.c.id == homes.c.node).where(_LIVES)
        with self._read() as connection:
            found = connection.execute(query.where(homes.c.run_id.in_(run_ids))).all()
        return {row.run_id: row.url for row in found}

    # ── Moving

    def ask_to_move(self, run_id: str, node_id: str = "") -> NodeRecord:
        """Have a run's home hand it over to this node, or to the one with the fewest runs. Return that node.

        The home does so when it looks next (`moves`). A run that is at home nowhere is given the node at once.
        """
        with self._write() as connection:
            model = connection.scalar(select(runs.c.base_model).where(runs.c.id == run_id))
            if model is None:
                raise ValidationError(f"There is no run {run_id!r}. `tinkex run list` shows them.")
            connection.execute(_LOCK, {"run": run_id})
            row = connection.execute(_HOME, {"run": run_id}).first()
            at_home = row.node if row is not None and row.lives else ""
            node = self._destination(connection, model, at_home, node_id)
            if at_home:
                target = None if node.id == at_home else node.id  # None: it stays, whatever was asked for before
                connection.execute(update(homes).where(homes.c.run_id == run_id).values(target=target))
            elif self._settle(connection, run_id, row, node) is None:
                raise ValidationError(f"{run_id} has just found a home by itself. Ask again.")
        return node

    @staticmethod
    def _destination(connection: Connection, model: str, at_home: str, node_id: str) -> NodeRecord:
        """Return the node that a run may move to. Raises ValidationError with the reason if there is none."""
        living = [_node(row) for row in connection.execute(_NODES.where(_LIVES))]
        if not node_id:
            fit = [node for node in living if node.trains and node.serves(model) and not node.is_draining]
            fit = [node for node in fit if node.id != at_home]
            if not fit:
                raise ValidationError(f"No other node that lives serves {model} and takes runs. Start one first.")
            return min(fit, key=lambda node: (node.runs, node.load, node.id))
        node = next((node for node in living if node.id == node_id), None)
        if node is None or not node.serves(model):
            lacks = "does not live" if node is None else f"serves {', '.join(node.models)}, and not {model}"
            raise ValidationError(f"The node {node_id} {lacks}.")
        if node.is_draining or not node.trains:
            reason = "is draining" if node.is_draining else "only samples"
            raise ValidationError(f"The node at {node.url} {reason}: it takes no runs.")
        return node

    def moves(self, node_id: str) -> list[tuple[Home, str]]:
        """Return the runs at home on this node that are wanted elsewhere, and where."""
        columns = (homes.c.run_id, homes.c.epoch, homes.c.target)
        wanted = select(*columns).where(homes.c.node == node_id, homes.c.target.is_not(None))
        with self._read() as connection:
            rows = connection.execute(wanted).all()
        return [(Home(run_id=row.run_id, node=node_id, epoch=row.epoch), row.target) for row in rows]

    def hand_over(self, home: Home, target: str) -> bool:
        """Give a run another home, in a new epoch. Return whether: not if that node does not live, or takes no runs."""
        is_ours = (homes.c.run_id == home.run_id, homes.c.node == home.node, homes.c.epoch == home.epoch)
        takes_runs = select(nodes.c.id).where(nodes.c.id == target, _LIVES, nodes.c.is_draining.is_(False)).exists()
        given = update(homes).where(*is_ours, takes_runs).values(node=target, epoch=home.epoch + 1, target=None)
        with self._write() as connection:
            is_given = bool(connection.execute(given).rowcount)
            if not is_given:
                connection.execute(update(homes).where(*is_ours).values(target=None))
        return is_given

    def waiting_runs(self, node_id: str) -> list[str]:
        """Return the runs with work that is accepted, whose home is this node or none that lives."""
        busy = select(operations.c.run_id).where(operations.c.state == "queued").distinct().subquery()
        homeless = or_(homes.c.node.is_(None), homes.c.node == node_id, func.coalesce(_LIVES, False).is_(False))
        joined = busy.outerjoin(homes, homes.c.run_id == busy.c.run_id).outerjoin(nodes, nodes.c.id == homes.c.node)
        with self._read() as connection:
            return list(connection.scalars(select(busy.c.run_id).select_from(joined).where(homeless)))


def _claim(run_id: str, row: Row[Any]) -> Claim:
    return Claim(Home(run_id=run_id, node=row.node, epoch=row.epoch), row.url)


def _node(row: Row[Any]) -> NodeRecord:
    values = row._mapping
    names = ("id", "url", "kind", "load", "version", "is_draining", "runs", "left_s")
    given = {name: values[name] for name in names}
    return NodeRecord(**given, models=tuple(values["models"]), facts=_facts(values["facts"]))


def _facts(said: object) -> NodeFacts:
    """Read what a node says of itself, which may be of an older release, or of a newer one."""
    if not isinstance(said, dict):
        return NO_FACTS
    known = {field.name: said[field.name] for field in fields(NodeFacts) if field.name in said}
    return NodeFacts(**{**known, "capabilities": tuple(known.get("capabilities", ()))})
