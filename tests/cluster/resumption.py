"""From a history to how long each fault kept a tenant waiting. Pure."""

from __future__ import annotations

from itertools import pairwise

from tests.cluster.kinds import BY_NAME, LEASE_S, MARGIN_S
from tests.faults.history import FaultRecord, History, Resumption


def resumptions(history: History) -> list[Resumption]:
    """Return for each fault the longest time after it, up to the next one, in which a tenant saw no call end.

    It may be longer by what the same tenants waited for before the first fault: calls take seconds on a busy machine.
    """
    rows = []
    tenants = {call.tenant for call in history.calls}
    faults = sorted((fault for fault in history.faults if fault.what in BY_NAME), key=lambda fault: fault.began_s)
    began_s = min((call.began_s for call in history.calls), default=0.0)
    until_s = faults[0].began_s if faults else began_s
    usual_s = max((_longest_s(history, tenant, began_s, until_s) for tenant in tenants), default=0.0)
    for number, fault in enumerate(faults):
        until_s = faults[number + 1].began_s if number + 1 < len(faults) else float("inf")
        waits = [_wait_s(history, tenant, fault, until_s) for tenant in tenants]
        if found := [seconds for seconds in waits if seconds is not None]:
            rows.append(Resumption(what=fault.what, seconds=max(found), most_s=LEASE_S + MARGIN_S + usual_s))
    return rows


def _wait_s(history: History, tenant: str, fault: FaultRecord, until_s: float) -> float | None:
    """Return the tenant's longest wait; None if it had ended, or the next fault came before it went on.

    A result that was under way when the fault began does not count as going on: so it is the longest wait, not the
    first one.
    """
    from_s = fault.began_s if BY_NAME[fault.what].counts_from == "begin" else fault.ended_s
    return _longest_s(history, tenant, from_s, until_s) or None


def _longest_s(history: History, tenant: str, from_s: float, until_s: float) -> float:
    """Return the longest time in which no call of a tenant ended; 0 if none did."""
    ends = sorted(call.ended_s for call in history.calls if call.tenant == tenant and call.ended_s is not None)
    ends = [end_s for end_s in ends if from_s < end_s <= until_s]
    return max((later - earlier for earlier, later in pairwise([from_s, *ends])), default=0.0)
