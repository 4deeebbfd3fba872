"""How bytes reach the agent inside a sandbox: the one thing that a backend must provide."""

from __future__ import annotations

from typing import Protocol


class ByteStream(Protocol):
    """A reliable, ordered stream of bytes in both directions (a socket, an exec's stdio, a tunnel)."""

    async def read(self, limit: int) -> bytes:
        """Return 1 to `limit` bytes, or `b""` once the other side has closed its half.

        Raises:
            TransportError: the stream broke.
        """
        ...

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; returns when the stream's buffer is below its bound (back-pressure).

        Raises:
            TransportError: the stream broke.
        """
        ...

    async def write_eof(self) -> None:
        """Close the sending half where the stream can; otherwise do nothing."""
        ...

    async def aclose(self) -> None:
        """Free the stream; idempotent, never raises."""
        ...


class Transport(Protocol):
    """Makes streams to one sandbox's agent: Unix socket, TCP, exec stdio, port-forward, TLS tunnel."""

    async def connect(self) -> ByteStream:
        """Open one more stream to the agent.

        Raises:
            SandboxGone: the sandbox does not exist any more.
            TransportError: it may exist, but can't be reached now.
        """
        ...

    async def aclose(self) -> None:
        """Free what the transport itself holds (a port-forward process, for instance); idempotent."""
        ...
