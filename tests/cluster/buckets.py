"""A bucket server in a process of its own, which the schedules of all lanes share, each with a bucket of its own."""

from __future__ import annotations

import multiprocessing
import re
import urllib.error
import urllib.request
from multiprocessing.connection import Connection
from types import TracebackType
from urllib.parse import quote

READY_WITHIN_S = 120.0
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=test-key-id/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}
"""moto wants to see that a request is signed, and compares nothing."""
ACCESS = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test-key-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}


class Buckets:
    """moto on 127.0.0.1. Who creates it closes it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        assert self._connection.poll(READY_WITHIN_S), "the bucket server did not start"
        self.port = int(self._connection.recv())

    def close(self) -> None:
        self._process.kill()
        self._process.join(10)

    def __enter__(self) -> Buckets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Bucket:
    """One bucket of it, with a prefix as an installation has. Plain HTTP makes it."""

    def __init__(self, port: int, name: str) -> None:
        self._address, self.url = f"http://127.0.0.1:{port}/{name}", f"s3://{name}/some/prefix"
        _ask("PUT", self._address)

    def close(self) -> None:
        """Delete everything: moto keeps it in memory."""
        while keys := re.findall(r"<Key>(.*?)</Key>", _ask("GET", f"{self._address}?list-type=2")):
            for key in keys:
                _ask("DELETE", f"{self._address}/{quote(key)}")
        _ask("DELETE", self._address)


def _ask(method: str, url: str) -> str:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=SIGNED), timeout=30) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.code} {error.read()[:300]!r}") from None


def _serve(connection: Connection) -> None:
    from tests.unit.store.bucket_server import BucketServer

    server = BucketServer()
    connection.send(int(server.endpoint.rpartition(":")[2]))
    try:
        connection.recv()  # until the parent is gone
    except EOFError:
        pass
    server.stop()
