"""Reads the fields of a JSON body. Pure; an error names the field that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

import orjson

from tinkex.errors import ValidationError
from tinkex.server.http.errors import RequestRejected, bad_request
from tinkex.types.base import Value
from tinkex.types.coerce import is_lenient
from tinkex.types.number_pieces import NumberPieces
from tinkex.types.tensor import INPUT_DTYPES
from tinkex.types.weights import ParsedCheckpointTinkerPath
from tinkex.wire import json_codec
from tinkex.wire.scan import (
    NumberList,
    count_json_containers,
    count_json_elements,
    cut_json_numbers,
    find_json_numbers,
    split_json_datums,
)

V = TypeVar("V", bound=Value)

MAX_METADATA_BYTES = 64 * 1024
"""Metadata is read with every list."""
MAX_CONTAINERS = 100_000
"""Lists and objects in one body. A pass of 1,024 datums has some 12,000; parsing so many takes 15 ms."""
MAX_ELEMENTS = 1 << 26
"""Numbers in a training pass. A legal call has at most three inputs (kl_divergence) of `max_targets` numbers, with the
default 50 million, and its tokens. Packed they take 8 bytes each."""
MAX_INDICES = 1 << 24
"""Indices of all sparse tensors of a pass, which stay lists of 40 bytes each. A tensor is sent sparse if that is
smaller: with the default `max_targets`, targets and their weights then have at most 8 million indices each."""
MAX_PARSED_AT_ONCE = 1 << 20
"""Elements of what is parsed in one call: a datum without its long lists of numbers, which has some hundred, or a body
that cannot be cut into datums, which no client sends. The call holds the interpreter for 20 ms."""
UNCUT_BYTES = 1 << 20
"""Of a datum that is parsed in one call: 10 ms."""
LONG_LIST_BYTES = 1 << 14
PIECE_BYTES = 1 << 18
"""Text of numbers that is parsed at once: 3 ms, and 5 MB of objects."""


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Decode JSON text that must be an object."""
    _check_containers(content)
    return _decode_object(content)


class JsonPass(NamedTuple):
    """A training pass from JSON. If its data are rejected, the error, and the body without them."""

    body: dict[str, Any]
    error: RequestRejected | None = None


def parse_json_pass(content: bytes, name: str, read_datum: Callable[[Any], Any] = lambda datum: datum) -> JsonPass:
    """Decode the JSON text of a training pass datum by datum. `name` is the field that has the list `data`.

    Each piece holds the interpreter only briefly; a body of 8 MB parsed at once would stop all others for 60 ms. What
    `read_datum` makes of a datum is kept instead of it: the numbers as objects take twenty times as much as packed.
    """
    _check_containers(content)
    if (pieces := split_json_datums(content, name.encode())) is None:
        return JsonPass(_decode_whole(content, name))  # of another form: the error names what is wrong
    _check_elements(pieces.envelope, MAX_PARSED_AT_ONCE, "The body, its datums not counted,")
    mark, hole = token_hex(16), pieces.hole
    body = _decode_object(b'%s"%s"%s' % (pieces.envelope[:hole], mark.encode(), pieces.envelope[hole:]))
    batch = body.get(name)
    if not isinstance(batch, dict) or batch.get("data") != [mark]:  # the field appears twice: the last one counts
        return JsonPass(_decode_whole(content, name))
    try:
        _check_elements(content, MAX_ELEMENTS, "The body")
        data = [read_datum(_decode_datum(datum)) for datum in pieces.datums]
    except RequestRejected as error:
        if error.code != "too_many":
            raise
        return JsonPass(body, error)
    return JsonPass(body | {name: batch | {"data": data}})


def _decode_whole(content: bytes, name: str) -> dict[str, Any]:
    where = f"The body does not have one list {name}.data of objects, and"
    _check_elements(content, MAX_PARSED_AT_ONCE, where)
    return _decode_object(content)


class DatumReader:
    """Makes a value of each datum, in order, so that its numbers are packed before the next one is parsed.

    A datum that does not fit stays as it is: the error of the whole pass names its place. Then none behind it is kept.
    """

    def __init__(self, datum_type: type[Value]) -> None:
        self._type = datum_type
        self._has_failed = False
        self._indices = 0

    def __call__(self, datum: dict[str, Any]) -> Any:
        if self._has_failed:
            return {}
        try:
            value: Any = parse_as(self._type, datum)
        except RequestRejected:
            self._has_failed = True
            return datum
        for tensor in value.loss_fn_inputs.values():
            self._indices += len(tensor.sparse_crow_indices or ()) + len(tensor.sparse_col_indices or ())
        if self._indices > MAX_INDICES:
            raise _too_many_indices()
        return value


