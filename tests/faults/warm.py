"""A process that has everything imported and forks servers on request, so that a start takes 0.3 s instead of five.

`python -m tests.faults.warm SOCKET` listens on a unix socket. A connection sends one line of JSON, `Start`, and gets
the server's process id; when the server has ended, its exit code. A connection that closes early takes its server with
it, and so does the end of this process's stdin: nothing is left running, however the test ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from tests.faults import broken, hooks

ROOT = Path(__file__).parents[2]
PACKAGES = ("tinkex.engine", "tinkex.server", "tinkex.store", "tinkex.cli")
LIBRARIES = (
    "torch", "safetensors.torch", "accelerate", "tokenizers", "transformers.utils.logging", "psycopg",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "uvicorn",
    "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql.psycopg",
)  # fmt: skip
"""What a server and an engine on the tiny model have loaded once they run. One that is missing costs time, no more."""
READY_WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """A server to start: the words after `tinkex`, where its output goes, its clock and the record of its stalls."""

    words: list[str]
    log: str
    clock: str
    stalls: str
    without: str = ""
    """The protection that this server does without, see `broken`."""
    environment: dict[str, str] = field(default_factory=dict)


class WarmServer:
    """A server that was forked: its process id is also that of its process group."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after so long. Negative: the signal that ended it."""
        if self._code is None:
            self._connection.settimeout(seconds)
            try:
                line = self._reader.readline()
            except TimeoutError:
                # A reader that timed out cannot be used again.
                self._reader = self._connection.makefile("rb")
                return None
            self._code = int(line) if line else -signal.SIGKILL
            self._connection.close()
        return self._code


class Warmth:
    """The warm process, seen from the tests. Who creates it closes it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tinkex-warm-")
        self.address = str(Path(self._folder.name) / "socket")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.warm", self.address],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until it takes requests. Everything is imported by then."""
        end = time.monotonic() + READY_WITHIN_S
        while not os.path.exists(self.address):
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the warm process did not start (exit code {self._process.returncode})")
            time.sleep(0.02)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._folder.cleanup()

    def __enter__(self) -> Warmth:
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start(address: str, request: Start) -> WarmServer:
    """Have the warm process at `address` fork a server."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(address)
    connection.sendall(json.dumps(asdict(request)).encode() + b"\n")
    return WarmServer(connection, int(connection.recv(32)))


# ── The process itself


def main(address: str) -> None:
    _import_everything()
    # A plain server has no torch. Here the collector would look through its objects for 100 ms, on the event loop.
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(8)
    os.rename(address + ".new", address)
    _Launcher(listener).run()


def _import_everything() -> None:
    names = list(LIBRARIES)
    for package in PACKAGES:
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        names += [module.name for module in found if not module.name.endswith((".build", ".__main__"))]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not warmed up: {name} ({error})", file=sys.stderr)


class _Launcher:
    """Waits for requests, for the end of servers and for the end of its own parent. One thread: forks are safe."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._servers: dict[int, tuple[int, socket.socket]] = {}
        """Connection's descriptor → the server's process id and the connection."""

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "parent")
        while True:
            for key, _ in self._selector.select():
                if key.data == "listener":
                    self._serve_one()
                elif key.data == "parent":
                    for pid, _ in self._servers.values():
                        _kill_group(pid)
                    return
                elif key.data == "connection":
                    self._hang_up(key.fd)
                else:
                    self._reap(key.fd, key.data)

    def _serve_one(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        with connection.makefile("rb") as reader:
            request = Start(**json.loads(reader.readline()))
        pid = os.fork()
        if pid == 0:
            _be_server(request)
        self._servers[connection.fileno()] = (pid, connection)
        self._selector.register(connection, selectors.EVENT_READ, "connection")
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, connection.fileno())
        connection.sendall(f"{pid}\n".encode())

    def _hang_up(self, descriptor: int) -> None:
        """The test is gone: its server goes too, and is reaped when its process has ended."""
        pid, connection = self._servers[descriptor]
        self._selector.unregister(connection)
        _kill_group(pid)

    def _reap(self, pidfd: int, descriptor: int) -> None:
        pid, connection = self._servers.pop(descriptor)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if descriptor in self._selector.get_map():
            self._selector.unregister(connection)
        try:
            connection.sendall(f"{code}\n".encode())
        except OSError:
            pass
        connection.close()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _be_server(request: Start) -> None:
    """Become `tinkex` with those words, in a process group of its own. Never returns."""
    status = 1
    try:
        os.setsid()
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.closerange(3, 4096)
        os.environ.update(request.environment)
        hooks.jump_clock(Path(request.clock))
        hooks.watch_loops(hooks.note_in(Path(request.stalls)))
        hooks.fork_engines()
        broken.take_away(request.without, "server")
        from tinkex.cli.main import main as command

        sys.argv = ["tinkex", *request.words]
        status = command(request.words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
