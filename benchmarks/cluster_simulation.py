"""A cluster in simulated time: how placement, and fairness within an engine, treat users who come and leave.

    python -m benchmarks.cluster_simulation             (writes benchmarks/results/cluster_simulation.md)
    python -m benchmarks.cluster_simulation --engines 8 --seeds 2 --tenants 200 --minutes 5

Discrete events. What decides is the product's own code: `server.cluster.placement` chooses nodes and moves, and
`server.training.scheduler.Shares` chooses whose operation enters an engine. Nodes are seen as the product sees them:
the number of runs is exact, everything else as old as the last renewal of a lease. Assumed, and named in the result,
is the speed of an engine; there is no database, front or network. Everything is drawn from a seed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import heapq
import itertools
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.client_cost import commit
from tinkex.server.cluster import placement
from tinkex.server.training.scheduler import Shares, cost_of
from tinkex.server.training.worker import WINDOW
from tinkex.store.cluster.cluster_store import NodeFacts, NodeRecord

RESULTS = Path(__file__).parent / "results" / "cluster_simulation.md"

TOKENS_PER_S = 20_000.0
"""Of one engine with full micro-batches: assumed, of the order of a small model on one GPU."""
MICRO_BATCH_S = 0.05
"""What a micro-batch costs beside its tokens: assumed."""
BUDGET = 16_384
"""Tokens of a micro-batch: assumed."""
LEASE_S, RENEWALS = 15.0, 3
LOOK_S = 5.0
"""How often a node adopts accepted work and gives up runs."""
REBUILD_S = 2.0
"""To read a snapshot and restore it at another node; a replay comes on top when the former one died."""
DOWN_S, STARTING_S = 60.0, 20.0
"""How long a failed engine's machine is away, and how long an engine then loads its models."""
FAILS_EVERY_S = 1800.0
"""Between two failures of one engine, on average: far more often than machines do."""
LOAD = 0.9
"""Part of the engines' tokens that users ask for, on average over the whole time."""
EQUAL_TENANTS, EQUAL_STEPS, EQUAL_TOKENS, EQUAL_THINK_S = 32, 60, 6000.0, 0.5
"""A course: as many tenants, each with one job of the same size, that begin at the same moment."""
BURSTS, BURST_TENANTS = 3, 60

Choice = Callable[[Sequence[NodeRecord], random.Random, int], NodeRecord]


