"""The agent's messages: what goes out is encoded, what comes in is checked."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from orchard_api.errors import (
    InfraError,
    OrchardError,
    OverloadedError,
    SandboxFileError,
    SandboxGone,
    SandboxRequestError,
    TransportError,
)
from orchard_api.sandbox import ExecResult, FileInfo, TarReport

FILE_REASONS = frozenset(
    {"not_found", "exists", "denied", "not_regular", "not_directory", "is_directory", "not_empty", "no_space"}
    | {"too_large", "other"}
)
KINDS = frozenset(("file", "directory", "symlink", "fifo", "socket", "device", "other"))
MAX_TIMEOUT_S = 30 * 24 * 3600.0
MAX_OUTPUT = 64 << 20
HEAD_LIMIT = 64 << 10


def target(endpoint: str, parameters: Mapping[str, str | int | None]) -> bytes:
    """A request target with its query; text of surrogate escapes travels as its bytes."""
    pairs = [
        f"{name}={quote_from_bytes(os.fsencode(str(value)), safe='/')}"
        for name, value in parameters.items()
        if value is not None
    ]
    return f"/v1/{endpoint}{'?' if pairs else ''}{'&'.join(pairs)}".encode("ascii")


def encode_exec(
    command: str | Sequence[str],
    *,
    stdin: bytes | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | int | None,
    timeout_s: float,
    output_limit: int,
    key: str,
) -> bytes:
    """The body of an exec: a JSON head with lengths, then those parts as raw bytes.

    Raises:
        SandboxRequestError: an argument that no agent could serve.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise SandboxRequestError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:.0f}, not {timeout_s!r}")
    if not 0 <= output_limit <= MAX_OUTPUT:
        raise SandboxRequestError(f"output_limit must be 0 to {MAX_OUTPUT}, not {output_limit!r}")
    head: dict[str, Any] = {"key": key, "timeout_ms": timeout_s * 1000, "output_limit": output_limit}
    if user is not None:
        head["user"] = str(user)
    parts: list[bytes] = []
    if cwd is not None:
        parts.append(os.fsencode(cwd))
        head["cwd"] = len(parts[-1])
    if env:
        for name in env:
            if not name or "=" in name or "\0" in name + env[name]:
                raise SandboxRequestError(f"{name!r} can't be an environment variable")
        parts.append(b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items()))
        head["env"] = len(parts[-1])
    if isinstance(command, str):
        parts.append(os.fsencode(command))
        head["line"] = len(parts[-1])
    else:
        arguments = [os.fsencode(argument) for argument in command]
        if not arguments:
            raise SandboxRequestError("the command is empty")
        parts += arguments
        head["argv"] = [len(argument) for argument in arguments]
    if stdin is not None:
        parts.append(stdin)
        head["stdin"] = len(stdin)
    text = json.dumps(head).encode("ascii")
    return b"".join((struct.pack(">I", len(text)), text, *parts))


