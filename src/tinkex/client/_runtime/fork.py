"""Per-process state: what a forked child must forget, and the one registry of shared objects.

The three places where the life of a process matters to the SDK:

* **Threads.** All I/O runs on one daemon thread with one event loop (`loop.py`). Shared objects are made once per
  process and key, on any thread, by a `ProcessRegistry`.
* **Fork.** A child inherits the parent's memory but not its threads; its sockets and its epoll are still the parent's.
  So the child starts again empty: modules register a hook with `after_fork_in_child`, and registries do it themselves.
  Objects of the parent are kept and never used: closing or collecting them would reach into the parent's event loop.
* **Exit.** `loop.py` stops the loop thread at interpreter exit, after short goodbyes (`LoopThread.at_exit`);
  `operation_queue.py` logs failures that no caller has looked at.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def after_fork_in_child(hook: Callable[[], None]) -> None:
    """Call `hook` in every forked child, before any code of the program runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=hook)


class ProcessRegistry(Generic[K, V]):
    """Objects that are shared by key within one process. A forked child starts with none."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._lock = threading.Lock()
        self._of_parents: list[dict[K, V]] = []
        after_fork_in_child(self._forget)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the object of this key; `make` it on first use, once, whatever number of threads ask."""
        value = self._values.get(key)
        if value is None:
            with self._lock:
                value = self._values.get(key)
                if value is None:
                    value = self._values[key] = make()
        return value

    def _forget(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it at the fork
        self._of_parents.append(self._values)
        self._values = {}
