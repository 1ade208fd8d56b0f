"""The guide to a cluster is followed word by word: all its servers are started, with PostgreSQL and a bucket."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service.live import CACHE, free_port
from tests.product.docs.pages import ROOT, Block, blocks, mark
from tests.product.docs.test_guides import MODEL, OF_CLUSTER
from tests.unit.store.bucket_server import BucketServer
from tests.unit.store.postgres import PostgresServer

PAGE = ROOT / "docs" / "guides" / OF_CLUSTER
RUNS = "it runs until it is stopped"
READY_S = 90.0


class Follower:
    """Somebody who follows the guide, on one machine, with ports of the test's own."""

    def __init__(self, folder: Path, postgres: PostgresServer, bucket: BucketServer) -> None:
        self.folder, self.space = folder, dict[str, object](__name__="__main__")
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "TINKEX_CACHE_DIR": str(CACHE),
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TINKEX_THREADS": "1",
        }
        self.replaced = {
            MODEL: "tinkex/tiny",
            "postgresql://tinkex:PASSWORD@127.0.0.1/tinkex": postgres.url(),
            "http://127.0.0.1:8333": bucket.endpoint,
            **{str(port): str(free_port()) for port in (8651, 8652, 8642)},
        }
        self.servers: list[subprocess.Popen[bytes]] = []

    def follow(self, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
        text, said = block.text, mark(PAGE, block)
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        if said.startswith("file: "):
            (self.folder / said.removeprefix("file: ")).write_text(text)
        elif said.endswith(RUNS):
            self._start(text)
        elif block.kind == "python":
            for name, value in self.environment.items():
                monkeypatch.setenv(name, value)
            exec(compile("\n" * block.line + text, str(PAGE), "exec"), self.space)
        elif block.kind == "bash" and not said:
            self._run(text)
        else:
            assert said.endswith("it installs") or block.kind not in ("bash", "python"), said

    def _start(self, text: str) -> None:
        [port] = re.findall(r"--port (\d+)", text)
        log = self.folder / f"{port}.log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self.folder, env=self.environment, stdout=out, stderr=out
            )
        self.servers.append(server)
        scheme = "http" if "--no-engine" in text else "https"
        tls = ssl.create_default_context(cafile=self.folder / "certs" / "ca.crt")
        end = time.monotonic() + READY_S
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/readyz", timeout=2, context=tls).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)

    def _run(self, text: str) -> None:
        after = self.folder / "environment"
        script = f'set -euo pipefail\n{text}\nenv -0 > "{after}"'
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        entries = (entry.partition("=") for entry in after.read_text().split("\0") if entry)
        self.environment |= {name: value for name, _, value in entries}

    def stop(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
        for server in self.servers:
            assert server.wait(40) == 0


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    postgres, bucket = PostgresServer(), BucketServer()
    bucket.client.create_bucket(Bucket="training")
    follower = Follower(tmp_path, postgres, bucket)
    try:
        yield follower
        follower.stop()
    finally:
        for server in follower.servers:
            server.kill()
        bucket.stop()
        postgres.stop()


@pytest.mark.full
def test_the_guide_to_a_cluster_works_as_it_is_written(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(follower.folder)
    for block in blocks(PAGE):
        follower.follow(block, monkeypatch)
    assert len(follower.servers) == 3
