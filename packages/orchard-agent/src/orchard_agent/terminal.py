"""Commands on a terminal."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence

from orchard_agent import frames, wire
from orchard_agent.calls import AgentCalls
from orchard_agent.connection import UpgradedStream
from orchard_agent.exec_stream import FAILURE, RESULT, TYPED
from orchard_api.errors import DeadlineError, SandboxRequestError, TransportError
from orchard_api.powers import PtySession
from orchard_api.sandbox import ExecResult

_DATA, _RESIZE, _SIGNAL = 0, 1, 2
_TYPED_BYTES = 1024
_TYPED_FRAMES = 24
"""Frames of typed bytes that may be unread inside; the agent ends a session that sends many more."""
_SHOWN_BYTES = 256 << 10
"""Output that is read ahead of its reader; the terminal is held up beyond it."""


class AgentPty:
    """See `PtySession`. One task takes the agent's frames apart, so that typing goes on while nobody reads."""

    def __init__(self, calls: AgentCalls, stream: UpgradedStream) -> None:
        self._calls = calls
        self._stream = stream
        self._shown = bytearray()
        self._changed = asyncio.Condition()
        self._window = asyncio.Semaphore(_TYPED_FRAMES)
        self._typing = asyncio.Lock()
        self._result: ExecResult | None = None
        self._error: Exception | None = None
        self._closed = False
        self._task = asyncio.create_task(self._take())

    @property
    def _over(self) -> bool:
        return self._result is not None or self._error is not None

    async def _take(self) -> None:
        reader = frames.FrameReader(self._stream)
        try:
            while not self._over:
                frame = await reader.next()
                if frame is None:
                    raise TransportError("the agent closed a terminal before its result")
                await self._took(*frame)
        except TransportError as error:
            try:
                await self._calls.broken(error)
            except Exception as worse:
                self._error = worse
            else:
                self._error = error
        except Exception as error:
            self._error = error
        finally:
            for _ in range(_TYPED_FRAMES):
                self._window.release()
            async with self._changed:
                self._changed.notify_all()

    async def _took(self, kind: int, data: bytes) -> None:
        if kind == TYPED:
            self._window.release()
            return
        async with self._changed:
            if kind == _DATA:
                await self._changed.wait_for(lambda: len(self._shown) < _SHOWN_BYTES)
                self._shown += data
            elif kind in (RESULT, FAILURE):
                self._result = wire.decode_end(kind == FAILURE, data)
            # What a command that could not be started would have written comes as its stderr.
            elif kind == 2:
                self._shown += data
            else:
                raise TransportError(f"the agent sent a frame of type {kind} on a terminal")
            self._changed.notify_all()

    async def read(self, limit: int) -> bytes:
        """See `ByteStream`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._shown or self._over or self._closed)
            if not self._shown:
                if self._closed and not self._over:
                    raise TransportError("this terminal is closed")
                if self._error is not None:
                    raise self._error
                return b""
            data = bytes(memoryview(self._shown)[:limit])
            del self._shown[: len(data)]
            self._changed.notify_all()
            return data

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream`; waits while the program does not read what was typed before.

        Raises:
            TransportError: the terminal has ended.
        """
        async with self._typing:
            for start in range(0, len(data), _TYPED_BYTES):
                await self._window.acquire()
                await self._send(_DATA, bytes(data[start : start + _TYPED_BYTES]))

    async def _send(self, kind: int, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        if self._result is not None or self._closed:
            raise TransportError("this terminal has ended")
        await self._stream.write(frames.encode(kind, data))

    async def write_eof(self) -> None:
        """Type the end of input: Ctrl-D, which ends the input of a program that reads lines."""
        await self.write(b"\x04")

    async def resize(self, *, rows: int, cols: int) -> None:
        """See `PtySession`."""
        await self._send(_RESIZE, struct.pack(">HH", *_size(rows, cols)))

    async def signal(self, signal: int) -> None:
        """See `PtySession`."""
        if not 1 <= signal <= 64:
            raise SandboxRequestError(f"there is no signal {signal}")
        await self._send(_SIGNAL, bytes([signal]))

    async def wait(self, *, timeout_s: float) -> ExecResult:
        """See `PtySession`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._over or self._closed)
        except TimeoutError:
            raise DeadlineError(f"the command on the terminal did not end within {timeout_s:g} s") from None
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise TransportError("this terminal is closed")
        return self._result

    async def aclose(self) -> None:
        """See `ByteStream`. The agent kills the command and all that it started."""
        if self._closed:
            return
        self._closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stream.aclose()
        async with self._changed:
            self._changed.notify_all()


def _size(rows: int, cols: int) -> tuple[int, int]:
    if not (0 < rows < 1 << 16 and 0 < cols < 1 << 16):
        raise SandboxRequestError(f"a terminal of {rows} rows and {cols} columns can't be made")
    return rows, cols


class TerminalCalls(AgentCalls):
    """See `Pty`."""

    async def open_pty(
        self,
        command: Sequence[str],
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> PtySession:
        """See `Pty`."""
        _size(rows, cols)
        body = wire.encode_exec(
            command,
            stdin=None,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=wire.MAX_TIMEOUT_S,
            output_limit=4096,
            key="",
        )
        return AgentPty(self, await self._upgrade("pty", {"rows": rows, "cols": cols}, body))
