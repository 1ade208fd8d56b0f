"""Hostile text in everything that the console shows, in a real browser: nothing of it runs, and pages stay usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, Run
from tests.product.console.browser import Browser
from tests.product.console.test_console import TOO_WIDE
from tinkex.wire import sse

pytestmark = pytest.mark.slow
HOSTILE = {
    "script": "<script>window.__pwned = 1; alert(1)</script>",
    "handler": "<img src=x onerror=\"window.__pwned = 1\" style='position:fixed;inset:0'>",
    "svg": '"><svg onload=window.__pwned=1><iframe srcdoc="<script>parent.__pwned=1</script>">',
    "link": "javascript:window.__pwned=1//",
    "anchor": '<a href="javascript:window.__pwned=1" autofocus onfocus=window.__pwned=1>click</a>',
    "braces": "{{constructor.constructor('window.__pwned=1')()}} ${window.__pwned=1} <%= 7*7 %> #{7*7}",
    "quotes": "';window.__pwned=1;//\\\";window.__pwned=1;//`${window.__pwned=1}`",
    "marks": "\u202egnp.exe\u2066\u200f\u0000\u0007 \U0001f600 \u0301\u0301\u0301",
    "long": "x" * 10_000,
    "words": "wide " * 2_000,
}
ALL = " ".join(HOSTILE.values())
PAGES = ("#/runs", "#/queue", "#/checkpoints", "#/playground", "#/failures")
STRANGE = """
    const tags = /^(SCRIPT|IFRAME|OBJECT|EMBED|IMG|BASE|STYLE|LINK|META)$/i;
    const runs = (a) => a.name.startsWith("on")
        || (["href", "src", "action", "formaction"].includes(a.name) && /^\\s*javascript:/i.test(a.value));
    return [...document.querySelectorAll("main *, #status *, dialog *")]
        .filter((e) => tags.test(e.tagName) || [...e.attributes].some(runs))
        .map((e) => e.outerHTML.slice(0, 200));
