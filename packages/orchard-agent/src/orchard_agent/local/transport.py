"""Reaches a local sandbox's agent, and knows when there is none any more."""

from __future__ import annotations

from pathlib import Path

from orchard_agent.local.launch import LaunchedAgent
from orchard_agent.local.records import Record
from orchard_agent.streams import SocketStream, UnixTransport
from orchard_api.errors import SandboxGone, TransportError


class LocalTransport(UnixTransport):
    """A Unix socket whose agent is a process of this machine.

    Args:
        agent: our own child, when this process made the sandbox; it knows why it ended.
    """

    def __init__(self, path: Path, *, record: Record, agent: LaunchedAgent | None) -> None:
        super().__init__(path)
        self._record = record
        self._agent = agent

    async def connect(self) -> SocketStream:
        """See `Transport`."""
        if self._agent is not None and (reason := self._agent.death()) is not None:
            raise self._gone(reason)
        try:
            return await super().connect()
        except TransportError as error:
            if not self._record.process.alive:
                raise self._gone("its processes have ended") from error
            raise

    def _gone(self, reason: str) -> SandboxGone:
        return SandboxGone(f"sandbox {self._record.sandbox_id} is gone: {reason}")
