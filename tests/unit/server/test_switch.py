"""Which node of a cluster gets a request that names a run: one that has the run's base model."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.unit.server.conftest import Served
from tinkex.server.cluster.concern import Concern
from tinkex.server.cluster.switch import Switch
from tinkex.store.cluster.cluster_store import NodeRecord

TINY, OTHER = (
    NodeRecord(id=name, url=f"http://{name}", models=(model,), version="1")
    for name, model in (("tiny", "tinkex/tiny"), ("other", "org/other"))
)


class TwoNodes:
    """The peers that a front sees: each has another base model."""

    async def living(self) -> list[NodeRecord]:
        return [TINY, OTHER]

    async def choose(self, name: str, model: str | None, *, sequences: int = 1) -> NodeRecord | None:
        return next((node for node in await self.living() if node.serves(model or "")), None)


@pytest.mark.parametrize("name", ["mine", "abcd:train:0", "abcd", "abcd:0", "latest"])
def test_a_completion_of_a_run_goes_to_a_node_with_its_base_model(served: Served, name: str) -> None:
    run = served.training_run("abcd:train:0", base_model="org/other", name="mine")
    served.checkpoint(run, kind="sampler_weights")
    switch = Switch(served.service, None, cast(Any, None), cast(Any, TwoNodes()))

    def found(tenant: str, model: str) -> str:
        return served.run(switch.find(tenant, Concern("sampler", f"{model} prompt", model=model)))

    assert found("local", name) == OTHER.url
    assert found("local", "tinkex/tiny") == TINY.url
    assert found("another", name) == TINY.url, "nothing is known of another tenant's run: any node says so"
