"""A backend: makes, finds and removes sandboxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from orchard_api.sandbox import Sandbox, SandboxInfo, SandboxSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can give; a task that needs more is refused before anything starts.

    Attributes:
        images: whether `SandboxSpec.image` is honoured; False: only the default exists.
        networks: the network modes that it can enforce.
        limits: the `Resources` fields that it can enforce.
        architectures: what it can run.
        users: whether commands may run as another user than the default.
        programs: whether `SandboxSpec.programs` is enforced.
        powers: names of the optional powers that its sandboxes have (`StreamingExec`, `Processes`, `Pty`, `Snapshot`,
            `Fork`, `Ports`, `ReversePorts`).
        isolation: one line for people on what keeps a sandbox in.
    """

    images: bool = False
    networks: frozenset[str] = frozenset({"none"})
    limits: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset({"amd64"})
    users: bool = False
    programs: bool = False
    powers: frozenset[str] = frozenset()
    isolation: str = ""

    def missing(self, spec: SandboxSpec) -> list[str]:
        """Say what `spec` needs that this backend can't give; empty when all is fine."""
        problems: list[str] = []
        if spec.image is not None and not self.images:
            problems.append(f"an image ({spec.image!r}); this backend only has its default")
        if spec.network.mode not in self.networks:
            problems.append(f"network mode {spec.network.mode!r}; enforced here: {', '.join(sorted(self.networks))}")
        for name in ("cpus", "memory_mb", "disk_mb", "pids"):
            if getattr(spec.resources, name) is not None and name not in self.limits:
                problems.append(f"a limit on {name}, which this backend does not enforce")
        if spec.resources.gpus and "gpus" not in self.limits:
            problems.append(f"{spec.resources.gpus} GPU(s)")
        if spec.architecture is not None and spec.architecture not in self.architectures:
            problems.append(f"architecture {spec.architecture}; here: {', '.join(sorted(self.architectures))}")
        if spec.programs is not None and not self.programs:
            problems.append("a list of programs that may run, which this backend does not enforce")
        if spec.user is not None and not self.users:
            problems.append(f"commands run as user {spec.user!r}")
        return problems


class Environment(Protocol):
    """A backend. Built from its config; `start` is awaited once before the first `create`.

    Any backend that can run our agent only has to get it running and hand its `Transport` to
    `orchard_agent.AgentSandbox`; the rest is written once.
    """

    capabilities: Capabilities

    async def start(self) -> None:
        """Check that the backend can be reached.

        Raises:
            InfraError: it can't, with what to do.
        """
        ...

    async def create(self, spec: SandboxSpec, *, sandbox_id: str) -> Sandbox:
        """Make a sandbox and wait until its agent answers.

        The id comes from the caller, so a repeated call after a lost reply adopts what the first one made.
        Cancelled, it leaves nothing.

        Raises:
            CapabilityError: `spec` needs what this backend can't give.
            SandboxCreateError: it could not be made; nothing is left.
        """
        ...

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Open a handle on a live sandbox, from any process.

        Raises:
            SandboxGone: there is none of that id.
        """
        ...

    async def list(self, labels: Mapping[str, str] = MappingProxyType({})) -> Sequence[SandboxInfo]:
        """The backend's own listing (not this process's memory) of our sandboxes that carry all `labels`."""
        ...

    async def renew(self, sandbox_id: str, ttl_s: float) -> None:
        """Let the sandbox live `ttl_s` seconds from now."""
        ...

    async def delete(self, sandbox_id: str) -> None:
        """End the sandbox and all that belongs to it; an unknown id is fine.

        Raises:
            SandboxDeleteError: it could not be removed and stays listed.
        """
        ...

    async def aclose(self) -> None:
        """Free what the environment object holds; sandboxes that it made and that still live are deleted."""
        ...
