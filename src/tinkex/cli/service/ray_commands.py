"""`tinkex cluster up` and `tinkex cluster down`: the servers of a cluster, started and stopped by Ray."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tinkex.cli.parser import CommandParser
from tinkex.cli.service.data_folder import LOCATION, WORK, add_flags, config_of
from tinkex.terminal import output

MORE_UP = """\
Ray starts every server as an actor where it has room, and again elsewhere if its machine dies.
Each machine of the Ray cluster needs tinkex with the extras local, postgres, s3 and ray, in the
same release. Run this again with other numbers to scale: what is missing is added, what is too
much is drained first and then stopped. Servers that Ray has no room for wait, and its autoscaler
sees them.

Set TINKEX_DATABASE_URL and the bucket's variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID …) where
you run this; they travel through Ray to its actors. So Ray must let nobody else in: set
RAY_AUTH_MODE=token on all its machines, and RAY_USE_TLS=1 where its network is not private. Without
--blobs, --data-dir must be a folder that all machines share."""
MORE_DOWN = """\
Every node gives up its runs, each with a snapshot, and stops; the fronts stop last. Nothing is
lost: `tinkex cluster up` goes on with the same database and bucket."""
OF_NODES = {
    "models and computation": (
        "base_models", "device", "dtype", "decode_weights", "threads", "cache_dir", "max_batch_tokens",
        "sampler", "vllm_python", "proofs",
    ),
    "network": ("port", "public_url"),
    "access": ("keys_file",),
    "storage": ("data_dir", "database_url", "blobs", "blobs_cache_gb", "durability", "snapshot_every_s"),
    "cluster": ("cluster_secret_file", "node_lease_s", "drain_s"),
}  # fmt: skip
WAIT_S = 600.0


def add_to(group: CommandParser) -> None:
    up = group.add_command(
        "up", start, "have Ray run the servers of a cluster",
        "tinkex cluster up --train 4xGPU:1 --fronts 2 --base-model Qwen/Qwen3-8B --blobs s3://tinkex",
        "tinkex cluster up --train 2xGPU:1 --sample 6xGPU:1 --sampler vllm --blobs s3://tinkex",
        "tinkex cluster up --ray 10.0.0.5:6379 --train 2xCPU:4 --data-dir /shared/tinkex",
        more=MORE_UP,
    )  # fmt: skip
    up.add_argument(
        "--train", metavar="NxCPU:K", type=_shape, required=True,
        help="how many nodes that train, and how many CPUs or GPUs each has: 2xCPU:4, 4xGPU:1",
    )  # fmt: skip
    up.add_argument(
        "--sample", metavar="NxGPU:K", type=_shape, default="0",
        help="how many nodes that only sample; without them (0) those of --train do",
    )  # fmt: skip
    up.add_argument("--fronts", metavar="N", type=int, default=1, help="how many fronts (default: 1)")
    for title, names in OF_NODES.items():
        add_flags(up.add_argument_group(title), names)
    down = group.add_command("down", stop, "drain and stop what Ray runs", "tinkex cluster down", more=MORE_DOWN)
    add_flags(down.add_argument_group("the cluster's database"), LOCATION)
    for command, done in ((up, "all servers are ready"), (down, "the nodes have no runs")):
        command.add_argument(
            "--ray",
            metavar="ADDRESS",
            default="auto",
            help="address of the Ray cluster (default: the one of this machine)",
        )
        command.add_argument(
            "--wait-s", metavar="S", type=float, default=WAIT_S, help=f"seconds to wait until {done} (default: 600)"
        )


def start(args: argparse.Namespace) -> int:
    from tinkex.errors import ConfigError
    from tinkex.launch.ray_cluster import scale
    from tinkex.local_service import needs_local

    needs_local(WORK)
    if args.fronts < 0:
        raise ConfigError(f"--fronts must be 0 or more, not {args.fronts}.")
    states = scale(
        args.ray, config_of(args), args.train, args.sample, args.fronts, wait_s=args.wait_s, report=output.remark
    )
    if args.output == "json":
        output.write_json({"servers": [asdict(state) for state in states]})
    elif states:
        rows = [(state.name, state.url, "ready" if state.is_ready else f"waits: {state.failure}") for state in states]
        output.write_table(("NAME", "ADDRESS", "STATE"), rows)
    left = [state.name for state in states if not state.is_ready]
    if left:
        output.remark(f"Not ready after {args.wait_s:g} s: {', '.join(left)}. Ray goes on with it; look again later.")
    return 1 if left else 0


def stop(args: argparse.Namespace) -> int:
    from tinkex.launch.ray_cluster import stop as stop_all
    from tinkex.local_service import needs_local

    needs_local(WORK)
    busy = stop_all(args.ray, config_of(args), wait_s=args.wait_s, report=output.remark)
    if busy:
        output.remark(f"These still have runs, and go on draining: {', '.join(busy)}. Run this again later.")
    return 1 if busy else 0


def _shape(text: str) -> Any:
    from tinkex.launch.ray_cluster import read_shape

    try:
        return read_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}") from None
