"""A model hub on 127.0.0.1: one model, what huggingface_hub needs of the API, and a list of what was asked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    name: str
    files: dict[str, bytes]
    status: int = 200
    """Of the model's page; 401 and 403 come with the hub's own error codes."""
    asked: list[str] = field(default_factory=list)
    address: str = ""
    stalls: bool = False
    """Send half of each file, and the rest when the hub ends."""
    has_stalled: threading.Event = field(default_factory=threading.Event)
    is_ending: threading.Event = field(default_factory=threading.Event)

    @property
    def fetched(self) -> set[str]:
        """Files whose content was sent."""
        return {path.split(f"/resolve/{COMMIT}/")[1] for path in self.asked if f"/resolve/{COMMIT}/" in path}


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.is_ending.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._file(with_body=False)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(path)
            if path == f"/api/models/{hub.name}" and hub.status != 200:
                code = {403: "GatedRepo", 401: "RepoNotFound"}[hub.status]
                self._send(hub.status, b"{}", {"X-Error-Code": code})
            elif path == f"/api/models/{hub.name}":
                siblings = [{"rfilename": file, "size": len(body)} for file, body in hub.files.items()]
                self._json({"id": hub.name, "modelId": hub.name, "sha": COMMIT, "siblings": siblings})
            elif path.startswith(f"/api/models/{hub.name}/tree/"):
                self._json(
                    [
                        {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                        for file, body in hub.files.items()
                    ]
                )
            else:
                self._file(with_body=True)

        def _file(self, with_body: bool) -> None:
            body = hub.files.get(self.path.split("?")[0].removeprefix(f"/{hub.name}/resolve/{COMMIT}/"))
            if body is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                etag = hashlib.sha1(body).hexdigest()
                self._send(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body=with_body)

        def _json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body and hub.stalls and "ETag" in headers:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.has_stalled.set()
                hub.is_ending.wait(120)
            elif with_body:
                self.wfile.write(body)

    return Handler
