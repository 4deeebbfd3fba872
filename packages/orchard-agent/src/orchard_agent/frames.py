"""Frames on an upgraded stream: [type, 1 byte][length, 4 bytes big-endian][data]."""

from __future__ import annotations

import struct

from orchard_agent.connection import READ_BYTES, UpgradedStream
from orchard_api.errors import TransportError

_HEAD = struct.Struct(">BI")
MAX_FRAME = 64 << 10
"""Bytes of data in one frame, either way."""


def encode(kind: int, data: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(data)) + data


class FrameReader:
    """Takes an agent's frames out of a stream; one that breaks the rules ends it."""

    def __init__(self, stream: UpgradedStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._ended = False

    async def next(self) -> tuple[int, bytes] | None:
        """The next frame's type and data; None where the stream ended between two frames.

        A call that is cancelled loses nothing.

        Raises:
            TransportError: the stream broke, ended within a frame, or a frame is longer than `MAX_FRAME`.
        """
        while True:
            if len(self._buffer) >= _HEAD.size:
                kind, length = _HEAD.unpack_from(self._buffer)
                if length > MAX_FRAME:
                    raise TransportError(f"the agent sent a frame of {length} bytes; at most {MAX_FRAME} are allowed")
                end = _HEAD.size + length
                if len(self._buffer) >= end:
                    data = bytes(memoryview(self._buffer)[_HEAD.size : end])
                    del self._buffer[:end]
                    return kind, data
            if self._ended:
                return None
            chunk = await self._stream.read(READ_BYTES)
            if not chunk:
                if self._buffer:
                    raise TransportError("the agent closed a stream within a frame")
                self._ended = True
            self._buffer += chunk
