"""`AgentSandbox`: the `Sandbox` protocol, written once for every backend that can carry a byte stream to our agent."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchard_agent import wire
from orchard_agent.background import BackgroundCalls
from orchard_agent.connection import Response
from orchard_agent.exec_stream import StreamingCalls
from orchard_agent.heartbeat import Heartbeat
from orchard_agent.ports import PortCalls
from orchard_agent.terminal import TerminalCalls
from orchard_api.errors import DeadlineError, InfraError, SandboxFileError, TransportError
from orchard_api.sandbox import DEFAULT_OUTPUT_LIMIT, ExecResult, FileInfo, SandboxInfo, SandboxState, TarReport

logger = logging.getLogger("orchard_agent")


class TarStream:
    """The bytes of a tar as they come; `report` says afterwards what was packed and what was left out."""

    def __init__(self, chunks: Callable[[TarStream], AsyncIterator[bytes]]) -> None:
        self.report = TarReport(delivered=0)
        self._chunks = chunks(self)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)


class AgentSandbox(StreamingCalls, BackgroundCalls, TerminalCalls, PortCalls):
    """A handle on a sandbox whose agent is reached through a transport. Each optional power is a base class of it."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float = 60.0,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        key: str | None = None,
    ) -> ExecResult:
        """See `Sandbox`. A connection that breaks is made again, and the same command's result awaited by its key."""
        own_key = key or secrets.token_hex(12)
        body = wire.encode_exec(
            command,
            stdin=stdin,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            output_limit=output_limit,
            key=own_key,
        )
        deadline = asyncio.get_running_loop().time() + timeout_s + self._limits.exec_slack_s
        limit = 2 * output_limit + wire.HEAD_LIMIT + 8192
        try:
            answer = await self._exec_by_key(body, limit, deadline)
        except asyncio.CancelledError:
            await self._cancel(own_key)
            raise
        result, survivors = wire.decode_exec(answer, output_limit)
        if survivors:
            logger.warning("sandbox %s: %d processes of a command outlived SIGKILL", self.sandbox_id, survivors)
        return result

    async def _exec_by_key(self, body: bytes, limit: int, deadline: float) -> bytes:
        failures = 0
        while True:
            try:
                async with asyncio.timeout_at(deadline) as timeout:
                    heartbeat = Heartbeat(self._ping, timeout, interval_s=self._limits.heartbeat_s)
                    try:
                        return await self._exchange("POST", b"/v1/exec", body, limit=limit, fresh=failures > 1)
                    finally:
                        heartbeat.stop()
            except TimeoutError:
                if heartbeat.failed:
                    raise self._lost("it no longer answers while a command runs") from None
                raise DeadlineError("the sandbox did not return the result of a command in time") from None
            except TransportError as error:
                failures += 1
                await self._revive(error)
                if failures >= 5:
                    raise

    async def _cancel(self, key: str) -> None:
        """Kill a command whose caller no longer wants it, without making the caller wait long."""

        async def request() -> None:
            try:
                async with asyncio.timeout(2.0):
                    await self._exchange("POST", wire.target("cancel", {"key": key}), limit=1024)
            except (TimeoutError, InfraError):
                # Its connection is closed: the agent ends it by itself after its grace time.
                return

        task = asyncio.create_task(request())
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue

    async def wait_ready(self) -> None:
        """Wait for the first answer; the caller sets the deadline.

        Raises:
            SandboxGone, TransportError: the agent can't be reached.
        """
        await self._ping()

    async def status(self) -> SandboxInfo:
        """See `Sandbox`."""

        async def attempt() -> Mapping[str, Any]:
            return await self._ping()

        health = await self._guarded(attempt, what="health", total_s=self._limits.call_s, repeatable=True)
        names = ("uptime_s", "running", "execs", "ttl_s", "version", "killed_programs")
        known = {name: health[name] for name in names if name in health}
        return replace(self._info, state=SandboxState.READY, details={**self._info.details, **known})

    async def renew(self, ttl_s: float) -> None:
        """Let the sandbox live `ttl_s` seconds from now; for backends' `Environment.renew`."""
        await self._call("POST", "renew", {"ttl_s": str(ttl_s)})

    async def kill_processes(self) -> int:
        """See `Sandbox`."""
        answer = wire.decode_json(await self._call("POST", "kill", {}))
        killed, left = (answer.get("killed"), answer.get("left")) if isinstance(answer, dict) else (None, None)
        if not isinstance(killed, int) or left != 0:
            raise InfraError(f"processes of sandbox {self.sandbox_id} could not be killed: {left} left")
        return killed

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None, limit: int = 64 << 20) -> bytes:
        """See `Sandbox`."""
        request = wire.target("file", {"path": path, "offset": offset or None, "length": length})
        most = limit if length is None else min(limit, length)

        async def attempt() -> bytes:
            async with self._pool.connection(wait_s=self._limits.call_s) as connection:
                response = await self._open(connection, "GET", request, path=path)
                if response.length is not None and response.length > limit:
                    raise _too_large(path, limit)
                parts: list[bytes] = []
                size = 0
                async for chunk in self._progress(connection, response):
                    size += len(chunk)
                    if size > most:
                        raise _too_large(path, limit)
                    parts.append(chunk)
                return parts[0] if len(parts) == 1 else b"".join(parts)

        return await self._guarded(attempt, what="file", total_s=self._transfer_s(most), repeatable=True)

    def _transfer_s(self, size: int) -> float:
        """Total time that a transfer of known size may take: 2 MB/s at least."""
        return self._limits.call_s + self._limits.idle_s + size / 2e6

    async def stream_file(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """See `Sandbox`."""
        request = wire.target("file", {"path": path, "offset": offset or None, "length": length})
        async for chunk in self._stream("GET", request, path):
            yield chunk

    async def _stream(
        self, method: str, request: bytes, path: str, stream: TarStream | None = None
    ) -> AsyncIterator[bytes]:
        try:
            async with self._pool.connection(wait_s=self._limits.call_s) as connection:
                response = await self._open(connection, method, request, path=path)
                async for chunk in self._progress(connection, response):
                    yield chunk
        except TransportError as error:
            await self._revive(error)
            raise
        if stream is not None:
            _finish_tar(stream, response, path)

    async def write_file(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        owner: str | int | None = None,
        offset: int | None = None,
        make_parents: bool = True,
    ) -> int:
        """See `Sandbox`."""
        request = wire.target(
            "file",
            {
                "path": path,
                "mode": None if mode is None else f"{mode:o}",
                "owner": owner,
                "offset": offset,
                "parents": 1 if make_parents else None,
            },
        )
        answer = wire.decode_json(await self._upload(request, data, path))
        written = answer.get("written") if isinstance(answer, dict) else None
        if not isinstance(written, int) or (isinstance(data, bytes) and written != len(data)):
            raise TransportError(f"the agent says it wrote {written!r} bytes of {path}")
        return written

    async def _upload(self, request: bytes, data: bytes | AsyncIterable[bytes], path: str) -> bytes:
        data = bytes(data) if isinstance(data, (bytearray, memoryview)) else data
        total = self._transfer_s(len(data)) if isinstance(data, bytes) else 24 * 3600.0

        async def attempt() -> bytes:
            return await self._exchange("PUT", request, data, limit=256 << 10, path=path, idle_s=self._limits.idle_s)

        return await self._guarded(attempt, what=path, total_s=total, repeatable=isinstance(data, bytes))

    async def put_tar(self, path: str, data: bytes | AsyncIterable[bytes]) -> TarReport:
        """See `Sandbox`."""
        return wire.decode_report(wire.decode_json(await self._upload(wire.target("tar", {"path": path}), data, path)))

    def get_tar(self, path: str) -> TarStream:
        """See `Sandbox`; unpack it with `orchard_agent.unpack`."""
        request = wire.target("tar", {"path": path})
        return TarStream(lambda stream: self._stream("GET", request, path, stream))

    async def list_dir(self, path: str, *, limit: int = 100_000) -> Sequence[FileInfo]:
        """See `Sandbox`."""
        request = wire.target("list", {"path": path, "limit": limit})

        async def attempt() -> bytes:
            return await self._exchange(
                "GET", request, limit=(limit + 16) * 9000, path=path, idle_s=self._limits.idle_s
            )

        body = await self._guarded(attempt, what="list", total_s=self._transfer_s(limit * 200), repeatable=True)
        lines = body.splitlines()
        if len(lines) > limit:
            raise TransportError("the agent listed more entries than were asked for")
        return [wire.decode_file(wire.decode_json(line)) for line in lines]

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """See `Sandbox`."""
        parameters = {"path": path, "follow": 1 if follow else None}
        return wire.decode_file(wire.decode_json(await self._call("GET", "stat", parameters, path=path)))

    async def make_dir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        """See `Sandbox`."""
        parameters = {"path": path, "mode": f"{mode:o}", "parents": 1 if parents else None}
        await self._call("POST", "mkdir", parameters, path=path, repeatable=parents)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """See `Sandbox`."""
        parameters = {"path": path, "recursive": 1 if recursive else None}
        await self._call("POST", "remove", parameters, path=path, repeatable=False)

    async def aclose(self) -> None:
        """See `Sandbox`. Commands of streams and terminals end with it; background processes stay."""
        await self._end_attending()
        await self._pool.aclose()


def _too_large(path: str, limit: int) -> SandboxFileError:
    return SandboxFileError(
        f"{path} has more than {limit} bytes", reason="too_large", path=path, hint="give length, or use stream_file"
    )


def _finish_tar(stream: TarStream, response: Response, path: str) -> None:
    failed = response.trailers.get("x-orchard-error")
    if failed:
        raise SandboxFileError(f"{path} could not be packed: {wire.unquote(failed)}", reason="other", path=path)
    try:
        report = json.loads(response.trailers.get("x-orchard-report", "null"))
    except ValueError:
        report = None
    stream.report = wire.decode_report(report)
