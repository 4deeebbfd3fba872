"""Background processes."""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from orchard_agent import wire
from orchard_agent.calls import AgentCalls
from orchard_api.errors import DeadlineError, InfraError, SandboxRequestError, TransportError
from orchard_api.powers import OutputChunk, ProcessInfo

_WAIT_S = 10.0
"""How long one request waits; longer waits are made of several."""
_READ_BYTES = 1 << 20
_WRITE_BYTES = 256 << 10


class BackgroundCalls(AgentCalls):
    """See `Processes`."""

    async def start_process(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        output_limit: int = 1 << 30,
        key: str | None = None,
    ) -> str:
        """See `Processes`."""
        body = wire.encode_exec(
            command,
            stdin=None,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=wire.MAX_TIMEOUT_S,
            output_limit=4096,
            key=key or secrets.token_hex(12),
        )
        parameters = {"stdin": 1 if stdin else None, "output_limit": output_limit}
        answer = wire.decode_json(await self._call("POST", "process", parameters, body=body))
        process_id = answer.get("id") if isinstance(answer, dict) else None
        if not isinstance(process_id, str) or not 0 < len(process_id) <= 64:
            raise TransportError("the agent did not say which process it started")
        return process_id

    async def read_output(
        self, process_id: str, *, offset: int, limit: int = _READ_BYTES, wait_s: float = 0.0
    ) -> OutputChunk:
        """See `Processes`; at most 1 MiB comes at once."""
        limit = min(limit, _READ_BYTES)
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            left = deadline - asyncio.get_running_loop().time()
            parameters: dict[str, str | int | None] = {
                "id": process_id,
                "offset": offset,
                "limit": limit,
                "wait_s": f"{max(0.0, min(left, _WAIT_S)):.3f}",
            }
            body = await self._call("GET", "process/output", parameters, limit=limit + 4096)
            chunk = _decode_output(body, offset, limit)
            if chunk.data or chunk.ended or limit == 0 or left <= _WAIT_S:
                return chunk

    async def write_stdin(self, process_id: str, data: bytes, *, eof: bool = False) -> None:
        """See `Processes`."""
        view = memoryview(data)
        deadline = asyncio.get_running_loop().time() + self._limits.call_s
        while True:
            part = bytes(view[:_WRITE_BYTES])
            last = len(part) == len(view)
            parameters: dict[str, str | int | None] = {"id": process_id, "eof": 1 if eof and last else None}
            answer = wire.decode_json(
                await self._call("POST", "process/stdin", parameters, body=part, repeatable=False)
            )
            written = answer.get("written") if isinstance(answer, dict) else None
            if not isinstance(written, int) or not 0 <= written <= len(part):
                raise TransportError(f"the agent says it wrote {written!r} bytes of {len(part)}")
            if last and written == len(part):
                return
            view = view[written:]
            now = asyncio.get_running_loop().time()
            if written:
                deadline = now + self._limits.call_s
            elif now > deadline:
                raise DeadlineError(f"process {process_id} does not read its stdin; {len(view)} bytes are not written")

    async def signal_process(self, process_id: str, signal: int, *, tree: bool = False) -> None:
        """See `Processes`."""
        if not 1 <= signal <= 64:
            raise SandboxRequestError(f"there is no signal {signal}")
        parameters: dict[str, str | int | None] = {"id": process_id, "signal": int(signal), "tree": 1 if tree else None}
        await self._call("POST", "process/signal", parameters, repeatable=False)

    async def wait_process(self, process_id: str, *, timeout_s: float) -> ProcessInfo:
        """See `Processes`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left = deadline - asyncio.get_running_loop().time()
            parameters: dict[str, str | int | None] = {
                "id": process_id,
                "wait_s": f"{max(0.0, min(left, _WAIT_S)):.3f}",
            }
            info = _decode_info(wire.decode_json(await self._call("GET", "process/wait", parameters)))
            if not info.running or left <= _WAIT_S:
                return info

    async def list_processes(self) -> Sequence[ProcessInfo]:
        """See `Processes`."""
        answer = wire.decode_json(await self._call("GET", "process/list", {}, limit=1 << 20))
        rows = answer.get("processes") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            raise TransportError("the agent's list of processes can't be read")
        return [_decode_info(row) for row in rows]

    async def forget_process(self, process_id: str) -> None:
        """See `Processes`."""
        answer = wire.decode_json(await self._call("POST", "process/forget", {"id": process_id}))
        if not isinstance(answer, dict) or answer.get("left") != 0:
            raise InfraError(f"what process {process_id} started could not be killed")


def _decode_output(body: bytes, offset: int, limit: int) -> OutputChunk:
    try:
        (size,) = struct.unpack_from(">I", body)
        if size > 1024 or 4 + size > len(body):
            raise ValueError("its head is cut")
        head = json.loads(body[4 : 4 + size])
        start, ended, data = head["offset"], head["ended"], body[4 + size :]
        if not isinstance(start, int) or not offset <= start < 1 << 62 or not isinstance(ended, bool):
            raise ValueError(f"it starts at {start!r}")
        if len(data) > limit:
            raise ValueError("it is longer than what was asked for")
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise TransportError(f"the agent's piece of output can't be read: {error}") from error
    return OutputChunk(offset=start, data=data, ended=ended)


def _decode_info(row: Any) -> ProcessInfo:
    try:
        return ProcessInfo(
            process_id=str(row["id"])[:64],
            command=str(row["command"])[:200],
            running=bool(row["running"]),
            exit_code=wire.maybe_int(row, "exit_code", 255),
            signal=wire.maybe_int(row, "signal", 64),
            started_at=float(row["started_at"]),
            output_start=wire.count(row, "output_start"),
            output_end=wire.count(row, "output_end"),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TransportError(f"the agent's facts on a process can't be read: {error}") from error
