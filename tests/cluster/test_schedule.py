"""What the seeds of the cluster suite stand for."""

from __future__ import annotations

from tests.cluster.kinds import BY_NAME
from tests.cluster.schedule import NAMES, kinds_of, schedule_of
from tests.faults.broken import PROTECTIONS, names_for_cluster
from tests.faults.program import steps_of


def test_every_kind_of_fault_happens_within_200_schedules() -> None:
    assert set().union(*(kinds_of(schedule_of(seed)) for seed in range(200))) == set(BY_NAME)


def test_the_first_schedules_have_what_each_protection_is_for() -> None:
    """So a proof by removal takes minutes."""
    first = [kinds_of(schedule_of(seed)) for seed in range(20)]
    assert set(names_for_cluster()) == {"journal-first", "fence", "renewal"}
    for name in names_for_cluster():
        assert any(PROTECTIONS[name].cluster_faults & kinds for kinds in first), name


def test_a_long_schedule_has_four_tenants_of_40_steps() -> None:
    for seed in range(8):
        brief, long = schedule_of(seed), schedule_of(seed, is_long=True)
        assert [steps_of(number) for number in long.programs.values()] == [40] * len(NAMES)
        assert [steps_of(number) for number in brief.programs.values()] == [10 if seed % 4 else 40] * len(NAMES)
