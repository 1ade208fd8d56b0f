"""What one sampling request may ask for, and how its result becomes a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.fake_engine import FakeEngine
from tests.unit.server.test_survival import request
from tests.unit.server.test_worker import TINY, running, scenario
from tinkex.engine.contract import Sampled, SequenceOutput
from tinkex.server.http.errors import RequestRejected
from tinkex.server.openai import routes as openai
from tinkex.server.routes import sampling as routes
from tinkex.server.sampling import sample_spec
from tinkex.server.sampling.sample_queue import TargetsLayout
from tinkex.server.sampling.sample_spec import response_of
from tinkex.server.service import Service
from tinkex.types.packed import pack_floats
from tinkex.types.sampling import TopkLogprobs
from tinkex.types.tensor import TensorData
from tinkex.wire import json_codec, json_pieces
from tinkex.wire.dialect import Dialect

PROMPT = {"chunks": [{"tokens": [1, 2, 3]}]}


async def rejected(service: Service, **given: Any) -> RequestRejected:
    params = {"max_tokens": 4, **given.pop("sampling_params", {})}
    body = {"base_model": "tinkex/tiny", "prompt": PROMPT, "num_samples": 1, "sampling_params": params, **given}
    for handler in (routes.asample, routes.sample_stream):
        with pytest.raises(RequestRejected) as caught:
            await handler(request(service, body))
    assert caught.value.status == 400
    return caught.value


@scenario
async def test_hundreds_of_thousands_of_stop_strings_are_rejected(tmp_path: Path) -> None:
    """Before: 300,000 of them were looked for after every token, and 32 x 20 tokens of another tenant took 14 s."""
    async with running(tmp_path, FakeEngine()) as service:
        many = await rejected(service, sampling_params={"stop": [f"stop {index}" for index in range(100_000)]})
        assert many.code == "too_many_stops"
        assert "100000 stop strings" in many.detail and "--max-stops" in many.detail
        tokens = await rejected(service, sampling_params={"stop": [1] * 257})
        assert tokens.code == "too_many_stops"
        long = await rejected(service, sampling_params={"stop": ["x" * 4097]})
        assert long.code == "text_too_long"


@scenario
async def test_long_stop_strings_are_rejected_by_their_sum(tmp_path: Path) -> None:
    """Before: each could have 4,096 characters, a megabyte together, and all were looked for after every token."""
    async with running(tmp_path, FakeEngine()) as service:
        long = await rejected(service, sampling_params={"stop": ["x" * 4000] * 256})
        assert long.code == "text_too_long"
        assert "1024000 characters" in long.detail and "--max-text-characters" in long.detail
        almost = await rejected(service, sampling_params={"stop": ["x" * 16] * 255 + ["x" * 17]})
        assert "4097 characters" in almost.detail
        params = {"max_tokens": 4, "stop": ["x" * 16] * 256}
        body = {"base_model": "tinkex/tiny", "prompt": PROMPT, "num_samples": 1, "sampling_params": params}
        assert (await routes.asample(request(service, body))).status_code == 200


@scenario
async def test_stop_strings_of_the_openai_routes_have_the_same_limits(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(), max_sample_values=1000) as service:
        service.tokenizers.load = lambda name: None  # type: ignore[assignment, method-assign, return-value]
        body = {"model": "tinkex/tiny", "prompt": [1, 2, 3], "max_tokens": 4}
        for wrong, code in (
            ({"stop": "x" * 4097}, "text_too_long"),
            ({"stop": ["x" * 2000] * 3}, "text_too_long"),
            ({"stop_token_ids": [1] * 300}, "too_many_stops"),
            ({"n": 5, "logprobs": 6}, "too_many_values"),
        ):
            with pytest.raises(RequestRejected) as caught:
                await openai.completions(request(service, {**body, **wrong}))
            assert (caught.value.status, caught.value.code) == (400, code)


@scenario
async def test_a_sample_that_would_return_billions_of_numbers_is_rejected(tmp_path: Path) -> None:
    """Before: 1024 x 2045 tokens with 1024 ranked tokens each were allowed."""
    async with running(tmp_path, FakeEngine()) as service:
        room = TINY.max_context_length - 3
        many = await rejected(
            service, num_samples=1024, topk_sample_logprobs=1024, sampling_params={"max_tokens": room}
        )
        assert many.code == "too_many_values"
        assert str(1024 * room * 1025) in many.detail
    async with running(tmp_path, FakeEngine(), max_sample_values=1000) as service:
        scored = await rejected(service, topk_prompt_logprobs=300, prompt_alt_tokens_k=20)
        assert str(4 + 3 * (300 + 8 * 20)) in scored.detail


RANKED = TopkLogprobs.from_lists([None, [(1, -0.5), (2, -1.5)], [(3, -0.25), (4, -2.0)]])
RESULTS = {
    "plain": Sampled(sequences=[SequenceOutput(tokens=[1, 2], logprobs=[-0.5, -0.25], stop_reason="stop")]),
    "ranked": Sampled(
        sequences=[
            SequenceOutput(tokens=[1, 2, 3], logprobs=[-0.5] * 3, stop_reason="length", topk=RANKED) for _ in range(2)
        ],
        prompt_logprobs=[None, -0.5, -1.0],
        topk_prompt=RANKED,
        targets=pack_floats([-1.0, -2.0]),
        alternatives=TopkLogprobs.from_lists([[(5, -0.5)], [(6, -0.75)]]),
        cache_hit_tokens=2,
    ),
    "nothing": Sampled(
        sequences=[SequenceOutput(tokens=[], logprobs=[], stop_reason="length")],
        prompt_logprobs=[None],
        topk_prompt=TopkLogprobs.from_buffers(b"", b"", 1, 0),
    ),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("numbers", [1, 1 << 15])
def test_json_that_is_written_in_pieces_is_the_same_as_whole(
    name: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_spec, "BLOCK_BYTES", 4 * numbers)
    monkeypatch.setattr(json_pieces, "PIECE_NUMBERS", numbers)
    result = RESULTS[name]
    layout = TargetsLayout.of(TensorData([7, 8], "int64", [2, 1]))
    response = response_of(result, layout, [f"id{index}" for index in range(len(result.sequences))])
    whole = json_codec.encode(json_codec.dump(response, Dialect.PROTO))
    assert json.loads(b"".join(json_pieces.sample_pieces(response))) == json.loads(whole)
