"""The header that carries what a custom loss returned: bounded, ASCII, and read only if it is right."""

from __future__ import annotations

import math

import pytest

from tinkex.errors import ValidationError
from tinkex.server.cluster.middleware import NOT_SENT
from tinkex.wire.custom_loss import LOSS_HEADER, MAX_BYTES, PASS_HEADER, decode_custom_loss, encode_custom_loss


def test_every_finite_number_survives_and_others_are_null() -> None:
    metrics = {"margin": 0.1 + 0.2, "größe": 3, "nan": math.nan, "inf": -math.inf, "beyond": 10**400}
    text = encode_custom_loss(1 / 3, metrics)
    assert text.isascii() and "\n" not in text
    assert decode_custom_loss(text) == {
        "loss": 1 / 3,
        "metrics": {"margin": 0.1 + 0.2, "größe": 3.0, "nan": None, "inf": None, "beyond": None},
    }
    assert decode_custom_loss(encode_custom_loss(math.nan, {}))["loss"] is None


def test_metrics_that_do_not_fit_are_left_out_and_the_loss_stays() -> None:
    text = encode_custom_loss(2.0, {f"metric {number}\n{'x' * 300}": 1.0 for number in range(100)})
    assert len(text) <= MAX_BYTES
    read = decode_custom_loss(text)
    assert read["loss"] == 2.0 and 10 < len(read["metrics"]) < 100


@pytest.mark.parametrize(
    "text",
    ["", "[]", "1", "{}", '{"loss":1}', '{"loss":1,"metrics":[]}', '{"loss":true,"metrics":{}}', "[" * 4000,
     '{"loss":"1","metrics":{}}', '{"loss":NaN,"metrics":{}}', '{"loss":1e999,"metrics":{}}', "x" * 5000,
     '{"loss":1,"metrics":{"a":{}}}', '{"loss":1,"metrics":{},"more":1}', f'{{"loss":{"9" * 400},"metrics":{{}}}}'],
)  # fmt: skip
def test_anything_else_is_rejected_with_the_headers_name(text: str) -> None:
    with pytest.raises(ValidationError, match=LOSS_HEADER) as caught:
        decode_custom_loss(text)
    assert len(str(caught.value)) < 400


def test_the_headers_pass_from_one_server_of_a_cluster_to_another() -> None:
    assert not NOT_SENT & {PASS_HEADER.encode(), LOSS_HEADER.encode()}
