"""Runs a user's function in a daemon thread, so that it blocks neither the loop nor the end of the interpreter."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tinkex.errors import TinkexError

T = TypeVar("T")


async def in_thread(fn: Callable[[], T], name: str) -> T:
    """Run `fn()` on a new thread, in the context of the awaiting task, and return its result."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            setter(value)

    def work() -> None:
        try:
            value = context.run(fn)
        except BaseException as error:
            _post(loop, settle, outcome.set_exception, _safe_error(error))
        else:
            _post(loop, settle, outcome.set_result, value)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await outcome


def _safe_error(error: BaseException) -> Exception:
    """Return an error that may be raised on the loop: a SystemExit would end it, and futures reject a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    stand_in = TinkexError(f"The function raised {type(error).__name__}({str(error)!r}) in its worker thread.")
    stand_in.__cause__ = error
    return stand_in


def _post(loop: asyncio.AbstractEventLoop, fn: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(fn, *args)
    except RuntimeError:
        pass  # the loop is gone: the process is ending
