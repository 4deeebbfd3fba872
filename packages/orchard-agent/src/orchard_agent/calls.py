"""Requests to an agent, and what becomes of them when a connection breaks or the sandbox is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from orchard_agent import wire
from orchard_agent.connection import Body, Connection, ConnectionPool, Response, UpgradedStream
from orchard_agent.heartbeat import TOLERATED
from orchard_api.errors import DeadlineError, OrchardError, SandboxGone, TransportError
from orchard_api.sandbox import SandboxInfo
from orchard_api.transport import Transport

T = TypeVar("T")

PROTOCOL_MAJOR = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """Bounds of one handle.

    Attributes:
        connections: streams open together.
        idle_s: how long a file transfer may stand still.
        call_s: total time of a call that isn't an exec or a transfer.
        exec_slack_s: how much longer than its own timeout an exec may take before it is given up.
        revive_s: how long an agent may be out of reach before its sandbox counts as gone.
        heartbeat_s: interval of signs of life asked for while an exec runs.
    """

    connections: int = 64
    idle_s: float = 30.0
    call_s: float = 30.0
    exec_slack_s: float = 20.0
    revive_s: float = 1.5
    heartbeat_s: float = 5.0


class AgentCalls:
    """What all parts of a handle share: its connections, its limits, and whether the sandbox is gone.

    Args:
        info: what the backend knows of it; `status` adds what the agent says.
        limits: bounds of this handle.
    """

    def __init__(
        self, transport: Transport, *, token: str, info: SandboxInfo, limits: ClientLimits | None = None
    ) -> None:
        self._info = info
        self._limits = limits or ClientLimits()
        self._pool = ConnectionPool(transport, token=token, limit=self._limits.connections)
        self._instance: str | None = None
        self._gone: SandboxGone | None = None
        self._attending: asyncio.Task[None] | None = None

    @property
    def sandbox_id(self) -> str:
        """See `Sandbox`."""
        return self._info.sandbox_id

    async def _exchange(
        self,
        method: str,
        target: bytes,
        body: Body = None,
        *,
        limit: int,
        path: str | None = None,
        fresh: bool = False,
        idle_s: float | None = None,
    ) -> bytes:
        """One request and its whole answer, on a pooled connection."""
        if self._gone is not None:
            raise self._gone
        async with self._pool.connection(wait_s=self._limits.call_s, fresh=fresh) as connection:
            response = await connection.request(method, target, body, idle_s=idle_s)
            if response.status != 200:
                raise wire.refusal(response.status, await connection.read_all(response, 64 << 10), path=path)
            return await connection.read_all(response, limit)

    async def _call(
        self,
        method: str,
        endpoint: str,
        parameters: Mapping[str, str | int | None],
        *,
        body: Body = None,
        limit: int = 64 << 10,
        path: str | None = None,
        repeatable: bool = True,
    ) -> bytes:
        """A short call, repeated once when its connection breaks and repeating it does no harm."""
        request = wire.target(endpoint, parameters)

        async def attempt() -> bytes:
            return await self._exchange(method, request, body, limit=limit, path=path)

        return await self._guarded(attempt, what=endpoint, total_s=self._limits.call_s, repeatable=repeatable)

    async def _guarded(self, attempt: Callable[[], Awaitable[T]], *, what: str, total_s: float, repeatable: bool) -> T:
        for first in (True, False):
            try:
                async with asyncio.timeout(total_s):
                    return await attempt()
            except TimeoutError:
                await self._revive(None)
                raise DeadlineError(f"the sandbox did not answer {what} within {total_s:.0f} s") from None
            except TransportError as error:
                await self._revive(error)
                if not (first and repeatable):
                    raise
        raise AssertionError

    async def _revive(self, cause: TransportError | None) -> None:
        """After a broken connection: return when the same agent answers again, else the sandbox is gone.

        Raises:
            SandboxGone: it is.
        """
        if self._pool.closed:
            raise cause or TransportError("this handle on the sandbox is closed")
        await self._pool.reset()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.revive_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._ping()
                return
            except SandboxGone as error:
                self._gone = error
                raise
            except (TransportError, TimeoutError) as error:
                if loop.time() + 0.05 >= deadline:
                    raise self._lost("it no longer answers") from cause or error
            await asyncio.sleep(0.05)

    def _lost(self, reason: str) -> SandboxGone:
        self._gone = SandboxGone(f"sandbox {self.sandbox_id} is gone: {reason}")
        return self._gone

    async def _ping(self) -> Mapping[str, Any]:
        """Ask for a sign of life and compare it with the agent that we knew."""
        health = wire.decode_json(await self._exchange("GET", b"/v1/health", limit=8192))
        if not isinstance(health, dict):
            raise TransportError("the agent's health is no object")
        if str(health.get("version", "")).partition(".")[0] != str(PROTOCOL_MAJOR):
            raise self._lost(f"its agent speaks protocol {health.get('version')!r}, we speak {PROTOCOL_MAJOR}")
        instance = str(health.get("instance"))
        if self._instance is None:
            self._instance = instance
        elif self._instance != instance:
            raise self._lost("it was restarted, and what was in it is lost")
        return health

    async def _open(
        self, connection: Connection, method: str, target: bytes, body: Body = None, *, path: str
    ) -> Response:
        if self._gone is not None:
            raise self._gone
        response = await connection.request(method, target, body, idle_s=self._limits.idle_s)
        if response.status != 200:
            raise wire.refusal(response.status, await connection.read_all(response, 64 << 10), path=path)
        return response

    async def _progress(self, connection: Connection, response: Response) -> AsyncIterator[bytes]:
        """The body, each chunk within the idle limit."""
        chunks = connection.chunks(response)
        while True:
            try:
                async with asyncio.timeout(self._limits.idle_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TransportError(f"a transfer stood still for {self._limits.idle_s:g} s") from None
            yield chunk

    async def _upgrade(
        self,
        endpoint: str,
        parameters: Mapping[str, str | int | None],
        body: bytes = b"",
        *,
        method: str = "POST",
    ) -> UpgradedStream:
        """Turn a new connection into a stream of bytes to something inside.

        The agent takes the request, answers 101, and from then on the connection is that stream.
        """
        if self._gone is not None:
            raise self._gone
        try:
            async with asyncio.timeout(self._limits.call_s):
                answer = await self._pool.upgrade(method, wire.target(endpoint, parameters), body)
        except TimeoutError:
            await self._revive(None)
            raise DeadlineError(f"the sandbox did not answer {endpoint} within {self._limits.call_s:.0f} s") from None
        except TransportError as error:
            await self._revive(error)
            raise
        if not isinstance(answer, UpgradedStream):
            raise wire.refusal(*answer)
        self._attend()
        return answer

    def _attend(self) -> None:
        """Ask for signs of life for as long as streams are open.

        Streams are none themselves, and a machine that died without closing its connections would hold their readers
        for good.
        """
        if self._attending is None or self._attending.done():
            self._attending = asyncio.create_task(self._ask_for_life())

    async def _ask_for_life(self) -> None:
        failures = 0
        while failures < TOLERATED:
            await asyncio.sleep(self._limits.heartbeat_s)
            if not self._pool.streams:
                return
            try:
                async with asyncio.timeout(self._limits.heartbeat_s):
                    await self._ping()
                failures = 0
            except SandboxGone as error:
                self._gone = error
                break
            except (TimeoutError, OrchardError):
                failures += 1
        if self._gone is None:
            self._lost("it no longer answers while a stream is open")
        await self._pool.close_streams()

    async def _end_attending(self) -> None:
        task, self._attending = self._attending, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def cause_of(self, error: TransportError) -> Exception:
        """Why a stream broke: that the sandbox is gone, where that is known."""
        return self._gone or error

    async def broken(self, error: TransportError) -> None:
        """After a stream broke: return when the sandbox still answers.

        Raises:
            SandboxGone: it does not.
        """
        await self._revive(error)
