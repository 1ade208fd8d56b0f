"""In a Jupyter kernel, whose cells run inside an event loop, and with Ctrl-C inside `result()`: waits end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.integration.client.conftest import MODEL
from tinkex.testing import ScriptedService, Work

SET_UP = f"""
import asyncio, time, tinkex
service = tinkex.ServiceClient(base_url={{url!r}}, api_key="tml-notebook", telemetry=False)
training = service.create_lora_training_client({MODEL!r})
sampler = service.create_sampling_client(base_model={MODEL!r})
prompt, params = tinkex.ModelInput.from_ints([1, 2]), tinkex.SamplingParams(max_tokens=3)
datum = tinkex.Datum(model_input=prompt, loss_fn_inputs={{{{"target_tokens": [1, 2], "weights": [1.0, 1.0]}}}})
adam = tinkex.AdamParams(learning_rate=1e-3)

async def tick():
    # The kernel notices an interrupt of any await, even of asyncio.sleep, only when its loop next wakes up.
    while True:
        await asyncio.sleep(0.05)

ticking = asyncio.ensure_future(tick())
"""


class Notebook:
    """A real kernel in a process of its own, one cell at a time."""

    def __init__(self, folder: Path) -> None:
        # "python3" is the Python that runs the tests; its files stay out of the user's folders.
        self.manager = KernelManager(kernel_name="python3", connection_file=str(folder / "kernel.json"))
        self.manager.start_kernel(env={**os.environ, "IPYTHONDIR": str(folder)})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, code: str) -> str:
        return str(self.client.execute(code))

    def outcome(self, cell: str, timeout_s: float = 30.0) -> str:
        """What the cell printed, or its error as `Name: text`."""
        printed = ""
        error = ""
        deadline = time.monotonic() + timeout_s
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.1))
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return error or printed

    def run(self, code: str) -> str:
        return self.outcome(self.start(code))

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedService]:
    with ScriptedService(base_models=[MODEL]) as running:
        yield running


@pytest.fixture(scope="module")
def notebook(scripted: ScriptedService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    kernel = Notebook(tmp_path_factory.mktemp("kernel"))
    try:
        assert kernel.run(SET_UP.format(url=scripted.url)) == ""
        yield kernel
    finally:
        kernel.stop()


@pytest.mark.slow
def test_a_cell_may_call_and_block_although_a_loop_is_running(notebook: Notebook) -> None:
    assert notebook.run("print(asyncio.get_running_loop().is_running())") == "True\n"
    code = """
first = training.forward_backward([datum], "cross_entropy")
second = training.optim_step(adam)
print(len(first.result(20).loss_fn_outputs), second.result(20) is not None)
print(len(sampler.sample(prompt, 2, params).result(20).sequences))
print(training.get_info().model_id == training.model_id)
print(type(training.save_weights_and_get_sampling_client()).__name__)
"""
    assert notebook.run(code) == "1 True\n2\nTrue\nSamplingClient\n"


@pytest.mark.slow
def test_a_cell_may_await_futures_and_coroutines(notebook: Notebook) -> None:
    code = """
future = await training.forward_backward_async([datum], "cross_entropy")
output = await future
print(output is future.result(), len(output.loss_fn_outputs))
print(len((await sampler.sample_async(prompt, 2, params)).sequences))
answers = await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for _ in range(10)))
print(len(answers))
chunks = [chunk async for chunk in sampler.stream(prompt, params)]
print(sum(len(chunk.tokens) for chunk in chunks))
"""
    assert notebook.run(code) == "True 1\n2\n10\n3\n"


@pytest.mark.slow
def test_a_future_made_in_one_cell_is_read_in_another(notebook: Notebook) -> None:
    assert notebook.run("kept = sampler.sample(prompt, 1, params)") == ""
    assert notebook.run("print(len((await kept).sequences), len(kept.result().sequences))") == "1 1\n"


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("wait", ["slow.result()", "await slow", "await slow.result_async()"])
def test_interrupting_a_cell_stops_the_wait_and_not_the_work(
    notebook: Notebook, scripted: ScriptedService, wait: str
) -> None:
    scripted.script.on("asample", nth=1, do=Work(1.5))
    try:
        polls = len(scripted.requests_to("retrieve_future"))
        cell = notebook.start(
            "slow = sampler.sample(prompt, 1, params)\n"
            f"try:\n    {wait}\n"
            "except BaseException as problem:\n    print(type(problem).__name__, time.monotonic())"
        )
        scripted.wait_for_requests("retrieve_future", polls + 1)
        time.sleep(0.2)  # the poll is under way before the cell has come to its last line
        started = time.monotonic()
        notebook.interrupt()
        name, stopped = notebook.outcome(cell).split()
        assert name in ("KeyboardInterrupt", "CancelledError")
        assert float(stopped) - started < 1
        assert notebook.run("print(slow.cancelled(), len(slow.result(20).sequences))") == "False 1\n"
    finally:
        scripted.script.clear()


WAIT_FOR_EVER = f"""
import sys, time, tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-ctrl-c", telemetry=False)
sampler = service.create_sampling_client(base_model={MODEL!r})
prompt, params = tinkex.ModelInput.from_ints([1, 2]), tinkex.SamplingParams(max_tokens=3)
future = sampler.sample(prompt, 1, params)
"""


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    [
        "future.result()",
        "future.result(100)",
        "import asyncio; asyncio.run(future.result_async())",
        "import asyncio; asyncio.run(sampler.sample_async(prompt, 1, params))",
        "with service: future.result()",
    ],
)
def test_ctrl_c_inside_result_raises_at_once_and_the_program_ends_at_once(wait: str) -> None:
    with ScriptedService(base_models=[MODEL], work_s=60.0) as service:
        code = (
            f"{WAIT_FOR_EVER}\ntry:\n    print('waiting', flush=True)\n    {wait}\n"
            "except KeyboardInterrupt:\n    print(time.monotonic(), flush=True)\n"
        )
        program = subprocess.Popen(
            [sys.executable, "-c", code, service.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "waiting\n"
        service.wait_for_requests("retrieve_future", timeout_s=20)
        time.sleep(0.3)  # let it come to rest inside the wait
        pressed = time.monotonic()
        os.kill(program.pid, signal.SIGINT)
        printed, errors = program.communicate(timeout=30)
        ended = time.monotonic()
        assert errors == ""
        assert program.returncode == 0
        assert float(printed) - pressed < 1
        assert ended - pressed < 2
        finished = [session.finished for session in service.sessions.values()]
        if wait.startswith("with"):
            assert finished == [{"reason": {"type": "interrupted"}, "detail": "KeyboardInterrupt"}]


@pytest.mark.timing
@pytest.mark.slow
def test_ctrl_c_that_nobody_catches_ends_the_program_with_its_own_trace_only() -> None:
    with ScriptedService(base_models=[MODEL], work_s=60.0) as service:
        program = subprocess.Popen(
            [sys.executable, "-c", f"{WAIT_FOR_EVER}\nfuture.result()", service.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        service.wait_for_requests("retrieve_future", timeout_s=20)
        time.sleep(0.3)
        pressed = time.monotonic()
        os.kill(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=30)
        assert time.monotonic() - pressed < 2
        assert program.returncode in (-signal.SIGINT, 1)
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
