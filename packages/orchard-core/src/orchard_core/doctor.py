"""What `orchard doctor` looks at by itself; each plugin adds its own checks."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from orchard_api.hookspecs import DoctorCheck
from orchard_core.limits import FILES_BESIDES, FILES_PER_SANDBOX

WANTED_DISK_GB = 2.0
WANTED_SANDBOXES = 64


def own_checks() -> list[DoctorCheck]:
    """Python, disk, open files, temporary folder."""
    return [_python(), _disk(Path.cwd()), _files(), _temporary()]


def _python() -> DoctorCheck:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info >= (3, 11)
    return DoctorCheck(name="python", ok=ok, detail=version, fix="" if ok else "install Python 3.11 or newer")


def _disk(path: Path) -> DoctorCheck:
    free = shutil.disk_usage(path).free / 1e9
    ok = free >= WANTED_DISK_GB
    return DoctorCheck(
        name="disk",
        ok=ok,
        detail=f"{free:.1f} GB free",
        required=False,
        fix="" if ok else f"free some space: runs want at least {WANTED_DISK_GB:g} GB here",
    )


def _files() -> DoctorCheck:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = float("inf") if hard == resource.RLIM_INFINITY else hard
    room = (limit - FILES_BESIDES) / FILES_PER_SANDBOX
    ok = room >= WANTED_SANDBOXES
    shown = "unlimited" if limit == float("inf") else f"{hard}"
    return DoctorCheck(
        name="open files",
        ok=ok,
        detail=f"hard limit {shown}",
        required=False,
        fix="" if ok else f"ulimit -n {FILES_BESIDES + FILES_PER_SANDBOX * WANTED_SANDBOXES}",
    )


def _temporary() -> DoctorCheck:
    folder = tempfile.gettempdir()
    ok = os.access(folder, os.W_OK | os.X_OK)
    return DoctorCheck(
        name="temporary folder", ok=ok, detail=folder, fix="" if ok else "set TMPDIR to a writable folder"
    )
