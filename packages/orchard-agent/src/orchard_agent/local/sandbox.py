"""A handle on a local sandbox, which can be forked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchard_agent.calls import ClientLimits
from orchard_agent.client import AgentSandbox
from orchard_agent.local.limits import out_of_memory_kills
from orchard_api.sandbox import DEFAULT_OUTPUT_LIMIT, ExecResult, Sandbox, SandboxInfo
from orchard_api.transport import Transport


class LocalSandbox(AgentSandbox):
    """See `AgentSandbox`; `fork` copies what programs inside can write: workdir, home and /tmp.

    Processes are not copied, nor is /dev/shm. Programs that write meanwhile are not held up: their files may be copied
    half-written, so end or pause them where that matters.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        token: str,
        info: SandboxInfo,
        fork: Callable[[str, Sequence[str]], Awaitable[Sequence[Sandbox]]],
        memory_group: Path | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        super().__init__(transport, token=token, info=info, limits=limits)
        self._fork = fork
        self._memory_group = memory_group

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
        """See `Sandbox`. `oom_killed` says that the kernel killed a process of the sandbox while this command ran."""
        before = self._memory_kills()
        result = await super().exec(
            command,
            stdin=stdin,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            output_limit=output_limit,
            key=key,
        )
        return replace(result, oom_killed=True) if self._memory_kills() > before else result

    def _memory_kills(self) -> int:
        return 0 if self._memory_group is None else out_of_memory_kills(self._memory_group) or 0

    async def fork(self, sandbox_ids: Sequence[str]) -> Sequence[Sandbox]:
        """See `Fork`."""
        return await self._fork(self.sandbox_id, sandbox_ids)
