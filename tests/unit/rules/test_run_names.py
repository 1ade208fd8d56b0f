"""What a run may be called; and what `user_metadata` of a client that knows no names gives it."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.errors import ValidationError
from tinkex.rules.run_names import check_run_name, check_tags, name_in, printable_name, tags_in, with_name


@pytest.mark.parametrize("name", [5, "a\nb", "latest", " latest ", "tinker://r/weights/a", "x" * 201, b"x"])
def test_what_is_no_name_is_rejected(name: object) -> None:
    with pytest.raises(ValidationError, match=r"^name "):
        check_run_name(name)


def test_a_name_loses_the_spaces_around_it_and_an_empty_one_is_none() -> None:
    assert [check_run_name(name) for name in (None, "", "  ", " dpo, second try ", "größe")] == [
        None, None, None, "dpo, second try", "größe",
    ]  # fmt: skip


@pytest.mark.parametrize("tags", ["dpo", 5, [5], [""], ["a,b"], ["a\n"], ["x" * 65], [str(n) for n in range(33)]])
def test_what_are_no_tags_is_rejected(tags: object) -> None:
    with pytest.raises(ValidationError, match=r"^tags "):
        check_tags(tags)


def test_name_and_tags_travel_in_metadata_and_come_back() -> None:
    metadata = with_name({"team": "blue", "name": "old"}, "mine", ["a", " b ", "a"])
    assert metadata == {"team": "blue", "name": "mine", "tags": "a, b"}
    assert (name_in(metadata), tags_in(metadata)) == ("mine", ["a", "b"])
    assert with_name(None, None, None) is None and with_name({"a": "b"}, "", []) == {"a": "b"}


@pytest.mark.parametrize(
    ("metadata", "name", "tags"),
    [
        (None, None, []),
        ({"name": 5, "tags": 7}, None, []),
        ({"name": "", "run_name": "fallback"}, "fallback", []),
        ({"name": "latest"}, None, []),
        ({"name": "a\nb" + "x" * 300, "tags": ["a", 5, "b,c", "a"]}, "a b" + "x" * 197, ["a"]),
        ({"tags": " ,a,,b"}, None, ["a", "b"]),
    ],
)
def test_metadata_that_give_no_name_are_passed_over(metadata: Any, name: str | None, tags: list[str]) -> None:
    assert (name_in(metadata), tags_in(metadata)) == (name, tags)


def test_a_text_that_was_no_name_becomes_one_if_it_can() -> None:
    assert [printable_name(text) for text in (None, 5, "\x00", "a\tb", "latest")] == [None, None, None, "a b", None]
