"""Which isolation works on this machine: tried, not guessed."""

from __future__ import annotations

import os
from pathlib import Path

from orchard_agent.local.config import LocalConfig
from orchard_agent.local.isolation import Enclosure, Isolation, Mode, candidate, probe
from orchard_agent.local.root_folder import AGENT_PATH, RootFolder
from orchard_api.errors import InfraError

_MODES: tuple[Mode, ...] = ("bubblewrap", "unshare")


def try_mode(mode: Mode, *, uid: int | None, root: RootFolder) -> Isolation | str:
    """A working isolation of this mode, or what is wrong with it."""
    found = candidate(mode, uid=uid, agent=str(root.path / AGENT_PATH.lstrip("/")))
    if isinstance(found, str):
        return found
    enclosure = Enclosure(root=str(root.path), binds=root.binds, network=False, workdir="/")
    problem = probe(found, enclosure)
    return found if problem is None else problem


def choose_isolation(config: LocalConfig, *, uid: int | None, root: RootFolder) -> Isolation:
    """The first isolation that works, as the config allows.

    Raises:
        InfraError: none does, with how to get one.
    """
    wanted: tuple[Mode, ...] = _MODES if config.isolation == "auto" else (config.isolation,)
    problems: list[str] = []
    for mode in wanted:
        if mode == "none":
            problems.append('isolation = "none" was chosen')
            continue
        found = try_mode(mode, uid=uid, root=root)
        if isinstance(found, Isolation):
            return found
        problems.append(f"{mode}: {found}")
    if config.allow_unisolated:
        found = candidate("none", uid=uid, agent=str(root.path / AGENT_PATH.lstrip("/")))
        if isinstance(found, Isolation):
            return found
        problems.append(found)
    raise InfraError("local sandboxes can't be isolated on this machine: " + "; ".join(problems), hint=fix())


def fix() -> str:
    """What makes isolation work here, by what the kernel's switches say."""
    steps: list[str] = []
    for name, bad, command in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        switch = Path("/proc/sys", name)
        if switch.is_file() and os.access(switch, os.R_OK) and switch.read_text().strip() == bad:
            steps.append(command)
    steps.append("install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)")
    steps.append("inside a container, allow user namespaces and an unmasked /proc")
    steps.append("or set allow_unisolated = true under [environment] to run without isolation")
    return "; ".join(steps)
