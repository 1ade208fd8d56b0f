"""Small bodies that would become large ones: rejected before objects are made, while others are served."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
import zstandard

from tests.unit.server.conftest import Served
from tinkex.rules import limits
from tinkex.server.http.errors import RequestRejected
from tinkex.server.http.fields import parse_json_object, parse_json_pass
from tinkex.server.training.checks import check_data
from tinkex.types.inputs import Datum, ModelInput

ZSTD = {"content-encoding": "zstd"}
PROTO = {"content-type": "application/x-protobuf"}
BOMBS: dict[str, Callable[[], tuple[str, bytes, dict[str, str]]]] = {
    "four million empty datums": lambda: ("forward_backward", b"\x1a\x00" * 4_000_000, PROTO),
    "a datum of two million empty chunks": lambda: (
        "forward_backward",
        b"\x1a" + _varint(4_000_000) + b"\x0a\x00" * 2_000_000,
        PROTO,
    ),
    "empty lists in a session": lambda: ("create_session", b'{"tags": [' + b"[]," * 20_000_000 + b"[]]}", {}),
    "empty lists in a pass": lambda: (
        "forward_backward",
        b'{"forward_backward_input": {"data": [' + b"[]," * 4_000_000 + b"[]]}}",
        {},
    ),
    "empty objects in a pass": lambda: (
        "forward",
        b'{"forward_input": {"data": [' + b"{}," * 4_000_000 + b"{}]}}",
        {},
    ),
    "a hundred megabytes of zeros": lambda: ("forward_backward", bytes(100 << 20), PROTO),
}


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
    path, body, headers = BOMBS[name]()
    folded = zstandard.compress(body)
    del body
    began = time.monotonic()
    answer = served.ask("POST", path, folded, headers=headers | ZSTD)
    assert answer.status in (400, 413), answer
    assert "detail" in answer.json
    assert time.monotonic() - began < 3  # with much slack: it is decompressed, and no more


def test_a_call_with_more_datums_than_advertised_is_rejected(served: Served) -> None:
    most = served.ask("POST", "client/config", b"{}").json["fwdbwd_max_chunk_len"]
    assert most == limits.MAX_DATUMS
    model = replace(served.service.catalog.find("tiny"), vocab_size=264, max_context_length=512)
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    assert check_data([datum] * most, "cross_entropy", None, model) == 2 * most
    with pytest.raises(RequestRejected, match="at most 1024"):
        check_data([datum] * (most + 1), "cross_entropy", None, model)


@pytest.mark.parametrize("extra", [b"", b',"forward_input":{"data":[{"b":2}]}', b',"other":{"data":[{"c":3}]}'])
def test_a_pass_that_is_parsed_in_pieces_is_the_same_as_whole(extra: bytes) -> None:
    datum = orjson.dumps({"tokens": list(range(3000)), "text": 'a "quote" \\ and ] } brackets'})
    body = b'{"forward_input":{"loss_fn":"x","data":[' + b",".join([datum] * 300) + b'],"n":1}' + extra + b"}"
    assert parse_json_pass(body, "forward_input") == parse_json_object(body)
