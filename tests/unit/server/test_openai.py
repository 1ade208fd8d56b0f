"""The OpenAI-compatible API, used with the `openai` package over HTTP, with the real engine on the tiny model."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from prometheus_client import generate_latest

from tests.unit.server.live import Loop, checkpoint
from tinkex.engine.contract import EngineFault, Sampled, SampleEvent, SampleSpec, SequenceOutput, Tokens, pass_frame
from tinkex.engine.frames import Frame
from tinkex.engine.host import LocalEngine
from tinkex.engine.models import registry
from tinkex.server.app import make_app
from tinkex.server.http import event_stream
from tinkex.server.main import build
from tinkex.server.sampling.sample_queue import SampleTarget
from tinkex.server.service import Service
from tinkex.settings import ServeConfig
from tinkex.store.errors import DiskFull
from tinkex.store.records import OperationRecord, RunRecord
from tinkex.store.store import Store
from tinkex.types.inputs import Datum, ModelInput

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789"
RUN = "00000000-0000-4000-8000-000000000000:train:0"
RED, BLUE = f"tinker://{RUN}/sampler_weights/red", f"tinker://{RUN}/sampler_weights/blue"
TINY = "tinkex/tiny"


class Live:
    """The service under test, and two checkpoints of Alice's that say different things."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.config = ServeConfig(
            base_models=(TINY,), data_dir=folder, cache_dir=folder, api_keys=(ALICE, BOB), max_queued_samples=100
        )
        self.info = replace(registry.resolve(TINY, folder), aliases=("tiny",))
        self.store = Store.open(self.config.database_url, folder)
        self.engine = LocalEngine([self.info], threads=1)
        self.service: Service = self.loop.call(self._start())

    async def _start(self) -> Service:
        service = build(self.config, [self.info], self.store, self.engine)
        await self.engine.start()
        tenant = await service.access.tenant(ALICE)
        for path, text in ((RED, "red red red red"), (BLUE, "blue blue blue ")):
            await self._train(path.rpartition("/")[2], text)
            self.store.add_checkpoint(checkpoint(path, tenant))
        return service

    async def _train(self, name: str, text: str) -> None:
        """An adapter that has learnt to say something after anything."""
        flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        await self.engine.run(Frame({"op": "create", "adapter": name, "base": TINY, "rank": 8, "seed": 1, **flags}, []))
        tokens = list(("ab" + text).encode())
        datum = Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        for _ in range(40):
            await self.engine.run(pass_frame("forward_backward", name, [datum], "cross_entropy", None))
            await self.engine.run(Frame({"op": "optim_step", "adapter": name, "learning_rate": 0.01, **settings}, []))
        folder = str(self.config.data_dir / "checkpoints" / name)
        await self.engine.run(Frame({"op": "save", "adapter": name, "folder": folder, "with_optimizer": False}, []))

    def sample(self, prompt: str, weights: str | None = None, **options: Any) -> Sampled:
        """What the engine itself says."""
        folder = None if weights is None else str(self.config.data_dir / "checkpoints" / weights)
        spec = SampleSpec(base=TINY, weights=folder, prompt=tuple(prompt.encode()), **options)

        async def last() -> Sampled:
            result = [event async for event in self.engine.sample(spec)][-1]
            assert isinstance(result, Sampled)
            return result

        return self.loop.call(last())

    def close(self) -> None:
        self.loop.call(self.engine.close())
        self.service.db.close()
        self.store.close()
        self.loop.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    made = Live(tmp_path_factory.mktemp("openai"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(live: Live) -> Iterator[str]:
    with live.loop.serve(make_app(live.service)) as url:
        yield url


def client_of(address: str, key: str = ALICE, prefix: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=address + prefix, api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as made:
        yield made


def text_of(sampled: Sampled, place: int = 0) -> str:
    return bytes(token for token in sampled.sequences[place].tokens if token < 256).decode("utf-8", "replace")


# ── Which model answers


def test_a_base_model_and_its_alias_return_the_engines_sample(live: Live, client: openai.OpenAI) -> None:
    expected = text_of(live.sample("ab", max_tokens=12, temperature=0.0, stop_tokens=(257,)))
    for model in (TINY, "tiny"):
        got = client.completions.create(model=model, prompt="ab", max_tokens=12, temperature=0)
        assert got.choices[0].text == expected
        assert got.model == model
        assert got.object == "text_completion"


def test_every_path_gets_its_own_adapter_even_at_the_same_time(live: Live, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 15, "temperature": 0}
    expected = {
        RED: text_of(live.sample("ab", "red", max_tokens=15, temperature=0.0)),
        BLUE: text_of(live.sample("ab", "blue", max_tokens=15, temperature=0.0)),
        TINY: text_of(live.sample("ab", max_tokens=15, temperature=0.0)),
    }
    assert expected[RED].startswith("red red") and expected[BLUE].startswith("blue bl")
    order = [RED, TINY, BLUE, BLUE, RED, TINY] * 2
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda name: client.completions.create(model=name, prompt="ab", **options), order))
    assert [answer.choices[0].text for answer in got] == [expected[name] for name in order]


def test_a_chat_is_rendered_with_the_models_own_template(live: Live, client: openai.OpenAI) -> None:
    prompt = live.service.tokenizers.load(TINY).encode(
        "<|system|>Be brief.<|eos|><|user|>hi<|eos|><|assistant|>", False
    )
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    got = client.chat.completions.create(model=RED, messages=messages, max_completion_tokens=10, temperature=0)
    same = client.completions.create(model=RED, prompt=prompt, max_tokens=10, temperature=0)
    assert got.choices[0].message.content == same.choices[0].text
    assert got.choices[0].message.role == "assistant"
    assert got.usage is not None and got.usage.prompt_tokens == len(prompt)


def test_training_weights_are_rejected_with_advice(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="save_weights_for_sampler") as caught:
        client.completions.create(model=f"tinker://{RUN}/weights/red", prompt="ab")
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("model", ["gpt-4", "../../etc", f"tinker://{RUN}/sampler_weights/green", "tinker://"])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=model, prompt="ab")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.fixture(scope="module")
def named_runs(live: Live) -> None:
    """The run of the two checkpoints, and one that saved nothing for sampling; both of Alice."""
    tenant = live.loop.call(live.service.access.tenant(ALICE))
    flags: dict[str, Any] = {"rank": 8, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    flags |= {"created_at": 1.0, "last_request_at": 1.0}
    for run_id, name in ((RUN, "colours"), ("11111111-0000-4000-8000-000000000000:train:0", "training only")):
        run = RunRecord(id=run_id, tenant=tenant, session_id="s", base_model=TINY, name=name, **flags)
        creation = OperationRecord(
            request_id=f"create-{run_id}", run_id=run_id, tenant=tenant, seq_id=0, kind="create_model", digest=""
        )
        live.loop.call(live.service.db(live.store.add_run, run, creation, b""))
    state = checkpoint(f"tinker://{run_id}/weights/state", tenant)
    live.loop.call(live.service.db(live.store.add_checkpoint, state))


@pytest.mark.usefixtures("named_runs")
@pytest.mark.parametrize("model", ["colours", RUN, RUN[:8], "0000:0", "latest"])
def test_a_run_stands_for_what_it_saved_for_sampling_last(client: openai.OpenAI, model: str) -> None:
    """`model="latest"`, and the name or the id of a run, were 404."""
    newest = max(RED, BLUE)  # saved in the same moment: then by name
    got, same = (
        client.completions.create(model=name, prompt="ab", max_tokens=10, temperature=0) for name in (model, newest)
    )
    assert got.choices[0].text == same.choices[0].text and got.model == model
    assert client.models.retrieve(model).model_dump()["root"] == TINY


@pytest.mark.usefixtures("named_runs")
def test_a_model_that_is_not_found_says_what_there_is(address: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=rf"'gpt-4' is not known. Base models: {TINY}. Your newest .*{RED}"):
        client.completions.create(model="gpt-4", prompt="ab")
    with pytest.raises(openai.NotFoundError, match=r"training only has no weights for sampling. It has tinker://1111"):
        client.completions.create(model="training only", prompt="ab")
    with client_of(address, BOB) as bob:
        for model in ("colours", RUN, "latest"):
            with pytest.raises(openai.NotFoundError) as caught:
                bob.completions.create(model=model, prompt="ab")
            assert "tinker://" not in str(caught.value)


def test_another_tenants_checkpoint_is_not_known(live: Live, address: str) -> None:
    with client_of(address, BOB) as bob:
        with pytest.raises(openai.NotFoundError):
            bob.completions.create(model=RED, prompt="ab")
        with pytest.raises(openai.NotFoundError):
            bob.models.retrieve(RED)
        assert RED not in [model.id for model in bob.models.list()]


def test_models_are_listed_and_found_under_both_addresses(address: str) -> None:
    for prefix in ("/v1", "/oai/api/v1"):
        with client_of(address, prefix=prefix) as client:
            assert {model.id for model in client.models.list()} == {TINY, "tiny", RED, BLUE}
            assert client.models.retrieve(TINY).id == TINY
            assert client.models.retrieve(RED).id == RED
            assert client.completions.create(model=TINY, prompt="ab", max_tokens=1).choices[0].finish_reason


# ── Prompts, choices, stops


def test_every_form_of_a_prompt_gives_the_same(client: openai.OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        got = client.completions.create(model=RED, prompt=prompt, max_tokens=8, temperature=0)
        assert [choice.index for choice in got.choices] == list(range(len(got.choices)))
        return [choice.text for choice in got.choices]

    one, two = texts("ab"), texts("xyz")
    assert texts([97, 98]) == one
    assert texts(["ab", "xyz"]) == one + two
    assert texts([[97, 98], [120, 121, 122]]) == one + two


def test_a_long_list_of_prompts_is_answered_in_order(client: openai.OpenAI) -> None:
    prompts = [f"prompt {number}" for number in range(60)]
    got = client.completions.create(model=TINY, prompt=prompts, max_tokens=1, echo=True, temperature=0)
    assert all(choice.text.startswith(prompts[choice.index]) for choice in got.choices)
    assert len(got.choices) == 60


def test_a_seed_repeats_the_samples_and_the_samples_differ(client: openai.OpenAI) -> None:
    def texts(seed: int | None) -> list[str]:
        got = client.completions.create(model=TINY, prompt=["ab", "ab"], n=2, max_tokens=12, seed=seed)
        return [choice.text for choice in got.choices]

    assert texts(7) == texts(7)
    assert len(set(texts(7))) == 4
    assert texts(7) != texts(8)
    assert texts(None) != texts(None)


def test_n_choices_are_counted_in_the_usage(client: openai.OpenAI) -> None:
    got = client.completions.create(
        model=TINY, prompt=["ab", "xyz"], n=3, max_tokens=4, extra_body={"ignore_eos": True, "top_k": 50, "min_p": 0.01}
    )
    assert [choice.index for choice in got.choices] == list(range(6))
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (5, 24, 29)
    assert {choice.finish_reason for choice in got.choices} == {"length"}


def test_a_stop_string_is_cut_off_whole_and_streamed(live: Live, client: openai.OpenAI) -> None:
    # "red red red": the stop string ends inside what is said, and parts of it occur before it does.
    for stop, expected in (("d red", "re"), (["zzz", " red r"], "red"), ("red", "")):
        options: dict[str, Any] = {"model": RED, "prompt": "ab", "max_tokens": 15, "temperature": 0, "stop": stop}
        got = client.completions.create(**options).choices[0]
        assert (got.text, got.finish_reason) == (expected, "stop")
        chunks = list(client.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_text_that_only_begins_like_a_stop_string_is_not_lost(client: openai.OpenAI) -> None:
    got = client.completions.create(model=RED, prompt="ab", max_tokens=3, temperature=0, stop="red hot", stream=True)
    assert "".join(chunk.choices[0].text for chunk in got) == "red"


def test_an_end_token_ends_the_answer_and_is_not_in_its_text(client: openai.OpenAI) -> None:
    body = {"stop_token_ids": [ord("d")]}
    got = client.completions.create(model=RED, prompt="ab", max_tokens=9, temperature=0, logprobs=0, extra_body=body)
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None and got.usage.completion_tokens == 3
    assert got.choices[0].logprobs is not None and got.choices[0].logprobs.tokens == ["r", "e", "d"]


def test_without_a_limit_a_chat_may_fill_the_context(live: Live, client: openai.OpenAI) -> None:
    long = "x" * (live.info.max_context_length - 30)
    got = client.chat.completions.create(
        model=TINY, messages=[{"role": "user", "content": long}], extra_body={"ignore_eos": True}
    )
    assert got.usage is not None and got.usage.total_tokens == live.info.max_context_length


# ── Log-probabilities


def test_log_probabilities_of_a_completion_are_the_engines(live: Live, client: openai.OpenAI) -> None:
    expected = live.sample("ab", "red", max_tokens=6, temperature=0.0, topk_sample=3).sequences[0]
    got = client.completions.create(model=RED, prompt="ab", max_tokens=6, temperature=0, logprobs=3).choices[0]
    assert got.logprobs is not None and expected.topk is not None
    assert got.logprobs.tokens == list("red re") == list(got.text)
    assert got.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert got.logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert got.logprobs.top_logprobs is not None
    for told, top in zip(got.logprobs.top_logprobs, expected.topk.to_lists(), strict=True):
        assert sorted(told.values(), reverse=True) == pytest.approx([logprob for _, logprob in top or ()], abs=1e-5)


def test_log_probabilities_of_a_chat_are_the_engines(live: Live, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    got = client.chat.completions.create(
        model=TINY, messages=messages, max_tokens=4, seed=3, logprobs=True, top_logprobs=2
    ).choices[0]
    assert got.logprobs is not None and got.logprobs.content is not None
    assert len(got.logprobs.content) == 4
    for entry in got.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.bytes is not None and bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    plain = client.chat.completions.create(model=TINY, messages=messages, max_tokens=4, seed=3, logprobs=True)
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.content is not None
    assert [entry.logprob for entry in plain.choices[0].logprobs.content] == pytest.approx(
        [entry.logprob for entry in got.logprobs.content], abs=1e-5
    )


def test_an_echoed_prompt_comes_with_its_log_probabilities(live: Live, client: openai.OpenAI) -> None:
    expected = live.sample("hello", "red", max_tokens=1, prompt_logprobs=True, topk_prompt=1)
    assert expected.prompt_logprobs is not None
    for prompt in ("hello", list(b"hello")):
        got = client.completions.create(model=RED, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        choice = got.choices[0]
        assert (choice.text, choice.finish_reason) == ("hello", "length")
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.tokens == list("hello")
        assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-5)
        assert got.usage is not None and got.usage.completion_tokens == 0


def test_scoring_a_prompt_with_one_more_token_lines_up(client: openai.OpenAI) -> None:
    # Evaluation harnesses drop the last entry; it must be there even if the token ends the text.
    body = {"stop_token_ids": [ord("r")]}
    got = client.completions.create(
        model=RED, prompt="ab", max_tokens=1, echo=True, logprobs=1, temperature=0, extra_body=body
    ).choices[0]
    assert got.logprobs is not None and got.logprobs.tokens == ["a", "b", "r"]
    assert got.logprobs.top_logprobs is not None and got.logprobs.top_logprobs[0] is None


# ── Streams


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_streamed_completion_equals_the_whole_one(client: openai.OpenAI, logprobs: int | None) -> None:
    options: dict[str, Any] = {
        "model": TINY, "prompt": ["ab", "xyz"], "n": 2, "max_tokens": 40, "seed": 5, "logprobs": logprobs, "echo": True,
    }  # fmt: skip
    whole = client.completions.create(**options)
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    reasons = {}
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            told = [] if choice.logprobs is None else choice.logprobs.tokens or []
            tokens[choice.index] = tokens.get(choice.index, []) + told
            reasons[choice.index] = choice.finish_reason
    assert usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        assert tokens[choice.index] == ([] if choice.logprobs is None else choice.logprobs.tokens)


def test_a_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": BLUE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "seed": 5, "logprobs": True,
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    entries = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole.logprobs is not None and entries == whole.logprobs.content
    assert len(chunks) > 3


def ended(live: Live, outcome: str) -> float:
    found = live.service.metrics.registry.get_sample_value("tinkex_samples_total", {"outcome": outcome})
    return found or 0.0


def wait_until_idle(live: Live) -> None:
    """Until the engine has nothing to sample. Bounded; the answer comes within milliseconds."""
    done = threading.Event()
    for _ in range(1000):
        if live.service.sampling.running == 0:
            return
        done.wait(0.01)
    raise AssertionError("the engine still samples for a client that is gone")


LONG: dict[str, Any] = {"model": TINY, "prompt": "ab", "max_tokens": 2000, "n": 8, "extra_body": {"ignore_eos": True}}


def test_a_client_that_leaves_a_stream_ends_the_sampling(live: Live, client: openai.OpenAI) -> None:
    before = ended(live, "cancelled")
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    stream.close()
    wait_until_idle(live)
    assert ended(live, "cancelled") == before + 1


def test_a_client_that_hangs_up_ends_the_sampling(live: Live, address: str) -> None:
    before = ended(live, "cancelled")
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    body = {**LONG, **LONG["extra_body"]}
    connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": f"Bearer {ALICE}"})
    started = threading.Event()
    while live.service.sampling.running == 0:
        started.wait(0.005)
    connection.close()
    wait_until_idle(live)
    assert ended(live, "cancelled") == before + 1


def test_a_full_queue_is_429_with_retry_after(live: Live, client: openai.OpenAI) -> None:
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    for is_streamed in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=TINY, prompt="ab", n=100, stream=is_streamed)
        assert caught.value.response.headers["retry-after"]
        assert caught.value.type == "rate_limit_error"
    stream.close()
    wait_until_idle(live)


# ── Refusals


def test_an_unsupported_field_is_named_in_the_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias") as caught:
        client.chat.completions.create(
            model=TINY, messages=[{"role": "user", "content": "hi"}], logit_bias={"50256": -100}
        )
    assert (caught.value.param, caught.value.code) == ("logit_bias", "unsupported")
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_beyond_the_context_is_rejected_with_the_lengths(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048 tokens; this prompt has 3000") as caught:
        client.completions.create(model=TINY, prompt="x" * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at most 1948"):
        client.completions.create(model=TINY, prompt="x" * 100, max_tokens=1949)
    whole = client.completions.create(model=TINY, prompt="x" * 2048, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert whole.logprobs is not None and len(whole.logprobs.token_logprobs or []) == 2048


def test_tools_are_rejected_if_the_template_does_not_support_them(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="does not support tools"):
        client.chat.completions.create(model=TINY, messages=[{"role": "user", "content": "hi"}], tools=tools)
    got = client.chat.completions.create(
        model=TINY, messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice="none", max_tokens=1
    )
    assert got.choices


def test_fields_that_change_nothing_are_ignored(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model=TINY,
        messages=[{"role": "user", "content": "hi", "name": "ann"}],
        max_tokens=2,
        user="u",
        store=False,
        metadata={"a": "b"},
        logit_bias={},
        top_p=0,
        response_format={"type": "text"},
        stop=None,
        extra_body={"made_up": 1, "service_tier": "auto", "top_k": 0},
    )
    assert got.choices[0].finish_reason == "length"


def test_errors_have_openais_format_whatever_was_sent(address: str) -> None:
    def ask(method: str, path: str, body: bytes = b"", key: str = ALICE) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request(method, path, body, {"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        content = response.read()
        assert response.headers["content-length"] == str(len(content))
        connection.close()
        return response.status, json.loads(content)

    cases = [
        ("POST", "/v1/completions", b"{", 400), ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/completions", b"", 400), ("POST", "/v1/embeddings", b"{}", 404), ("GET", "/v1/nothing", b"", 404),
        ("POST", "/v1/completions", b'{"model": 5, "prompt": "a"}', 400), ("GET", "/v1/models/gpt-4", b"", 404),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400),
    ]  # fmt: skip
    for method, path, body, status in cases:
        got, content = ask(method, path, body)
        assert got == status, (path, body, content)
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in content["error"]["message"]


# ── What only a scripted engine shows


class Scripted:
    """Says what it is told to."""

    def __init__(self, live: Live, events: list[SampleEvent | Exception], gate: threading.Event | None) -> None:
        self.open = live.service.sampling.open
        self._events = events
        self._gate = gate

    async def run(
        self, tenant: str, target: SampleTarget, spec: SampleSpec, *more: object
    ) -> AsyncIterator[SampleEvent]:
        if self._gate is not None:
            await asyncio.to_thread(self._gate.wait, 10)
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield event


def scripted(live: Live, events: list[SampleEvent | Exception], gate: threading.Event | None = None) -> Any:
    return live.loop.serve(make_app(replace(live.service, sampling=cast(Any, Scripted(live, events, gate)))))


def test_a_stream_never_shows_half_a_character(live: Live) -> None:
    text = "naïve 😀 日本"
    tokens = list(text.encode())
    whole = Sampled(sequences=[SequenceOutput(tokens=tokens, logprobs=[-1.0] * len(tokens), stop_reason="stop")])
    events: list[SampleEvent | Exception] = [Tokens(0, [token], [-1.0]) for token in tokens]
    with scripted(live, [*events, whole]) as url, client_of(url) as client:
        chunks = list(client.completions.create(model=TINY, prompt="a", max_tokens=99, logprobs=0, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == [*text, ""]
    named = [name for chunk in chunks if chunk.choices[0].logprobs for name in chunk.choices[0].logprobs.tokens or []]
    assert named[2:4] == ["bytes:\\xc3", "bytes:\\xaf"] and len(named) == len(tokens)


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_the_error(live: Live) -> None:
    events: list[SampleEvent | Exception] = [Tokens(0, [97], [-1.0]), EngineFault("The engine died.", "server")]
    with scripted(live, events) as url, client_of(url) as client:
        said: list[str] = []
        with pytest.raises(openai.APIError, match="The engine died"):
            said.extend(
                chunk.choices[0].text for chunk in client.completions.create(model=TINY, prompt="a", stream=True)
            )
        assert said == ["a"]
        with pytest.raises(openai.InternalServerError, match="The engine died"):
            client.completions.create(model=TINY, prompt="a")


def test_a_silent_stream_is_kept_alive_with_comments(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "FIRST_EVENT_S", 0.01)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    gate = threading.Event()
    whole = Sampled(sequences=[SequenceOutput(tokens=[97], logprobs=[-1.0], stop_reason="length")])
    with scripted(live, [whole], gate) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = json.dumps({"model": TINY, "prompt": "a", "stream": True})
        connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {ALICE}"})
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.readline() == b": keep-alive\n"
        gate.set()
        lines = response.read().decode().splitlines()
        connection.close()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [chunk["choices"][0]["text"] for chunk in told] == ["a"]
    assert lines[-2] == "data: [DONE]"


def test_an_unexpected_failure_reveals_no_internals(live: Live) -> None:
    with scripted(live, [RuntimeError("/secret/path")]) as url, client_of(url) as client:
        for is_streamed in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model=TINY, prompt="a", stream=is_streamed)
            assert "secret" not in str(caught.value.body)
            assert caught.value.type == "server_error"


def test_a_full_disk_is_503_as_in_the_rest_of_the_api(live: Live) -> None:
    with scripted(live, [DiskFull()]) as url, client_of(url) as client:
        with pytest.raises(openai.InternalServerError, match="disk is full") as caught:
            client.completions.create(model=TINY, prompt="a")
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")


def test_requests_are_counted_by_endpoint_and_not_by_path(live: Live, client: openai.OpenAI) -> None:
    client.models.retrieve(RED)
    page = generate_latest(live.service.metrics.registry).decode()
    assert 'tinkex_requests_total{endpoint="openai.get_model",status="200"}' in page
    assert "sampler_weights" not in page and ALICE not in page
