"""An engine process without torch: the real `child`, whose trainer and sampler do what a test's command says.

Run by its path in place of `tinkex.engine.process.main`. A model's name decides how it starts: `broken` cannot be
loaded, `endless` never is, `garbage` says something that is not a packet.

With arguments it first starts a process that holds its stdin, stdout and stderr for ten minutes: the first names a
file that gets the process's id as another line; a second one, `leave`, lets it leave the process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Mapping
from time import sleep
from typing import Any

from tinkex.engine.contract import EngineFault, Sampled, SampleEvent, SampleSpec, SequenceOutput, Tokens
from tinkex.engine.frames import Frame
from tinkex.engine.process import main
from tinkex.engine.process.loop import Loop, Send
from tinkex.engine.training.saver import Saver


class Trainer:
    """One command at a time."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Generator[None, None, Frame]]] = deque()
        self.saver = Saver()

    passes = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, number: int, command: Frame) -> None:
        self._queue.append((number, self._run(command)))

    def step(self) -> list[tuple[int, Frame | Exception]]:
        number, running = self._queue[0]
        try:
            next(running)
            return []
        except StopIteration as end:
            reply = end.value
        except Exception as problem:
            reply = problem
        self._queue.popleft()
        return [(number, reply)]

    def _run(self, command: Frame) -> Generator[None, None, Frame]:
        match command.head["op"]:
            case "echo":
                return Frame({"heard": command.head}, command.buffers)
            case "print":
                print("a print", flush=True)
                os.write(1, b"a write to fd 1\n")
                subprocess.run([sys.executable, "-c", "print('a print of a child')"], check=True)
                return Frame({"read": sys.stdin.read()})
            case "steps":
                for _ in range(command.head["count"]):
                    sleep(0.01)
                    yield
                return Frame({})
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fault":
                raise EngineFault("This will not do.", "user")
            case "unwritable":
                return Frame({"metrics": object()})
        raise KeyError("a secret at /some/path")


class Sampler:
    """Draws one token per step and sequence: 0, 1, 2 … A temperature of 13 breaks the step, the base `none` the add."""

    cache_bytes = 0

    def __init__(self) -> None:
        self._drawn: dict[int, tuple[SampleSpec, list[int]]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._drawn)

    def add(self, number: int, spec: SampleSpec) -> None:
        if spec.base == "none":
            raise EngineFault("There is no such base.")
        self._drawn[number] = (spec, [])

    def cancel(self, number: int) -> None:
        self._drawn.pop(number, None)

    def step(self) -> list[tuple[int, SampleEvent | EngineFault]]:
        sleep(0.005)
        events: list[tuple[int, SampleEvent | EngineFault]] = []
        for number, (spec, tokens) in list(self._drawn.items()):
            if spec.temperature == 13:
                raise ZeroDivisionError
            tokens.append(len(tokens))
            if spec.is_streamed:
                events.append((number, Tokens(0, tokens[-1:], [-0.5])))
            if len(tokens) == spec.max_tokens:
                row = SequenceOutput(tokens=tokens, logprobs=[-0.5] * len(tokens), stop_reason="length")
                events.append((number, Sampled(sequences=[row], prompt_tokens=len(spec.prompt))))
                del self._drawn[number]
        return events


def load(start: Mapping[str, Any], send: Send) -> Loop:
    name = start["models"][0]["name"]
    send(0, Frame({"news": "loading", "what": name}))
    match name:
        case "broken":
            raise OSError("its weights are missing")
        case "endless":
            threading.Event().wait()
        case "garbage":
            send(0, Frame({"no": "news"}))
    send(0, Frame({"news": "ready", "threads": 1, "device": "cpu"}))
    return Loop(Trainer(), Sampler(), send)  # type: ignore[arg-type]


def start_child(file: str, *, leaves: bool) -> None:
    is_written, says_so = os.pipe()
    if os.fork() == 0:
        if leaves:
            os.setsid()
        with open(file, "a") as out:
            out.write(f"{os.getpid()}\n")
        os.closerange(3, 100)  # it has the pipes and nothing else, as if it were another program
        sleep(600)
        os._exit(0)
    os.close(says_so)
    os.read(is_written, 1)  # nothing comes; it ends when both have closed the other end
    os.close(is_written)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start_child(sys.argv[1], leaves="leave" in sys.argv)
    main.load = load
    main.main()
