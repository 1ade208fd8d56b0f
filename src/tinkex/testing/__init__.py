"""For test suites: a scripted service on 127.0.0.1, the faults it can be told to have, and a clock to turn by hand.

    from tinkex.testing import Drop, ScriptedService, Status

    with ScriptedService(dialect="proto") as service:
        service.script.on("forward_backward", nth=2, do=Status(500))
        ...  # run the code under test against service.url
        assert service.executed == [...]

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
