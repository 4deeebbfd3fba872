"""`orchard doctor` for the `local` environment."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

from orchard_agent.local.binary import agent_binary, architecture
from orchard_agent.local.config import DEFAULT_UID
from orchard_agent.local.isolation import Isolation
from orchard_agent.local.limits import find_limits
from orchard_agent.local.root_folder import make_root_folder
from orchard_agent.local.selection import fix, try_mode
from orchard_api.errors import InfraError
from orchard_api.hookspecs import DoctorCheck


def checks() -> list[DoctorCheck]:
    """Look at this machine by trying: each isolation starts one enclosed program."""
    try:
        kind = architecture()
        agent = agent_binary()
    except InfraError as error:
        return [DoctorCheck(name="local: agent", ok=False, detail=error.message, fix=error.hint or "")]
    found = [DoctorCheck(name="local: agent", ok=True, detail=f"linux-{kind}, {agent}")]
    uid = DEFAULT_UID if os.geteuid() == 0 else None
    if uid is not None:
        found.append(_uid_check(uid))
    found.append(_limits_check())
    return found + _isolation_checks(agent, uid)


def _uid_check(uid: int) -> DoctorCheck:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return DoctorCheck(name="local: uid", ok=True, detail=f"root: sandboxes run as uid {uid}, which nobody has")
    return DoctorCheck(
        name="local: uid",
        ok=False,
        detail=f"sandboxes run as uid {uid}, which is {name}'s",
        fix="set uid = ... under [environment] to one that nobody has",
        required=False,
    )


def _limits_check() -> DoctorCheck:
    limits = find_limits("auto")
    assert limits is not None
    return DoctorCheck(
        name="local: limits",
        ok=limits.version > 0,
        detail=limits.text,
        fix="" if limits.version else "run as root where /sys/fs/cgroup can be written, for limits of whole sandboxes",
        required=False,
    )


def _isolation_checks(agent: Path, uid: int | None) -> list[DoctorCheck]:
    with tempfile.TemporaryDirectory(prefix="orchard-doctor-") as folder:
        base = Path(folder)
        base.chmod(0o755)
        root = make_root_folder(base, agent=agent, network=False, read_only=())
        results = {mode: try_mode(mode, uid=uid, root=root) for mode in ("bubblewrap", "unshare")}
    works = [mode for mode, result in results.items() if isinstance(result, Isolation)]
    return [
        DoctorCheck(
            name=f"local: {mode}",
            ok=isinstance(result, Isolation),
            detail=result.text if isinstance(result, Isolation) else result,
            fix="" if isinstance(result, Isolation) else fix(),
            required=not works,
        )
        for mode, result in results.items()
    ]
