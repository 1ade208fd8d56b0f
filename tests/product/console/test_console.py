"""The console in a real browser, on services that really trained. Pictures of it are left in build/screenshots."""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

import tinkex
from tests.product.console.browser import Browser, BrowserError
from tests.product.console.conftest import (
    ALICE,
    BOB,
    NASTY,
    PICTURES,
    STEPS,
    Prefixed,
    Stage,
    add_runs,
    add_steps,
    data,
    without_key,
)

pytestmark = pytest.mark.slow
DESK, TABLET, PHONE = (1200, 800), (780, 1000), (360, 740)


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """Ends with nothing to complain of: no error, no breach of the policy, nothing asked of another host."""
    browser.size(*DESK)
    browser.complaints()
    yield browser
    assert browser.complaints() == []
    assert browser.asked_hosts() <= {urlsplit(browser.run("return location.href")).netloc}


def ask(url: str, path: str, body: object = None, key: str = "tml-none") -> Any:
    """Past the console."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, content, {"x-api-key": key, "accept": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def saved(stage: Stage, name: str) -> dict[str, Any]:
    rows = ask(stage.url, "/api/v1/checkpoints")["checkpoints"]
    return next((row for row in rows if row["checkpoint_id"].endswith(f"/{name}")), {})


def run_of(stage: Stage) -> str:
    return f"{stage.url}/#/runs/{stage.training.model_id}"


# ── Every page


PAGES: dict[str, tuple[str, list[str]]] = {
    "runs": ("#/runs", ["proverbs", NASTY, "tinkex/tiny · rank 8", "Any status", str(STEPS)]),
    "run": (
        "#/runs/{run}",
        ["proverbs", "Tokens per second", "Learning rate", "evaluation", "three proverbs", "grad_norm (max)"],
    ),
    "queue": (
        "#/queue",
        ["The service is ready.", "local (no keys)", "tinkex/tiny", "None of your operations is waiting."],
    ),
    "checkpoints": ("#/checkpoints", ["first", "second", "for-you", "Training state", "Sampler", "never", "Private"]),
    "playground": ("#/playground", ["Temperature", "Top-p", "Max tokens", "Seed", "Model 1"]),
    "failures": ("#/failures", ["load_weights", "Failed", "Your input", "'tinker://nobody/weights/lost' is not known"]),
}


TOO_WIDE = """
    const cut = (e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1;
    return [document.documentElement, ...document.querySelectorAll(".table, .card, .top-inner, td, nav, .plot")]
        .filter(cut).map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 60)}`);
"""
"""What would have to be scrolled sideways, or is cut off."""


@pytest.mark.parametrize("name", PAGES)
def test_every_page_shows_its_data_in_both_themes_and_on_a_phone(page: Browser, stage: Stage, name: str) -> None:
    address, texts = PAGES[name]
    page.open(f"{stage.url}/{address.format(run=stage.training.model_id)}")
    for text in texts:
        page.wait_text(text)
    assert page.texts("nav [aria-current]") == ["Runs" if name == "run" else name.capitalize()]
    backgrounds = set()
    looks = (("light", DESK, False), ("dark", DESK, True), ("tablet", TABLET, True), ("phone", PHONE, False))
    for look, size, is_dark in looks:
        page.size(*size, is_dark=is_dark)
        assert page.run(TOO_WIDE) == [], f"{name} on {look}"
        page.picture(PICTURES / f"{name}-{look}.png")
        backgrounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_text_from_users_is_never_html(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/runs/{stage.nasty_id}")
    page.wait(lambda: page.texts("h1") == [NASTY], "the heading")
    for address in ("#/runs", "#/checkpoints", "#/playground"):
        page.go(f"{stage.url}/{address}")
        page.wait(lambda: len(page.text()) > 50, address)
        assert page.run("return document.querySelectorAll('main img, main b:not(.readout b)').length") == 0
    assert "harmed" not in str(page.run("return document.title"))


def test_the_browser_itself_rejects_html_made_from_text(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/")
    with pytest.raises(BrowserError, match="TrustedHTML"):
        page.run("document.body['inner' + 'HTML'] = '<p>text</p>'")
    assert any("TrustedHTML" in line for line in page.complaints())


def test_an_unknown_run_shows_a_message(browser: Browser, stage: Stage) -> None:
    browser.open(f"{stage.url}/#/runs/nobody:train:0")
    browser.wait_text("This run does not exist, or it belongs to another tenant.")
    assert any("404" in line for line in browser.complaints())  # what the browser itself logs of the answer


# ── A run while it trains


def test_a_run_grows_on_the_page_while_it_trains(page: Browser, stage: Stage) -> None:
    page.open(run_of(stage))
    page.find("path.line.is-loss")
    page.run("window.untouched = true")
    before = len(ask(stage.url, f"/api/v1/training_runs/{stage.training.model_id}/steps")["steps"])
    page.wait(lambda: fact(page, "Steps") == str(before), "the steps so far")
    loss = stage.step()
    page.wait(lambda: fact(page, "Steps") == str(before + 1), "one more step")
    told = fact(page, "Loss per token")
    assert told.startswith(f"{loss:.6f}"[: len(told) - 1]) and f"training {told}" in page.text(".plot .readout")
    page.go(f"{stage.url}/#/runs")
    page.wait_text(fact_of_row(page, "proverbs", "Loss"))
    stage.step()
    page.wait(lambda: fact_of_row(page, "proverbs", "Steps") == str(before + 2), "the step in the list")
    assert page.run("return window.untouched") is True


def fact(page: Browser, term: str) -> str:
    return str(
        page.run(
            "return [...document.querySelectorAll('.facts > div')]"
            ".find((e) => e.firstChild.textContent === arguments[0])?.lastChild.textContent ?? ''",
            term,
        )
    )


def fact_of_row(page: Browser, name: str, label: str) -> str:
    return str(
        page.run(
            "const row = [...document.querySelectorAll('tbody tr')].find((e) => e.textContent.includes(arguments[0]));"
            "return row?.querySelector(`[data-label=${arguments[1]}]`).textContent ?? ''",
            name,
            label,
        )
    )


def test_mouse_and_arrow_keys_show_the_values_of_a_step_in_all_plots(page: Browser, stage: Stage) -> None:
    page.open(run_of(stage))
    page.find("path.line.is-rate")
    steps = ask(stage.url, f"/api/v1/training_runs/{stage.training.model_id}/steps")["steps"]
    drawing = page.find("svg.drawing")
    page.hover(drawing)
    page.wait(lambda: all(text.startswith("step ") for text in drawn(page)), "the step under the mouse")
    told = drawn(page)
    place = int(re.match(r"step (\d+)", told[0])[1])  # type: ignore[index]
    assert abs(place - len(steps) / 2) < 4
    assert f"training {steps[place - 1]['loss']:.3f}"[:13] in told[0]
    page.run("arguments[0].focus()", drawing)
    page.press("Home", "ArrowRight")
    assert all(text.startswith("step 2") for text in drawn(page))
    said = page.run("return arguments[0].getAttribute('aria-valuetext')", drawing)
    assert said.startswith(f"step 2: training {steps[1]['loss']:.3f}"[:20])
    page.press("Escape")
    assert all(text.startswith("latest") for text in drawn(page))


def drawn(page: Browser) -> list[str]:
    """The readouts of the plots in view: those far below are drawn when they come into view."""
    return [text for text in page.texts(".readout") if text]


def test_a_run_of_5000_steps_is_drawn_with_few_points_and_not_redrawn_by_the_cursor(
    page: Browser, stage: Stage
) -> None:
    add_runs(stage.server, "long")
    add_steps(stage.server, "long", 5000)
    page.open(f"{stage.url}/#/runs/long:train:0")
    page.wait(lambda: fact(page, "Steps") == "5,000", "all steps", 30)
    size = page.run("return document.querySelector('path.line.is-loss').getAttribute('d').length")
    assert 1000 < size < 40_000
    page.find("svg.drawing")
    changed = page.run(
        "const svg = document.querySelector('svg.drawing'), box = svg.getBoundingClientRect();"
        "const observer = new MutationObserver(() => {}), seen = [];"
        "observer.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});"
        "for (let n = 0; n < 20; n++) {"
        "    svg.dispatchEvent(new PointerEvent('pointermove', "
        "        {clientX: box.left + 100 + n * 20, clientY: box.top + 50}));"
        "    const records = observer.takeRecords();"
        "    seen.push([records.length, records.filter((r) => r.target.matches?.('path.line')).length]);"
        "}"
        "return seen"
    )
    # Moving the cursor writes a few numbers; it draws no line again. How long that takes is the machine's affair.
    assert all(0 < count < 100 and lines == 0 for count, lines in changed), changed
    page.picture(PICTURES / "run-5000-steps.png")


def test_a_long_list_comes_in_pages(page: Browser, stage: Stage) -> None:
    add_runs(stage.server, *(f"old-{number}" for number in range(55)))
    page.open(f"{stage.url}/#/runs")
    page.wait_text("1–50 of ")
    assert "proverbs" in page.texts("tbody .strong")
    page.click("button", "Older")
    page.wait(lambda: "proverbs" not in page.text("tbody") and len(page.texts("tbody tr")) < 50, "the rest")
    page.click("button", "Newer")
    page.wait_text("proverbs")


def test_a_plot_has_round_ticks_and_loses_no_spike(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/")
    told = page.run("""
        return import("./console/scale.js").then(({ ticks, tickText, wholeTicks, thin, smooth, range }) => {
            const points = Array.from({ length: 5000 }, (_, n) => [n, n === 3333 ? 99 : n % 7]);
            const thinned = thin(points, 400);
            const texts = (low, high, wanted) => {
                const { step, values } = ticks(low, high, wanted);
                return values.map((x) => tickText(x, step));
            };
            return {
                texts: [
                    texts(0, 6.6, 4), texts(0, 0.00112, 3), texts(-0.3, 0.3, 4), texts(0, 12345, 3),
                    texts(3.2855, 3.2869, 3),
                ],
                whole: [wholeTicks(1, 3, 8), wholeTicks(1, 60, 6)],
                thinned: [thinned.length, Math.max(...thinned.map(([, x]) => x)), thinned.at(-1)],
                isSorted: thinned.every(([n], at) => at === 0 || n > thinned[at - 1][0]),
                smoothed: smooth(points.map(([n]) => [n, 2])).every(([, x]) => Math.abs(x - 2) < 1e-9),
                ranges: [range([], false), range([5], false), range([1, 2], true)],
            };
        });
    """)
    assert told["texts"] == [
        ["0", "2", "4", "6"],
        ["0", "5e−4", "1e−3"],
        ["−0.2", "0", "0.2"],
        ["0", "5,000", "10,000"],
        ["3.2855", "3.2860", "3.2865"],
    ]
    assert told["whole"][0] == [1, 2, 3] and told["whole"][1] == [10, 20, 30, 40, 50, 60]
    assert told["thinned"][0] <= 401 and told["thinned"][1:] == [99, [4999, 4999 % 7]]
    assert told["isSorted"] and told["smoothed"]
    assert told["ranges"][0] is None and told["ranges"][1][0] < 5 < told["ranges"][1][1] and told["ranges"][2][0] == 0


# ── The playground


def open_playground(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/playground")
    wait_for_models(page)


def wait_for_models(page: Browser) -> None:
    page.wait(lambda: page.run("return document.querySelector('#model-1')?.value"), "models to choose from")


def sample(page: Browser, **fields: str) -> None:
    for name, text in fields.items():
        page.enter(f"#{name}", text)
    page.click("button.primary")


def test_the_playground_shows_the_log_probability_of_each_token(page: Browser, stage: Stage) -> None:
    path = saved(stage, "for-you")["tinker_path"]
    page.open(f"{stage.url}/#/checkpoints")
    page.click("[aria-label='Try for-you']")
    page.wait(lambda: page.run("return document.querySelector('#model-1')?.value") == path, "the checkpoint, chosen")
    sample(page, prompt="Still w", max_tokens="12", temperature="0.5", seed="11")
    page.wait_text("mean log-probability")
    asked = {"model": path, "prompt": "Still w", "max_tokens": 12, "temperature": 0.5, "seed": 11, "logprobs": 0}
    answer = ask(stage.url, "/v1/completions", asked)["choices"][0]
    tokens = page.run("return [...document.querySelectorAll('.token')].map((token) => token.textContent)")
    assert "".join(tokens).startswith(answer["text"]) and len(answer["text"]) > 3
    page.hover(page.find(".token"))
    wanted = f"{answer['logprobs']['token_logprobs'][0]:.3f}".replace("-", "−")
    page.wait(lambda: wanted in "".join(page.texts(".tip")), f"{wanted} on hover")
    page.run("document.querySelector('.token').focus()")
    page.press("ArrowRight", "ArrowRight")
    wanted = f"{answer['logprobs']['token_logprobs'][2]:.3f}".replace("-", "−")
    page.wait(lambda: wanted in "".join(page.texts(".tip")), f"{wanted} on focus")
    page.picture(PICTURES / "playground-token.png", is_whole=False)


def test_two_models_sample_side_by_side_until_stop_is_pressed(page: Browser, stage: Stage) -> None:
    open_playground(page, stage)
    page.click("label[for=columns-2]")
    assert len(page.texts(".column")) == 2
    chosen = page.run("return ['1', '2'].map((n) => document.querySelector(`#model-${n}`).value)")
    assert chosen == ["tinkex/tiny", saved(stage, "to-go")["tinker_path"]]
    # A model of random weights may come to an end by itself, and with which seed differs between processors: a person
    # would sample again.
    for seed in range(1, 21):
        sample(page, prompt="All that", max_tokens="1500", temperature="1", seed=str(seed))
        page.wait(
            lambda: page.run("return document.querySelectorAll('.column:has(.token)').length") == 2, "first tokens"
        )
        running = ask(stage.url, "/api/v1/service_state")["running_samples"]
        is_busy = page.run("return document.querySelector('button.primary').disabled")
        page.click("button", "Stop")
        page.wait(lambda: all("mean log-probability" in text for text in page.texts(".told")), "both to end")
        if running and all("stopped here" in text for text in page.texts(".told")):
            break
    else:
        raise AssertionError("in none of twenty tries were both models stopped")
    assert is_busy is True
    page.wait(lambda: ask(stage.url, "/api/v1/service_state")["running_samples"] == 0, "the service to stop too")


