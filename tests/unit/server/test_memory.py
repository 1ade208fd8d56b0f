"""What a request needed is free again when it is over, without a full garbage collection, and returns to the system."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.unit.server.conftest import Served
from tinkex.errors import ValidationError
from tinkex.server.http.errors import bad_request
from tinkex.server.http.requests import ApiRequest, guarded
from tinkex.types import SampleRequest

GROWN_BY_LARGE_BLOCKS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

def resident_mb():
    if not Path("/proc/self/status").exists():
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))

def grown_mb():
    together = threading.Barrier(6)

    def read_bodies(_):
        together.wait(30)
        for size in (8 << 20, 4 << 20, 2 << 20):
            bodies = [b"x" * size for _ in range(8)]
            del bodies

    with ThreadPoolExecutor(6) as pool:
        before = resident_mb()
        list(pool.map(read_bodies, range(6)))
        return resident_mb() - before
"""
LARGE_BLOCKS = f"""
import sys
from tinkex.server.upkeep.machine import return_large_blocks
{GROWN_BY_LARGE_BLOCKS}
if sys.argv[1] == "returned":
    return_large_blocks()
print(grown_mb())
"""


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Body:
    """Stands for the bytes of a body, which cannot be referred to weakly."""


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_body_of_a_rejected_request_is_freed_at_once(served: Served, is_wrapped: bool) -> None:
    bodies: list[weakref.ref[Body]] = []

    async def handler(request: ApiRequest) -> Response:
        body = Body()
        bodies.append(weakref.ref(body))
        try:
            raise ValidationError("bad")
        except ValidationError as error:
            rejected = bad_request(str(error), "bad") if is_wrapped else error
        raise rejected  # refers to the frame that refers to it

    scope: dict[str, Any] = {"type": "http", "headers": [], "app": served.app, "state": {}}
    call: Any = guarded("x", handler)
    response = asyncio.run(call(Request(scope)))
    assert response.status_code == 400
    assert bodies[0]() is None


@pytest.mark.usefixtures("no_collections")
def test_reading_a_request_leaves_no_cycles_behind() -> None:
    chunk = {"type": "encoded_text", "tokens": [5, 6]}

    def cycles(stop: Any) -> int:
        params = {"max_tokens": 1, "stop": stop}
        body = {"base_model": "tinkex/tiny", "prompt": {"chunks": [chunk]}, "sampling_params": params, "num_samples": 1}
        gc.collect()
        SampleRequest.model_validate(body)
        return gc.collect()

    for stop in ([], "end", [7]):
        # A thread that another test left behind makes a cycle now and then; one of the request is there each time.
        assert min(cycles(stop) for _ in range(8)) == 0, stop


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps large blocks")
def test_memory_of_large_bodies_returns_to_the_system() -> None:
    def grown_mb(mode: str) -> int:
        command = [sys.executable, "-c", LARGE_BLOCKS, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert grown_mb("returned") <= 10
    if grown_mb("kept") <= 10:
        pytest.skip("this system's malloc returns large blocks by itself")
