"""`tinkex cluster`: starts the servers that share a database, shows them, drains one before it is stopped, moves a run,
makes certificates.

This module has the commands that need the database alone; `ray_commands` has those that start and stop servers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.parser import CommandParser
from tinkex.cli.service import ray_commands
from tinkex.cli.service.data_folder import LOCATION, WORK, add_flags, config_of
from tinkex.clock import REAL
from tinkex.errors import ConfigError, ValidationError
from tinkex.launch.emptying import LOOK_S, wait_until_empty
from tinkex.settings import ServeConfig
from tinkex.terminal import output
from tinkex.terminal.format import plural

if TYPE_CHECKING:
    from tinkex.store.cluster.cluster_store import ClusterStore, NodeRecord

MORE = """\
Several servers share one PostgreSQL when each is started with --node-url and the same cluster
secret. Each training run is at home on one of them; the others hand its requests on. These commands
read and write the database; they need its address (TINKEX_DATABASE_URL) and nothing else."""
MORE_DRAIN = """\
The node takes no more runs, and gives up those it has: each is saved and goes on at another node
with its next request. Clients notice nothing but a short wait. When no run is left the node can be
stopped. Samples that it is drawing are asked for again if it stops before they are done."""
MORE_CERT = """\
For TLS between the servers. DIR gets an authority (ca.crt, ca.key) unless it has one, and for every
--name a certificate with its key, HOST.crt and HOST.key; those that are there are replaced. A node is
started with --node-cert HOST.crt, --node-key HOST.key and --cluster-ca ca.crt, a front with
--cluster-ca ca.crt alone. HOST is the host of the node's --node-url; a node with several has them
with commas between. Keep ca.key where no server is: with it anybody can be a node."""
MORE_MOVE = """\
The run's home finishes the operation that it is working on, saves the run, and hands it over.
Without NODE it goes to the node with the fewest runs among the others. It goes on with the same
bits on the same kind of machine; its client notices nothing but a short wait."""
OUTSIDE = "the cluster's database"


def add(parser: CommandParser, about: str) -> None:
    group = parser.add_group(
        "cluster", about, "tinkex cluster status", "tinkex cluster drain http://10.0.0.5:8642", more=MORE, is_local=True
    )
    shown = group.add_command("status", status, "list the nodes and what they do", "tinkex cluster status -o json")
    drained = group.add_command(
        "drain", drain, "move all runs away from a node", "tinkex cluster drain http://10.0.0.5:8642",
        "tinkex cluster drain 1f0c9a3b5d7e9f01 --undo", more=MORE_DRAIN,
    )  # fmt: skip
    drained.add_argument("node", metavar="NODE", help="id or address of the node, from `tinkex cluster status`")
    drained.add_argument("--undo", action="store_true", help="let the node take runs again")
    drained.add_argument(
        "--wait-s", metavar="S", type=float, default=120.0, help="seconds to wait for its last run (default: 120)"
    )
    made = group.add_command(
        "cert", cert, "make certificates for TLS between the servers",
        "tinkex cluster cert certs --name node1.internal --name node2.internal,10.0.0.6", more=MORE_CERT,
    )  # fmt: skip
    made.add_argument("folder", metavar="DIR", type=Path, help="where the authority is, or is to be")
    made.add_argument("--name", metavar="HOST", action="append", default=[], help="a node; may be repeated")
    made.add_argument(
        "--days", metavar="N", type=int, default=730, help="how long a certificate is valid (default: 730)"
    )
    moved = group.add_command(
        "move", move, "move a run to another node", "tinkex cluster move 6f0c…:train:0",
        "tinkex cluster move 6f0c…:train:0 http://10.0.0.5:8642", more=MORE_MOVE,
    )  # fmt: skip
    moved.add_argument("run_id", metavar="RUN", help="id of the run, from `tinkex run list`")
    moved.add_argument("node", metavar="NODE", nargs="?", help="id or address of the node that is to have it")
    moved.add_argument(
        "--wait-s", metavar="S", type=float, default=120.0, help="seconds to wait until it has moved (default: 120)"
    )
    for command in (shown, drained, moved):
        add_flags(command.add_argument_group(OUTSIDE), LOCATION)
    ray_commands.add_to(group)


def status(args: argparse.Namespace) -> None:
    with _open(config_of(args)) as store:
        nodes = store.list_nodes(only_living=False)
    if args.output == "json":
        output.write_json({"nodes": [_fields(node) for node in nodes]})
        return
    if not nodes:
        output.remark("No server shares this database. Start some with `tinkex serve --node-url URL`.")
        return
    rows = [
        (node.id, node.url, _state(node), str(node.runs), str(node.load), ", ".join(node.models), node.version)
        for node in nodes
    ]
    output.write_table(("ID", "ADDRESS", "STATE", "RUNS", "QUEUED", "MODELS", "VERSION"), rows, ["RUNS", "QUEUED"])
    versions = sorted({node.version for node in nodes if node.left_s > 0})
    if len(versions) > 1:
        output.remark(f"The nodes are of different releases ({', '.join(versions)}), as during an upgrade.")


def drain(args: argparse.Namespace) -> int:
    with _open(config_of(args)) as store:
        node = _find(store, args.node)
        if not store.set_draining(node.id, not args.undo):
            raise ValidationError(f"The node {node.id} at {node.url} does not live any more: it has no runs.")
        if args.undo:
            output.remark(f"{node.url} takes runs again.")
            return 0
        if left := wait_until_empty(store, node.id, args.wait_s):
            output.remark(f"{node.url} still has {plural(left, 'run')}; it goes on draining.")
            return 1
    output.remark(f"{node.url} has no runs any more. Stop it with SIGTERM, or let it take runs again with --undo.")
    return 0


def move(args: argparse.Namespace) -> int:
    with _open(config_of(args)) as store:
        node = store.ask_to_move(args.run_id, _find(store, args.node).id if args.node else "")
        give_up_s = REAL.now() + args.wait_s
        while (claim := store.find_home(args.run_id)) is None or claim.home.node != node.id:
            if REAL.now() >= give_up_s:
                at = "nowhere" if claim is None else f"at {claim.url}"
                output.remark(f"{args.run_id} is still at home {at}; it was to move to {node.url}.")
                return 1
            REAL.pause(LOOK_S)
    output.remark(f"{args.run_id} is at home at {node.url} now.")
    return 0


def cert(args: argparse.Namespace) -> None:
    try:
        from tinkex.server.tls import certificates
    except ImportError:
        raise ConfigError(
            "Making certificates needs the package cryptography: pip install 'tinkex[cluster]'. Those that openssl or "
            "another authority makes will do, too: a server reads PEM files."
        ) from None
    if not 1 <= args.days <= certificates.CA_DAYS:
        raise ValidationError(f"--days must be from 1 to {certificates.CA_DAYS}.")
    nodes = [certificates.checked_names(text) for text in args.name]
    if len({names[0] for names in nodes}) < len(nodes):
        raise ValidationError("A --name is given twice.")
    authority = certificates.open_authority(args.folder)
    for names in nodes:
        file = args.folder / f"{certificates.stem_of(names)}.crt"
        if file.exists() and not certificates.is_from(file, authority):
            raise ConfigError(f"{file} is not from the CA in {args.folder}: it is not replaced. Remove it first.")
    made = [certificates.issue(args.folder, authority, names, args.days) for names in nodes]
    if args.output == "json":
        rows = [
            {"names": list(one.names), "cert": str(one.cert), "key": str(one.key), "until": one.until.isoformat()}
            for one in made
        ]
        output.write_json({"ca": str(args.folder / certificates.CA_CERT), "is_new": authority.is_new, "nodes": rows})
        return
    if authority.is_new:
        output.remark(f"Made an authority. Keep {args.folder / certificates.CA_KEY} where no server is.")
    if made:
        shown = [(", ".join(one.names), str(one.cert), str(one.key), f"{one.until:%Y-%m-%d}") for one in made]
        output.write_table(("NAMES", "CERTIFICATE", "KEY", "VALID UNTIL"), shown)
    output.remark(f"All servers need {args.folder / certificates.CA_CERT} (--cluster-ca).")


def _open(config: ServeConfig) -> ClusterStore:
    from tinkex.local_service import needs_local

    needs_local(WORK)
    if config.database_url.startswith("sqlite"):
        raise ConfigError(
            "Servers share a PostgreSQL, and this database is SQLite. Set TINKEX_DATABASE_URL to the one that they use."
        )
    from tinkex.store.cluster.cluster_store import ClusterStore

    return ClusterStore.open(config.database_url, config.data_dir, durability=config.durability)


def _find(store: ClusterStore, name: str) -> NodeRecord:
    nodes = store.list_nodes()
    found = [node for node in nodes if name.rstrip("/") in (node.id, node.url)]
    if len(found) != 1:
        known = ", ".join(f"{node.id} ({node.url})" for node in nodes) or "none"
        raise ValidationError(f"No one node is called {name!r}. Living nodes: {known}.")
    return found[0]


def _state(node: NodeRecord) -> str:
    if node.left_s <= 0:
        return f"gone for {-node.left_s:.0f} s"
    state = "draining" if node.is_draining else "alive"
    return state if node.trains else f"{state}, only samples"


def _fields(node: NodeRecord) -> dict[str, object]:
    return {
        "id": node.id,
        "url": node.url,
        "is_alive": node.left_s > 0,
        "is_draining": node.is_draining,
        "kind": node.kind,
        "runs": node.runs,
        "queued_operations": node.load,
        "models": list(node.models),
        "version": node.version,
        "lease_left_s": round(node.left_s, 3),
    }
