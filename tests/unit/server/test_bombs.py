"""Small bodies that would become large ones: rejected before objects are made, while others are served."""

from __future__ import annotations

import gc
import gzip
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
import zstandard

from tests.unit.server.conftest import Served
from tinkex.rules import ranges
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.fields import parse_json_object, parse_json_pass
from tinkex.server.training.checks import check_data
from tinkex.types.inputs import Datum, ModelInput

ZSTD = {"content-encoding": "zstd"}
PROTO = {"content-type": "application/x-protobuf"}
MAX_GROWTH_MB = 150
"""Bombs become 16 MB of body at most, before they are rejected for their ratio. Measured: tokens, which are packed
before their count is known to be wrong, take 90 MB with their body, all others 50. Before, those of numbers took 154
to 490."""


ONES = b"1," * 7_500_000 + b"1"


class Bomb(NamedTuple):
    path: str
    make: Callable[[], bytes]
    headers: dict[str, str]
    expected: tuple[int, str]


BOMBS: dict[str, Bomb] = {
    "four million empty datums": Bomb("forward_backward", lambda: b"\x1a\x00" * 4_000_000, PROTO, (413, "too_many")),
    "a datum of two million empty chunks": Bomb(
        "forward_backward", lambda: _field(3, b"\x0a\x00" * 2_000_000), PROTO, (413, "too_many")
    ),
    "a tensor of fifteen million extents": Bomb(
        "forward_backward", lambda: _datum_of_tensor(_field(4, b"\x01" * 15_000_000)), PROTO, (413, "too_many")
    ),
    "a tensor of seven million extents, not packed": Bomb(
        "forward", lambda: _datum_of_tensor(b"\x20\x01" * 7_500_000), PROTO, (413, "too_many")
    ),
    "empty lists in a session": Bomb(
        "create_session", lambda: b'{"tags": [' + b"[]," * 20_000_000 + b"[]]}", {}, (400, "bad_encoding")
    ),
    "empty lists in a pass": Bomb(
        "forward_backward",
        lambda: b'{"forward_backward_input": {"data": [' + b"[]," * 4_000_000 + b"[]]}}",
        {},
        (400, "too_many"),
    ),
    "empty objects in a pass": Bomb(
        "forward", lambda: b'{"forward_input": {"data": [' + b"{}," * 4_000_000 + b"{}]}}", {}, (400, "too_many")
    ),
    "a datum of fifteen megabytes of numbers": Bomb(
        "forward", lambda: _json_pass(b'{"what": [' + ONES + b"]}"), {}, (400, "too_many")
    ),
    "a datum of fifteen megabytes of tokens": Bomb(
        "forward", lambda: _json_pass(_json_datum(ONES)), {}, (400, "invalid")
    ),
    "fifteen megabytes of numbers, and data given twice": Bomb(
        "forward", lambda: _json_pass(_json_datum(ONES), b',"data": []'), {}, (400, "too_many")
    ),
    "fifteen megabytes of numbers beside the datums": Bomb(
        "forward", lambda: _json_pass(b"", b', "what": [' + ONES + b"]"), {}, (400, "too_many")
    ),
    "fifteen megabytes of numbers that are no datums": Bomb(
        "forward", lambda: b'{"forward_input": [' + ONES + b"]}", {}, (400, "too_many")
    ),
    "a hundred megabytes of zeros": Bomb("forward_backward", lambda: bytes(100 << 20), PROTO, (400, "bad_encoding")),
}


def _json_pass(datums: bytes, more: bytes = b"") -> bytes:
    return b'{"forward_input": {"loss_fn": "cross_entropy", "data": [' + datums + b"]" + more + b"}}"


def _json_datum(tokens: bytes) -> bytes:
    return b'{"model_input": {"chunks": [{"tokens": [' + tokens + b'], "type": "encoded_text"}]}}'


def _datum_of_tensor(tensor: bytes) -> bytes:
    return _field(3, _field(2, _field(1, b"weights") + _field(2, tensor)))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.timing
@pytest.mark.parametrize("name", BOMBS)
def test_a_few_hundred_bytes_do_not_become_gigabytes(served: Served, name: str) -> None:
    """Before: 756 bytes took 40 s and 1.4 GB, 5.8 kB of JSON blocked every request for 9.6 s."""
    bomb = BOMBS[name]
    folded = zstandard.compress(bomb.make())
    gc.collect()
    began, before_mb = time.monotonic(), _peak_mb(reset=True)
    answer = served.ask("POST", bomb.path, folded, headers=bomb.headers | ZSTD)
    took_s, growth_mb = time.monotonic() - began, _peak_mb() - before_mb
    assert (answer.status, answer.json["code"]) == bomb.expected, answer
    assert took_s < 3  # with much slack: it is decompressed, and no more
    assert growth_mb < MAX_GROWTH_MB


@pytest.mark.parametrize("folded", [zstandard.compress(bytes(12 << 20)), gzip.compress(bytes(20 << 20))])
def test_a_tenant_whose_bodies_became_too_much_waits_and_another_does_not(
    serve: Callable[..., Served], folded: bytes
) -> None:
    """Before: two clients with bombs of a few kilobytes took half of the server's processor time, for as long as they
    sent them. A body that is rejected half-way counts as well as one that is read."""
    alice, bob = "tml-alice-0123456789", "tml-bob-0123456789ab"
    served = serve(api_keys=(alice, bob), max_decompressed_per_s=1 << 20)
    encoding = {"content-encoding": "gzip" if folded[:2] == b"\x1f\x8b" else "zstd"}
    codes = []
    for _ in range(3):
        answer = served.ask("POST", "forward_backward", folded, key=bob, headers=PROTO | encoding)
        codes.append(answer.status)
    assert codes[0] in (400, 413) and codes[-1] == 429, codes
    assert answer.json["code"] == "too_many_decompressed" and int(answer.headers["retry-after"]) > 1
    assert served.ask("POST", "forward_backward", folded, key=alice, headers=PROTO | encoding).status == codes[0]
    served.clock.advance(int(answer.headers["retry-after"]))
    assert served.ask("POST", "forward_backward", folded, key=bob, headers=PROTO | encoding).status == codes[0]


def _peak_mb(*, reset: bool = False) -> float:
    """Return the most memory that this process has had since the last reset. 0 where the system does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def test_a_call_with_more_datums_than_advertised_is_rejected(served: Served) -> None:
    most = served.ask("POST", "client/config", b"{}").json["fwdbwd_max_chunk_len"]
    assert most == ranges.MAX_DATUMS
    model = replace(served.service.catalog.find("tiny"), vocab_size=264, max_context_length=512)
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    assert check_data([datum] * most, "cross_entropy", None, model) == 2 * most
    with pytest.raises(RequestRejected, match="at most 1024"):
        check_data([datum] * (most + 1), "cross_entropy", None, model)


@pytest.mark.parametrize(
    "extra",
    [
        b"",
        b',"forward_input":{"data":[{"b":2}]}',
        b',"forward_input":{"data":[]}',
        b',"forward_input":{"loss_fn":"x"}',
        b',"other":{"data":[{"c":3}]}',
    ],
)
def test_a_pass_that_is_parsed_in_pieces_is_the_same_as_whole(extra: bytes) -> None:
    datum = orjson.dumps({"tokens": list(range(3000)), "text": 'a "quote" \\ and ] } brackets'})
    body = b'{"forward_input":{"loss_fn":"x","data":[' + b",".join([datum] * 300) + b'],"n":1}' + extra + b"}"
    assert parse_json_pass(body, "forward_input") == (parse_json_object(body), None)
