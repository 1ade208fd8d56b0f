"""Whatever the client's validation lets pass, a real service accepts and its engine runs; whatever the service rejects,
the client rejects first, in the same words.

The requests go past the client's validation, as bytes, to `tinkex serve` with the tiny model. Values are drawn around
the edges of every rule. What only a service can know (its own limits) is named where it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Answer, Raw, Run, batch
from tinkex.client._calls import validate
from tinkex.client._calls.sample_call import SampleCall
from tinkex.errors import ValidationError
from tinkex.rules import checkpoint_names, ranges
from tinkex.rules.losses import LOSSES
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensor import INPUT_DTYPES, TensorData
from tinkex.types.training import AdamParams, LoraConfig
from tinkex.wire import requests
from tinkex.wire.body import Body
from tinkex.wire.dialect import Dialect

VOCABULARY = 263
FEW = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Raw:
    return Raw(live, "tml-test")


@pytest.fixture(scope="module")
def run(client: Raw) -> Run:
    return client.run()


def words_of(check: Callable[[], object]) -> str | None:
    """Why the client rejects the call; None if it would send it."""
    try:
        check()
    except ValidationError as error:
        return str(error)
    return None


def post(client: Raw, endpoint: str, body: Body) -> Answer:
    return client.post(endpoint, body.content, headers={"content-type": body.content_type})


def check_agreement(client: Raw, response: Answer, rejection: str | None) -> None:
    """The two halves of the promise."""
    if 400 <= response.status < 500:
        assert response.text == rejection
        return
    assert response.status == 200, response.content
    result = client.poll(response.json["request_id"])
    assert result.status == 200, result.content
    if rejection is None:
        assert "error" not in result.json, f"accepted, but the engine failed: {result.text}"


def mostly(good: list[Any], bad: list[Any]) -> st.SearchStrategy[Any]:
    """Nine times of ten a value within the rule, so that whole requests pass; both lists have the rule's edges."""
    return st.integers(0, 9).flatmap(lambda draw: st.sampled_from(good if draw else bad))


# -- training data ----------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-4, 4, width=32)
LENGTHS = st.integers(0, 4)


@st.composite
def tensors(draw: st.DrawFn, key: str, shape: list[int], *, is_odd: bool) -> TensorData:
    """An input of a loss; an odd one has another dtype or shape, a NaN, or a negative token."""
    is_int = INPUT_DTYPES.get(key, "float32") == "int64"
    number: st.SearchStrategy[Any] = NUMBERS
    token = st.integers(0, VOCABULARY - 1)
    if is_odd:
        is_int = is_int != (draw(LENGTHS) == 0)
        length = shape[0] if draw(LENGTHS) else draw(LENGTHS)
        shape = draw(st.sampled_from([[length], shape, [length, 1], [length, 2], [length, 1, 1], [2 * length]]))
        number |= st.sampled_from([math.nan, math.inf, -math.inf])
        token |= st.integers(-2, -1)
    if draw(LENGTHS) == 0:
        number = st.just(0.0)
    size = math.prod(shape)
    if is_int:
        return TensorData(draw(st.lists(token, min_size=size, max_size=size)), "int64", shape)
    return TensorData(draw(st.lists(number, min_size=size, max_size=size)), "float32", shape)


@st.composite
def datums(draw: st.DrawFn, loss_fn: str) -> Datum:
    """Two of three are right, so that whole calls pass."""
    is_odd = draw(st.integers(0, 2)) == 0
    rule = LOSSES[loss_fn]
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=0 if is_odd else 1, max_size=4))
    shape = [len(tokens), 2] if rule.takes_2d and draw(st.booleans()) else [len(tokens)]
    keys = [*rule.required, *(key for key in rule.optional if draw(st.booleans()))]
    if is_odd and draw(st.booleans()):
        keys.append(draw(st.sampled_from(["reward", "weights", "advantages"])))
        keys.remove(draw(st.sampled_from(keys)))
    odd = draw(st.sampled_from(keys)) if is_odd and keys else None
    return Datum(ModelInput.from_ints(tokens), {key: draw(tensors(key, shape, is_odd=key == odd)) for key in keys})


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Datum], dict[str, Any]]:
    loss_fn = draw(st.sampled_from(sorted(LOSSES)))
    # Settings that the loss does not have are left out: only the service knows all of its own.
    value = mostly([0.9, 1.0, 1.1], [0.0, 2.0, math.nan, math.inf, "text"])
    config = {key: draw(value) for key in LOSSES[loss_fn].config if draw(st.booleans())}
    fewest = 1 if draw(st.integers(0, 9)) else 0
    return loss_fn, draw(st.lists(datums(loss_fn), min_size=fewest, max_size=2)), config


@settings(FEW, max_examples=150)
@given(call=calls())
def test_training_data(client: Raw, run: Run, call: tuple[str, list[Datum], dict[str, Any]]) -> None:
    loss_fn, data, config = call
    rejection = words_of(lambda: (validate.check_data(data, loss_fn), validate.check_loss_config(config, loss_fn)))
    body = requests.forward_backward(run.id, run.take(), data, loss_fn, config, dialect=Dialect.PROTO)
    check_agreement(client, post(client, "forward_backward", body), rejection)


# -- optimizer steps --------------------------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1e-20, 1e-21, 1e-12, 0.5, 1.0, math.nextafter(1, 0), 2.0, 1e4, 1.1e4, 1e12, 1e300, -1e-9]
SETTING = st.sampled_from([*EDGES, math.nan, math.inf, -math.inf]) | st.floats(0, 1)