def _open(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Every policy knows which nodes are ready and not draining."""
    fit = [node for node in nodes if not node.is_draining]
    return [node for node in fit if node.facts.is_ready] or fit or list(nodes)


def ours(nodes: Sequence[NodeRecord], dice: random.Random, turn: int) -> NodeRecord:
    return placement.node_for_run(nodes, "") or nodes[0]


def in_turn(nodes: Sequence[NodeRecord], dice: random.Random, turn: int) -> NodeRecord:
    fit = _open(nodes)
    return fit[turn % len(fit)]


def two_choices(nodes: Sequence[NodeRecord], dice: random.Random, turn: int) -> NodeRecord:
    fit = _open(nodes)
    return min(dice.sample(fit, min(2, len(fit))), key=lambda node: node.runs)


def at_random(nodes: Sequence[NodeRecord], dice: random.Random, turn: int) -> NodeRecord:
    return dice.choice(_open(nodes))


def fewest_runs(nodes: Sequence[NodeRecord], dice: random.Random, turn: int) -> NodeRecord:
    """As ours, but that all runs weigh the same."""
    same = [replace(node, facts=replace(node.facts, busy=0, runs=node.runs)) for node in nodes]
    return placement.node_for_run(same, "") or nodes[0]


@dataclass(frozen=True)
class Policy:
    choose: Choice
    is_fair: bool = True
    """Whether tenants share an engine (`Shares`, equal parts of a micro-batch), or are served in order of arrival."""
    moves: bool = False


POLICIES = {
    "ours": Policy(ours, moves=True),
    "fewest runs": Policy(fewest_runs, moves=True),
    "fewest runs, moves on drain alone": Policy(fewest_runs),
    "in turn": Policy(in_turn),
    "two random choices": Policy(two_choices),
    "first come": Policy(in_turn, is_fair=False),
}


@dataclass(eq=False)
class Run:
    """One training run of a tenant: passes of some tokens with a pause between them, so many times."""

    id: str
    tenant: str
    tokens: float
    think_s: float
    steps: int
    pauses_at: int = -1
    """The step after which the user looks at the results for five minutes."""
    is_equal: bool = False
    began: float = 0.0
    home: Engine | None = None
    ready_at: float = 0.0
    operation: Operation | None = None


@dataclass(eq=False)
class Operation:
    run: Run
    at: float
    left: float
    """Tokens that are still to compute."""
    place: Literal["journal", "queue", "window"] = "journal"


@dataclass(eq=False)
class Engine:
    row: NodeRecord
    runs: dict[str, Run] = field(default_factory=dict)
    queue: dict[str, deque[Operation]] = field(default_factory=dict)
    """By tenant, in the order of arrival."""
    window: list[Operation] = field(default_factory=list)
    shares: Shares = field(default_factory=Shares)
    lives: bool = True
    is_busy: bool = False
    life: int = 0
    used_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    waits: list[float]
    """Seconds of each operation beyond what it takes on an engine that has nothing else to do."""
    slowdowns: list[float]
    """Of each tenant: the mean of its operations' time, as a multiple of that alone."""
    equal_minutes: list[float]
    """How long each of the equal jobs took."""
    used: float
    moves: int

    @property
    def jain(self) -> float:
        """Fairness over the equal tenants' speed: 1 if all are equally fast, 1/n if one has everything."""
        speeds = [1 / minutes for minutes in self.equal_minutes]
        return sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds)) if speeds else 0.0

    def wait(self, part: float) -> float:
        return self.waits[min(int(len(self.waits) * part), len(self.waits) - 1)]

    @property
    def slow(self) -> float:
        return self.slowdowns[min(int(len(self.slowdowns) * 0.99), len(self.slowdowns) - 1)]

    @property
    def spread(self) -> float:
        return max(self.equal_minutes) / min(self.equal_minutes)


def alone_s(tokens: float) -> float:
    return math.ceil(tokens / BUDGET) * MICRO_BATCH_S + tokens / TOKENS_PER_S