def decode_exec(body: bytes, output_limit: int) -> tuple[ExecResult, int]:
    """The result of an exec, and how many of its processes could not be killed.

    Raises:
        TransportError: it is not what an agent sends.
    """
    try:
        (size,) = struct.unpack_from(">I", body)
        if size > HEAD_LIMIT or 4 + size > len(body):
            raise ValueError("its head is cut")
        head = json.loads(body[4 : 4 + size])
        stdout, stderr = count(head, "stdout"), count(head, "stderr")
        start = 4 + size
        if len(body) != start + stdout + stderr or max(stdout, stderr) > output_limit + 4096:
            raise ValueError("its output has another length than it says")
        result = _result(head, body[start : start + stdout], body[start + stdout :])
        survivors = head.get("survivors", 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise TransportError(f"the agent's result can't be read: {error}") from error
    return result, survivors if isinstance(survivors, int) else 0


def _result(head: Mapping[str, Any], stdout: bytes, stderr: bytes) -> ExecResult:
    return ExecResult(
        exit_code=maybe_int(head, "exit_code", 255),
        signal=maybe_int(head, "signal", 64),
        stdout=stdout,
        stderr=stderr,
        stdout_dropped=count(head, "stdout_dropped"),
        stderr_dropped=count(head, "stderr_dropped"),
        timed_out=bool(head.get("timed_out")),
        duration_s=float(head["duration_s"]),
    )


def decode_end(failed: bool, data: bytes) -> ExecResult:
    """The last frame of a command's stream: its result, without output.

    Raises:
        SandboxRequestError: the command could not be started; raised as a plain exec would have.
        TransportError: it is not what an agent sends.
    """
    if failed:
        status = decode_json(data)
        status = status.get("status") if isinstance(status, dict) else None
        raise refusal(status if isinstance(status, int) else 500, data)
    try:
        return _result(decode_json(data), b"", b"")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TransportError(f"the agent's result can't be read: {error}") from error


def count(head: Mapping[str, Any], name: str) -> int:
    """A number that is 0 or more, 0 where it is missing; `ValueError` where it is none."""
    value = head.get(name, 0)
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r}")
    return value


def maybe_int(head: Mapping[str, Any], name: str, most: int) -> int | None:
    """A number of 0 to `most`, or none; `ValueError` where it is neither."""
    value = head.get(name)
    if value is not None and not (isinstance(value, int) and 0 <= value <= most):
        raise ValueError(f"{name} is {value!r}")
    return value


def decode_json(body: bytes) -> Any:
    """JSON of the agent.

    Raises:
        TransportError: it is none.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"the agent's answer is not JSON: {error}") from error


def unquote(text: Any) -> str:
    """A quoted name as text; bytes that are no UTF-8 become surrogate escapes."""
    if not isinstance(text, str):
        raise ValueError(f"a name is {text!r}")
    return os.fsdecode(unquote_to_bytes(text))


def decode_file(row: Any) -> FileInfo:
    """One row of a listing.

    Raises:
        TransportError: it is not what an agent sends.
    """
    try:
        name, kind, size, mode, modified, uid, gid, link = row
        return FileInfo(
            name=unquote(name),
            kind=kind if kind in KINDS else "other",
            size=int(size),
            mode=int(mode) & 0o7777,
            modified=float(modified),
            uid=int(uid),
            gid=int(gid),
            target=None if link is None else unquote(link),
        )
    except (ValueError, TypeError) as error:
        raise TransportError(f"the agent's listing can't be read: {error}") from error


def decode_report(value: Any) -> TarReport:
    """What a tar transfer did.

    Raises:
        TransportError: it is not what an agent sends.
    """
    try:
        skipped = [(unquote(name), str(reason)[:500]) for name, reason in value.get("skipped") or ()]
        more = int(value.get("more", 0))
        if more:
            skipped.append((f"({more} more)", "the list is cut"))
        return TarReport(delivered=int(value["delivered"]), skipped=tuple(skipped))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TransportError(f"the agent's report can't be read: {error}") from error


def refusal(status: int, body: bytes, *, path: str | None = None) -> OrchardError:
    """The error that a refused request stands for.

    Args:
        path: given for file operations.
    """
    try:
        answer = json.loads(body)
        code, message = str(answer["error"]), str(answer["message"])[:2000]
    except (ValueError, TypeError, KeyError, RecursionError):
        code, message = "other", f"the agent answered {status}"
    if status == 401:
        return SandboxGone("the agent at the sandbox's address is not this sandbox's: it does not know our token")
    if status in (429, 503):
        return OverloadedError(message, retry_after_s=1.0)
    if path is not None and (code in FILE_REASONS or status == 507):
        return SandboxFileError(message, reason=code if code in FILE_REASONS else "other", path=path)
    if status >= 500:
        return InfraError(f"the agent failed: {message}")
    if path is not None and code == "bad_archive":
        return SandboxFileError(message, reason="other", path=path)
    return SandboxRequestError(message)
