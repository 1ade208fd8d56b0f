"""Requests in OpenAI's format: what is supported, what is rejected, and with which message. No HTTP, no engine."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.engine.contract import ModelInfo
from tinkex.server.openai.chat import read_messages
from tinkex.server.openai.errors import BadField
from tinkex.server.openai.requests import read_chat, read_completion, seeds_of, spec_of

INFO = ModelInfo(name="m", folder="", vocab_size=263, max_context_length=2048, end_tokens=(257,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"50256": -100}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("structured_outputs", {"json": {}}),
        ("min_tokens", 5),
        ("continue_final_message", True),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_logprobs", 5),
        ("n", 0),
        ("n", 1000),
        ("max_tokens", 0),
        ("max_tokens", 1 << 20),
        ("max_completion_tokens", "many"),
        ("seed", 1 << 70),
        ("stop", ["", "x"]),
        ("stop", 5),
        ("stop_token_ids", [100_000]),
        ("stream", "yes"),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("min_p", 2),
        ("tools", [{"type": "retrieval"}]),
        ("messages", []),
        ("messages", "hi"),
    ],
)
def test_an_unsupported_field_is_rejected_by_name(field: str, value: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], field: value}
    with pytest.raises(BadField) as caught:
        spec_of(read_chat(body).options, INFO, None, [1, 2], 0)
    assert caught.value.param == field
    assert caught.value.detail.startswith(f"{field}: ")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "end"), ("best_of", 3), ("prompt", []), ("prompt", [1, "a"]), ("prompt", [300]), ("prompt", ""),
     ("prompt", [[1], "a"]), ("prompt", [True]), ("prompt", None), ("prompt", [-1]), ("logprobs", 21), ("echo", 1)],
)  # fmt: skip
def test_an_invalid_completion_is_rejected_by_field(field: str, value: Any) -> None:
    with pytest.raises(BadField) as caught:
        asked = read_completion({"model": "m", "prompt": "ab", field: value})
        for prompt in asked.prompts:
            spec_of(asked.options, INFO, None, list(prompt.encode()) if isinstance(prompt, str) else prompt, 0)
    assert caught.value.param.startswith(field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "king", "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0]"),
        ("hi", "messages[0]"),
    ],
)
def test_an_invalid_message_is_rejected_with_its_index(message: Any, param: str) -> None:
    with pytest.raises(BadField) as caught:
        read_messages([message])
    assert caught.value.param == param


def test_every_setting_reaches_the_engine() -> None:
    given = {
        "n": 3, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -5,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "stop": ["a", "b"],
    }  # fmt: skip
    options = read_completion({"model": "m", "prompt": "ab", "logprobs": 4, "echo": True, **given}).options
    spec = spec_of(options, INFO, "folder", [1, 2], 9, is_echoed=True)
    assert (spec.base, spec.weights, spec.prompt, spec.seed) == ("m", "folder", (1, 2), 9)
    assert (spec.num_samples, spec.max_tokens, spec.stop_strings, spec.stop_tokens) == (3, 7, ("a", "b"), (257,))
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (0.5, 0.9, 40, 0.1)
    assert (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty) == (1.1, 0.2, -0.3)
    assert (spec.prompt_logprobs, spec.topk_prompt, spec.topk_sample) == (True, 4, 4)
    assert options.seed == -5


def test_null_means_absent() -> None:
    plain = read_completion({"model": "m", "prompt": "ab"})
    names = ("n", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "echo", "stream", "logit_bias")
    assert read_completion({"model": "m", "prompt": "ab", **dict.fromkeys(names)}) == plain
    assert plain.options.max_tokens == 16 and plain.options.top_logprobs is None


def test_top_p_of_zero_keeps_only_the_likeliest_token() -> None:
    options = read_completion({"model": "m", "prompt": "ab", "top_p": 0}).options
    assert (options.filters["top_p"], options.filters["top_k"]) == (1.0, 1)


def test_a_stream_waits_for_logprobs_that_come_with_the_result() -> None:
    def is_streamed(is_echoed: bool, **fields: Any) -> bool:
        options = read_completion({"model": "m", "prompt": "ab", "stream": True, **fields}).options
        return spec_of(options, INFO, None, [1], 0, is_echoed=is_echoed).is_streamed

    assert is_streamed(False) and is_streamed(False, logprobs=0) and is_streamed(True)
    assert not is_streamed(False, logprobs=1) and not is_streamed(True, logprobs=0)


def test_each_prompt_gets_its_own_reproducible_seed() -> None:
    assert seeds_of(7, 1) == [7]
    assert seeds_of(7, 5) == seeds_of(7, 5) and len(set(seeds_of(7, 5))) == 5
    assert all(0 <= seed < 2**63 for seed in (*seeds_of(-1, 3), *seeds_of(None, 3)))


def test_calls_of_the_assistant_are_given_to_the_template_as_objects() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "!"}]
    messages = read_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": parts},
        ]
    )
    assert messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert messages[0]["content"] == ""
    assert messages[1] == {"role": "tool", "content": "2\n!", "tool_call_id": "1"}
    with pytest.raises(BadField, match="not JSON"):
        read_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])
