"""Byte streams over sockets, and the transports of agents that listen on a Unix socket or on TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from orchard_api.errors import TransportError

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
_BACKLOG_PAUSE_S = 0.005
_CLOSE_S = 1.0


class SocketStream:
    """A `ByteStream` on a connected, non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._closed = False
        self._pending = 0
        self._quiet: asyncio.Event | None = None

    async def read(self, limit: int) -> bytes:
        """See `ByteStream`."""
        return await self._do(asyncio.get_running_loop().sock_recv(self._socket, limit))

    async def read_into(self, buffer: memoryview) -> int:
        """Read into a buffer; 0 at the end."""
        return await self._do(asyncio.get_running_loop().sock_recv_into(self._socket, buffer))

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream`."""
        await self._do(asyncio.get_running_loop().sock_sendall(self._socket, data))

    async def _do(self, step: Coroutine[Any, Any, T]) -> T:
        self._pending += 1
        try:
            return await step
        except (OSError, ValueError) as error:
            raise TransportError(f"the connection to the agent broke: {error}") from error
        finally:
            self._pending -= 1
            if self._quiet is not None and not self._pending:
                self._quiet.set()

    async def write_eof(self) -> None:
        """See `ByteStream`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """See `ByteStream`. Reads and writes that still wait end first: the loop watches the descriptor for them."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._pending:
                self._quiet = asyncio.Event()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._quiet.wait(), _CLOSE_S)
        finally:
            self._socket.close()

    @property
    def stale(self) -> bool:
        """Whether an idle stream has ended or holds bytes that nobody asked for: not to be used again."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


class UnixTransport:
    """Reaches an agent by its Unix socket.

    Args:
        path: the socket's path; it may be longer than the 107 bytes that an address holds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def connect(self) -> SocketStream:
        """See `Transport`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_TIMEOUT_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                connect_unix(connection, self._path)
            except BlockingIOError:
                # The backlog is full: the agent is alive but behind.
                connection.close()
                if loop.time() > deadline:
                    raise TransportError(f"the agent at {self._path} takes no more connections") from None
                await asyncio.sleep(_BACKLOG_PAUSE_S)
            except OSError as error:
                connection.close()
                raise TransportError(f"no agent answers at {self._path}: {error.strerror}") from error
            else:
                return SocketStream(connection)

    async def aclose(self) -> None:
        """See `Transport`."""


def connect_unix(connection: socket.socket, path: Path) -> None:
    """Connect a socket to a path of any length, through a descriptor of its folder."""
    _with_short_address(path, connection.connect)


def bind_unix(listener: socket.socket, path: Path) -> None:
    """Bind a socket to a path of any length."""
    _with_short_address(path, listener.bind)


def _with_short_address(path: Path, call: object) -> None:
    assert callable(call)
    if len(os.fsencode(path)) < 100:
        call(str(path))
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


class TcpTransport:
    """Reaches an agent by TCP."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def connect(self) -> SocketStream:
        """See `Transport`."""
        loop = asyncio.get_running_loop()
        connection: socket.socket | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, address = found[0]
                connection = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
                await loop.sock_connect(connection, address)
        except (OSError, TimeoutError) as error:
            if connection is not None:
                connection.close()
            raise TransportError(f"no agent answers at {self._host}:{self._port}: {error or 'timed out'}") from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return SocketStream(connection)

    async def aclose(self) -> None:
        """See `Transport`."""
