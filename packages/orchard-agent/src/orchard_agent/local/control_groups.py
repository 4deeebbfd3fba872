"""A cgroup v2 for each sandbox, where the client is root and may make them: nothing escapes a timeout then."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_DELEGATED = ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control")
_REMOVAL_S = 5.0


def own_group() -> Path | None:
    """This process's own cgroup v2, when groups can be made below it: whoever manages it ends them with it."""
    if os.geteuid() != 0:
        return None
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    for root in _ROOTS:
        folder = root / path
        if (folder / "cgroup.procs").is_file() and _can_make(folder):
            return folder
    return None


def _can_make(folder: Path) -> bool:
    probe = folder / f"orchard-probe-{os.getpid()}"
    try:
        probe.mkdir()
        return (probe / "cgroup.kill").is_file()
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


def make_group(group: Path, *, uid: int) -> None:
    """Make a sandbox's group and let its agent write it.

    Raises:
        OSError: it can't be made.
    """
    group.mkdir()
    for file in _DELEGATED:
        os.chown(group / file, uid, uid)


def enter_group(group: Path, pid: int) -> None:
    """Move an agent into its group, before its first command.

    Raises:
        OSError: it can't be moved.
    """
    (group / "cgroup.procs").write_text(str(pid))


def remove_group(group: Path) -> None:
    """Kill what is left in a group and remove it with its leaves; one that isn't there is fine.

    Raises:
        OSError: it can't be removed.
    """
    deadline = time.monotonic() + _REMOVAL_S
    while group.is_dir():
        with contextlib.suppress(OSError):
            (group / "cgroup.kill").write_text("1")
        try:
            for leaf in group.iterdir():
                if leaf.is_dir():
                    leaf.rmdir()
            group.rmdir()
        except OSError:
            # A process that was killed is in its group until it is reaped.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