@pytest.fixture(scope="module")
def stepped(client: Raw) -> Run:
    """A run for steps alone, with a gradient: rates at the edge of the rule leave weights that no pass should meet."""
    run = client.run()
    run.done("forward_backward", forward_backward_input=batch())
    return run


@settings(FEW, max_examples=80)
@given(params=st.fixed_dictionaries({}, optional=dict.fromkeys(ranges.ADAMW, SETTING)))
def test_optimizer_settings(client: Raw, stepped: Run, params: dict[str, float]) -> None:
    rejection = words_of(lambda: validate.check_adam(AdamParams(**params)))
    body = {"model_id": stepped.id, "seq_id": stepped.take(), "adam_params": params}
    check_agreement(client, client.post("optim_step", body), rejection)


# -- samples ----------------------------------------------------------------------------------------------------------


PENALTY = mostly([-100.0, -1.0, 0.0, 0.5, 100.0], [-100.1, 100.1, 1e30, math.nan, math.inf])
PARAMS = st.fixed_dictionaries(
    {"max_tokens": mostly([1, 2, 3], [0, -1])},
    optional={
        "temperature": mostly([0.0, 1e-9, 0.7, 1e30], [-1.0, math.nan, math.inf]),
        "top_p": mostly([1e-9, 0.5, 1.0], [-0.1, 0.0, 1.1, math.nan]),
        "top_k": mostly([-1, 1, 5, 2**40], [-2, 0]),
        "seed": st.sampled_from([0, -1, 2**63 - 1, -(2**63)]),
        "min_p": mostly([0.0, 0.5, 1.0], [-0.1, 1.1]),
        "stop": mostly([[], "a", ["a", "b"], [0, 262]], ["", ["a", ""], [-1]]),
        "repetition_penalty": mostly([1e-3, 0.5, 1.0, 1e3], [-1.0, 0.0, 1e-4, 1.1e3, math.nan]),
        "presence_penalty": PENALTY,
        "frequency_penalty": PENALTY,
    },
)
TARGETS = [TensorData([[1, 2]]), TensorData([[1], [2]]), TensorData([1, 2]), TensorData([[0.5]])]
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        # Beyond ranges.MAX_TOPK it is the service's own limit.
        "topk_prompt_logprobs": mostly([0, 3, ranges.MAX_TOPK], [-1]),
        "topk_sample_logprobs": mostly([0, 3], [-1]),
        "prompt_alt_tokens_k": mostly([0, 2], [-1]),
        "prompt_logprobs_last_n": mostly([1, 99], [-1, 0]),
        "target_prompt_logprobs": st.sampled_from(TARGETS),
    },
)


@settings(FEW, max_examples=100)
@given(
    params=PARAMS,
    extras=EXTRAS,
    count=mostly([1, 3], [0, -1]),
    tokens=mostly([[1], [2, 3], [4, 5, 6]], [[]]),
    has_logprobs=st.booleans(),
)
def test_samples(
    client: Raw,
    sampler: tuple[str, list[int]],
    params: dict[str, Any],
    extras: dict[str, Any],
    count: int,
    tokens: list[int],
    has_logprobs: bool,
) -> None:
    prompt, sampling = ModelInput.from_ints(tokens), SamplingParams(**params)
    sample = SampleCall(prompt, count, sampling, include_prompt_logprobs=has_logprobs, **extras)
    rejection = words_of(lambda: validate.check_sampling(sample, 2048))
    sampler_id, numbers = sampler
    numbers.append(len(numbers))
    fields = {
        "sampling_session_id": sampler_id,
        "seq_id": numbers[-1],
        "num_samples": count,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": params,
        "prompt_logprobs": has_logprobs,
        **{name: entry.model_dump() if isinstance(entry, TensorData) else entry for name, entry in extras.items()},
    }
    check_agreement(client, client.post("asample", fields), rejection)


@pytest.fixture(scope="module")
def sampler(client: Raw) -> tuple[str, list[int]]:
    """A sampling session, and the numbers that were used in it."""
    return client.sampler(), []


# -- runs and checkpoints ---------------------------------------------------------------------------------------------


@settings(FEW, max_examples=25)
@given(
    rank=st.sampled_from([-1, 0, 1, 8, 512, 513, 1024]),
    flags=st.fixed_dictionaries(dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), st.booleans())),
)
def test_adapters(client: Raw, rank: int, flags: dict[str, bool]) -> None:
    rejection = words_of(lambda: validate.check_lora(LoraConfig(rank=rank, **flags)))
    if rejection is None:  # the width of the model is the service's own knowledge
        rejection = words_of(lambda: ranges.check_rank(rank, "tinkex/tiny", 64))
    body = {
        "session_id": client.session(),
        "model_seq_id": 0,
        "base_model": "tinkex/tiny",
        "lora_config": {"rank": rank, **flags},
    }
    check_agreement(client, client.post("create_model", body), rejection)


@settings(FEW, max_examples=60)
@given(
    name=st.sampled_from([".", "..", ".x", "a.b", "a b", "a/b", "ü", "~", "x" * 200, "x" * 201, "final"])
    | st.text(max_size=3),
    ttl=st.sampled_from([None, None, 1, 0, -1, checkpoint_names.MAX_TTL_S, checkpoint_names.MAX_TTL_S + 1]),
)
def test_names_of_checkpoints(client: Raw, run: Run, name: str, ttl: int | None) -> None:
    rejection = words_of(lambda: (validate.check_name(name), validate.check_ttl(ttl)))
    body = {"model_id": run.id, "seq_id": run.take(), "path": name, "ttl_seconds": ttl}
    check_agreement(client, client.post("save_weights", body), rejection)
