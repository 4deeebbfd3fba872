"""What `orchard doctor` looks at by itself; each plugin adds its own checks."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
from pathlib import Path

from orchard_api.hookspecs import DoctorCheck
from orchard_api.registry import Registry
from orchard_core.limits import FILES_BESIDES, FILES_PER_SANDBOX

WANTED_DISK_GB = 2.0
WANTED_SANDBOXES = 64


def own_checks(registry: Registry) -> list[DoctorCheck]:
    """Python, disk, open files, temporary folder, and plugins that failed to load."""
    return [_python(), _disk(Path.cwd()), _files(), _temporary(), *_broken(registry)]


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
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError as error:
        fix = "export TMPDIR=... to a writable folder with some space"
        return DoctorCheck(name="temporary folder", ok=False, detail=str(error), fix=fix)
    return DoctorCheck(name="temporary folder", ok=True, detail=folder)


def _broken(registry: Registry) -> list[DoctorCheck]:
    return [
        DoctorCheck(
            name=f"plugin {broken.name}",
            ok=False,
            detail=f"{broken.distribution} {broken.version} failed to load: {type(broken.cause).__name__}: "
            f"{broken.cause}",
            fix=f"pip install --force-reinstall {broken.distribution}, or ORCHARD_DISABLE_PLUGINS={broken.name}",
        )
        for broken in registry.broken
    ]
