"""Runs the loop's actions in a sandbox and says what the model sees of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orchard_api.errors import SandboxFileError, SandboxRequestError
from orchard_api.sandbox import ExecResult, Sandbox
from orchard_harnesses.actions import Action, Edit, Shell

_EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of what an action may take and return.

    Attributes:
        shell_timeout_s: seconds for a command that asks for no timeout of its own.
        shell_timeout_limit_s: the most that a command can ask for.
        shell_output_bytes: bytes kept of stdout and of stderr each.
        observation_chars: characters of one action's observation; head and tail are kept.
        edit_bytes: largest file that an edit reads.
        empty_output: what a command that succeeds silently shows.
    """

    shell_timeout_s: float = 60.0
    shell_timeout_limit_s: float = 300.0
    shell_output_bytes: int = 32_768
    observation_chars: int = 16_000
    edit_bytes: int = 4 << 20
    empty_output: str = "[no output]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolbox:
    """One episode's hands.

    Attributes:
        remaining_s: seconds left of the episode.
        env: environment of its commands, besides the sandbox's own.
    """

    sandbox: Sandbox
    limits: Limits
    remaining_s: Callable[[], float]
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)

    async def run(self, action: Action) -> str:
        """Run one action and return its observation.

        A refusal by the sandbox is an observation; a sandbox that is gone raises.

        Raises:
            InfraError: the sandbox failed; its text must not reach the model.
        """
        try:
            if isinstance(action, Shell):
                text = await self._shell(action)
            elif isinstance(action, Edit):
                text = await self._edit(action)
            else:
                raise TypeError(f"{type(action).__name__} can't be run in a sandbox")
        except SandboxFileError as error:
            text = f"[error] {error.path}: {error.reason.replace('_', ' ')}"
        except SandboxRequestError as error:
            text = f"[error] {error.message}"
        return shorten(text, self.limits.observation_chars)

    async def _shell(self, action: Shell) -> str:
        timeout = min(self._timeout(action.timeout_s), max(self.remaining_s(), 0.1))
        result = await self.sandbox.exec(
            action.command,
            env=self.env or None,
            timeout_s=timeout,
            output_limit=self.limits.shell_output_bytes,
        )
        return describe_result(result, timeout_s=timeout, limits=self.limits)

    def _timeout(self, asked: object) -> float:
        limits = self.limits
        if isinstance(asked, bool) or not isinstance(asked, (int, float)) or not math.isfinite(asked) or asked <= 0:
            return min(limits.shell_timeout_s, limits.shell_timeout_limit_s)
        return min(float(asked), limits.shell_timeout_limit_s)

    async def _edit(self, action: Edit) -> str:
        if action.old is None:
            await self.sandbox.write_file(action.path, _encode(action.new))
            return f"[wrote {action.path}]"
        data = await self.sandbox.read_file(action.path, limit=self.limits.edit_bytes)
        text = data.decode("utf-8", "surrogateescape")
        count = text.count(action.old) if action.old else 0
        if count != 1:
            found = "is empty" if not action.old else f"occurs {count} times" if count else "was not found"
            return f"[error] the old text {found} in {action.path}; it must occur exactly once. Nothing was changed."
        mode = (await self.sandbox.stat(action.path)).mode & 0o7777
        await self.sandbox.write_file(action.path, _encode(text.replace(action.old, action.new)), mode=mode)
        return f"[edited {action.path}]"


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def describe_result(result: ExecResult, *, timeout_s: float, limits: Limits) -> str:
    """What a model sees of a command: stdout, then stderr, then how it ended where that isn't exit 0."""
    stdout = _stream(result.stdout, result.stdout_dropped)
    stderr = _stream(result.stderr, result.stderr_dropped)
    lines = [part for part in (stdout, stderr) if part]
    if result.timed_out:
        lines.append(f"[timed out after {timeout_s:g}s]")
    elif result.signal is not None:
        lines.append(f"[killed by signal {result.signal}]")
    elif result.exit_code:
        lines.append(f"[exit {result.exit_code}]")
    if result.oom_killed:
        lines.append("[out of memory]")
    return "\n".join(lines) if lines else limits.empty_output


def _stream(data: bytes, dropped: int) -> str:
    if not dropped:
        return data.decode("utf-8", "replace").rstrip("\n")
    half = len(data) // 2
    head, tail = data[:half].decode("utf-8", "replace"), data[half:].decode("utf-8", "replace")
    return f"{head}\n[{dropped} bytes dropped]\n{tail}".rstrip("\n")


def shorten(text: str, limit: int) -> str:
    """Head and tail of a text that has more than `limit` characters, with what is missing between."""
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n[{len(text) - limit} characters dropped]\n{text[len(text) - tail :]}"
