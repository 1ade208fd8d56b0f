"""A scripted service on 127.0.0.1 for test suites, with faults that a script chooses, and a clock to advance by hand.

    from tinkex.testing import Drop, ScriptedService, Status

    with ScriptedService(dialect="proto") as service:
        service.script.on("forward_backward", nth=2, do=Status(500))
        ...  # run the code under test against service.url
        assert service.executed == [...]

It is a second, independent implementation of the service, on purpose. It runs where only the SDK is installed: without
starlette, sqlalchemy and torch. And it reads training data and writes results by its own code (`testing/http/codec.py`,
with the protobuf runtime), not by the SDK's codecs: a fault that the two halves of one codec share would show here.

With pytest: `pytest_plugins = ["tinkex.testing.pytest_plugin"]` gives the fixtures `tinkex_service` and `tinkex_clock`.
"""

from __future__ import annotations

from tinkex.testing.clock import FakeClock
from tinkex.testing.http.messages import Request
from tinkex.testing.script import (
    Answer,
    Delay,
    Drop,
    Expire,
    FailFuture,
    Hang,
    Pending,
    Rule,
    Script,
    Status,
    Work,
)
from tinkex.testing.service import ScriptedService
from tinkex.testing.state import Config

__all__ = [
    "Answer",
    "Config",
    "Delay",
    "Drop",
    "Expire",
    "FailFuture",
    "FakeClock",
    "Hang",
    "Pending",
    "Request",
    "Rule",
    "Script",
    "ScriptedService",
    "Status",
    "Work",
]
