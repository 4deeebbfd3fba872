"""Where the agent's binary for this machine is."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from orchard_api.errors import InfraError

_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def architecture() -> str:
    """`amd64` or `arm64`.

    Raises:
        InfraError: another one, or not Linux.
    """
    if sys.platform != "linux":
        raise InfraError(
            f"the local environment needs Linux; this is {sys.platform}",
            hint='use another backend, "docker" for instance, or run in a Linux virtual machine',
        )
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise InfraError(f"the agent is built for amd64 and arm64; this machine is {machine}")
    return _MACHINES[machine]


def agent_binary() -> Path:
    """The agent for this machine.

    Raises:
        InfraError: it is not there.
    """
    path = Path(__file__).resolve().parent.parent / "_bin" / f"orchard-agent-linux-{architecture()}"
    if not path.is_file():
        raise InfraError(f"the agent's binary is missing: {path}", hint="python -m orchard_agent.build")
    return path
