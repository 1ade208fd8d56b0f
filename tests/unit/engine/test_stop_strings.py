"""Stop strings on tokenizers of each kind: bytes, byte-level merges, sentencepiece with spaces and byte fallback."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinkex.engine.contract import EngineFault
from tinkex.engine.models import tiny
from tinkex.engine.sampling.stop_strings import REPLACEMENT, StopStrings, load_tokenizer


def byte_tokenizer() -> Any:
    return tiny.tokenizer()


def sentencepiece_tokenizer() -> Any:
    """As Llama 2's: ▁ for spaces, bytes for what is not in the vocabulary, and the first space of a text goes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁", "lo", "▁Hel", "END", "."]
    made = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return made


def merged_tokenizer() -> Any:
    """Byte-level, with tokens that end inside a character and tokens that hold one's end and more."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {text: _spell(text) for text in (b" \xf0\x9f", b"\x98\x80!", b"ab", b"cd")}
    pieces = [*letters, *spelled.values()]
    made = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    return made


def _spell(content: bytes) -> str:
    return "".join(tiny._byte_letters()[byte] for byte in content)


class ByteTokenizer:
    """Token n is piece n of a text's bytes, wherever it was cut."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "replace")


def stops_at(tokenizer: Any, strings: list[str], tokens: list[int], prompt: list[int] | None = None) -> int | None:
    """The place of the token that ends the sequence, or None."""
    watcher = StopStrings(tokenizer, strings, prompt if prompt is not None else [0])
    return next((place for place, token in enumerate(tokens) if watcher.add_token(token)), None)


def test_a_stop_string_spans_tokens_and_ends_with_the_last_of_them() -> None:
    tokens = list(b"one\n\nHuman: two")
    assert stops_at(byte_tokenizer(), ["\n\nHuman:"], tokens) == tokens.index(ord(":"))


def test_the_first_of_several_stop_strings_wins() -> None:
    assert stops_at(byte_tokenizer(), ["zzz", "cd", "bcd"], list(b"abcde")) == 3


def test_a_string_that_never_occurs_never_stops() -> None:
    assert stops_at(byte_tokenizer(), ["abd"], list(b"abcabcab")) is None


def test_a_stop_string_may_end_inside_a_token() -> None:
    tokenizer = merged_tokenizer()
    tokens = [tokenizer.token_to_id("ab"), tokenizer.token_to_id("cd")]
    assert stops_at(tokenizer, ["bc"], tokens) == 1
    assert stops_at(tokenizer, ["a"], tokens) == 0


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    assert stops_at(byte_tokenizer(), ["stop"], list(b"ping"), prompt=list(b"sto")) is None
    assert stops_at(byte_tokenizer(), ["stop"], list(b"going"), prompt=list(b"stop")) is None


@pytest.mark.parametrize("text", ["é", "€", "😀", "日本"])
def test_a_character_of_several_bytes_stops_with_its_last_byte(text: str) -> None:
    tokens = list(f"ab{text}c".encode())
    assert stops_at(byte_tokenizer(), [text], tokens) == 1 + len(text.encode())


def test_half_a_character_does_not_match() -> None:
    # The first three bytes of 😀 alone must not count as a replacement character, nor as anything else.
    assert stops_at(byte_tokenizer(), ["\ufffd"], list("😀".encode())) is None


def test_tokens_that_end_inside_characters_are_put_together() -> None:
    tokenizer = merged_tokenizer()
    tokens = [tokenizer.token_to_id(_spell(part)) for part in (b" \xf0\x9f", b"\x98\x80!")]
    assert stops_at(tokenizer, ["😀!"], tokens) == 1
    assert stops_at(tokenizer, [" "], tokens) == 0


def test_a_character_begun_by_the_prompt_counts_when_the_sample_ends_it() -> None:
    head, tail = "😀".encode()[:2], "😀".encode()[2:]
    assert stops_at(byte_tokenizer(), ["😀"], list(tail), prompt=list(b"a" + head)) == 1


def test_bytes_that_never_make_a_character_do_not_hide_what_follows() -> None:
    assert stops_at(byte_tokenizer(), ["end"], [0xF0] * 30 + list(b"the end")) == 36


