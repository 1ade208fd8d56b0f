"""Two clients of a shared service that mean harm: bombs, slow bodies, unread streams, samples as large as allowed.

Used by `benchmarks/hostile_load.py`. They have valid keys of their own and send nothing to any other address.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import zstandard

MODEL = "tinkex/tiny"
SLOW_CONNECTIONS = 24
STREAMS = 8
ROUND_S = 8.0
"""How long slow bodies and unread streams stay open before they are opened again."""
PROTOBUF = "application/x-protobuf"
MISSED = "MISSED ITS TARGET"
EXPECTED = {
    "protobuf bomb": (413, "too_many", "datums"),
    "zstd bomb": (400, "bad_encoding", "unfolds"),
    "json bomb": (400, "too_many", "lists and objects"),
    "nested json": (400, "bad_json", "depth limit"),
    "tar of headers": (400, "bad_archive", "members"),
    "gzip bomb": (400, "bad_encoding", "unfolds"),
}
"""Attack → status, code and a word of the message that say that it reached its target and was rejected there. An attack
that fails before that, as for a query that is not right, measures nothing."""


class HostileClient:
    """One tenant with four threads, one for each kind of attack."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._key = parts.hostname or "", parts.port or 80, key
        self._is_over = threading.Event()
        self.statuses: Counter[str] = Counter()
        """Attack and what came back → how often."""
        attacks = (self.bombs, self._slow_bodies, self._unread_streams, self._huge_samples)
        self._threads = [threading.Thread(target=self._repeat, args=(attack,), daemon=True) for attack in attacks]

    def start(self) -> None:
        _bombs()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(ROUND_S + 15)

    def _repeat(self, attack: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            try:
                attack()
            except (OSError, http.client.HTTPException) as error:
                self.statuses[f"{attack.__name__.strip('_')}: {type(error).__name__}"] += 1
            self._is_over.wait(0.2)

    def _post(
        self, path: str, body: bytes, name: str, timeout_s: float = 10.0, headers: Mapping[str, str] | None = None
    ) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        sent = {"x-api-key": self._key, "content-type": "application/json", **(headers or {})}
        try:
            connection.request("POST", path, body, sent)
            response = connection.getresponse()
            content = response.read()
            self.statuses[f"{name}: {response.status} {self._remark(name, response.status, content)}".rstrip()] += 1
            return content
        finally:
            connection.close()

    def _remark(self, name: str, status: int, content: bytes) -> str:
        """Return what the report adds to a status: the code, where an attack was rejected by what it was made for."""
        if name not in EXPECTED or status == 429:  # 429: the limits of its own tenant came first
            return ""
        expected_status, code, word = EXPECTED[name]
        text = content.decode(errors="replace")
        if status == expected_status and f'"{code}"' in text and word in text:
            return code
        return f"{MISSED} ({text[:160]})"

    # ── Small bodies that become large

    def bombs(self) -> None:
        """Send each of them once."""
        for name, path, body, headers in _bombs():
            self._post(path, body, name, headers=headers)

    # ── Connections that are kept

    def _slow_bodies(self) -> None:
        """Half of them never end their headers, half send a body of which a byte comes now and then."""
        sockets: list[socket.socket] = []
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\nx-api-key: {self._key}\r\n"
        try:
            for number in range(SLOW_CONNECTIONS):
                opened = socket.create_connection((self._host, self._port), timeout=5)
                sockets.append(opened)
                end = "content-length: 8000000\r\ncontent-type: application/json\r\n\r\n" if number % 2 else "x-a: "
                opened.sendall((head + end).encode())
            for _ in range(int(ROUND_S / 0.5)):
                if self._is_over.wait(0.5):
                    break
                for opened in sockets:
                    with contextlib.suppress(OSError):
                        opened.sendall(b"1")
            self.statuses["slow bodies: rounds"] += 1
        finally:
            for opened in sockets:
                opened.close()

    def _unread_streams(self) -> None:
        """Ask for long streams and read nothing of them."""
        sockets: list[socket.socket] = []
        asked = {"model": MODEL, "prompt": "x" * 20, "stream": True, "max_tokens": 1500, "n": 8, "ignore_eos": True}
        body = json.dumps({**asked, "logprobs": 5}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            for _ in range(STREAMS):
                opened = socket.socket()
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                opened.settimeout(5)
                opened.connect((self._host, self._port))
                sockets.append(opened)
                opened.sendall(head.encode() + body)
            self._is_over.wait(ROUND_S)
            for opened in sockets[:1]:
                first = opened.recv(64).split(b"\r\n")[0].decode(errors="replace")
                self.statuses[f"unread streams: {first}"] += 1
        finally:
            for opened in sockets:
                opened.close()

    # ── Samples

    def _huge_samples(self) -> None:
        """As many sequences and ranked tokens as a request may ask for."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [20 + number % 200 for number in range(400)]}]}
        body = {"base_model": MODEL, "prompt": prompt, "type": "sample"}
        many = {**body, "num_samples": 1024, "sampling_params": {"max_tokens": 256, "stop": []}}
        ranked = {
            **body,
            "num_samples": 64,
            "sampling_params": {"max_tokens": 128, "stop": []},
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 250,
            "topk_sample_logprobs": 250,
        }
        for name, asked in (("1024 × 256 tokens", many), ("64 × 128 tokens, k 250", ranked)):
            content = self._post("/api/v1/asample", json.dumps(asked).encode(), name)
            try:
                request_id = json.loads(content).get("request_id")
            except (ValueError, AttributeError):
                continue
            for _ in range(3):
                if request_id is None or self._is_over.is_set():
                    break
                poll = json.dumps({"request_id": request_id}).encode()
                self._post("/api/v1/retrieve_future", poll, f"result of {name}", timeout_s=60.0)


@functools.cache
def _bombs() -> list[tuple[str, str, bytes, dict[str, str]]]:
    """Make the bombs once: an attacker's processor is not the service's, but here it is the same machine."""
    compress = zstandard.ZstdCompressor(level=3).compress
    lists = b'{"model_id":"x","forward_backward_input":{"data":[' + b"[]," * (5 << 20) + b"[]]}}"
    training, zstd = "/api/v1/forward_backward", {"content-encoding": "zstd"}
    upload = f"/api/v1/import_weights?base_model={MODEL}&name=x"
    return [
        ("protobuf bomb", training, compress(b"\x1a\x00" * (8 << 20)), {**zstd, "content-type": PROTOBUF}),  # datums
        ("zstd bomb", training, compress(b"\x00" * (400 << 20)), {**zstd, "content-type": PROTOBUF}),
        ("json bomb", training, compress(lists), zstd),
        ("nested json", "/api/v1/asample", b"[" * 90_000 + b"]" * 90_000, {}),
        ("tar of headers", upload, _header_chain(4000), {"content-type": "application/x-tar"}),
        (
            "gzip bomb",
            training,
            gzip.compress(b"\0" * (64 << 20)),
            {"content-type": PROTOBUF, "content-encoding": "gzip"},
        ),
    ]


def _header_chain(count: int) -> bytes:
    """Return a tar in which every header announces a long name for the next one, which does the same."""
    block = bytearray(512)
    block[0:13] = b"././@LongLink"
    block[124:136] = b"00000000001\0"
    block[156:157] = b"L"
    block[257:265] = b"ustar  \0"
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return (bytes(block) + b"a" + b"\0" * 511) * count
