"""Runs one schedule of a cluster: starts it, runs the programs through its fronts, breaks it, checks what is left."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.cluster.resumption import resumptions
from tests.cluster.schedule import BRIEF_PROGRAMS, LONG_PROGRAMS, NAMES, ClusterSchedule
from tests.cluster.servers import ALONE, Cluster
from tests.cluster.strikes import strike
from tests.faults.harness import AnySchedule, Bench, look, run_programs, spy, wait_closed
from tests.faults.history import FaultRecord, Recorder
from tests.faults.program import program_of
from tests.faults.proxy import Proxy
from tests.faults.tenant import Board, Patience, Tenant

PROGRAM_WITHIN_S = 600.0
"""40 steps by each of four tenants, with three faults, took 262 s beside a load of 14 on two cores."""
PATIENCE = Patience(options={}, answer_within_s=150.0)
"""Clients as they are by default, and calls that may wait for a bucket that is away for a minute."""


class ClusterBench(Bench):
    """`buckets_port` is where the bucket server listens that schedules share."""

    program = "tests.cluster"
    environment = ALONE
    hurries = False

    def __init__(self, warmth: str, buckets_port: int, program: str = program) -> None:
        super().__init__(warmth)
        self._buckets_port, self.program = buckets_port, program

    def _perform(self, schedule: AnySchedule, stack: ExitStack, folder: Path, recorder: Recorder, without: str) -> str:
        if not isinstance(schedule, ClusterSchedule):  # one server, undisturbed, to compare with
            return super()._perform(schedule, stack, folder, recorder, without)
        cluster = Cluster(
            schedule, folder, self._shared_postgres(), self._buckets_port, recorder, self._warmth, without, stack
        )
        _play(schedule, cluster, recorder)
        recorder.history.counts = cluster.counts()
        recorder.history.resumptions = resumptions(recorder.history)
        return "\n".join(f"── {server.name}\n{server.log()}" for server in cluster.supervisors)

    def _groups(self) -> list[dict[str, int]]:
        """Two tenants at a time: what is compared with must not come near a limit."""
        programs = (*BRIEF_PROGRAMS, *LONG_PROGRAMS)
        return [dict(zip(NAMES, programs[at : at + 2], strict=False)) for at in range(0, len(programs), 2)]


def _play(schedule: ClusterSchedule, cluster: Cluster, recorder: Recorder) -> None:
    """Run the programs while things break, then look at what is left."""
    board = Board()
    proxy = Proxy([front.supervisor.port for front in cluster.fronts], schedule.network, recorder, spy(board, NAMES))
    cluster.clients = proxy
    try:
        cluster.wait()
        recorder.say("ready")
        tenants = [Tenant(name, program_of(number), proxy.url, recorder, board, PATIENCE)
                   for name, number in schedule.programs.items()]  # fmt: skip
        run_programs(tenants, partial(_break_things, schedule, cluster, proxy, recorder), PROGRAM_WITHIN_S, 90)
        recorder.say("the programs have ended")
        wait_closed(proxy, recorder)
        requests = proxy.requests
        look([front.supervisor for front in cluster.fronts], tenants, recorder)
        if proxy.requests > requests:
            recorder.history.left_over.append(f"Clients sent {proxy.requests - requests} requests after close().")
        for server in cluster.supervisors:
            server.check_alive()
            server.stop()
            recorder.history.stalls += server.stalls()
        recorder.say("stopped")
    except Exception as error:
        recorder.history.crashes.append(f"The schedule broke off: {type(error).__name__}: {error}")
    finally:
        proxy.close()


def _break_things(
    schedule: ClusterSchedule, cluster: Cluster, proxy: Proxy, recorder: Recorder, is_over: threading.Event
) -> None:
    """Do the faults one after the other, each when its request has passed."""
    for fault in schedule.faults:
        if not proxy.wait_for_training_requests(fault.at, is_over.is_set):
            recorder.say(f"not reached: {fault}")
            continue
        threading.Event().wait(fault.delay_s)
        began_s, note = recorder.now(), ""
        recorder.say(f"begins: {fault}")
        try:
            note = strike(cluster, fault)
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            recorder.history.crashes.append(f"The fault {fault} could not be done: {note}")
        record = FaultRecord(what=fault.kind, began_s=began_s, ended_s=recorder.now(), note=note)
        recorder.add(recorder.history.faults, record)
        recorder.say(f"ends: {fault.kind} {note}")
    cluster.heal()
