"""Optional powers of a sandbox, each a protocol of its own: `isinstance(sandbox, Pty)` asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from orchard_api.sandbox import ExecResult, Sandbox
from orchard_api.transport import ByteStream


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecChunk:
    """A piece of a command's output, as it comes.

    Attributes:
        stream: 1 for stdout, 2 for stderr.
    """

    stream: Literal[1, 2]
    data: bytes


@runtime_checkable
class ExecStream(Protocol):
    """A command whose output is read while it runs: `async for chunk in stream`, then `result`.

    A command whose output nobody reads is held up once the pipes are full. Both streams come in the order of writing
    within each; chunks of a hundred bytes to 64 KiB.
    """

    def __aiter__(self) -> AsyncIterator[ExecChunk]:
        """The output to its end."""
        ...

    @property
    def result(self) -> ExecResult:
        """What the command did, without output.

        Raises:
            SandboxRequestError: the output has not been read to its end yet.
        """
        ...

    async def aclose(self) -> None:
        """Kill the command and all that it started, if it still runs; idempotent."""
        ...


@runtime_checkable
class StreamingExec(Protocol):
    """Optional power: output of a command as it comes, with back-pressure."""

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
        """Start a command and read its output as it comes; nothing is dropped. Close the stream in the end.

        The timeout counts from the start to the process's exit, time in which nobody read included. A stream whose
        connection breaks is not resumed: the command is killed, and reading raises `TransportError`.

        Raises:
            SandboxRequestError: as `Sandbox.exec`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessInfo:
    """What is known of a background process.

    Attributes:
        command: its command for people, cut at 200 characters.
        running: whether it has not exited yet; its children may live on either way.
        exit_code: its exit code once it has exited; None when a signal ended it.
        signal: the signal that ended it.
        started_at: seconds since the epoch, by the clock inside.
        output_start: offset of the first output byte that is still kept.
        output_end: offset after the last byte written so far.
    """

    process_id: str
    command: str
    running: bool
    exit_code: int | None = None
    signal: int | None = None
    started_at: float = 0.0
    output_start: int = 0
    output_end: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputChunk:
    """A piece of a background process's output.

    Attributes:
        offset: where `data` starts.
        data: the bytes; empty when nothing came in the time given.
        ended: no more will come: the process has exited, nobody holds its output, and `data` reaches the end.
    """

    offset: int
    data: bytes
    ended: bool

    @property
    def next_offset(self) -> int:
        """Where to go on reading."""
        return self.offset + len(self.data)


@runtime_checkable
class Processes(Protocol):
    """Optional power: background processes that outlive a client's connection, found again by their id.

    They end with the sandbox, by `kill_processes`, by a signal, or by themselves. Any client that is attached to the
    sandbox may use them.
    """

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
        """Start a process and return its id.

        Args:
            stdin: whether `write_stdin` will feed it; else its stdin is empty.
            output_limit: bytes of output kept, stdout and stderr in one as a terminal shows them; the oldest go.
            key: idempotency key; a repeated request with the same key returns the first one's id.

        Raises:
            SandboxRequestError: unknown user, missing cwd, limits.
            OverloadedError: too many run already.
        """
        ...

    async def read_output(
        self, process_id: str, *, offset: int, limit: int = 1 << 20, wait_s: float = 0.0
    ) -> OutputChunk:
        """Output bytes from `offset`; waits up to `wait_s` seconds for the first.

        Where bytes from `offset` on are no longer kept, the chunk starts at the first that is.

        Raises:
            SandboxRequestError: no such process, or an offset after the end.
        """
        ...

    async def write_stdin(self, process_id: str, data: bytes, *, eof: bool = False) -> None:
        """Write all of `data` to its stdin, then close it when `eof`; waits while the process does not read.

        Raises:
            SandboxRequestError: no such process, it has no stdin, or its stdin is closed.
            DeadlineError: the process did not read within the call's deadline.
        """
        ...

    async def signal_process(self, process_id: str, signal: int, *, tree: bool = False) -> None:
        """Send a signal to its process group, or with `tree` to all that it started. One that has exited is fine.

        Raises:
            SandboxRequestError: no such process, or no such signal.
        """
        ...

    async def wait_process(self, process_id: str, *, timeout_s: float) -> ProcessInfo:
        """Wait for its exit, `timeout_s` at most; `running` says whether it still runs."""
        ...

    async def list_processes(self) -> Sequence[ProcessInfo]:
        """The background processes that are known, the oldest first."""
        ...

    async def forget_process(self, process_id: str) -> None:
        """Kill it with all that it started, and drop its output; an unknown id is fine."""
        ...


@runtime_checkable
class PtySession(ByteStream, Protocol):
    """A command on a terminal: what is written is typed, what is read is shown; `b""` after the last byte.

    Closing it, or losing it, kills the command and all that it started.
    """

    async def resize(self, *, rows: int, cols: int) -> None:
        """Change the terminal's size; the foreground process gets SIGWINCH."""
        ...

    async def signal(self, signal: int) -> None:
        """Send a signal to the terminal's foreground process group."""
        ...

    async def wait(self, *, timeout_s: float) -> ExecResult:
        """The command's result, without output, once it has exited and its output has been read.

        Raises:
            DeadlineError: it did not end in time.
        """
        ...


@runtime_checkable
class Pty(Protocol):
    """Optional power: interactive terminals."""

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
        """Start a command on a new terminal of that size; `TERM` is `xterm-256color` unless `env` says otherwise.

        Raises:
            SandboxRequestError: as `Sandbox.exec`.
        """
        ...


@runtime_checkable
class Snapshot(Protocol):
    """Optional power: keep a sandbox's files (not its processes) to start others from."""

    async def snapshot(self) -> str:
        """Return a reference usable as `SandboxSpec.image`."""
        ...


@runtime_checkable
class Fork(Protocol):
    """Optional power: copies of a live sandbox. Files are copied, processes are not."""

    async def fork(self, sandbox_ids: Sequence[str]) -> Sequence[Sandbox]:
        """Make one copy per given id, of the same spec; all or none. What is copied is the backend's to document.

        Raises:
            SandboxCreateError: they could not be made; none is left.
        """
        ...


@runtime_checkable
class Ports(Protocol):
    """Optional power: reach a port on the inside loopback, whatever the sandbox's network rule."""

    async def connect_port(self, port: int) -> ByteStream:
        """Open a stream to 127.0.0.1:`port` inside.

        Raises:
            SandboxRequestError: nothing listens there.
        """
        ...


@runtime_checkable
class ReversePort(Protocol):
    """A port inside that leads to one target outside, until it is closed."""

    @property
    def port(self) -> int:
        """The port on 127.0.0.1 inside."""
        ...

    async def aclose(self) -> None:
        """Close the port and all that goes through it; idempotent."""
        ...


@runtime_checkable
class ReversePorts(Protocol):
    """Optional power: let the inside reach one target through the client, without any network."""

    async def serve_port(self, port: int, *, host: str, target_port: int) -> ReversePort:
        """Tunnel the inside 127.0.0.1:`port` (0: any free one) to `host`:`target_port` on the client's side.

        The inside chooses nothing but when to connect: the target is fixed here.

        Raises:
            SandboxRequestError: the port is taken inside.
        """
        ...
