"""Each example does what it says, on a real service with the tiny model."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys

import pytest

import tinkex
from tests.integration.service.live import LiveServer
from tests.product.docs.conftest import tokenizer_json
from tests.product.examples.conftest import EXAMPLES, ROOT, TINY, Run
from tinkex.testing import Pending, ScriptedService, Status

pytestmark = pytest.mark.slow

SERVICE_LINE = 'tinkex.ServiceClient() if "TINKER_BASE_URL" in os.environ else tinkex.local('


def change(name: str, text: str) -> tuple[float, float]:
    """The first and the last value in the last line of a progress: `loss per token 6.12 → 2.86`."""
    found = re.search(rf"steps · .*{name}(?: per token)? (-?[\d.e-]+) → (-?[\d.e-]+)", text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("number", EXAMPLES)
def test_every_example_documents_its_command_and_finds_its_service_the_same_way(number: str) -> None:
    text = EXAMPLES[number].read_text(encoding="utf-8")
    assert f"python examples/{EXAMPLES[number].name} --model smollm2-135m" in text
    assert text.count(SERVICE_LINE) == 1
    assert f"[{EXAMPLES[number].name}](../examples/{EXAMPLES[number].name})" in (ROOT / "docs/examples.md").read_text()
    assert 50 <= len(text.splitlines()) <= 150


def test_chat_fine_tuning_lowers_the_loss_and_weights_only_the_answers(run: Run, live: LiveServer) -> None:
    ran = run("01", live.url, f"--model={TINY}", "--steps=10")
    losses = [record.loss for record in ran.names["progress"].history]
    assert len(losses) == 10
    assert losses[-1] < 0.85 * losses[0]
    tokenizer = ran.names["tokenizer"]
    said = [
        message["content"]
        for messages in ran.names["conversations"]
        for message in messages
        if message["role"] != "user"
    ]
    for datum, answer in zip(ran.names["data"], said, strict=True):
        targets, weights = (datum.loss_fn_inputs[key].tolist() for key in ("target_tokens", "weights"))
        weighed = [token for token, weight in zip(targets, weights, strict=True) if weight]
        assert tokenizer.decode(weighed) == f"{answer}<|eos|>"
        assert [*datum.model_input.to_ints()[1:], targets[-1]] == targets
        assert datum.model_input.to_ints()[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    before, after = re.findall(r"^Where do I buy a ticket\? → (.*)$", ran.out, re.MULTILINE)
    assert before != after
    assert re.search(r"saved tinker://.+/weights/harbour", ran.out)


@pytest.mark.full
def test_without_a_service_an_example_starts_its_own(folders: dict[str, str]) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "TINKEX_"))}
    done = subprocess.run(
        [sys.executable, EXAMPLES["11"], f"--model={TINY}"],
        env={**without, **folders},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "0 checkpoints left" in done.stdout


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_reinforcement_raises_the_reward(run: Run, live: LiveServer, loss: str) -> None:
    ran = run("02", live.url, f"--model={TINY}", "--steps=7", "--learning-rate=1e-2", f"--loss={loss}")
    first, last = change("reward", ran.err)
    assert first < 0.1
    assert last > first + 0.15
    assert len(re.findall(r"^\d \+ \d = '.*', reward [01]\.\d\d$", ran.out, re.MULTILINE)) == 8


def test_a_right_answer_is_rewarded_more_than_any_other_number() -> None:
    reward_of = runpy.run_path(str(EXAMPLES["02"]))["reward_of"]
    assert reward_of("12", 12) == 1.0
    assert reward_of("13", 12) == 0.5
    assert reward_of("It is 12", 12) == 0.125
    assert reward_of("", 12) == reward_of("twelve", 12) == reward_of("²", 12) == 0.0


def test_dpo_prefers_the_chosen_answers_more_and_more(run: Run, live: LiveServer) -> None:
    ran = run("03", live.url, f"--model={TINY}", "--steps=5")
    first, last = change("loss", ran.err)
    assert first == pytest.approx(math.log(2), abs=1e-3), "at first nothing is preferred"
    assert last < 0.5 * first
    assert change("margin", ran.err)[1] > 1
    assert "in 100% of the pairs" in ran.out


def test_distillation_brings_the_student_nearer_to_the_teacher(run: Run, live: LiveServer) -> None:
    ran = run("04", live.url, f"--model={TINY}", "--steps=12")
    first, last = change("divergence", ran.err)
    assert 0 < last < 0.8 * first
    lesson = ran.names["lesson_of"]([1, 2, 3], [7, 8], [[(7, -0.5), (9, -1.5)], [(8, -0.1), (4, -3.0)]])
    weights = lesson.datum.loss_fn_inputs["weights"].tolist()
    assert [round(sum(row), 6) for row in weights] == [0, 0, 1, 1], "of the prompt nothing is learnt"
    assert lesson.datum.loss_fn_inputs["target_tokens"].tolist()[2][:2] == [7, 9]
    said = [re.search(rf"^{name}: (.+)$", ran.out, re.MULTILINE) for name in ("teacher, instructed", "not instructed")]
    assert said[0] and said[1] and said[0][1] != said[1][1]


def test_many_adapters_train_together_and_the_best_is_named_first(run: Run, live: LiveServer) -> None:
    ran = run("05", live.url, f"--model={TINY}", "--steps=5")
    head, *rows = ran.out.splitlines()
    outcomes = [[float(figure) for figure in row.split()] for row in rows]
    assert head.split() == ["rank", "learning", "rate", "first", "loss", "last", "loss"]
    assert {(rank, rate) for rank, rate, _, _ in outcomes} == {(r, a) for r in (4, 16) for a in (3e-4, 1e-3, 3e-3)}
    assert all(last < first for _, _, first, last in outcomes)
    assert [last for *_, last in outcomes] == sorted(last for *_, last in outcomes)


def test_a_killed_run_resumes_and_ends_with_the_same_result(run: Run, live: LiveServer) -> None:
    ran = run("06", live.url, f"--model={TINY}", "--steps=10")
    assert "the first process ended with -9 in step 6" in ran.out
    assert "going on after step 4" in ran.out
    assert "differ by 0.0e+00 at most" in ran.out
    assert change("loss", ran.err)[1] < 6


def test_evaluation_sees_the_weights_of_its_step_and_exact_match_rises(run: Run, live: LiveServer) -> None:
    ran = run("07", live.url, f"--model={TINY}", "--steps=16")
    found = re.findall(r"after step (\d+): held-out loss ([\d.]+), exact match ([\d.]+)", ran.out)
    assert [int(step) for step, _, _ in found] == [0, 8, 16]
    losses = [float(loss) for _, loss, _ in found]
    assert losses[2] < losses[1] < losses[0]
    assert float(found[0][2]) == 0 < float(found[2][2])
    assert "best after step 16" in ran.out


def test_the_openai_client_samples_base_and_adapter_with_and_without_streaming(run: Run, live: LiveServer) -> None:
    ran = run("08", live.url, f"--model={TINY}", "--steps=25")
    base = re.search(r"^base model: (.*)$", ran.out, re.MULTILINE)
    adapter = re.search(r"^adapter: '(.*)'$", ran.out, re.MULTILINE)
    streamed = re.search(r"^adapter, streamed: (.*)\|$", ran.out, re.MULTILINE)
    assert base and adapter and streamed
    assert adapter[1].startswith("The lamp in")
    assert streamed[1].replace("|", "") == adapter[1]
    assert streamed[1].count("|") > 10
    likely = [float(figure) for figure in re.findall(r"mean probability ([\d.]+)", ran.out)]
    assert likely[1] > 3 * likely[0], "the adapter is surer of what it was taught"


def test_peft_computes_the_log_probabilities_of_the_service(run: Run, live: LiveServer) -> None:
    ran = run("09", live.url, f"--model={TINY}", "--steps=6")
    assert "downloaded adapter_config.json, adapter_model.safetensors" in ran.out
    base, adapter = re.findall(r"(?:base|adapter) (-[\d.]+)", ran.out)
    assert float(adapter) > float(base) + 0.5
    apart = re.search(r"differ by ([\d.e+-]+) at most", ran.out)
    assert apart and float(apart[1]) < 1e-4


@pytest.fixture
def scripted() -> ScriptedService:
    """A service that can be told to fail: no model, but the same HTTP."""
    return ScriptedService(
        base_models=[TINY],
        api_key="tml-examples",
        tokenizers={TINY: {"tokenizer.json": tokenizer_json()}},
        vocabulary=256,
    )


def test_many_samples_survive_429_and_one_is_streamed(run: Run, scripted: ScriptedService) -> None:
    with scripted:
        scripted.script.on("asample", times=5, do=Status(429, headers={"retry-after-ms": "20"}))
        ran = run("10", scripted.url, f"--model={TINY}", "--prompts=100")
        assert "100 of 100 prompts answered, 3200 tokens" in ran.out
        assert "told to slow down 5 times" in ran.out
        assert "(length)\n16 tokens, mean log-probability -" in ran.out
        assert len(scripted.requests_to("sample_stream")) == 1


def test_checkpoints_are_saved_resumed_listed_and_deleted(run: Run, live: LiveServer) -> None:
    ran = run("11", live.url, f"--model={TINY}")
    first, resumed = (float(loss) for loss in re.findall(r"loss ([\d.]+)", ran.out))
    assert resumed < first
    assert "weights/after-step-1 (training) is kept for good" in ran.out
    assert re.search(r"sampler_weights/after-step-1 \(sampler\) is kept until \d{4}-\d\d-\d\d", ran.out)
    assert "0 checkpoints left" in ran.out


def test_watching_shows_waits_retries_and_where_the_time_went(run: Run, scripted: ScriptedService) -> None:
    with scripted:
        scripted.script.on("create_model", nth=1, do=Status(503, headers={"retry-after-ms": "20"}))
        scripted.script.on("forward_backward", nth=1, do=Pending("paused_capacity", "no room now", times=2))
        ran = run("12", scripted.url, f"--model={TINY}")
    assert re.search(r"still (queued|submitting|accepted)", ran.out)
    assert "done after 3 polls" in ran.out
    assert "1 retries" in ran.out
    assert "create_model: attempt 1 failed, the next came 0.02 s later" in ran.out
    assert "the queue was paused_capacity: no room now" in ran.out
    assert re.search(r"forward_backward: \d\.\d+ s = submit .* \+ queue .* \+ compute .* \+ fetch", ran.out)


def test_an_example_on_a_model_that_is_not_served_prints_why(run: Run, live: LiveServer) -> None:
    with pytest.raises(tinkex.TinkexError, match="no/such"):
        run("11", live.url, "--model=no/such")
