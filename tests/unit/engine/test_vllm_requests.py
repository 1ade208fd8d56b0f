"""A request in vLLM's words and its output in ours, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tinkex.engine.contract import EngineFault, ModelInfo, Proof, SampleSpec, Tokens, read_sample, sample_frame
from tinkex.engine.vllm.launch import program
from tinkex.engine.vllm.requests import (
    Collector,
    check_prompt,
    lack_reason,
    ranked,
    sampling_arguments,
    spread_seed,
)
from tinkex.engine.vllm.sampler import engine_arguments

MODEL = ModelInfo(name="m", folder="/models/m", vocab_size=100, max_context_length=32)
SPEC = SampleSpec(base="m", prompt=(1, 2, 3), seed=7, stop_tokens=(9,))


@dataclass
class Entry:
    logprob: float
    rank: int | None


@dataclass
class Sent:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Entry]] | None = None
    finish_reason: str | None = None
    text: str = field(default="")


def place(token: int, logprob: float, **others: float) -> dict[int, Entry]:
    """One position: the token that is there, of rank 3, and tokens of rank 1 and 2."""
    best = {int(name[1:]): Entry(value, rank) for rank, (name, value) in enumerate(others.items(), 1)}
    return {token: Entry(logprob, 3), **best}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"alt_k": 2}, "prompt_alt_tokens_k"),
        ({"targets": ((1,), (2,))}, "target_prompt_logprobs"),
        ({"prompt_logprobs": True}, "log-probabilities of the prompt"),
        ({"topk_prompt": 3}, "log-probabilities of the prompt"),
        ({"max_tokens": 0}, "a request that draws no token"),
        ({"num_samples": 0}, "a request that draws no token"),
        ({"prompt": (1,) * 32}, "a prompt that fills the context"),
        ({"prompt": (1,) * 31}, None),
        ({"temperature": 0.0}, None),
        ({"temperature": 0.005}, "a temperature between 0 and 0.01"),
    ],
)
def test_what_vllm_does_not_offer_is_named(change: dict[str, Any], reason: str | None) -> None:
    assert lack_reason(replace(SPEC, **change), MODEL) == reason


def test_a_request_keeps_its_meaning() -> None:
    spec = replace(SPEC, num_samples=3, max_tokens=5, temperature=0.7, top_p=0.9, stop_strings=("a", ""), topk_sample=4)
    given = sampling_arguments(spec, 100)
    assert (given["n"], given["max_tokens"], given["temperature"], given["top_p"]) == (3, 5, 0.7, 0.9)
    assert given["top_k"] == -1 and given["logprobs"] == 4
    assert given["stop"] == ["a"] and given["stop_token_ids"] == [9] and given["detokenize"]
    assert given["ignore_eos"] and given["include_stop_str_in_output"]


def test_no_more_ranked_tokens_are_asked_for_than_there_are() -> None:
    assert sampling_arguments(replace(SPEC, topk_sample=1000), 100)["logprobs"] == 100


def test_requests_with_neighbouring_seeds_share_no_sample() -> None:
    """vLLM draws the samples of a request with seed, seed + 1, …"""
    drawn = [spread_seed(seed) + index for seed in range(200) for index in range(1024)]
    assert len(set(drawn)) == len(drawn) and min(drawn) >= 0 and max(drawn) < 2**63
    assert spread_seed(5) == spread_seed(5)


@pytest.mark.parametrize("prompt", [(), (1, 100), (-1,)])
def test_tokens_that_the_model_does_not_have_never_reach_vllm(prompt: tuple[int, ...]) -> None:
    with pytest.raises(EngineFault) as caught:
        check_prompt(replace(SPEC, prompt=prompt), 100)
    assert caught.value.category == "user"
    check_prompt(SPEC, 100)


def test_pieces_of_several_sequences_become_one_result() -> None:
    collector = Collector(replace(SPEC, num_samples=2, topk_sample=2))
    first = Sent(0, [4, 8], [place(4, -1.0, t1=-0.1, t2=-0.2), place(8, -1.5, t1=-0.3, t2=-0.4)])
    assert collector.add([first], 2) == [Tokens(0, [4, 8], [-1.0, -1.5])]
    assert collector.add([Sent(1, [9], [place(9, -2.5, t1=-0.1, t2=-0.2)], "stop")], None) == [Tokens(1, [9], [-2.5])]
    assert collector.add([Sent(0, [], [], "length")], None) == []
    result = collector.result()
    assert [row.tokens for row in result.sequences] == [[4, 8], [9]]
    assert [row.stop_reason for row in result.sequences] == ["length", "stop"]
    assert result.sequences[0].logprobs == [-1.0, -1.5]
    topk = result.sequences[0].topk
    assert topk is not None and [len(row or ()) for row in topk.to_lists()] == [2, 2]
    assert (result.cache_hit_tokens, result.prompt_tokens, collector.length) == (2, 3, 3)


def test_ranked_tokens_leave_the_drawn_one_out_if_it_is_not_among_the_best() -> None:
    position = place(4, -9.0, t1=-0.5, t2=-1.0)
    assert ranked(position, 2) == [(1, -0.5), (2, -1.0)]
    assert ranked(position, 3) == [(1, -0.5), (2, -1.0), (4, -9.0)]


def test_weights_that_have_diverged_fail_their_sample() -> None:
    collector = Collector(SPEC)
    with pytest.raises(EngineFault, match="diverged"):
        collector.add([Sent(0, [4], [{4: Entry(float("nan"), 1)}])], None)


def test_a_request_that_ends_without_a_reason_is_no_result() -> None:
    collector = Collector(SPEC)
    collector.add([Sent(0, [4], [place(4, -1.0)])], None)
    with pytest.raises(EngineFault, match="without a result"):
        collector.result()


def test_a_proof_travels_with_the_sample() -> None:
    spec = replace(SPEC, proof=Proof(tokens=(1, 2), logprobs=(-0.5,), base_logprobs=(-0.75,)))
    assert read_sample(sample_frame(spec)) == spec
    assert read_sample(sample_frame(SPEC)) == SPEC


@pytest.mark.parametrize(("asked", "built"), [(1, 8), (8, 8), (9, 16), (65, 128), (512, 512)])
def test_vllm_is_built_for_a_rank_that_it_knows(asked: int, built: int) -> None:
    start = {
        "dtype": "float32",
        "max_rows": 4,
        "vllm": {"max_rank": asked, "slots": 2, "adapters": 64, "cache_gb": 1.5},
    }
    on_cpu, on_gpu = (engine_arguments(start, MODEL, is_cpu=is_cpu) for is_cpu in (True, False))
    assert on_cpu["max_lora_rank"] == built and on_cpu["max_model_len"] == 32
    assert on_gpu["kv_cache_memory_bytes"] == 1_500_000_000 and not on_gpu["enforce_eager"]


def test_the_packages_of_the_service_come_after_those_beside_vllm() -> None:
    python, *words = program("/opt/vllm/bin/python")
    assert python == "/opt/vllm/bin/python" and words[:2] == ["-P", "-c"]
    assert "sys.path.append" in words[2] and "tinkex.engine.vllm.main" in words[2]
