"""A real Ray cluster whose machines are network namespaces, with token authentication; and `tinkex cluster` on it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tests import tools
from tests.cluster.network import Network
from tests.cluster.processes import kill_marked, marked, until_none
from tests.integration.service.live import CACHE

PORT = 6390
LEASE_S = 5.0
GPUS = 2
"""What each machine but the head is said to have. Ray counts resources; it does not look at them."""
OBJECTS_BYTES = 100_000_000
"""Ray's object store of each machine. Nothing of ours is put there, and this is near the least that Ray takes."""


class RayMachines:
    """The first machine is the head, without room for actors that ask for CPUs; the others have `cpus` each."""

    def __init__(self, network: Network, cpus: int) -> None:
        self._network, self._cpus = network, cpus
        self.python = tools.make("ray")
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: a socket's path has 107 characters at most
        self._token = secrets.token_hex(32)
        self._run = uuid.uuid4().hex
        self.head, *self.others = network.addresses
        self.address = f"{self.head}:{PORT}"

    @property
    def mark(self) -> str:
        return f"TEST_OF_RAY={self._run}"

    def mark_of(self, address: str) -> str:
        """In the environment of everything that runs on a machine."""
        return f"TEST_OF_RAY_ON={self._run}-{address}"

    def environment(self, address: str = "") -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("TINKEX_")},
            **dict(mark.split("=") for mark in (self.mark, self.mark_of(address))),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # A machine that does not respond is given up after three seconds, not after fifteen.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
            # Ray's own: without its head every machine ends its actors after a minute (docs/decisions/ray.md).
            "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
        }

    def start(self) -> None:
        """Start three machines; a fourth may be added."""
        self._start(self.head, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
        for address in self.others[:2]:
            self.add(address)

    def add(self, address: str) -> None:
        self._start(address, f"--address={self.address}", f"--num-cpus={self._cpus}", f"--num-gpus={GPUS}")

    def _start(self, address: str, *flags: str) -> None:
        words = [*self._network.prefix(address), str(self.python), "-m", "ray.scripts.scripts", "start"]
        words += [f"--node-ip-address={address}", f"--object-store-memory={OBJECTS_BYTES}", "--disable-usage-stats"]
        words += [f"--temp-dir={self._folder / address.rpartition('.')[2]}"]
        done = subprocess.run(
            [*words, *flags], env=self.environment(address), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"ray start on {address}: {done.stdout[-2000:]}{done.stderr[-2000:]}"

    def tinkex(self, *words: str, variables: dict[str, str], wait_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run the command on the head."""
        command = [*self._network.prefix(self.head), str(self.python), "-m", "tinkex", *words]
        environment = {**self.environment(self.head), **variables}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=wait_s, check=False, cwd=self._folder
        )

    def status(self) -> str:
        """What `ray status` shows: the machines, what is used, and the demands that have no room."""
        words = [*self._network.prefix(self.head), str(self.python), "-m", "ray.scripts.scripts", "status"]
        words += [f"--address={self.address}"]
        done = subprocess.run(words, env=self.environment(self.head), capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def kill_raylet(self, address: str) -> None:
        assert kill_marked(self.mark_of(address), "raylet")

    def kill_machine(self, address: str) -> None:
        """End everything there at once, as a power cut does."""
        while kill_marked(self.mark_of(address)):
            time.sleep(0.01)

    def logs(self) -> str:
        """The ends of what the actors wrote: also the log of their servers."""
        files = sorted(self._folder.glob("*/session_latest/logs/worker-*.err"))
        return "\n".join(f"── {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)

    def everything_shown(self) -> str:
        """All logs of Ray, and all command lines: no secret may be there."""
        files = [
            file for folder in self._folder.glob("*/session_2*/logs") for file in folder.rglob("*") if file.is_file()
        ]
        text = "\n".join(file.read_text(errors="replace") for file in files)
        return text + "\n".join(" ".join(words) for _, words in marked(self.mark))

    def stop(self) -> None:
        while kill_marked(self.mark):
            time.sleep(0.05)
        until_none(self.mark, 10.0)
        shutil.rmtree(self._folder, ignore_errors=True)


class TinkexOnRay:
    """`tinkex cluster up` and `down` on such machines."""

    def __init__(self, machines: RayMachines, database: str, bucket: str, access: dict[str, str], folder: Path) -> None:
        self._machines, self._bucket, self._folder = machines, bucket, folder
        self._variables = {"TINKEX_DATABASE_URL": database, **access}

    def up(self, train: str, fronts: int = 2, *, wait_s: float = 240.0) -> tuple[int, dict[str, Any], str]:
        """Return the exit code, the servers by name, and what the command said."""
        flags = {
            "--ray": self._machines.address,
            "--train": train,
            "--sample": "0",
            "--fronts": fronts,
            "--base-model": "tinkex/tiny",
            "--threads": 1,
            "--cache-dir": CACHE,
            "--blobs": self._bucket,
            "--data-dir": self._folder,
            "--node-lease-s": LEASE_S,
            "--drain-s": 5,
            "--wait-s": wait_s,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        done = self._machines.tinkex(
            "-o", "json", "cluster", "up", *words, variables=self._variables, wait_s=wait_s + 60
        )  # fmt: skip
        assert done.stdout, done.stderr
        servers = {row["name"]: row for row in json.loads(done.stdout)["servers"]}
        return done.returncode, servers, done.stderr

    def down(self) -> tuple[int, str]:
        done = self.cluster("down", "--ray", self._machines.address, "--wait-s", "60")
        return done.returncode, done.stderr

    def cluster(self, *words: str) -> subprocess.CompletedProcess[str]:
        flags = ("--data-dir", str(self._folder))
        return self._machines.tinkex("cluster", *words, *flags, variables=self._variables)
