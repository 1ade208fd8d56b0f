"""The page of a cluster's nodes, in a real browser. `tests/cluster/test_cluster_console.py` has it on real nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.product.console.browser import Browser
from tests.product.console.conftest import PICTURES, Stage
from tests.product.console.test_console import DESK, PHONE, TABLET, TOO_WIDE, ask

pytestmark = pytest.mark.slow
STATE = "**/api/v1/service_state"


def node(number: int, **given: Any) -> dict[str, Any]:
    about = {
        "id": f"{number:016x}", "url": f"http://10.0.0.{number}:8642", "is_this": number == 1, "kind": "train",
        "state": "busy", "runs": 12, "busy_runs": 5, "queued_operations": 9, "samples": 1200, "lease_left_s": 12.4,
        "models": ["HuggingFaceTB/SmolLM2-135M", "smollm2-135m"], "version": "0.1.0",
    }  # fmt: skip
    return {**about, **given}


NODES = [
    node(1),
    node(2, state="starting", runs=0, busy_runs=0, queued_operations=0, samples=0),
    node(3, state="draining", runs=1, models=["<img src=x onerror=\"document.title='harmed'\">"]),
    node(4, state="gone", runs=3, lease_left_s=-75.0),
]


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    browser.size(*DESK)
    browser.complaints()
    yield browser
    browser.answer_no_more()
    assert browser.complaints() == []


def test_the_page_of_the_cluster_shows_each_node_in_both_themes_and_on_a_phone(page: Browser, stage: Stage) -> None:
    page.answer(STATE, json.dumps({**ask(stage.url, "/api/v1/service_state"), "nodes": NODES}).encode())
    page.open(f"{stage.url}/#/cluster")
    page.wait_text("3 nodes with 13 runs: 1 busy, 1 starting, 1 draining, 1 gone.")
    assert page.texts("nav [aria-current]") == ["Cluster"]
    for text in (
        "http://10.0.0.1:8642",
        "this server",
        "5 of 12 busy",
        "1,200",
        "12 s",
        "ended 1 min 15 s ago",
        "0.1.0",
    ):
        page.wait_text(text)
    assert NODES[2]["models"][0] in page.text() and "harmed" not in str(page.run("return document.title"))
    looks = (("light", DESK, False), ("dark", DESK, True), ("tablet", TABLET, True), ("phone", PHONE, False))
    for look, size, is_dark in looks:
        page.size(*size, is_dark=is_dark)
        assert page.run(TOO_WIDE) == [], look
        page.picture(PICTURES / f"cluster-{look}.png")


def test_a_server_that_is_alone_has_no_such_page_in_its_menu(page: Browser, stage: Stage) -> None:
    page.open(f"{stage.url}/#/cluster")
    page.wait_text("This server is alone")
    assert "Cluster" not in page.texts("nav a")


def test_the_page_of_a_run_names_its_node(page: Browser, stage: Stage) -> None:
    steps = ask(stage.url, f"/api/v1/training_runs/{stage.training.model_id}/steps")
    assert steps["home"] is None
    page.answer("**/steps*", json.dumps({**steps, "steps": [], "home": "http://10.0.0.2:8642"}).encode())
    page.open(f"{stage.url}/#/runs/{stage.training.model_id}")
    page.wait_text("http://10.0.0.2:8642", ".facts")
