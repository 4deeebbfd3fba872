"""Waiting for clean-up that must not be cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def settle(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until all tasks have ended, however often the caller is cancelled meanwhile.

    The tasks must be bounded in time themselves. Their errors are theirs to report.

    Raises:
        asyncio.CancelledError: the caller was cancelled while it waited; all tasks have ended.
    """
    pending = {task for task in tasks if not task.done()}
    cancelled = False
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
            pending = {task for task in pending if not task.done()}
    if cancelled:
        raise asyncio.CancelledError
