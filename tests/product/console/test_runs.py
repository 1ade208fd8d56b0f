"""Finding, comparing and reading runs in the console, in a real browser, on a service that really trained."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import tinkex
from tests.product.console.browser import Browser
from tests.product.console.conftest import PICTURES, Stage, add_runs, add_steps, data
from tests.product.console.test_console import DESK, PHONE, TABLET, ask, drawn, fact, run_of
from tests.product.console.test_console import page as page

pytestmark = pytest.mark.slow
WIDE = (1400, 900)
COVERED = """
    const clickable = "main a, main button, main input, main select, main summary, header a, header button";
    return [...document.querySelectorAll(clickable)].filter((e) => e.checkVisibility() && !e.disabled).filter((e) => {
        e.scrollIntoView({ block: "center" });
        const [box] = e.getClientRects(); // of a link in two lines, the first
        const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        return !(top && (e.contains(top) || top.closest("label")?.contains(e)));
    }).map((e) => e.outerHTML.slice(0, 200));
"""
"""What a click in its middle would not reach."""
LONG_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct-and-a-very-long-suffix-of-its-quantisation-Q4_K_M.gguf"


@pytest.fixture(scope="module")
def second(stage: Stage) -> Iterator[tinkex.TrainingClient]:
    """Another run, with another rank and rate, and an operation that failed."""
    training = stage.service.create_lora_training_client(
        "tinkex/tiny", rank=4, seed=5, user_metadata={"name": "proverb drills", "tags": "sweep, second"}
    )
    for _ in range(6):
        training.forward_backward(data(), "cross_entropy")
        last = training.optim_step(tinkex.AdamParams(learning_rate=2e-3))
    last.result(60)
    with pytest.raises(tinkex.TinkexError):
        training.load_state("tinker://nobody/weights/gone").result(60)
    yield training


# ── The list


@pytest.mark.parametrize("size", [PHONE, (700, 900), TABLET, DESK, WIDE])
def test_nothing_that_can_be_clicked_lies_under_something_else(
    page: Browser, stage: Stage, size: tuple[int, int]
) -> None:
    state = ask(stage.url, "/api/v1/service_state")
    named = json.dumps({**state, "models": [LONG_NAME, "smollm2-135m", *state["models"]]}).encode()
    page.answer("**/api/v1/service_state", named)
    try:
        page.size(*size)
        for address in ("#/queue", "#/runs", "#/checkpoints", f"#/runs/{stage.training.model_id}"):
            page.open(f"{stage.url}/{address}")
            page.find(".models .button" if address == "#/queue" else "main tbody a, main tbody button")
            assert page.run(COVERED) == [], f"{address} at {size}"
    finally:
        page.answer_no_more()


def test_twenty_runs_take_two_screens_of_a_phone(page: Browser, stage: Stage) -> None:
    add_runs(stage.server, *(f"short-{number}" for number in range(20)))
    page.open(f"{stage.url}/#/runs")
    page.size(*PHONE)
    page.wait(lambda: len(page.texts("tbody tr")) > 20, "the rows")
    height = page.run(
        "return [...document.querySelectorAll('tbody tr')].slice(0, 20)"
        ".reduce((sum, row) => sum + row.getBoundingClientRect().height, 0)"
    )
    assert height < 2.2 * PHONE[1], height  # it was 4,868 pixels


def test_chosen_runs_are_drawn_over_each_other_and_their_differences_marked(
    page: Browser, stage: Stage, second: tinkex.TrainingClient
) -> None:
    page.open(f"{stage.url}/#/runs?q=proverb")
    for name in ("proverb drills", "proverbs"):
        page.click(f"tbody input[aria-label='Choose {name}']")
    assert page.texts(".selection .strong") == ["2 runs chosen"]
    page.click(".selection a", "Compare")
    page.find("path.line.is-run-1")
    page.find("path.line.is-run-2")
    page.find("section[aria-label=Parameters]")
    differing = page.texts(".differs .lead")
    assert "Rank" in differing and "Learning rate" in differing and "Base model" not in differing
    page.wait(lambda: "proverb drills" in drawn(page)[0], "the names beside the values")
    for look, size, is_dark in (("dark", DESK, True), ("phone", PHONE, False)):
        page.size(*size, is_dark=is_dark)
        page.picture(PICTURES / f"compare-{look}.png")
    page.size(*DESK)
    page.click("input[aria-label='Draw proverbs']")
    page.wait(lambda: page.run("return document.querySelectorAll('path.line.is-run-1').length") != 0, "the other run")
    page.wait(lambda: len(page.texts(".plot")) > 0 and "proverb drills" in drawn(page)[0], "one line")


def listed(page: Browser) -> list[str]:
    return page.texts("tbody .run-name > a")


def choose(page: Browser, field: str, value: str) -> None:
    page.run(
        "const list = document.getElementById(arguments[0]); list.value = arguments[1];"
        "list.dispatchEvent(new Event('change'))",
        field,
        value,
    )


def test_runs_are_searched_filtered_and_ordered_and_the_address_keeps_it(
    page: Browser, stage: Stage, second: tinkex.TrainingClient
) -> None:
    page.open(f"{stage.url}/#/runs")
    page.enter("#search", "proverb")
    page.wait(lambda: listed(page) == ["proverb drills", "proverbs"], "the two runs of that name")
    choose(page, "by-tag", "sweep")
    page.wait(lambda: listed(page) == ["proverb drills"], "the one with the tag")
    page.open(str(page.run("return location.href")))
    page.wait(lambda: listed(page) == ["proverb drills"], "the same list at the same address")
    assert page.run("return [document.getElementById('search').value, document.getElementById('by-tag').value]") == [
        "proverb",
        "sweep",
    ]
    choose(page, "by-status", "finished")
    page.wait_text("No run matches.")
    page.click("button", "Show all runs")
    choose(page, "by-order", "steps")
    page.wait(lambda: is_falling(page), "those with the most steps first")


def is_falling(page: Browser) -> bool:
    counts = [int(text.replace(",", "")) for text in page.texts("tbody [data-label=Steps]")]
    return counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_a_run_is_renamed_tagged_archived_and_deleted(page: Browser, stage: Stage) -> None:
    training = stage.service.create_lora_training_client("tinkex/tiny", rank=2, user_metadata={"name": "draft"})
    training.save_state("kept").result(60)
    page.open(f"{stage.url}/#/runs/{training.model_id}")
    page.click("button", "Rename…")
    page.enter("#text", "final answer")
    page.press("Enter")
    page.wait(lambda: page.texts("h1") == ["final answer"], "the new name")
    page.click("button", "Add tag…")
    page.enter("#text", "keep")
    page.press("Enter")
    page.find(".heading .tag", "keep")
    page.click("button[aria-label='Remove the tag keep']")
    page.wait(lambda: page.texts(".heading .tag") == [], "no tag")
    page.click("button", "Archive")
    page.find(".heading .tag", "Archived")
    page.go(f"{stage.url}/#/runs?q=final")
    page.wait_text("No run matches.")
    choose(page, "by-archived", "only")
    page.wait(lambda: listed(page) == ["final answer"], "the archived run")
    page.click("tbody a", "final answer")
    page.click("button", "Delete…")
    page.find("dialog")
    assert page.focused() == "Cancel" and "weights/kept" in page.text("dialog")
    page.picture(PICTURES / "run-delete.png", is_whole=False)
    page.click("dialog button.danger", "Delete with checkpoints")
    page.wait_text("final answer is deleted.", "#status")
    page.wait(lambda: page.run("return location.hash") == "#/runs", "the list")
    assert "detail" in ask(stage.url, f"/api/v1/training_runs/{training.model_id}")
    # A poll of the page may have been under way.
    assert [line for line in page.complaints() if "404" not in line] == []


# ── A run


def test_curves_are_drawn_over_steps_time_or_tokens_and_on_a_logarithmic_scale(page: Browser, stage: Stage) -> None:
    page.open(run_of(stage))
    page.find("path.line.is-loss")
    steps = ask(stage.url, f"/api/v1/training_runs/{stage.training.model_id}/steps")["steps"]
    before = page.run("return document.querySelector('path.line.is-loss').getAttribute('d')")
    page.click("#log")
    assert page.run("return document.querySelector('path.line.is-loss').getAttribute('d')") != before
    readouts = {}
    for axis in ("tokens", "time", "step"):
        page.run(
            "const axis = document.getElementById('axis'); axis.value = arguments[0];"
            "axis.dispatchEvent(new Event('change'))",
            axis,
        )
        page.run("document.querySelector('svg.drawing').focus()")
        page.press("Home", "ArrowRight")
        readouts[axis] = drawn(page)[0]
    page.click("#log")
    loss = f"{steps[1]['loss']:.3f}"[:4]
    assert readouts["step"].startswith(f"step 2training {loss}")
    assert readouts["tokens"].startswith(f"{steps[0]['tokens'] + steps[1]['tokens']} tokenstraining {loss}")
    assert readouts["time"].startswith("after ") and f"training {loss}" in readouts["time"]


def test_zooming_into_a_long_run_asks_for_the_steps_that_were_left_out(page: Browser, stage: Stage) -> None:
    add_runs(stage.server, "longer")
    add_steps(stage.server, "longer", 4500)
    page.open(f"{stage.url}/#/runs/longer:train:0")
    page.wait(lambda: fact(page, "Steps") == "4,500", "all steps")
    page.find("path.line.is-loss")
    drawing = "document.querySelector('svg.drawing')"
    page.run(f"{drawing}.focus()")
    page.press("End", "ArrowLeft")
    first = drawn(page)[0].split("training")[0]
    page.press("ArrowRight", *["+"] * 4)
    page.find("button", "Whole run")

    def beside() -> bool:
        """Whether the step beside the last one is the one before it."""
        page.press("End", "ArrowLeft")
        return drawn(page)[0].startswith("step 4,499")

    assert first == "step 4,495"  # one of five was sent
    page.wait(beside, "every step of the part in view")
    page.picture(PICTURES / "run-zoomed.png", is_whole=False)
    page.click("button", "Whole run")
    page.wait(lambda: page.texts(".plot-options button") == [], "the whole run")


def test_the_page_of_a_run_says_which_of_its_operations_failed(
    page: Browser, stage: Stage, second: tinkex.TrainingClient
) -> None:
    page.open(f"{stage.url}/#/runs/{second.model_id}")
    page.wait_text("1 operation of this run failed.")
    page.click(".notice a")
    page.wait_text("'tinker://nobody/weights/gone' is not known")
    assert "tinker://nobody/weights/lost" not in page.text()  # of another run
    address = f"/api/v1/training_runs/{second.model_id}"
    page.wait(lambda: page.texts(".heading .state") == [ask(stage.url, address)["status"].capitalize()], "its status")


def test_a_mean_and_a_sum_have_different_names(page: Browser, stage: Stage) -> None:
    page.open(run_of(stage))
    page.find("path.line.is-loss")
    titles = page.texts(".plot h3")
    assert titles[0] == "Loss per token" and "Loss (sum)" in titles and "loss:sum" not in titles


def test_metrics_and_samples_of_ones_own_are_drawn_and_listed(page: Browser, stage: Stage) -> None:
    training = stage.service.create_lora_training_client("tinkex/tiny", rank=2, user_metadata={"name": "rewarded"})
    for step in (1, 2, 3):
        training.forward_backward(data(), "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result(60)
        training.log_metrics({"reward": step / 4, "kl": 0.01 * step}, step=step)
        for number in range(5):
            training.log_sample(f"2 + {number} =", f"answer {step}", reward=step / 4, step=step)
    training.flush_metrics()
    page.open(f"{stage.url}/#/runs/{training.model_id}")
    page.find("section[aria-label='Your metrics'] path.line.is-own")
    assert [
        text.replace("latest", "").strip() for text in page.texts("section[aria-label='Your metrics'] .readout")
    ] == [
        "0.75",
        "0.03",
    ]
    page.wait_text("10 of 15 samples")
    assert page.texts(".samples tbody tr:first-child [data-label=Step]") == ["3"]
    choose(page, "prompt-choice", "2 + 1 =")
    page.wait_text("3 of 3 samples")
    assert page.texts(".samples tbody [data-label=Text]") == ["answer 3", "answer 2", "answer 1"]
    page.picture(PICTURES / "run-rewarded.png")
    for kind in ("CSV", "JSONL"):
        page.click(".run-actions button", kind)
        page.wait(lambda: list(page.downloads.glob(f"*.{kind.lower()}")), f"the {kind}")  # noqa: B023
    [lines] = page.downloads.glob("*.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["metrics"]["reward"] for row in rows if row["kind"] == "metrics"] == [0.25, 0.5, 0.75]
    assert len([row for row in rows if row["kind"] == "step"]) == 3


def negative_mean(_: list[tinkex.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -torch.stack([row.mean() for row in logprobs]).sum()
    return loss, {"halved": float(loss.detach()) / 2}


def test_the_loss_of_a_custom_loss_is_drawn_as_the_program_computed_it(page: Browser, stage: Stage) -> None:
    training = stage.service.create_lora_training_client("tinkex/tiny", rank=2, user_metadata={"name": "own loss"})
    returned = []
    for _ in range(3):
        done = training.forward_backward_custom(data(), negative_mean)
        returned.append(done.result(60).metrics["loss:sum"])
        training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result(60)
    page.open(f"{stage.url}/#/runs/{training.model_id}")
    page.find("path.line.is-loss")
    page.wait(lambda: page.texts(".plot h3")[0] == "Loss", "a loss that is no mean per token")
    assert float(fact(page, "Loss")) == pytest.approx(returned[-1], rel=1e-3) and returned[-1] < returned[0]
    assert "evaluation" not in drawn(page)[0]
    [readout] = page.texts("section[aria-label='Your metrics'] .readout")
    assert float(readout.removeprefix("latest").strip()) == pytest.approx(returned[-1] / 2, rel=1e-3)
    cells = page.texts(".parameters tbody td")
    assert cells[cells.index("Loss function") + 1] == "custom"
