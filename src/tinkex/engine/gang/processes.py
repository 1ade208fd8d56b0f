"""The other processes of a gang as the first one sees them: starts them, talks with them, notices their end. No torch.

They are children of the engine's process and in its process group, so the server ends them with it. No wait for one of
them is without a deadline. When one ends, or does not respond, the engine ends: the collectives of the others would
wait for it, and the journal of the server rebuilds what was lost.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from tinkex.clock import REAL
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame, read_frame

logger = logging.getLogger("tinkex.engine")

PROGRAM = (sys.executable, "-P", "-m", "tinkex.engine.gang.member")
WAIT_S = 120.0
"""How long a process may wait for another one, in a collective or for a reply. They do the same work at the same time,
so none waits much longer than a layer of a micro-batch takes, or than the machine needs to swap."""

NOTICED_WITHIN_S = 0.5
"""When a process dies, a collective of this one may fail before the kernel has reported the death, which says more."""


@dataclass(frozen=True, slots=True)
class ChildLink:
    process: subprocess.Popen[bytes]
    commands: socket.socket
    replies: BinaryIO


class Processes:
    """The processes 1 to size - 1 of a gang; this one is 0."""

    def __init__(self, size: int, wait_s: float = WAIT_S) -> None:
        """Starts them. They import torch while this process does."""
        if sys.platform == "win32":
            raise EngineFault("--devices-per-engine needs Linux or macOS. Serve with one device.", "server")
        self.size, self.wait_s = size, wait_s
        self._ending = threading.Lock()
        # Gloo looks its address up by the machine's name, which may lead to a network, or to nothing.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # border: gloo reads it, and nothing else
        self._links = [self._start(index) for index in range(1, size)]

    def _start(self, index: int) -> ChildLink:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(PROGRAM, stdin=theirs.fileno(), stdout=2)
        threading.Thread(target=self._watch, args=(index, process), daemon=True, name=f"process {index}").start()
        return ChildLink(process, ours, ours.makefile("rb"))

    def _watch(self, index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        hint = " (often: the machine ran out of memory)" if code == -signal.SIGKILL else ""
        reason = f"was killed by signal {-code}{hint}" if code < 0 else f"ended with exit code {code}"
        self.end(f"process {index} of the engine's {self.size} {reason}", was_killed=code < 0)

    def send(self, frame: Frame) -> None:
        """Send the same command to every process."""
        self.send_each([frame] * len(self._links))

    def send_each(self, frames: Sequence[Frame]) -> None:
        """Send every process its own command."""
        for index, (link, frame) in enumerate(zip(self._links, frames, strict=True), 1):
            self._send(index, link, frame)

    def ask(self, index: int, frame: Frame, *, wait_s: float) -> Frame:
        """Send one process a command, and return its reply."""
        link = self._links[index - 1]
        self._send(index, link, frame)
        return self._receive(index, link, wait_s)

    def receive(self, *, wait_s: float | None = None) -> list[Frame]:
        """Return one reply of every process."""
        return [self._receive(index, link, wait_s or self.wait_s) for index, link in enumerate(self._links, 1)]

    def _send(self, index: int, link: ChildLink, frame: Frame) -> None:
        link.commands.settimeout(self.wait_s)
        try:
            link.commands.sendall(b"".join(frame.parts()))
        except OSError as error:
            self._fail(index, error, self.wait_s)

    def _receive(self, index: int, link: ChildLink, wait_s: float) -> Frame:
        link.commands.settimeout(wait_s)
        try:
            reply = read_frame(link.replies)
        except OSError as error:
            self._fail(index, error, wait_s)
        if reply is None:
            self._fail(index, EOFError(), wait_s)
        if "error" in reply.head:
            raise EngineFault(reply.head["error"], "server")
        return reply

    def _fail(self, index: int, error: Exception, wait_s: float) -> NoReturn:
        what = f"did not respond within {wait_s:.0f} s" if isinstance(error, TimeoutError) else "closed its connection"
        self.end_unless_noticed(f"process {index} of the engine's {self.size} {what}")

    def end_unless_noticed(self, reason: str) -> NoReturn:
        """End the gang for what may only be a consequence: that a process has died comes first."""
        REAL.pause(NOTICED_WITHIN_S)
        self.end(reason)

    def end(self, reason: str, *, was_killed: bool = False) -> NoReturn:
        """End the gang, this process included. The first reason is logged; the server starts another engine.

        `was_killed`: as if this process had been killed, which is no reason for the server to give up at the start.
        """
        with self._ending:  # held to the end: another thread notices what this one does to the processes
            logger.error("The engine cannot go on: %s.", reason)
            for link in getattr(self, "_links", ()):
                link.process.kill()
            if was_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)  # an ordinary exit would wait for a lock that the reading thread has
