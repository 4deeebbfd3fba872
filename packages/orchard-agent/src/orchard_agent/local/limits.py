"""Limits of a sandbox: by control groups where they can be made, by rlimits elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchard_agent.local.control_groups import remove_group
from orchard_api.sandbox import Resources

LimitsMode = Literal["auto", "cgroups", "rlimits"]

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = {"memory_mb": "memory", "pids": "pids", "cpus": "cpu"}
_PERIOD_US = 100_000
AGENT_TASKS = 32
"""Threads of the agent and its launcher, which share a group with the commands."""
AGENT_MEMORY_MB = 24
"""Memory of the agent, which shares it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How limits are enforced on this machine.

    Attributes:
        version: of the control groups; 0 when rlimits have to do.
        parents: folder below which groups of a controller can be made; one for all in version 2.
    """

    version: int
    parents: Mapping[str, Path] = field(default_factory=dict)

    @property
    def enforced(self) -> frozenset[str]:
        """The fields of `Resources` that can be limited."""
        if self.version == 0:
            return frozenset({"memory_mb", "pids"})
        return frozenset(name for name, controller in _CONTROLLERS.items() if controller in self.parents)

    @property
    def text(self) -> str:
        """One line for people."""
        if self.version == 0:
            return "rlimits: memory is limited for each process, the number of processes for each sandbox; no cpus"
        return f"cgroup v{self.version}: {', '.join(sorted(self.enforced))}"

    def groups(self, resources: Resources, name: str) -> dict[Path, dict[str, str]]:
        """The groups that a sandbox needs, and what is to be written to their files."""
        found: dict[Path, dict[str, str]] = {}
        if self.version == 0:
            return found
        for limit, controller in _CONTROLLERS.items():
            value = getattr(resources, limit)
            if value is not None:
                group = self.parents[controller] / name
                found.setdefault(group, {}).update(_files(self.version, controller, value))
        return found

    def rlimits(self, resources: Resources) -> dict[str, Any]:
        """The agent's settings that stand in for groups."""
        if self.version:
            return {}
        return {
            "address_space_bytes": (resources.memory_mb or 0) << 20,
            "processes": resources.pids + 1 if resources.pids is not None else 0,
        }


def _files(version: int, controller: str, value: float) -> dict[str, str]:
    if controller == "memory":
        size = str((int(value) + AGENT_MEMORY_MB) << 20)
        if version == 1:
            # In this order: memory with swap may not be less than memory.
            return {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
        return {"memory.max": size, "memory.swap.max": "0"}
    if controller == "pids":
        return {"pids.max": str(int(value) + AGENT_TASKS)}
    quota = max(1000, round(value * _PERIOD_US))
    if version == 1:
        return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    return {"cpu.max": f"{quota} {_PERIOD_US}"}


_OPTIONAL = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max"})
"""Files that kernels without swap accounting lack."""


def make_groups(groups: Mapping[Path, Mapping[str, str]]) -> None:
    """Make groups and set their limits.

    Raises:
        OSError: one can't be made or limited; those that were made stay for their owner to remove.
    """
    for group, files in groups.items():
        group.mkdir()
        for name, value in files.items():
            try:
                (group / name).write_text(value)
            except OSError:
                if name not in _OPTIONAL:
                    raise


def out_of_memory_kills(group: Path) -> int | None:
    """How many processes of a group the kernel has killed for memory; None where the group does not say."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            for line in (group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def find_limits(mode: LimitsMode) -> Limits | None:
    """What this machine has, by trying; None where groups were asked for and can't be made."""
    if mode != "rlimits" and os.geteuid() == 0:
        found = _version_1() or _version_2()
        if found is not None:
            return found
    return None if mode == "cgroups" else Limits(version=0)


def _own_paths() -> dict[str, str]:
    """This process's group by controller, "" for version 2."""
    with contextlib.suppress(OSError):
        rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        return {name: row[2].strip("/") for row in rows if len(row) == 3 for name in row[1].split(",")}
    return {}


def _version_1() -> Limits | None:
    parents: dict[str, Path] = {}
    for controller, path in _own_paths().items():
        if controller not in _CONTROLLERS.values():
            continue
        # Within a container the path is the host's, and the root shown is already the container's own.
        for folder in (_ROOT / controller / path, _ROOT / controller):
            if (folder / "cgroup.procs").is_file() and _works(folder, 1, controller):
                parents[controller] = folder
                break
    return Limits(version=1, parents=parents) if parents else None


def _version_2() -> Limits | None:
    path = _own_paths().get("")
    if path is None:
        return None
    here = _ROOT / path
    # Only groups without processes of their own hand controllers on: the nearest one above us that does.
    for folder in (here, *here.parents):
        if not folder.is_relative_to(_ROOT):
            break
        try:
            handed = set((folder / "cgroup.subtree_control").read_text().split())
        except OSError:
            continue
        parents = {name: folder for name in _CONTROLLERS.values() if name in handed and _works(folder, 2, name)}
        if parents:
            return Limits(version=2, parents=parents)
    return None


def _works(parent: Path, version: int, controller: str) -> bool:
    probe = parent / f"orchard-probe-{os.getpid()}"
    try:
        make_groups({probe: _files(version, controller, 64)})
    except OSError:
        return False
    else:
        return True
    finally:
        with contextlib.suppress(OSError):
            remove_group(probe)
