"""Faults on demand: rules that pick requests, and what the scripted service does with them instead of its work.

    service.script.on("forward_backward", nth=2, do=Status(500))
    service.script.on("asample", times=3, do=[Delay(0.1), Status(429, headers={"retry-after-ms": "20"})])
    service.script.on("optim_step", nth=1, do=Drop(when="after_accept"))
    service.script.chaos(seed=7, p_500=0.05, p_429=0.05, p_reset=0.05, p_delay=0.2)

Rules are asked in the order they were made; every rule counts every request that it matches, the first that fires acts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinkex.testing.http.messages import Request
from tinkex.wire import endpoints

When = Literal["before", "after_accept"]

FILE = "file"  # downloads of a checkpoint's files, which have no row in the table
ENDPOINTS = frozenset(row.name for row in endpoints.ALL) | {FILE}


@dataclass(frozen=True, slots=True)
class Status:
    """Answer a status. `when="after_accept"`: the work was accepted and runs, only the response is lost."""

    status: int
    detail: str = "scripted"
    headers: Mapping[str, str] = field(default_factory=dict)
    when: When = "before"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer exactly this: bytes, text, or anything JSON can say."""

    body: Any
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    when: When = "before"


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait, then go on; `when="after_accept"` runs the request first and keeps only its answer waiting."""

    seconds: float
    when: When = "before"


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answer, until the service stops."""

    when: When = "before"


@dataclass(frozen=True, slots=True)
class Drop:
    """Break the connection.

    before: reset once the headers are there (with `where`, or after a Delay: once the body is); nothing runs.
    after_accept: reset instead of the response; the work was accepted and runs once.
    mid_answer: close half way through the response.
    """

    when: Literal["before", "after_accept", "mid_answer"] = "before"


@dataclass(frozen=True, slots=True)
class FailFuture:
    """The accepted operation fails: its poll answers `{"error", "category"}`. Nothing is executed."""

    message: str = "scripted failure"
    category: str = "server"


@dataclass(frozen=True, slots=True)
class Pending:
    """The next polls of the operation find it queued: 408, or 200 `try_again`."""

    queue_state: str = "active"
    reason: str | None = None
    times: int = 1
    try_again: bool = False


@dataclass(frozen=True, slots=True)
class Expire:
    """The result is lost: polls answer 410."""


@dataclass(frozen=True, slots=True)
class Work:
    """The operation takes this long once it runs."""

    seconds: float


# What happens to a future, as against to the request that made or polled it.
Twist = FailFuture | Pending | Expire | Work
Action = Status | Answer | Delay | Hang | Drop | Twist


@dataclass(slots=True)
class Rule:
    """Which requests, how often, and what then. `seen` and `fired` are counts a test may read."""

    endpoints: frozenset[str] | None
    choose: Callable[[], tuple[Action, ...]]
    dice: random.Random
    where: Callable[[Request], bool] | None = None
    first: int = 1
    times: int | None = None
    probability: float = 1.0
    acts_at_head: bool = False
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def draw(self, request: Request) -> tuple[Action, ...]:
        """What to do with this request: () if the rule does not fire."""
        if self.endpoints is not None and request.endpoint not in self.endpoints:
            return ()
        if self.where is not None and not self.where(request):
            return ()
        self.seen += 1
        if self.seen < self.first or (self.times is not None and self.fired >= self.times):
            return ()
        if self.probability < 1 and self.dice.random() >= self.probability:
            return ()
        chosen = self.choose()
        self.fired += bool(chosen)
        return chosen


class Script:
    """The rules of one service. They may be added and cleared at any time, from any thread."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def on(
        self,
        endpoint: str | Iterable[str] = "*",
        *,
        do: Action | Sequence[Action],
        where: Callable[[Request], bool] | None = None,
        nth: int | None = None,
        times: int | None = None,
        probability: float = 1.0,
        seed: int = 0,
    ) -> Rule:
        """Act on requests to `endpoint` ("*": any) for which `where` holds.

        Alone, every one; `times=3`, the first three; `nth=2`, only the second; `nth=2, times=3`, the second to fourth.
        """
        actions = (do,) if isinstance(do, Action) else tuple(do)
        if not actions:
            raise ValueError("do= needs at least one action")
        return self._add(
            Rule(
                endpoints=_names(endpoint),
                choose=lambda: actions,
                dice=random.Random(seed),
                where=where,
                first=nth or 1,
                times=1 if nth is not None and times is None else times,
                probability=probability,
                # Only a bare drop can act without the body; a predicate may want to read it.
                acts_at_head=actions[0] == Drop("before") and where is None,
            )
        )

    def chaos(
        self,
        seed: int,
        *,
        p_500: float = 0.0,
        p_429: float = 0.0,
        p_408: float = 0.0,
        p_reset: float = 0.0,
        p_delay: float = 0.0,
        delay_s: float = 0.05,
        retry_after_ms: int = 20,
        endpoint: str | Iterable[str] = "*",
    ) -> Rule:
        """Faults at random: the draws follow from the seed, the requests they hit from the order of arrival.

        Resets hit before the work is accepted, after it, and half way through the response.
        """
        dice = random.Random(seed)
        statuses = ((500, p_500), (429, p_429), (408, p_408))
        headers = {"retry-after-ms": str(retry_after_ms)}

        def choose() -> tuple[Action, ...]:
            delay = (Delay(dice.random() * delay_s),) if dice.random() < p_delay else ()
            ticket = dice.random()
            for status, odds in statuses:
                ticket -= odds
                if ticket < 0:
                    return (*delay, Status(status, "chaos", headers))
            if ticket < p_reset:
                return (*delay, Drop(dice.choice(("before", "after_accept", "mid_answer"))))
            return delay

        return self._add(Rule(_names(endpoint), choose, dice))

    def clear(self) -> None:
        """Back to good behaviour."""
        self.rules = []

    def decide(self, request: Request, at_head: bool) -> tuple[Action, ...]:
        chosen: tuple[Action, ...] = ()
        for rule in self.rules:
            if rule.acts_at_head == at_head:
                drawn = rule.draw(request)  # every rule counts, even when an earlier one acts
                chosen = chosen or drawn
        return chosen

    def _add(self, rule: Rule) -> Rule:
        self.rules = [*self.rules, rule]  # a new list: the service's thread may be walking the old one
        return rule


def _names(endpoint: str | Iterable[str]) -> frozenset[str] | None:
    if endpoint == "*":
        return None
    names = frozenset((endpoint,) if isinstance(endpoint, str) else endpoint)
    if unknown := names - ENDPOINTS:
        raise ValueError(f"no endpoint is named {', '.join(sorted(unknown))}. Names: {', '.join(sorted(ENDPOINTS))}")
    return names
