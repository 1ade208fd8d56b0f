"""A recording service on 127.0.0.1: answers the whole API from `canned`, keeps every request. Standard library only.

One server carries many stages, each under its own path prefix with its own configuration and its own record, so that
clients of an earlier case that still send heartbeats cannot disturb a later one.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .canned import Answer, Request, Service

PREFIX = "/api/v1/"


@dataclass
class Stage:
    """Where one case plays: its address, its service, its scripted answers, its record."""

    url: str
    service: Service
    # By endpoint, or by "retrieve_future:<request id>"; used up in order, then the usual answer.
    script: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def answer(self, request: Request) -> Answer:
        with self.changed:
            self.requests.append(request)
            usual = self.service.answer(decompressed(request))
            scripted = self.script.get(f"{request.endpoint}:{polled(request)}") or self.script.get(request.endpoint)
            self.changed.notify_all()
            return scripted.pop(0) if scripted else usual

    def forget(self) -> None:
        """Record from here on."""
        with self.changed:
            self.requests.clear()

    def wait_for(self, endpoint: str, timeout_s: float = 60.0) -> None:
        """Block until a request to this endpoint has arrived."""
        self.wait_until(lambda requests: any(r.endpoint == endpoint for r in requests), endpoint, timeout_s)

    def wait_until(self, seen: Callable[[list[Request]], bool], what: str, timeout_s: float = 60.0) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: seen(self.requests), timeout_s):
                raise TimeoutError(f"no {what} within {timeout_s} s; got {[r.endpoint for r in self.requests]}")


class GoldenServer:
    """`with GoldenServer() as server: stage = server.stage("name")`, then point a client at `stage.url`."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)

    def __enter__(self) -> GoldenServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def stage(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        dynamic_config: dict[str, Any] | None = None,
        old_service: bool = False,
    ) -> Stage:
        """A fresh stage. An old service answers 404 to client/config, as those before protobuf do."""
        service = Service(None if old_service else config or {}, dynamic_config or {})
        prefix = name.replace("/", ".")
        self.stages[prefix] = stage = Stage(f"http://127.0.0.1:{self.http.server_port}/{prefix}", service)
        return stage

    def handler(self) -> type[BaseHTTPRequestHandler]:
        stages = self.stages

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                request, prefix = self.received()
                stage = stages.get(prefix)
                answer = Answer(404) if stage is None else stage.answer(request)
                if answer.release is not None:
                    answer.release.wait(60)
                # A client that gave up has closed its end: nothing to tell it.
                with contextlib.suppress(ConnectionError):
                    self.send(answer)

            def send(self, answer: Answer) -> None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.headers.get("Connection") != "close":
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            do_POST = do_PUT = do_DELETE = do_GET

            def received(self) -> tuple[Request, str]:
                path, _, query = self.path.partition("?")
                prefix, _, endpoint = path.partition(PREFIX)
                headers: dict[str, str] = {}
                for name, value in self.headers.items():
                    key = name.lower()
                    headers[key] = f"{headers[key]}, {value}" if key in headers else value
                return Request(self.command, endpoint, query, headers, self.payload(headers)), prefix.lstrip("/")

            def payload(self, headers: dict[str, str]) -> bytes:
                if "chunked" not in headers.get("transfer-encoding", ""):
                    return self.rfile.read(int(headers.get("content-length", 0)))
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def log_message(self, format: str, *args: object) -> None:
                """Silence: the record is the log."""

        return Handler


def polled(request: Request) -> str:
    return str(request.json()["request_id"]) if request.endpoint == "retrieve_future" else ""


def decompressed(request: Request) -> Request:
    """The request with a readable body. A client that sends zstd brings the library that can read it."""
    if request.headers.get("content-encoding") != "zstd":
        return request
    body = importlib.import_module("zstandard").ZstdDecompressor().decompressobj().decompress(request.body)
    return Request(request.method, request.endpoint, request.query, request.headers, body)
