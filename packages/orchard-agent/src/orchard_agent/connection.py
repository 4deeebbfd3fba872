"""One HTTP/1.1 connection to an agent, and a bounded pool of them. What the agent sends is hostile: all is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import h11

from orchard_api.errors import OverloadedError, TransportError
from orchard_api.transport import ByteStream, Transport

T = TypeVar("T")
READ_BYTES = 256 << 10
_HEAD_BYTES = 64 << 10
_JOIN_BYTES = 128 << 10
_WRITE_BYTES = 1 << 20

Body = bytes | AsyncIterable[bytes] | None


async def _within(idle_s: float | None, step: Awaitable[T]) -> T:
    if idle_s is None:
        return await step
    try:
        async with asyncio.timeout(idle_s):
            return await step
    except TimeoutError:
        raise TransportError(f"the agent stood still for {idle_s:g} s") from None


def _machine() -> h11.Connection:
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)


@dataclass(kw_only=True, slots=True)
class Response:
    """An answer whose body is still to be read.

    Attributes:
        status: HTTP status.
        headers: lower-case names.
        length: the body's length where it is known beforehand.
        trailers: set once the body has been read.
    """

    status: int
    headers: Mapping[str, str]
    length: int | None
    trailers: dict[str, str] = field(default_factory=dict)


class Connection:
    """One stream that carries one request at a time."""

    def __init__(self, stream: ByteStream, *, headers: list[tuple[bytes, bytes]]) -> None:
        self._stream = stream
        self._headers = headers
        self._machine = _machine()
        self.reusable = False
        """Whether the last exchange ended cleanly and the agent keeps the connection open."""

    @property
    def stale(self) -> bool:
        """Whether the idle stream is known to have ended."""
        return bool(getattr(self._stream, "stale", False))

    async def request(self, method: str, target: bytes, body: Body = None, *, idle_s: float | None = None) -> Response:
        """Send a request and read the head of its answer.

        Args:
            idle_s: how long the body may stand still, and how long the answer may take after it; None: the caller's.

        Raises:
            TransportError: the stream broke or stood still, or what came is not HTTP.
        """
        self._machine = _machine()
        self.reusable = False
        if body is None or isinstance(body, bytes):
            framing = (b"Content-Length", str(len(body or b"")).encode())
        else:
            framing = (b"Transfer-Encoding", b"chunked")
        head = self._machine.send(h11.Request(method=method, target=target, headers=[*self._headers, framing]))
        try:
            await self._send(head or b"", body, idle_s)
        except TransportError as error:
            # The agent may have refused the body half-way, and said why.
            try:
                return await _within(idle_s, self._head())
            except TransportError:
                raise error from None
        return await _within(idle_s, self._head())

    async def upgrade(self, method: str, target: bytes, body: bytes) -> Response | bytes:
        """Ask for the connection to become a stream; returns the stream's first bytes, or the refusal's head."""
        self._machine = _machine()
        framing = (b"Content-Length", str(len(body)).encode())
        head = self._machine.send(h11.Request(method=method, target=target, headers=[*self._headers, framing]))
        await self._send(head or b"", body, None)
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            if event.status_code == 101:
                return self._machine.trailing_data[0]
            event = await self._next()
        return self._answer(event)

    async def _send(self, head: bytes, body: Body, idle_s: float | None) -> None:
        write = self._stream.write
        if body is None or isinstance(body, bytes):
            body = body or b""
            if body:
                self._machine.send(h11.Data(data=body))
            self._machine.send(h11.EndOfMessage())
            if len(body) <= _JOIN_BYTES:
                await _within(idle_s, write(head + body))
                return
            await _within(idle_s, write(head))
            view = memoryview(body)
            for start in range(0, len(body), _WRITE_BYTES):
                await _within(idle_s, write(view[start : start + _WRITE_BYTES]))
            return
        await _within(idle_s, write(head))
        async for chunk in body:
            if chunk:
                await _within(idle_s, write(self._machine.send(h11.Data(data=chunk)) or b""))
        await _within(idle_s, write(self._machine.send(h11.EndOfMessage()) or b""))

    async def _head(self) -> Response:
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        return self._answer(event)

    def _answer(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> Response:
        if not isinstance(event, h11.Response):
            raise TransportError("the agent closed the connection before it answered")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        length = None if "transfer-encoding" in headers else headers.get("content-length")
        return Response(status=event.status_code, headers=headers, length=None if length is None else int(length))

    async def chunks(self, response: Response) -> AsyncIterator[bytes]:
        """The body as it comes; trailers are in `response` afterwards."""
        steps = self._parsed(response) if response.length is None else self._counted(response, response.length)
        async for chunk in steps:
            yield chunk

    async def _counted(self, response: Response, left: int) -> AsyncIterator[bytes]:
        """A body of known length, straight from the stream: parsing it would copy large files several times."""
        chunk, _ = self._machine.trailing_data
        extra = len(chunk) > left
        chunk = chunk[:left]
        while left:
            if not chunk:
                chunk = await self._stream.read(min(left, READ_BYTES))
                if not chunk:
                    raise TransportError("the agent closed the connection in the middle of its answer")
            left -= len(chunk)
            yield chunk
            chunk = b""
        closes = response.headers.get("connection", "").lower() == "close"
        self.reusable = self._machine.our_state is h11.DONE and not (extra or closes)

    async def _parsed(self, response: Response) -> AsyncIterator[bytes]:
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                response.trailers.update((n.decode("latin-1"), v.decode("latin-1")) for n, v in event.headers)
                self.reusable = self._machine.our_state is h11.DONE and self._machine.their_state is h11.DONE
                return
            else:
                raise TransportError("the agent closed the connection in the middle of its answer")

    async def read_all(self, response: Response, limit: int) -> bytes:
        """The whole body.

        Raises:
            TransportError: it is longer than `limit` bytes, or the stream broke.
        """
        if response.length is not None and response.length > limit:
            raise TransportError(f"the agent's answer has {response.length} bytes; at most {limit} were asked for")
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks(response):
            size += len(chunk)
            if size > limit:
                raise TransportError(f"the agent's answer is longer than the {limit} bytes asked for")
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            while True:
                event = self._machine.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self._machine.receive_data(await self._stream.read(READ_BYTES))
        except h11.RemoteProtocolError as error:
            raise TransportError(f"the agent's answer is broken: {error}") from error

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()


class UpgradedStream:
    """A connection that has become a stream of bytes; see `ByteStream`."""

    def __init__(self, stream: ByteStream, first: bytes, closed: Callable[[], None]) -> None:
        self._stream = stream
        self._first = first
        self._closed: Callable[[], None] | None = closed

    async def read(self, limit: int) -> bytes:
        """See `ByteStream`."""
        if self._first:
            data, self._first = self._first[:limit], self._first[limit:]
            return data
        return await self._stream.read(limit)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream`."""
        await self._stream.write(data)

    async def write_eof(self) -> None:
        """See `ByteStream`."""
        await self._stream.write_eof()

    async def aclose(self) -> None:
        """See `ByteStream`."""
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()
        await self._stream.aclose()


