"""Ports inside, and ports inside that lead out to one target; neither needs a network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from orchard_agent import splice, wire
from orchard_agent.calls import AgentCalls
from orchard_agent.connection import UpgradedStream
from orchard_agent.frames import FrameReader
from orchard_api.errors import OrchardError, SandboxRequestError, TransportError
from orchard_api.powers import ReversePort
from orchard_api.transport import ByteStream

logger = logging.getLogger("orchard_agent")

_LISTENING, _ARRIVED = 0, 1
_MOST_OPEN = 128
"""Connections through one reverse port that are being opened or open; more are refused."""


class PortStream:
    """A stream to a port inside."""

    def __init__(self, calls: AgentCalls, stream: UpgradedStream) -> None:
        self._calls = calls
        self._stream = stream

    async def read(self, limit: int) -> bytes:
        """See `ByteStream`."""
        try:
            return await self._stream.read(limit)
        except TransportError as error:
            raise self._calls.cause_of(error) from None

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream`."""
        try:
            await self._stream.write(data)
        except TransportError as error:
            raise self._calls.cause_of(error) from None

    async def write_eof(self) -> None:
        """See `ByteStream`."""
        await self._stream.write_eof()

    async def aclose(self) -> None:
        """See `ByteStream`."""
        await self._stream.aclose()


class AgentReversePort:
    """See `ReversePort`."""

    def __init__(self, calls: PortCalls, control: UpgradedStream, target: tuple[str, int]) -> None:
        self._calls = calls
        self._control = control
        self._frames = FrameReader(control)
        self._target = target
        self._port = 0
        self._open: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """See `ReversePort`."""
        return self._port

    async def start(self) -> None:
        """Wait for the agent to listen, then serve in the background."""
        self._port = await self._next(_LISTENING, "port", 65535)
        self._task = asyncio.create_task(self._serve())

    async def _next(self, kind: int, name: str, most: int) -> int:
        try:
            frame = await self._frames.next()
        except TransportError as error:
            raise self._calls.cause_of(error) from None
        row: Any = wire.decode_json(frame[1]) if frame is not None and frame[0] == kind else None
        number = row.get(name) if isinstance(row, dict) else None
        if not isinstance(number, int) or not 0 < number <= most:
            raise TransportError("the agent closed a reverse port" if frame is None else "a reverse port is broken")
        return number

    async def _serve(self) -> None:
        try:
            while True:
                number = await self._next(_ARRIVED, "id", 1 << 62)
                if len(self._open) >= _MOST_OPEN:
                    with contextlib.suppress(OrchardError):
                        await self._calls.reject_port(number)
                    continue
                task = asyncio.create_task(self._join(number))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
        except OrchardError as error:
            logger.warning("sandbox %s: port %d no longer leads out: %s", self._calls.sandbox_id, self._port, error)

    async def _join(self, number: int) -> None:
        try:
            outside = await splice.connect(*self._target)
        except TransportError as error:
            logger.warning("sandbox %s: port %d: %s", self._calls.sandbox_id, self._port, error)
            with contextlib.suppress(OrchardError):
                await self._calls.reject_port(number)
            return
        try:
            inside = await self._calls.accept_port(number)
        except OrchardError:
            await outside.aclose()
            return
        except BaseException:
            await outside.aclose()
            raise
        await splice.splice(outside, inside)

    async def aclose(self) -> None:
        """See `ReversePort`."""
        tasks = [task for task in (self._task, *self._open) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._control.aclose()


class PortCalls(AgentCalls):
    """See `Ports` and `ReversePorts`."""

    async def connect_port(self, port: int) -> ByteStream:
        """See `Ports`."""
        _check(port, 1)
        return PortStream(self, await self._upgrade("port/connect", {"port": port}))

    async def forward_port(self, port: int, *, local_port: int = 0) -> splice.LocalPort:
        """Open a port on this machine's loopback that leads to a port inside, for programs that want an address.

        Anybody on this machine may connect to it. Close it in the end.
        """
        _check(port, 1)
        return splice.LocalPort(lambda: self.connect_port(port), port=local_port)

    async def serve_port(self, port: int, *, host: str, target_port: int) -> ReversePort:
        """See `ReversePorts`."""
        _check(port, 0)
        _check(target_port, 1)
        control = await self._upgrade("port/serve", {"port": port})
        served = AgentReversePort(self, control, (host, target_port))
        try:
            await served.start()
        except BaseException:
            await served.aclose()
            raise
        return served

    async def accept_port(self, number: int) -> ByteStream:
        """Take an announced connection over."""
        return PortStream(self, await self._upgrade("port/accept", {"id": number}))

    async def reject_port(self, number: int) -> None:
        """Close an announced connection."""
        await self._call("POST", "port/reject", {"id": number})


def _check(port: int, least: int) -> None:
    if not least <= port < 1 << 16:
        raise SandboxRequestError(f"there is no port {port}")