def test_a_chat_keeps_its_earlier_messages(page: Browser, stage: Stage) -> None:
    open_playground(page, stage)
    page.click("label[for=mode-chat]")
    for message in ("Good day.", "And then?"):
        sample(page, prompt=message, max_tokens="8", seed="3")
        page.wait(lambda: not page.run("return document.querySelector('button.primary').disabled"), "the answer")
    assert page.texts(".said") == ["Good day.", "And then?"] and len(page.texts(".turn.is-model")) == 2
    page.picture(PICTURES / "playground-chat.png")
    page.click("button", "New chat")
    assert page.texts(".turn") == []


def test_errors_of_the_service_are_shown_with_its_message(browser: Browser, stage: Stage) -> None:
    open_playground(browser, stage)
    sample(browser, prompt="x", max_tokens="90000")
    browser.wait_text("Shorten it, or set max_tokens to at most")
    assert any("400" in line for line in browser.complaints())


# ── Checkpoints


def test_a_checkpoint_is_published_and_unpublished(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/checkpoints")
    page.click("[aria-label='Publish first']")
    page.find("[aria-label='Unpublish first']")
    assert saved(stage, "first")["public"] is True and "first is public" in page.text("#status")
    page.click("[aria-label='Unpublish first']")
    page.find("[aria-label='Publish first']")
    assert saved(stage, "first")["public"] is False


def test_the_expiry_of_a_checkpoint_can_be_set_and_removed(page: Browser, stage: Stage) -> None:
    page.open(run_of(stage))
    page.click("[aria-label='Set the expiry of first']")
    page.run("document.querySelector('#life').value = '604800'")
    page.picture(PICTURES / "checkpoint-expiry.png", is_whole=False)
    page.click("dialog button.primary")
    page.wait_text("in 6 d")
    assert saved(stage, "first")["expires_at"] is not None
    page.click("[aria-label='Set the expiry of first']")
    page.click("dialog button.primary")
    page.wait(lambda: saved(stage, "first")["expires_at"] is None, "no expiry")


def test_a_checkpoint_is_deleted_only_after_confirmation(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/checkpoints")
    page.click("[aria-label='Delete second']")
    assert page.focused() == "Cancel"
    page.picture(PICTURES / "checkpoint-delete.png", is_whole=False)
    page.press("Enter")
    page.wait(lambda: page.texts("dialog") == [], "the dialog to close")
    assert page.focused() == "Delete second" and saved(stage, "second")
    page.click("[aria-label='Delete second']")
    page.click("dialog button.danger")
    page.wait(lambda: "second" not in page.text("tbody"), "the row to go")
    assert not saved(stage, "second")


def test_a_download_has_the_files_of_the_checkpoint(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/checkpoints")
    page.click("[aria-label='Download to-go']")
    file = page.downloads / "archive.tar"
    page.wait(file.exists, "the download")
    row = saved(stage, "to-go")
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as archive:
        sizes = {member.name: member.size for member in archive}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(sizes)
    assert sum(sizes.values()) == row["size_bytes"]


# ── Keys, tenants, prefix


def test_the_console_asks_for_an_api_key_and_rejects_a_wrong_one(browser: Browser, keyed: Prefixed) -> None:
    browser.size(*DESK)
    browser.open(keyed.page)
    browser.find("#key")
    browser.picture(PICTURES / "sign-in.png", is_whole=False)
    browser.enter("#key", "tml-wrong")
    browser.press("Enter")
    browser.wait_text("This API key is unknown or was revoked.")
    browser.enter("#key", "not a key")
    browser.press("Enter")
    browser.wait_text("without spaces")
    browser.enter("#key", BOB)
    browser.press("Enter")
    browser.wait_text("No runs yet.")
    assert browser.run("return [sessionStorage.length, localStorage.length]")[0] == 1
    browser.click("#sign-out")
    browser.find("#key")
    assert browser.run("return sessionStorage.length") == 0
    assert [line for line in browser.complaints() if "401" not in line] == []


def test_an_api_key_in_the_url_is_used_and_removed_from_the_history(page: Browser, keyed: Prefixed) -> None:
    page.open(f"{keyed.page}#key={BOB}")
    page.wait_text("No runs yet.")
    assert BOB not in str(page.run("return navigation.entries().map((entry) => entry.url)"))
    page.go(f"{keyed.page}#key={ALICE}")  # the same page, another key
    page.wait(lambda: page.run("return sessionStorage.getItem('tinkex-key')") == ALICE, "the other key")
    page.wait_text("Runs")
    assert ALICE not in str(page.run("return navigation.entries().map((entry) => entry.url)"))


def test_the_ten_lines_name_a_served_model_when_the_state_comes_late(page: Browser, keyed: Prefixed) -> None:
    page.delay("**/api/v1/service_state", 1.0)
    try:
        page.open(f"{keyed.page}#key={BOB}")
        page.wait_text("tinkex demo")
        lines = str(page.run("return [...document.querySelectorAll('pre')].at(-1).textContent"))
    finally:
        page.answer_no_more()
    assert 'create_lora_training_client("tinkex/tiny"' in lines


def test_the_ten_lines_on_the_first_page_work_and_only_their_tenant_sees_the_run(
    page: Browser, keyed: Prefixed
) -> None:
    page.open(f"{keyed.page}#key={ALICE}")
    page.wait_text("tinkex demo")
    lines = str(page.run("return [...document.querySelectorAll('pre')].at(-1).textContent"))
    assert f'base_url="{keyed.page.rstrip("/")}"' in lines
    page.picture(PICTURES / "runs-empty.png")
    subprocess.run(
        [sys.executable, "-c", lines], env={**without_key(), "TINKER_API_KEY": ALICE}, check=True, timeout=120
    )
    page.wait_text("first run")
    page.wait(lambda: fact_of_row(page, "first run", "Steps") == "20", "twenty steps")
    page.click("a", "first run")
    page.find("path.line.is-loss")
    address = page.run("return location.hash")
    page.go(f"{keyed.page}#/checkpoints")
    page.click("tbody button", "Download")
    page.wait(lambda: len(list(page.downloads.glob("archive*.tar"))) > 0, "a download behind the prefix")
    page.open(f"{keyed.page}#key={BOB}")
    page.wait_text("No runs yet.")
    for hidden, said in (("#/checkpoints", "Nothing is saved yet"), ("#/failures", "No operation has failed")):
        page.go(f"{keyed.page}{hidden}")
        page.wait_text(said)
    page.go(f"{keyed.page}{address}")
    page.wait_text("This run does not exist, or it belongs to another tenant.")
    assert [line for line in page.complaints() if "404" not in line] == []


# ── Hands, eyes, wires


def test_the_keyboard_is_enough(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/runs")
    page.find("tbody a")
    page.press("Tab")
    assert page.focused() == "Skip to the content"
    page.press("Enter", "Tab")
    walked = [page.focused()]
    assert walked == ["Search"]
    while walked[-1] not in page.texts("tbody a"):
        page.press("Tab")
        walked.append(page.focused())
        assert len(walked) < 12
    page.press("Enter")
    page.wait(lambda: page.run("return document.activeElement.tagName") == "H1", "the focus on the new page")
    page.press("Shift+Tab")
    for _ in range(40):
        walked.append(page.focused())
        page.press("Tab")
    assert {"Smoothing", "Log scale", "Rename…", "Runs"} <= set(walked)
    assert any(". Arrow keys move" in name for name in walked)
    page.run("document.querySelector('#nav a[href=\"#/playground\"]').focus()")
    page.press("Enter")
    wait_for_models(page)
    page.run("document.querySelector('#prompt').focus()")
    page.press("Control+Enter")
    page.wait_text("mean log-probability")
    for _ in range(20):
        page.press("Tab")
        if page.run("return document.activeElement.classList.contains('token')"):
            break
    page.press("ArrowRight")
    assert "%" in "".join(page.texts(".tip"))
    outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_every_field_and_button_has_a_name(page: Browser, stage: Stage) -> None:
    for address in ("#/playground", "#/checkpoints", f"#/runs/{stage.training.model_id}"):
        page.open(f"{stage.url}/{address}")
        page.find("main button, main input")
        nameless = page.run(
            "return [...document.querySelectorAll('button, input, select, textarea, a, [role=slider]')]"
            ".filter((e) => e.checkVisibility() && !(e.getAttribute('aria-label') || e.labels?.length || "
            "e.textContent.trim())).map((e) => e.outerHTML)"
        )
        assert nameless == []


def test_the_chosen_theme_is_remembered(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/")
    light = page.run("return getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    assert page.texts("#theme") == ["Theme: dark"]
    page.open(f"{stage.url}/")
    assert page.run("return getComputedStyle(document.body).backgroundColor") != light
    page.click("#theme")
    assert page.texts("#theme") == ["Theme: auto"]


def test_a_lost_connection_is_shown_and_recovers(browser: Browser, stage: Stage) -> None:
    browser.open(f"{stage.url}/#/runs")
    browser.find("tbody a")
    browser.offline(True)
    browser.wait_text("Connection lost, trying again.", "#connection")
    browser.picture(PICTURES / "connection-lost.png", is_whole=False)
    assert "proverbs" in browser.text()
    assert browser.texts("#service") == ["No connection"] and browser.texts(".lamp.is-on") == []
    browser.offline(False)
    browser.wait(lambda: browser.texts("#connection") == [], "the line to go")
    browser.wait(lambda: browser.texts("#service") == ["Ready"], "the lamp to be green again")
    assert [line for line in browser.complaints() if "ERR_INTERNET_DISCONNECTED" not in line] == []


def test_a_hidden_page_sends_no_requests(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/runs")
    page.find("tbody a")
    page.run(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    asked = "return performance.getEntriesByType('resource').length"
    page.wait(lambda: is_steady(page, asked, 2.2), "an end of the requests")
    before = page.run(asked)
    page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(lambda: page.run(asked) > before, "the next request")


def is_steady(page: Browser, script: str, seconds: float) -> bool:
    before = page.run(script)
    time.sleep(seconds)
    return bool(page.run(script) == before)


def test_the_queue_shows_what_waits_and_why(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/queue")
    page.find(".facts")
    waiting = [stage.training.forward_backward(data() * 30, "cross_entropy") for _ in range(8)]
    page.wait(lambda: ask(stage.url, "/api/v1/service_state")["queued_operations"] > 2, "a queue")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")  # looked at anew, it asks at once
    page.wait_text("of this run before it")
    page.picture(PICTURES / "queue-busy.png")
    for future in waiting:
        future.result(120)
    stage.training.optim_step(tinkex.AdamParams(learning_rate=0.0)).result(60)
    page.wait_text("None of your operations is waiting.")
