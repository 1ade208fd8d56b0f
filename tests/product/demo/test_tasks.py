"""The demos' tasks: their questions, and which answers count as right."""

from __future__ import annotations

import pytest

from tinkex.demo import opposites, orders


def test_the_test_orders_share_no_name_city_or_item_with_the_examples() -> None:
    seen = {word for number in range(2000) for word in map(str, orders.example(0, number).wanted.values())}
    for order in orders.held_out(50):
        assert not {order.wanted["name"], order.wanted["city"], order.wanted["item"]} & seen


def test_an_example_is_fixed_by_its_number_and_its_text_has_all_values() -> None:
    assert orders.example(0, 7) == orders.example(0, 7) != orders.example(1, 7)
    for order in (*orders.held_out(20), *(orders.example(0, number) for number in range(50))):
        assert all(str(value) in order.text for value in order.wanted.values())
        assert orders.is_right(order.answer, order)


@pytest.mark.parametrize("answer", ["", "{", "[]", '{"name": "Alice"}', "null", "{}"])
def test_only_exactly_the_expected_values_are_right(answer: str) -> None:
    order = orders.held_out(1)[0]
    assert not orders.is_right(answer, order)
    assert not orders.is_right(order.answer[:-1] + ', "more": 1}', order)


@pytest.mark.parametrize(
    ("answer", "points"),
    [
        (" cold.\n", 1.0),
        (" cold", 1.0),
        (' "Cold."', 1.0),
        (" cold.<|im_end|>", 1.0),
        (" cold. As a verb", 0.5),
        (" cold, and", 0.5),
        (" colder", 0.0),
        (" not cold", 0.0),
        ("", 0.0),
    ],
)
def test_one_word_earns_full_reward_more_words_half_and_another_word_none(answer: str, points: float) -> None:
    assert opposites.reward(answer, "cold") == points


def test_each_step_has_its_own_fixed_questions() -> None:
    assert opposites.questions(0, 1, 8) == opposites.questions(0, 1, 8) != opposites.questions(0, 2, 8)
    assert len(set(opposites.questions(3, 5, 8))) == 8
