"""Server-sent events: whatever a stream looks like and wherever it is cut, the same events come out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import APIResponseValidationError
from tinkex.settings import Config
from tinkex.settings.serve import ServeConfig
from tinkex.wire import sse
from tinkex.wire.sse import Event, SSEDecoder


def events_of(*chunks: bytes) -> list[Event]:
    decoder = SSEDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
line_ends = st.sampled_from(["\n", "\r", "\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    """A stream in any of the spellings the standard allows, with what it means."""
    out, meaning = draw(st.sampled_from(["", "\ufeff"])), []
    for _ in range(draw(st.integers(0, 4))):
        name, data = draw(lines), draw(st.lists(lines, min_size=1, max_size=3))
        identity = draw(st.none() | lines.filter(lambda text: "\0" not in text))
        fields = [f"event: {name}", *(f"data: {line}" for line in data)]
        fields += [] if identity is None else [f"id: {identity}"]
        fields.insert(draw(st.integers(0, len(fields))), ":" + draw(lines))
        out += "".join(field + draw(line_ends) for field in fields)
        is_after_cr = out[-1] == "\r"
        # An LF right after a CR would belong to it and be no line of its own.
        out += draw(line_ends.filter(lambda end: not (is_after_cr and end == "\n")))  # noqa: B023 (drawn at once)
        meaning.append(Event(name or "message", "\n".join(data)))
    return out.encode(), meaning


@given(streams(), st.lists(st.integers(0, 400)))
def test_a_stream_cut_anywhere_gives_the_same_events(stream: tuple[bytes, list[Event]], cuts: list[int]) -> None:
    content, meaning = stream
    edges = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    pieces = [content[start:end] for start, end in pairwise(edges)]
    assert events_of(*pieces) == meaning


@given(streams())
def test_a_stream_fed_byte_by_byte_gives_the_same_events(stream: tuple[bytes, list[Event]]) -> None:
    content, meaning = stream
    assert events_of(*(content[at : at + 1] for at in range(len(content)))) == meaning


def test_the_last_event_of_the_largest_sample_that_a_server_allows_is_not_refused() -> None:
    """Before: an event had at most 128 MiB, and the result of `max_sample_values` tokens has 218 MB."""
    assert ServeConfig().max_sample_values * 26 < sse.MAX_EVENT_BYTES == Config().max_response_bytes


def test_an_event_beyond_the_limit_names_the_setting() -> None:
    with pytest.raises(APIResponseValidationError, match=r"1,000 bytes.*max_response_bytes"):
        SSEDecoder(1000).feed(b"data: " + b"x" * 2000)


@given(lines, st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_an_encoded_event_reads_back_with_line_ends_as_lf(name: str, data: str) -> None:
    expected = data.replace("\r\n", "\n").replace("\r", "\n")
    assert events_of(sse.encode(name, data)) == [Event(name or "message", expected)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_every_line_end_of_the_standard_is_understood(end: bytes) -> None:
    stream = end.join([b"event: token", b"data: one", b"data: two", b"", b"data: three", b"", b""])
    assert events_of(stream) == [Event("token", "one\ntwo"), Event("message", "three")]


def test_a_crlf_split_between_two_chunks_is_one_line_end() -> None:
    assert events_of(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == [Event("message", "a\nb")]


def test_an_empty_chunk_inside_a_crlf_changes_nothing() -> None:
    assert events_of(b"data: a\r", b"", b"\n\n") == [Event("message", "a")]


def test_a_character_split_between_two_chunks_survives() -> None:
    snowman = "☃".encode()
    assert events_of(b"data: " + snowman[:1], snowman[1:2], snowman[2:] + b"\n\n") == [Event("message", "☃")]


def test_bytes_that_are_not_utf8_become_replacement_characters() -> None:
    assert events_of(b"data: a\xffb\n\n") == [Event("message", "a\ufffdb")]


def test_comments_keep_a_stream_open_and_give_no_event() -> None:
    assert events_of(sse.comment(""), sse.comment("still here"), b":no space\n\n") == []


def test_an_event_without_data_is_not_dispatched_and_its_name_is_forgotten() -> None:
    assert events_of(b"event: ping\n\ndata: x\n\n") == [Event("message", "x")]


def test_an_empty_data_line_is_an_event_with_empty_data() -> None:
    assert events_of(b"data\n\n", b"data:\n\n") == [Event("message", ""), Event("message", "")]


def test_only_one_space_after_the_colon_is_dropped() -> None:
    assert events_of(b"data:  x\n\ndata:y\n\n") == [Event("message", " x"), Event("message", "y")]


def test_unknown_fields_are_ignored() -> None:
    assert events_of(b"colour: red\ndata: x\n\n") == [Event("message", "x")]


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    mark = "\ufeff".encode()
    assert events_of(mark[:2], mark[2:] + b"data: a\n\n" + mark + b"data: b\n\n") == [Event("message", "a")]


def test_a_name_or_comment_of_two_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="one line"):
        sse.encode("a\nb", "")
    with pytest.raises(ValueError, match="one line"):
        sse.comment("a\rb")


def test_a_long_line_in_many_pieces_costs_linear_time() -> None:
    decoder = SSEDecoder()
    for _ in range(20_000):  # quadratic joining would take minutes here
        assert decoder.feed(b"data: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"[:40]) == []
    (event,) = decoder.feed(b"\n\n")
    assert len(event.data) == 20_000 * 40 - len("data: ")
