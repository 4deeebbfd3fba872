"""Signs of life while a long command runs: a machine that died without closing its connection is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from orchard_api.errors import OrchardError

TOLERATED = 2
"""Failures in a row after which a sandbox counts as gone."""


class Heartbeat:
    """Pings until stopped; after two failures in a row it ends the enclosing timeout at once.

    Args:
        ping: asks the agent for a sign of life.
        timeout: the timeout that the waiting code runs under.
        interval_s: seconds between pings, and what one may take. The first comes after one interval, so short commands
            cost nothing.
    """

    def __init__(self, ping: Callable[[], Awaitable[object]], timeout: asyncio.Timeout, *, interval_s: float) -> None:
        self.failed = False
        self._ping = ping
        self._timeout = timeout
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.call_later(interval_s, self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        failures = 0
        while failures < TOLERATED:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._ping()
                failures = 0
            except (TimeoutError, OrchardError):
                failures += 1
                if failures >= TOLERATED:
                    break
            await asyncio.sleep(self._interval_s)
        self.failed = True
        if not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    def stop(self) -> None:
        """End it; never raises."""
        self._begin.cancel()
        if self._task is not None:
            self._task.cancel()
