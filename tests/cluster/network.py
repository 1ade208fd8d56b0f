"""Machines that are network namespaces (Linux, as root): each has one address, and a bridge in one more joins them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
NAME = "tinkex-ray"


class Network:
    """`machines` have the addresses 10.99.0.1, .2, …; the hub, where tests and their bucket are, has 10.99.0.254.

    The addresses exist inside the namespaces alone. A namespace separates the network and nothing else: files, and so
    the unix socket of a PostgreSQL, are those of this machine.
    """

    def __init__(self, count: int) -> None:
        self._name = f"{NAME}-{os.getpid()}"
        self.hub, self.hub_address = f"{self._name}-hub", "10.99.0.254"
        self.addresses = [f"10.99.0.{number}" for number in range(1, count + 1)]
        self._made: list[str] = []
        _remove_left_over()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def prefix(self, address: str) -> tuple[str, ...]:
        """What a command line begins with, to run on a machine or in the hub."""
        return ("ip", "netns", "exec", self._of(address))

    @contextmanager
    def inside_hub(self) -> Iterator[None]:
        """Move this thread, and what it starts, into the hub."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        hub = os.open(Path("/run/netns") / self.hub, os.O_RDONLY)
        try:
            _enter(hub)
            yield
        finally:
            _enter(before)
            os.close(before)
            os.close(hub)

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def _make(self) -> None:
        self._add(self.hub)
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.hub, "addr", "add", f"{self.hub_address}/24", "dev", "bridge")
        _ip("-n", self.hub, "link", "set", "bridge", "up")
        for number, address in enumerate(self.addresses):
            name, port = self._of(address), f"port{number}"
            self._add(name)
            _ip("link", "add", "net", "netns", name, "type", "veth", "peer", "name", port, "netns", self.hub)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "net")
            _ip("-n", name, "link", "set", "net", "up")
            _ip("-n", self.hub, "link", "set", port, "master", "bridge", "up")

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _of(self, address: str) -> str:
        return self.hub if address == self.hub_address else f"{self._name}-{self.addresses.index(address)}"


def _remove_left_over() -> None:
    """Remove what a test left behind that was killed: its namespaces, and all processes in them."""
    for path in Path("/run/netns").glob(f"{NAME}-*-*"):
        if Path("/proc", path.name.split("-")[2]).exists():
            continue
        listed = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", path.name], check=False)


def can_make() -> bool:
    """Whether this user may make namespaces here."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    name = f"{NAME}-{os.getpid()}-try"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    except OSError:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return done.returncode == 0


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")
