"""One isolated machine: what it is made from, what it can do, and what its operations return."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

DEFAULT_OUTPUT_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkRule:
    """What a sandbox may reach.

    Attributes:
        mode: `none` (loopback inside only), `full`, or `allowlist`.
        allow: for `allowlist`: host names, `*.host` patterns, IP addresses or CIDR blocks.
    """

    mode: Literal["none", "full", "allowlist"] = "none"
    allow: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Limits of a sandbox; None leaves a limit to the backend's default.

    Attributes:
        cpus: CPU share in cores.
        memory_mb: memory limit in MiB, without swap.
        disk_mb: writable disk in MiB.
        pids: number of processes and threads.
        gpus: number of GPUs.
        gpu_types: acceptable GPU names; empty for any.
    """

    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    pids: int | None = None
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedProgram:
    """A program that may run inside, where not every one may.

    Attributes:
        path: absolute path inside, links resolved, of the executable (a script's is its interpreter's).
        sha256: hex digest of its content; None for any content at that path.
    """

    path: str
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """What a sandbox is made from; the same for every backend.

    Attributes:
        image: image name; None for the backend's documented default.
        workdir: working directory; None for the backend's default (`/workspace` where we choose).
        user: user name or uid that commands run as; None for the image's.
        env: environment variables of every command; the host's own are never seen inside.
        network: what it may reach; nothing by default.
        resources: limits.
        labels: searchable labels; the rollout engine adds owner and run.
        ttl_s: seconds without a sign of life from a client after which the sandbox ends by itself.
        start_timeout_s: seconds that creation may take, pulls excluded.
        architecture: `amd64` or `arm64` when the task needs one.
        programs: what may run inside; None: everything. Other processes are killed, and counted in `status`.
        extra: what only one backend understands; that backend validates it.
    """

    image: str | None = None
    workdir: str | None = None
    user: str | int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network: NetworkRule = NetworkRule()
    resources: Resources = Resources()
    labels: Mapping[str, str] = field(default_factory=dict)
    ttl_s: float = 3600.0
    start_timeout_s: float = 60.0
    architecture: str | None = None
    programs: tuple[AllowedProgram, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class SandboxState(StrEnum):
    """Where a sandbox is in its life."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxInfo:
    """What a backend's own listing says of one sandbox.

    Attributes:
        created_at: seconds since the epoch.
        expires_at: seconds since the epoch at which its TTL runs out, or None where only the inside knows.
        reason: why it is lost, or empty.
        details: backend's own facts (image, address, architecture); JSON values.
    """

    sandbox_id: str
    state: SandboxState
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    expires_at: float | None = None
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """What a command did. A non-zero exit, a signal and a timeout are results, not errors.

    Attributes:
        exit_code: the process's exit code; None when a signal ended it or it timed out.
        signal: the signal that ended it, else None. A timeout always reads exit_code None, signal 9.
        stdout: captured bytes; over the limit, its head and tail without what was dropped between.
        stderr: likewise.
        stdout_dropped: bytes of stdout dropped between head and tail; exact.
        stderr_dropped: likewise.
        timed_out: its own timeout ended it. A command that exits 124 or 137 by itself did not time out.
        oom_killed: the memory limit killed a process of it; False where the backend can't tell.
        duration_s: wall seconds from start to exit, measured inside.
    """

    exit_code: int | None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    timed_out: bool = False
    oom_killed: bool = False
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Whether any output was dropped."""
        return bool(self.stdout_dropped or self.stderr_dropped)

    @property
    def stdout_text(self) -> str:
        """Captured stdout as UTF-8, undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Captured stderr as UTF-8, undecodable bytes replaced."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """One directory entry or file. Names of any bytes: undecodable ones as surrogate escapes (`os.fsencode`).

    Attributes:
        kind: `file`, `directory`, `symlink`, `fifo`, `socket`, `device`, or `other` where it could not be told.
        size: bytes.
        mode: permission bits.
        modified: seconds since the epoch.
        target: a symlink's target; a broken one is listed like any other.
    """

    name: str
    kind: str
    size: int
    mode: int
    modified: float
    uid: int = 0
    gid: int = 0
    target: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TarReport:
    """What a tar transfer did: members delivered, and those left out with the reason."""

    delivered: int
    skipped: tuple[tuple[str, str], ...] = ()


@runtime_checkable
class Sandbox(Protocol):
    """A handle on one live sandbox. Every call has a deadline; every answer is bounded.

    All methods raise `SandboxGone` (infra) when the sandbox no longer exists, within two seconds of noticing,
    and `TransportError` when the fate of a request is unknown. Paths are POSIX paths inside the sandbox;
    relative ones start at the working directory.
    """

    @property
    def sandbox_id(self) -> str:
        """The id that the caller gave at creation."""
        ...

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
        """Run a command to its exit: a string is a shell line (`sh -c`), a sequence an exact argv.

        Returns when the process exits; background children live on. On timeout everything that the command
        started is killed, and the output so far is returned. Cancelling the call kills the command likewise.

        Args:
            output_limit: bytes kept of stdout and of stderr each; half head, half tail.
            key: idempotency key; a repeated request with the same key returns the first one's result.

        Raises:
            SandboxRequestError: unknown user, missing cwd, limits.
        """
        ...

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None, limit: int = 64 << 20) -> bytes:
        """Read a regular file, or `length` bytes of it from `offset`.

        Raises:
            SandboxFileError: not there, not regular, or more than `limit` bytes (`too_large`).
        """
        ...

    def stream_file(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Read a regular file in chunks with flat memory."""
        ...

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
        """Write a whole file atomically, or from `offset` in place; returns bytes written.

        Raises:
            SandboxFileError: denied, no space (nothing partial is left as the target), not regular.
        """
        ...

    async def put_tar(self, path: str, data: bytes | AsyncIterable[bytes]) -> TarReport:
        """Extract a tar into folder `path`; nothing lands outside it, unsafe members are skipped and listed."""
        ...

    def get_tar(self, path: str) -> AsyncIterator[bytes]:
        """Stream folder `path` as a tar; sockets, FIFOs and devices are left out. Unpack it with care."""
        ...

    async def list_dir(self, path: str, *, limit: int = 100_000) -> Sequence[FileInfo]:
        """List a folder, sorted by name; broken links and names of any bytes are listed."""
        ...

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """Describe one path."""
        ...

    async def make_dir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        """Make a folder; an existing one is fine when `parents` is true."""
        ...

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link, or a folder (with all in it when `recursive`)."""
        ...

    async def kill_processes(self) -> int:
        """Kill every process inside but the agent, until none is left; returns how many were killed.

        The engine calls it between the agent's end and grading.

        Raises:
            InfraError: some could not be killed.
        """
        ...

    async def status(self) -> SandboxInfo:
        """Ask the sandbox for a sign of life; renews its TTL."""
        ...

    async def aclose(self) -> None:
        """Close this handle's connections. The machine lives on: `Environment.delete` ends it."""
        ...
