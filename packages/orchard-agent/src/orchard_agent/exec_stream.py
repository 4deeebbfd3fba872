"""Commands whose output is read as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from orchard_agent import wire
from orchard_agent.calls import AgentCalls
from orchard_agent.connection import UpgradedStream
from orchard_agent.frames import FrameReader
from orchard_api.errors import SandboxRequestError, TransportError
from orchard_api.powers import ExecChunk, ExecStream
from orchard_api.sandbox import ExecResult

STDOUT, STDERR, RESULT, TYPED, FAILURE = 1, 2, 3, 4, 5
"""Types of the agent's frames; 0 is a terminal's output."""


class AgentExecStream:
    """See `ExecStream`."""

    def __init__(self, calls: AgentCalls, stream: UpgradedStream) -> None:
        self._calls = calls
        self._stream = stream
        self._frames = FrameReader(stream)
        self._result: ExecResult | None = None
        self._chunks = self._read()

    def __aiter__(self) -> AsyncIterator[ExecChunk]:
        """See `ExecStream`."""
        return self._chunks

    async def _read(self) -> AsyncIterator[ExecChunk]:
        while True:
            try:
                frame = await self._frames.next()
            except TransportError as error:
                await self._calls.broken(error)
                raise
            if frame is None:
                cut = TransportError("the agent closed a command's stream before its result")
                await self._calls.broken(cut)
                raise cut
            kind, data = frame
            if kind == STDOUT:
                yield ExecChunk(stream=1, data=data)
            elif kind == STDERR:
                yield ExecChunk(stream=2, data=data)
            else:
                self._result = wire.decode_end(kind == FAILURE, data)
                await self.aclose()
                return

    @property
    def result(self) -> ExecResult:
        """See `ExecStream`."""
        if self._result is None:
            raise SandboxRequestError("the output of this command has not been read to its end yet")
        return self._result

    async def aclose(self) -> None:
        """See `ExecStream`. The agent kills the command when its stream is closed."""
        await self._stream.aclose()


class StreamingCalls(AgentCalls):
    """See `StreamingExec`."""

    async def stream_exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float = 60.0,
    ) -> ExecStream:
        """See `StreamingExec`."""
        body = wire.encode_exec(
            command, stdin=stdin, cwd=cwd, env=env, user=user, timeout_s=timeout_s, output_limit=4096, key=""
        )
        return AgentExecStream(self, await self._upgrade("stream", {}, body))
