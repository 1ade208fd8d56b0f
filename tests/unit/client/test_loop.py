"""The loop thread's mailbox, and the registry that a forked child starts again empty."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from tinkex.client._runtime.fork import ProcessRegistry
from tinkex.client._runtime.loop import Mailbox


def test_a_letter_interrupted_by_ctrl_c_does_not_silence_the_next_ones() -> None:
    class Loop:
        """One that is interrupted at the first wake-up."""

        woken = 0

        def call_soon_threadsafe(self, deliver: Callable[[], None]) -> None:
            self.woken += 1
            if self.woken == 1:
                raise KeyboardInterrupt
            deliver()

    loop, got = Loop(), []
    mailbox = Mailbox(loop)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        mailbox.post(got.append, 1)
    mailbox.post(got.append, 2)
    assert got == [1, 2]


def test_a_registry_makes_one_object_per_key_however_many_threads_ask() -> None:
    registry: ProcessRegistry[str, object] = ProcessRegistry()
    barrier = threading.Barrier(8)
    got: list[object] = []

    def ask() -> None:
        barrier.wait()
        got.append(registry.get("key", object))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 and len(set(map(id, got))) == 1
    assert registry.get("another", object) is not got[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_its_own_objects_even_if_the_lock_was_held() -> None:
    registry: ProcessRegistry[str, object] = ProcessRegistry()
    of_parent = registry.get("key", object)
    registry._lock.acquire()
    child = os.fork()
    if child == 0:
        os._exit(0 if registry.get("key", object) is not of_parent else 1)
    registry._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert registry.get("key", object) is of_parent
