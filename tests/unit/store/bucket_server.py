"""A bucket for tests: moto speaks S3 over real HTTP on 127.0.0.1 and keeps objects in memory."""

from __future__ import annotations

import itertools
import logging
import socket
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from tinkex.store.blobs.bucket import Bucket

ACCESS = {"region": "us-east-1", "access_key_id": "test-key-id", "secret_access_key": "test-secret-of-the-bucket"}
_numbers = itertools.count()


class BucketServer:
    """Can be stopped and started again, at the same address and with the same objects."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        with socket.create_server((host, 0)) as free:
            self._port = free.getsockname()[1]
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def access(self) -> dict[str, str]:
        return {**ACCESS, "endpoint": self.endpoint}

    @property
    def environ(self) -> dict[str, str]:
        """The usual variables, for a process of its own."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": ACCESS["region"],
            "AWS_ACCESS_KEY_ID": ACCESS["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": ACCESS["secret_access_key"],
        }

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address=self._host, port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def new_url(self) -> str:
        """Return the address of a new bucket, with a prefix."""
        name = f"tinkex-test-{next(_numbers)}"
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}/some/prefix"

    def bucket(self, url: str | None = None, **options: Any) -> Bucket:
        return Bucket(url or self.new_url(), self.access, **options)

    @property
    def client(self) -> Any:
        """Another client of S3, which knows nothing of ours."""
        keys = {"aws_access_key_id": ACCESS["access_key_id"], "aws_secret_access_key": ACCESS["secret_access_key"]}
        return boto3.client("s3", endpoint_url=self.endpoint, region_name=ACCESS["region"], **keys)

    def keys(self, bucket: Bucket) -> list[str]:
        """Return every key of a bucket's prefix, relative to it, as the other client sees them."""
        name, _, prefix = bucket.url.removeprefix("s3://").partition("/")
        rows = self.client.list_objects_v2(Bucket=name, Prefix=prefix).get("Contents", [])
        return sorted(row["Key"].removeprefix(f"{prefix}/") for row in rows)

    def overwrite(self, bucket: Bucket, key: str, content: bytes) -> None:
        """Damage an object behind the back of the service."""
        name, _, prefix = bucket.url.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=name, Key=f"{prefix}/{key}", Body=content)
