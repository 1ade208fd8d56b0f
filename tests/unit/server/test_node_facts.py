"""What a node tells the others of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinkex.engine.contract import EngineState
from tinkex.server.cluster.member import ClusterMember

READY, STARTING = EngineState(is_ready=True), EngineState(is_ready=False, reason="loading the model")


@pytest.mark.parametrize(
    ("trainer", "samplers", "is_ready"),
    [
        (READY, {}, True),
        (STARTING, {}, False),
        (READY, {"tiny": READY, "other": STARTING}, False),
        (READY, {"tiny": READY, "other": READY}, True),
    ],
)
def test_a_node_is_ready_when_its_vllm_is_and_not_before(
    trainer: EngineState, samplers: dict[str, EngineState], is_ready: bool
) -> None:
    """Before: the trainer was enough. Samples went to a node whose vLLM was loading for minutes, and waited there."""
    state = EngineState(is_ready=trainer.is_ready, extras={"samplers": samplers} if samplers else {})
    service = SimpleNamespace(
        engine=SimpleNamespace(state=state),
        worker=SimpleNamespace(queued=0, waiting=list),
        sampling=SimpleNamespace(queued=2, running=3),
        catalog=SimpleNamespace(models=[]),
    )
    member = object.__new__(ClusterMember)
    member._service, member.homes = cast(Any, service), cast(Any, SimpleNamespace(held=["a run"]))
    facts = member._facts()
    assert facts.is_ready is is_ready
    assert (facts.runs, facts.samples, facts.operations) == (1, 5, 0)