class ConnectionPool:
    """Keep-alive connections to one agent, at most `limit` at once.

    Args:
        limit: connections that may be open together; callers beyond it wait.
        streams: upgraded connections that may be open together; more are refused.
    """

    def __init__(self, transport: Transport, *, token: str, limit: int = 64, streams: int = 256) -> None:
        self._transport = transport
        self._headers = [(b"Host", b"agent"), (b"Authorization", b"Bearer " + token.encode("ascii"))]
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(limit)
        self._limit = limit
        self.streams: set[UpgradedStream] = set()
        """The upgraded connections that are open."""
        self._most_streams = streams
        self.closed = False

    @contextlib.asynccontextmanager
    async def connection(self, *, wait_s: float, fresh: bool = False) -> AsyncIterator[Connection]:
        """Borrow a connection; one whose exchange did not end cleanly is closed afterwards.

        Args:
            wait_s: how long to wait for a free slot.
            fresh: open a new stream rather than trust an idle one.

        Raises:
            OverloadedError: all were busy for `wait_s`.
            SandboxGone, TransportError: no stream could be opened.
        """
        if self.closed:
            raise TransportError("this handle on the sandbox is closed")
        if self._slots.locked():
            try:
                async with asyncio.timeout(wait_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise OverloadedError(f"all {self._limit} connections to the sandbox are busy") from None
        else:
            await self._slots.acquire()
        try:
            connection = await self._open(fresh)
            try:
                yield connection
            finally:
                if connection.reusable and not self.closed:
                    self._idle.append(connection)
                else:
                    await connection.aclose()
        finally:
            self._slots.release()

    async def _open(self, fresh: bool) -> Connection:
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.stale:
                return connection
            await connection.aclose()
        return Connection(await self._transport.connect(), headers=self._headers)

    async def upgrade(self, method: str, target: bytes, body: bytes) -> UpgradedStream | tuple[int, bytes]:
        """Ask on a new connection to make it a stream; returns the stream, or a refusal's status and body.

        The streams are not counted among the pool's connections; `aclose` closes them.

        Raises:
            OverloadedError: too many streams are open.
            SandboxGone, TransportError: no connection could be opened, or it broke.
        """
        if self.closed:
            raise TransportError("this handle on the sandbox is closed")
        if len(self.streams) >= self._most_streams:
            raise OverloadedError(f"all {self._most_streams} streams to the sandbox are in use")
        raw = await self._transport.connect()
        connection = Connection(raw, headers=[*self._headers, (b"Connection", b"Upgrade"), (b"Upgrade", b"orchard")])
        try:
            answer = await connection.upgrade(method, target, body)
            if isinstance(answer, Response):
                refused = answer.status, await connection.read_all(answer, 64 << 10)
                await raw.aclose()
                return refused
            stream = UpgradedStream(raw, answer, lambda: self.streams.discard(stream))
            self.streams.add(stream)
        except BaseException:
            await raw.aclose()
            raise
        if self.closed:
            await stream.aclose()
            raise TransportError("this handle on the sandbox is closed")
        return stream

    async def reset(self) -> None:
        """Close the idle connections: the agent behind them has gone or changed."""
        while self._idle:
            await self._idle.pop().aclose()

    async def close_streams(self) -> None:
        """Close the upgraded connections; who reads one gets a `TransportError`, or its end."""
        for stream in list(self.streams):
            await stream.aclose()

    async def aclose(self) -> None:
        """Close all; those in use close when they are given back."""
        self.closed = True
        await self.reset()
        await self.close_streams()
        await self._transport.aclose()