def _decode_datum(content: bytes) -> dict[str, Any]:
    """Decode the JSON text of a datum. In a large one, long lists of numbers become `NumberPieces`."""
    if len(content) <= UNCUT_BYTES:
        return _decode_object(content)
    lists = find_json_numbers(content, _LISTS_OF_NUMBERS, LONG_LIST_BYTES)
    mark, parts, behind = token_hex(16), [], 0  # not to be guessed: a text of the datum must not become a list
    for index, numbers in enumerate(lists):
        parts += [content[behind : numbers.start], b'"%s %d"' % (mark.encode(), index)]
        behind = numbers.end
    rest = b"".join([*parts, content[behind:]])
    _check_elements(rest, MAX_PARSED_AT_ONCE, "A datum, its tokens and inputs not counted,")
    datum = _decode_object(rest)
    read = {f"{mark} {index}": _decode_numbers(content, numbers) for index, numbers in enumerate(lists)}
    objects: list[Any] = [datum]
    while objects:
        node = objects.pop()
        for key, value in node.items() if isinstance(node, dict) else ():
            if isinstance(value, str) and value in read:
                node[key] = read[value]
        objects += (
            value for value in (node.values() if isinstance(node, dict) else node) if type(value) in (dict, list)
        )
    return datum


_INDICES = frozenset((b"sparse_crow_indices", b"sparse_col_indices"))
_LISTS_OF_NUMBERS = frozenset((b"tokens", b"data", *_INDICES, *(name.encode() for name in INPUT_DTYPES)))


def _decode_numbers(content: bytes, numbers: NumberList) -> list[Any] | NumberPieces:
    """Read a list of numbers once, to see whether it is JSON. Only indices are kept as objects."""
    text = content[numbers.start : numbers.end]
    read = partial(_number_pieces, text)
    if numbers.key not in _INDICES:
        return NumberPieces(sum(map(len, read())), read)
    indices: list[Any] = []
    for piece in read():
        indices += piece
        if len(indices) > MAX_INDICES:
            raise _too_many_indices()
    return indices


def _number_pieces(text: bytes) -> Iterator[list[Any]]:
    for piece in cut_json_numbers(text, 0, len(text), PIECE_BYTES):
        numbers = _decode(piece)
        if not numbers:
            raise bad_request("The body is not JSON: a list of numbers has a comma with nothing behind it.", "bad_json")
        yield numbers


def _too_many_indices() -> RequestRejected:
    return bad_request(f"The sparse tensors have more than {MAX_INDICES:,} indices. Send fewer per call.", "too_many")


def _check_elements(content: bytes, max_elements: int, what: str) -> None:
    """Reject JSON text that would become too many objects, before any of them is made."""
    if len(content) > max_elements and count_json_elements(content) > max_elements:
        raise bad_request(f"{what} has more than {max_elements:,} elements. Send less at once.", "too_many")


def _check_containers(content: bytes) -> None:
    """Reject JSON text with more lists and objects than any honest body has, before any of them is made."""
    if count_json_containers(content) > MAX_CONTAINERS:
        raise bad_request(
            f"The body has more than {MAX_CONTAINERS:,} lists and objects. Send less at once.", "too_many"
        )


def _decode_object(content: bytes) -> dict[str, Any]:
    body = _decode(content) if content.strip() else {}
    if not isinstance(body, dict):
        raise bad_request(f"The body must be a JSON object, not {type(body).__name__}.", "bad_json")
    return body


def _decode(content: bytes) -> Any:
    try:
        body = json_codec.decode(content)
        if b"NaN" in content or b"Infinity" in content:
            # Only a more lenient parser reads these: make sure of UTF-8, and of numbers within 64 bits.
            orjson.dumps(body)
    except RecursionError:
        raise bad_request("The body is not JSON that can be read: it is nested too deeply.", "bad_json") from None
    except (ValueError, TypeError) as error:
        raise bad_request(f"The body is not JSON: {error}", "bad_json") from None
    return body


def parse_as(cls: type[V], body: dict[str, Any]) -> V:
    """Read a JSON object as one of our types. Unknown fields are ignored."""
    token = is_lenient.set(True)
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        raise bad_request(str(error), "invalid") from None
    finally:
        is_lenient.reset(token)


def optional_object(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} must be an object or null, not {type(value).__name__}.", f"bad_{name}")
    return value


def require_text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{name} is missing: it must be text.", "invalid")
    return value


def require_checkpoint_path(body: dict[str, Any], name: str) -> str:
    """Return a field that must be the path of a checkpoint."""
    return ParsedCheckpointTinkerPath.from_tinker_path(require_text(body, name)).tinker_path


def require_seq(body: dict[str, Any], name: str) -> int:
    """Return a field that must be a number which the client counts from 0."""
    number = body.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise bad_request(f"{name} must be a whole number from 0 on, got {str(number)[:50]!r}.", "bad_seq_id")
    return number


def parse_metadata(body: dict[str, Any]) -> dict[str, Any]:
    metadata = body.get("user_metadata") or {}
    if not isinstance(metadata, dict) or len(orjson.dumps(metadata)) > MAX_METADATA_BYTES:
        raise bad_request(
            f"user_metadata must be an object of at most {MAX_METADATA_BYTES} bytes as JSON.", "bad_metadata"
        )
    return metadata
