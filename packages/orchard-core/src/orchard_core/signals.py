"""Ctrl-C and SIGTERM: the first ends a run in order, the second cuts waits short."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

ORDERLY_S, HURRIED_S = 12.0, 3.0


def run_until_interrupted(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end.

    The first SIGINT or SIGTERM cancels it; it then has `ORDERLY_S` seconds to remove its sandboxes. A second one
    shortens that to `HURRIED_S`. A third, or the deadline, ends the process at once.

    Raises:
        KeyboardInterrupt: it was interrupted and has ended in order; an error on the way out is its cause.
    """
    interrupts = 0

    async def supervise() -> T:
        nonlocal interrupts
        loop = asyncio.get_running_loop()
        task = loop.create_task(work())
        timer: asyncio.TimerHandle | None = None

        def interrupt() -> None:
            nonlocal interrupts, timer
            interrupts += 1
            if timer is not None:
                timer.cancel()
            if interrupts > 2:
                _leave()
            timer = loop.call_later(ORDERLY_S if interrupts == 1 else HURRIED_S, _leave)
            print(
                "\ninterrupted: removing sandboxes" + (" (again to hurry)" if interrupts == 1 else ""), file=sys.stderr
            )
            if interrupts == 1:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await task
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if timer is not None:
                timer.cancel()

    try:
        result = asyncio.run(supervise())
    except (Exception, asyncio.CancelledError) as error:
        if interrupts:
            raise KeyboardInterrupt from (None if isinstance(error, asyncio.CancelledError) else error)
        raise
    if interrupts:
        raise KeyboardInterrupt
    return result


def _leave() -> None:
    print("some sandboxes may be left; they end by their own time limit", file=sys.stderr, flush=True)
    os._exit(130)
