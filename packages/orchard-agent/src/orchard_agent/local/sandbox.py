"""A handle on a local sandbox, which can be forked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from orchard_agent.calls import ClientLimits
from orchard_agent.client import AgentSandbox
from orchard_api.sandbox import Sandbox, SandboxInfo
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
        limits: ClientLimits | None = None,
    ) -> None:
        super().__init__(transport, token=token, info=info, limits=limits)
        self._fork = fork

    async def fork(self, sandbox_ids: Sequence[str]) -> Sequence[Sandbox]:
        """See `Fork`."""
        return await self._fork(self.sandbox_id, sandbox_ids)
