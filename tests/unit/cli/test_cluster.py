"""`tinkex cluster up` and `down`: what they refuse before they ask Ray for anything."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tinkex.launch import ray_cluster

from .conftest import Tinkex

DATABASE = "postgresql://user:the-password@db.invalid/tinkex"


def test_a_cluster_on_ray_needs_a_postgresql(run: Tinkex) -> None:
    for words in (("up", "--train", "2xCPU:1"), ("down",)):
        done = run("cluster", *words)
        assert done.code == 1
        assert f"`tinkex cluster {words[0]}` needs a PostgreSQL that all servers of the cluster share." in done.err


def test_without_ray_the_command_says_what_to_install(run: Tinkex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("TINKEX_DATABASE_URL", DATABASE)
    done = run("cluster", "up", "--train", "2xCPU:1")
    assert done.code == 1
    assert "pip install 'tinkex[ray]'" in done.err
    assert "the-password" not in done.out + done.err


def test_the_shapes_of_nodes_reach_ray(run: Tinkex, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def scale(address: str, config: Any, *rest: Any, **options: Any) -> list[Any]:
        asked.append(rest)
        return []

    monkeypatch.setattr(ray_cluster, "scale", scale)
    assert run("cluster", "up", "--train", "2xCPU:1", "--sample", "1xGPU:2").code == 0
    assert run("cluster", "up", "--train", "1xCPU:1", "--fronts", "3").code == 0
    train, sample, fronts = asked[0]
    assert (train.count, sample.count, sample.kind, sample.each, fronts) == (2, 1, "GPU", 2, 1)
    assert (asked[1][1].count, asked[1][2]) == (0, 3)


def test_a_number_of_fronts_below_none_is_refused(run: Tinkex) -> None:
    assert "--fronts must be 0 or more, not -1." in run("cluster", "up", "--train", "1xCPU:1", "--fronts", "-1").err


@pytest.mark.parametrize("shape", ["2", "2xTPU:1", "CPU:1"])
def test_a_shape_that_is_no_shape_is_misuse(shape: str, run: Tinkex) -> None:
    done = run("cluster", "up", "--train", shape)
    assert done.code == 2 and "must be COUNTxCPU:EACH or COUNTxGPU:EACH" in done.err