class Simulation:
    """`go` once. The users are the same for every policy: they have dice of their own."""

    def __init__(self, policy: Policy, engines: int, tenants: int, seed: int, seconds: float) -> None:
        self._policy, self._seconds = policy, seconds
        self._users, self._faults, self._dice = (random.Random(f"{seed} {name}") for name in ("users", "faults", "us"))
        self.now, self._events, self._numbers = 0.0, list[Any](), itertools.count()
        self._turns = itertools.count()
        self.engines = [Engine(self._row(f"n{number:02d}")) for number in range(engines)]
        self._waits: list[float] = []
        self._slow: dict[str, list[float]] = {}
        self._equal: list[float] = []
        self._moves = 0
        self._count = engines
        self._used_s: float | None = None
        for engine in self.engines:
            self._after(self._dice.random() * LEASE_S / RENEWALS, self._renew, engine, 0)
            self._after(self._dice.random() * LOOK_S, self._look, engine, 0)
            self._after(self._faults.expovariate(1 / FAILS_EVERY_S), self._fail, engine)
        # A quarter more engines come for the middle third of the time, and are drained then.
        for number in range(engines, engines + max(engines // 4, 1)):
            self._after(seconds / 3, self._come, Engine(self._row(f"n{number:02d}", is_ready=False)))
        self._invite(tenants, engines)

    # ── Users

    def _invite(self, tenants: int, engines: int) -> None:
        """Plan who comes when: a third from the start, the rest over time and in bursts, and the course of equals."""
        dice, seconds = self._users, self._seconds
        starts = [dice.random() * 20 for _ in range(tenants // 3)]
        for number in range(BURSTS):
            at = seconds * (number + 1) / (BURSTS + 1)
            starts += [at + dice.random() * 5 for _ in range(min(BURST_TENANTS, tenants // 10))]
        starts += [dice.random() * seconds * 0.9 for _ in range(tenants - len(starts))]
        weights = [dice.lognormvariate(0, 1.0) for _ in starts]
        lengths = [min(dice.lognormvariate(math.log(seconds / 4), 0.7), seconds - start) for start in starts]
        wanted = LOAD * engines * TOKENS_PER_S * seconds
        scale = wanted / sum(weight * length for weight, length in zip(weights, lengths, strict=True))
        for number, (start, weight, length) in enumerate(zip(starts, weights, lengths, strict=True)):
            self._after(start, self._arrive, f"t{number}", weight * scale, length)
        for number in range(EQUAL_TENANTS):
            run = Run(f"e{number}", f"e{number}", EQUAL_TOKENS, EQUAL_THINK_S, EQUAL_STEPS, is_equal=True)
            self._after(seconds / 4, self._begin, run)

    def _arrive(self, tenant: str, rate: float, length: float) -> None:
        """A tenant comes, with runs that ask for so many tokens a second together, for so long. One in ten gives up."""
        dice = self._users
        count = max(1, min(16, round(rate / 2000)))
        leaves = dice.random() if dice.random() < 0.1 else 1.0
        for number in range(count):
            tokens = min(60_000.0, dice.lognormvariate(math.log(6000), 0.8))
            cycle = max(tokens / (rate / count), alone_s(tokens) + 0.1)
            steps = max(1, round(leaves * length / cycle))
            pauses_at = dice.randrange(steps) if dice.random() < 0.25 else -1
            self._begin(Run(f"{tenant}/{number}", tenant, tokens, cycle - alone_s(tokens), steps, pauses_at))

    def _begin(self, run: Run) -> None:
        run.began = self.now
        self._claim(run)
        self._submit(run)

    def _submit(self, run: Run) -> None:
        run.operation = Operation(run, self.now, run.tokens)
        self._deliver(run.operation)

    def _finished(self, operation: Operation) -> None:
        run = operation.run
        run.operation = None
        took, alone = self.now - operation.at, alone_s(run.tokens)
        self._waits.append(took - alone)
        self._slow.setdefault(run.tenant, []).append(took / alone)
        run.steps -= 1
        if run.steps > 0:
            pause = 300.0 if run.steps == run.pauses_at else run.think_s * self._users.uniform(0.7, 1.3)
            self._after(pause, self._submit, run)
            return
        if run.is_equal:
            self._equal.append((self.now - run.began) / 60)
        if run.home is not None:
            run.home.runs.pop(run.id, None)

    # ── Homes

    def _claim(self, run: Run) -> Engine:
        """As the store's claim: the number of runs is counted, the rest of a row is from its renewal."""
        nodes = self._nodes()
        chosen = self._policy.choose(nodes, self._dice, next(self._turns)).id
        run.home = next(engine for engine in self.engines if engine.row.id == chosen)
        run.home.runs[run.id] = run
        return run.home

    def _nodes(self) -> list[NodeRecord]:
        return [
            replace(engine.row, runs=len(engine.runs), left_s=engine.row.left_s - self.now)
            for engine in self.engines
            if engine.row.left_s > self.now
        ]

    def _deliver(self, operation: Operation) -> None:
        """Bring an operation to the home of its run; while a dead home still counts, the client repeats it."""
        run = operation.run
        if operation is not run.operation or operation.place != "journal":
            return
        home = run.home
        if home is None:
            home = self._claim(run)
            run.ready_at = self.now + REBUILD_S
        if not home.lives:
            self._after(1.0, self._deliver, operation)
        elif run.ready_at > self.now:
            self._after(run.ready_at - self.now, self._deliver, operation)
        else:
            operation.place = "queue"
            home.queue.setdefault(run.tenant, deque()).append(operation)
            self._pump(home)

    def _renew(self, engine: Engine, life: int) -> None:
        if engine.life != life or not engine.lives:
            return
        busy = sum(run.operation is not None for run in engine.runs.values())
        facts = replace(engine.row.facts, busy=busy, operations=busy, runs=len(engine.runs))
        engine.row = replace(engine.row, load=busy, facts=facts, left_s=self.now + LEASE_S)
        self._after(LEASE_S / RENEWALS, self._renew, engine, life)

    def _look(self, engine: Engine, life: int) -> None:
        if engine.life != life or not engine.lives:
            return
        waiting = {run.id: int(run.operation is not None) for run in engine.runs.values()}
        leaving: list[str] = []
        if engine.row.is_draining:
            leaving = list(waiting)[:8]
        elif self._policy.moves:
            leaving = placement.runs_to_give_up(engine.row.id, self._nodes(), waiting)
        for run_id in leaving:
            self._give_up(engine, engine.runs[run_id])
        self._after(LOOK_S, self._look, engine, life)

    def _give_up(self, engine: Engine, run: Run) -> None:
        """Let a run go when what it has in the engine is done; the next request claims it."""
        operation = run.operation
        if operation is not None and operation.place == "window":
            self._after(0.5, self._give_up, engine, run)
            return
        if run.home is not engine or not engine.lives:
            return
        self._moves += 1
        self._leave(run)

    def _leave(self, run: Run) -> None:
        assert run.home is not None
        engine, run.home = run.home, None
        engine.runs.pop(run.id, None)
        operation = run.operation
        if operation is None:
            return
        if operation.place == "queue":
            engine.queue[run.tenant].remove(operation)
            if not engine.queue[run.tenant]:
                del engine.queue[run.tenant]
        operation.place = "journal"
        self._deliver(operation)

    # ── Nodes that come and go

    def _row(self, name: str, *, is_ready: bool = True) -> NodeRecord:
        facts, until = NodeFacts(is_ready=is_ready), self.now + LEASE_S
        return NodeRecord(id=name, url=name, models=("m",), version="1", facts=facts, left_s=until)

    def _fail(self, engine: Engine) -> None:
        """The process is gone. Until its lease has run out nobody knows; then its runs are claimed and replayed."""
        engine.lives, engine.life = False, engine.life + 1
        operations = [*engine.window, *(one for queue in engine.queue.values() for one in queue)]
        engine.window, engine.queue, engine.is_busy = [], {}, False
        for operation in operations:
            operation.place, operation.left = "journal", operation.run.tokens * 2  # the last pass is replayed before it
        self._after(max(engine.row.left_s - self.now, 0.0), self._expire, engine)
        self._after(DOWN_S, self._return, engine)

    def _expire(self, engine: Engine) -> None:
        for run in list(engine.runs.values()):
            self._leave(run)

    def _return(self, engine: Engine) -> None:
        fresh = Engine(self._row(engine.row.id, is_ready=False), life=engine.life, used_s=engine.used_s)
        self.engines[self.engines.index(engine)] = fresh
        self._join(fresh)

    def _come(self, engine: Engine) -> None:
        self.engines.append(engine)
        engine.row = replace(engine.row, left_s=self.now + LEASE_S)
        self._join(engine)
        self._after(self._seconds / 3, self._drain, engine.row.id)

    def _join(self, engine: Engine) -> None:
        self._renew(engine, engine.life)
        self._after(STARTING_S, self._started, engine)
        self._after(LOOK_S, self._look, engine, engine.life)
        self._after(self._faults.expovariate(1 / FAILS_EVERY_S), self._fail, engine)

    def _started(self, engine: Engine) -> None:
        engine.row = replace(engine.row, facts=NodeFacts())
        self._pump(engine)

    def _drain(self, name: str) -> None:
        for engine in self.engines:
            if engine.row.id == name:
                engine.row = replace(engine.row, is_draining=True)

    # ── Inside an engine

    def _pump(self, engine: Engine) -> None:
        """Let operations in as the worker does, then compute a micro-batch."""
        while len(engine.window) < WINDOW and engine.queue:
            if self._policy.is_fair:
                tenant = engine.shares.pick(engine.queue)
            else:
                tenant = min(engine.queue, key=lambda name: engine.queue[name][0].at)
            operation = engine.queue[tenant].popleft()
            if not engine.queue[tenant]:
                del engine.queue[tenant]
            engine.shares.charge(tenant, cost_of("forward_backward", round(operation.left)))
            operation.place = "window"
            engine.window.append(operation)
        if engine.is_busy or not engine.window or not engine.row.facts.is_ready:
            return
        taken = _fair_batch(engine.window) if self._policy.is_fair else _first_come_batch(engine.window)
        took = MICRO_BATCH_S + sum(tokens for _, tokens in taken) / TOKENS_PER_S
        engine.is_busy = True
        engine.used_s += took
        self._after(took, self._computed, engine, engine.life, taken)

    def _computed(self, engine: Engine, life: int, taken: list[tuple[Operation, float]]) -> None:
        if engine.life != life:
            return
        engine.is_busy = False
        for operation, tokens in taken:
            operation.left -= tokens
            if operation.left < 0.5:
                engine.window.remove(operation)
                self._finished(operation)
        self._pump(engine)

    # ── Time

    def _after(self, seconds: float, call: Callable[..., object], *given: object) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call, given))

    def go(self) -> Outcome:
        while self._events and self._events[0][0] < self._seconds * 1.25:  # the last jobs may end
            if self._used_s is None and self._events[0][0] > self._seconds:
                self._used_s = sum(engine.used_s for engine in self.engines)
            self.now, _, call, given = heapq.heappop(self._events)
            call(*given)
        return Outcome(
            waits=sorted(self._waits),
            slowdowns=sorted(map(statistics.mean, self._slow.values())),
            equal_minutes=sorted(self._equal),
            used=(self._used_s or 0.0) / self._seconds / self._count,
            moves=self._moves,
        )


def _fair_batch(window: Sequence[Operation]) -> list[tuple[Operation, float]]:
    """Equal parts of the budget for tenants, as `engine.training.micro_batches`; the others take what one leaves."""
    tenants: dict[str, list[Operation]] = {}
    for operation in window:
        tenants.setdefault(operation.run.tenant, []).append(operation)
    room, taken = float(BUDGET), []
    wanted = sorted((sum(one.left for one in own), name) for name, own in tenants.items())
    for position, (tokens, name) in enumerate(wanted):
        part = min(tokens, room / (len(wanted) - position))
        room -= part
        for operation in tenants[name]:
            if part <= 0:
                break
            taken.append((operation, min(operation.left, part)))
            part -= taken[-1][1]
    return taken


def _first_come_batch(window: Sequence[Operation]) -> list[tuple[Operation, float]]:
    room, taken = float(BUDGET), []
    for operation in window:
        if room <= 0:
            break
        taken.append((operation, min(operation.left, room)))
        room -= taken[-1][1]
    return taken


def simulate(policy: Policy, engines: int, tenants: int, seed: int, minutes: float) -> Outcome:
    return Simulation(policy, engines, tenants, seed, minutes * 60).go()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=20.0)
    given = parser.parse_args()
    rows = []
    for engines in given.engines:
        for name, policy in POLICIES.items():
            seeds = range(given.seeds)
            found = [simulate(policy, engines, given.tenants, seed, given.minutes) for seed in seeds]
            rows.append(_row_of(engines, name, found))
            print(rows[-1], file=sys.stderr, flush=True)
    text = _page(given, rows)
    print(text)
    if vars(given) == vars(parser.parse_args([])):
        RESULTS.write_text(text)
    return 0


def _row_of(engines: int, name: str, found: list[Outcome]) -> str:
    def middle(values: list[float], digits: int = 1) -> str:
        return f"{statistics.median(values):.{digits}f}"

    minutes = [minute for outcome in found for minute in outcome.equal_minutes]
    cells = (
        str(engines),
        name,
        middle([outcome.wait(0.5) for outcome in found], 2),
        f"{middle([outcome.wait(0.99) for outcome in found])} ({max(outcome.wait(0.99) for outcome in found):.1f})",
        middle([statistics.median(outcome.slowdowns) for outcome in found], 2),
        f"{middle([outcome.slow for outcome in found])} ({max(outcome.slow for outcome in found):.1f})",
        middle([outcome.jain for outcome in found], 3),
        f"{min(minutes):.1f} … {max(minutes):.1f}",
        f"{middle([outcome.spread for outcome in found], 2)} ({max(outcome.spread for outcome in found):.2f})",
        f"{statistics.median(outcome.moves for outcome in found):.0f}",
        middle([outcome.used for outcome in found], 2),
    )
    return f"| {' | '.join(cells)} |"


def _page(given: argparse.Namespace, rows: list[str]) -> str:
    heads = (
        "engines", "policy", "wait p50, s", "wait p99, s (worst)", "slowdown p50", "slowdown p99 (worst)", "Jain",
        "equal jobs, min", "longest ÷ shortest (worst)", "moves", "used",
    )  # fmt: skip
    return "\n".join(
        [
            "# A cluster in simulated time",
            "",
            f"Written by `python -m benchmarks.cluster_simulation` on {dt.date.today()}, commit {commit()}. Simulated: "
            "nothing here was measured on engines.",
            "",
            f"* **Users.** {given.tenants:,} tenants within {given.minutes:g} minutes: a third at the start, {BURSTS} "
            f"bursts of up to {BURST_TENANTS} within five seconds, the rest one by one; 1 to 16 runs each, of sizes "
            "and speeds over two orders of magnitude. One in ten leaves early, one run in four pauses for five "
            f"minutes. Together they ask for {LOAD:.0%} of what the engines compute in that time. Beside them "
            f"{EQUAL_TENANTS} equal tenants begin at one moment: one run each, {EQUAL_STEPS} steps of "
            f"{EQUAL_TOKENS:,.0f} tokens, {EQUAL_STEPS * (alone_s(EQUAL_TOKENS) + EQUAL_THINK_S) / 60:.1f} minutes "
            "on an idle engine.",
            f"* **Engines** (assumed): {TOKENS_PER_S:,.0f} tokens/s, {MICRO_BATCH_S * 1000:.0f} ms for each "
            f"micro-batch of {BUDGET:,}. Each fails about every {FAILS_EVERY_S / 60:.0f} minutes, is away for "
            f"{DOWN_S:.0f} s and loads for {STARTING_S:.0f} s; its runs are claimed when its lease of {LEASE_S:.0f} s "
            "has run out. A quarter more engines come for the middle third of the time and are drained then.",
            "* **Policies.** *Ours* is `server/cluster/placement.py`: the fewest runs, where those that train now or "
            "have just come count three times; and a node with far more runs than the others gives some up. *Fewest "
            "runs*: the same without the weights, and without the moves too. *Two random choices*: the one with fewer "
            "runs. *First come*: in turn, and an engine serves operations in the order of arrival; all others share an "
            "engine by `Shares` and equal parts of a micro-batch.",
            f"* **Figures**: medians over {given.seeds} seeds, in parentheses the worst seed. *Wait*: of an operation "
            "beyond its time on an idle engine. *Slowdown*: of a tenant's operations, on average, against that time; "
            "the 99th percentile is over tenants. *Jain*: fairness of the equal tenants' speeds, 1 is equal. *Equal "
            "jobs*: shortest and longest of all seeds. *Moves*: runs that left a living node, drained ones included. "
            "*Used*: busy time of all engines, of the time of those that were there from the start.",
            "",
            *(f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"),
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
