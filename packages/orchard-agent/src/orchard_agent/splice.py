"""Join two byte streams: what comes from one goes to the other, both ways, half-closes included."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from orchard_agent.streams import SocketStream
from orchard_api.errors import OrchardError, TransportError
from orchard_api.transport import ByteStream

CONNECT_S = 10.0
_BYTES = 512 << 10


async def copy(source: ByteStream, target: ByteStream) -> None:
    """Everything from one stream to the other, then the end of it."""
    into = getattr(source, "read_into", None)
    if into is None:
        while data := await source.read(_BYTES):
            await target.write(data)
    else:
        # Fresh buffers of this size would cost as much as the copy.
        buffer = memoryview(bytearray(_BYTES))
        while size := await into(buffer):
            await target.write(buffer[:size])
    await target.write_eof()


async def splice(one: ByteStream, other: ByteStream) -> None:
    """Copy both ways until both have ended or one breaks; closes both. Never raises but on cancellation."""
    ways = [asyncio.ensure_future(copy(one, other)), asyncio.ensure_future(copy(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        await one.aclose()
        await other.aclose()


async def connect(host: str, port: int) -> SocketStream:
    """A stream to a TCP address.

    Raises:
        TransportError: nothing answers there within 10 seconds.
    """
    loop = asyncio.get_running_loop()
    problem: Exception | None = None
    try:
        async with asyncio.timeout(CONNECT_S):
            for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                connection = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
                try:
                    await loop.sock_connect(connection, address)
                except OSError as error:
                    connection.close()
                    problem = error
                except BaseException:
                    connection.close()
                    raise
                else:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return SocketStream(connection)
    except (OSError, TimeoutError) as error:
        problem = error
    raise TransportError(f"nothing answers at {host}:{port}: {problem or 'timed out'}")


class LocalPort:
    """A port on this machine's loopback; each connection to it becomes a stream that `open_stream` gives.

    Args:
        most: connections at once; more wait in the kernel's backlog.
    """

    def __init__(self, open_stream: Callable[[], Awaitable[ByteStream]], *, port: int = 0, most: int = 64) -> None:
        self._open = open_stream
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen(128)
        except BaseException:
            self._socket.close()
            raise
        self._slots = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        number: int = self._socket.getsockname()[1]
        return number

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            connection, _ = await loop.sock_accept(self._socket)
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(SocketStream(connection)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, outside: SocketStream) -> None:
        try:
            try:
                inside = await self._open()
            except OrchardError:
                # Whoever connected sees what it would see without the tunnel: a connection that ends at once.
                await outside.aclose()
                return
            await splice(outside, inside)
        finally:
            await outside.aclose()
            self._slots.release()

    async def aclose(self) -> None:
        """Close the port and all that goes through it; idempotent."""
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._socket.close()