"""
"""Elements and attributes that the console never makes of what it shows."""


@dataclass
class Hostile:
    server: LiveServer
    runs: dict[str, Run]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    """A service full of hostile names, metadata, tags, checkpoints and failures, all of them by ordinary calls."""
    with LiveServer(tmp_path_factory.mktemp("injection") / "data") as server:
        client, runs = Raw(server), {}
        for number, (word, text) in enumerate(HOSTILE.items()):
            short = text[:200]
            session = client.post(
                "create_session",
                {"tags": [short], "display_name": short, "project_id": short, "user_metadata": {"name": short}},
            ).json["session_id"]
            body = {
                "session_id": session,
                "model_seq_id": number,
                "base_model": "tinkex/tiny",
                "lora_config": {"rank": 1, "seed": 1},
                "user_metadata": {"name": text, short: text},
            }
            run = Run(client, client.done("create_model", body)["model_id"])
            client.done("save_weights_for_sampler", run.named(path="saved", user_metadata={"note": text}))
            # Fails, and the failure names what was asked for.
            lost = run.named(path=f"tinker://nobody/weights/{text.replace('/', '_')[:500]}", optimizer=True)
            client.poll(client.post("load_weights", lost).json.get("request_id"))
            runs[word] = run
        yield Hostile(server, runs)


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    browser.size(1200, 800)
    browser.complaints()
    yield browser
    browser.answer_no_more()


def check_harmless(page: Browser, where: str) -> None:
    """Nothing ran, nothing tried to, nothing was made of the text but text; and the page can still be used."""
    assert page.run("return window.__pwned ?? null") is None, where
    assert page.run(STRANGE) == [], where
    refused = [line for line in page.complaints() if "Failed to load resource" not in line]
    assert refused == [], where  # a script that the policy stopped would be logged here
    assert page.run(TOO_WIDE) == [], where
    page.click("nav a", "Queue")
    page.wait_text("The service is ready.")


def test_no_list_runs_what_is_in_its_names(page: Browser, hostile: Hostile) -> None:
    for address in PAGES:
        page.open(f"{hostile.server.url}/{address}")
        page.wait(lambda: len(page.text()) > 50, address)
        if address == "#/runs":
            page.wait_text(HOSTILE["script"])
        if address == "#/failures":
            page.wait_text("tinker://nobody/weights/")
        check_harmless(page, address)


@pytest.mark.parametrize("word", HOSTILE)
def test_the_page_of_a_run_shows_hostile_metadata_as_text(page: Browser, hostile: Hostile, word: str) -> None:
    page.open(f"{hostile.server.url}/#/runs/{quote(hostile.runs[word].id)}")
    page.wait(lambda: page.texts("h1") not in ([], [""]), "the heading")
    page.wait(lambda: HOSTILE[word].strip()[:20].strip("\0") in page.run("return document.body.textContent"), word)
    check_harmless(page, word)


@pytest.mark.parametrize("size", [(780, 1000), (360, 740)])
def test_long_names_leave_a_small_screen_usable(page: Browser, hostile: Hostile, size: tuple[int, int]) -> None:
    for address in (*PAGES, f"#/runs/{hostile.runs['long'].id}", f"#/runs/{hostile.runs['words'].id}"):
        page.open(f"{hostile.server.url}/{address}")
        page.size(*size)
        page.wait(lambda: len(page.text()) > 50, address)
        check_harmless(page, f"{address} at {size}")


def test_an_address_runs_nothing(page: Browser, hostile: Hostile) -> None:
    """A link that somebody sends: the run, the model and the page in it are his words."""
    page.open(f"{hostile.server.url}/")
    for word, text in HOSTILE.items():
        for address in ("#/runs/{}", "#/playground?model={}", "#/{}"):
            for written in (text[:2000], quote(text[:2000], safe="")):
                page.go(f"{hostile.server.url}/{address.format(written)}")
                page.wait(lambda: len(page.text()) > 10, address)
                assert page.run("return window.__pwned ?? null") is None, (word, address)
                assert page.run(STRANGE) == [], (word, address)
    assert [line for line in page.complaints() if "Failed to load resource" not in line] == []


def sampled(text: str) -> bytes:
    """A stream in which the model says this."""
    logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [{text: -1.0}], "text_offset": [0]}
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop"}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": text}
    return sse.encode("", json.dumps({**head, "choices": [choice]})) + sse.encode("", "[DONE]")


def test_what_a_model_says_is_text(page: Browser, hostile: Hostile) -> None:
    page.open(f"{hostile.server.url}/#/playground")
    page.wait(lambda: page.run("return document.querySelector('#model-1')?.value"), "a model")
    for text in HOSTILE.values():
        page.answer("**/v1/completions", sampled(text), "text/event-stream")
        page.click("button.primary")
        page.wait(lambda: not page.run("return document.querySelector('button.primary').disabled"), "the end")
        page.wait(lambda: page.run("return document.querySelectorAll('.token').length"), "its tokens")
        page.hover(page.find(".token"))
        assert page.run("return window.__pwned ?? null") is None
        assert page.run(STRANGE) == [] and page.complaints() == []
        page.answer_no_more()
    check_harmless(page, "the playground")


@pytest.mark.parametrize("status", [400, 404, 500])
def test_an_error_message_is_text(page: Browser, hostile: Hostile, status: int) -> None:
    problem = json.dumps({"detail": ALL, "code": ALL, "category": ALL, "error": {"message": ALL}}).encode()
    for address, asked in (
        ("#/runs", "**/api/v1/training_runs*"),
        ("#/checkpoints", "**/api/v1/checkpoints*"),
        ("#/failures", "**/api/v1/failed_operations*"),
        ("#/playground", "**/v1/models"),
    ):
        page.answer(asked, problem, status=status)
        page.open(f"{hostile.server.url}/{address}")
        page.wait(lambda: "__pwned" in page.text("body"), address)
        page.answer_no_more()
        check_harmless(page, f"{address} with {status}")