def test_leading_spaces_of_sentencepiece_tokens_are_kept() -> None:
    tokenizer = sentencepiece_tokenizer()
    hello, world, end = (tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁world", "END"))
    assert stops_at(tokenizer, [" world"], [hello, world], prompt=[end]) == 1
    assert stops_at(tokenizer, [" Hello"], [hello], prompt=[end]) == 0
    assert stops_at(tokenizer, ["Helloworld"], [hello, world], prompt=[end]) is None
    assert stops_at(tokenizer, ["o w"], [hello, world] * 20, prompt=[end]) == 1


def test_byte_fallback_makes_characters() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é!".encode()]
    assert stops_at(tokenizer, ["é"], [tokenizer.token_to_id("lo"), *tokens]) == 2


def test_special_tokens_have_a_text_too() -> None:
    assert stops_at(byte_tokenizer(), ["<|eos|>"], [*b"ab", tiny.EOS]) == 2


def test_a_long_text_is_matched_wherever_the_string_stands() -> None:
    text = "wörd " * 300
    for place in (0, 7, 500, 1200):
        tokens = list((text[:place] + "S😀P" + text[place:]).encode())
        assert stops_at(byte_tokenizer(), ["S😀P"], tokens) == len((text[:place] + "S😀P").encode()) - 1


@given(
    st.text("aabé😀", max_size=80),
    st.lists(st.integers(1, 9), min_size=5),
    st.lists(st.text("aabé😀", min_size=3, max_size=6)),
    st.lists(st.tuples(st.integers(0, 70), st.integers(3, 40)), min_size=1),
)
def test_a_sequence_stops_where_a_search_of_the_whole_text_finds_a_string(
    text: str, sizes: list[int], anything: list[str], parts: list[tuple[int, int]]
) -> None:
    """Wherever the bytes of the text are cut into tokens, also inside characters."""
    strings = [*anything, *(text[first : first + count] or "é" for first, count in parts)]
    content, pieces = text.encode(), []
    for size in sizes:
        pieces.append(content[:size])
        content = content[size:]
    pieces = [piece for piece in [*pieces, content] if piece]
    tokenizer = ByteTokenizer(pieces)
    places = range(len(pieces))
    so_far = [tokenizer.decode(range(place + 1), skip_special_tokens=False).rstrip(REPLACEMENT) for place in places]
    expected = next((place for place in places if any(string in so_far[place] for string in strings)), None)
    assert stops_at(tokenizer, strings, list(places), prompt=[]) == expected


@pytest.mark.parametrize("length", range(1, 70))
def test_a_stop_string_of_any_length_is_found_beside_a_longer_one(length: int) -> None:
    text = "".join(chr(code) for code in range(33, 127))
    assert stops_at(byte_tokenizer(), ["~" * 100, text[9 : 9 + length]], list(text.encode())) == 8 + length


def test_bytes_that_make_no_character_count_as_text_after_eight_tokens() -> None:
    """Before: they were looked at with the token after, and then what was before them had been dropped."""
    tokens = [*b"xy", *[0xF0] * 8, *b"ab"]
    assert stops_at(byte_tokenizer(), [f"xy{REPLACEMENT}"], tokens) == 9
    assert stops_at(byte_tokenizer(), [f"{REPLACEMENT}a"], tokens) == 10


@pytest.mark.timing
def test_short_stop_strings_beside_a_long_one_cost_microseconds_per_token() -> None:
    """Before: the tail, as long as the longest string, was searched for each of them: 3 ms per row and token."""
    strings = [*(f"a{number:03d}aaaaaa" for number in range(255)), "a" * 3999 + "b"]
    watcher = StopStrings(ByteTokenizer([b"a" * 20]), strings, [])  # type: ignore[arg-type]
    assert not any(watcher.add_token(0) for _ in range(200))  # the tail is full now
    began = time.process_time()
    assert not any(watcher.add_token(0) for _ in range(300))
    assert time.process_time() - began < 0.1


def test_a_folder_without_a_tokenizer_is_reported_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"some/model has no tokenizer\.json.*stop token ids") as fault:
        load_tokenizer(str(tmp_path), "some/model")
    assert str(tmp_path) not in str(fault.value)
