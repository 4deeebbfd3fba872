"""The root folder that sandboxes see: empty mount points, a minimal /etc, the agent; no secret of the host."""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchard_api.errors import CapabilityError

INSIDE_UID = 1000
INSIDE_USER = "agent"
AGENT_PATH = "/orchard-agent"
WORKSPACE = "/workspace"
HOME = "/home/agent"
WRITABLE = {
    WORKSPACE: "workspace",
    "/tmp": "tmp",
    HOME: "home",
    **{f"/{name}": name for name in ("tests", "solution", "logs")},
}
"""Writable folders inside, and their names in a sandbox's folder on the host; the last three are Harbor's places."""

_MERGED = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_COPIED = (
    *("ld.so.cache", "localtime", "os-release", "debian_version", "services", "protocols", "mime.types", "inputrc"),
    *("ssl/openssl.cnf", "magic", "magic.mime", "shells"),
)
_SHOWN = ("/etc/alternatives", "/etc/ssl/certs", "/etc/pki/ca-trust/extracted", "/etc/pki/tls/certs")
_RESERVED = ("usr", "etc", "proc", "dev", "sys", "run", "orchard-agent", *_MERGED)
_NETWORK_COPIED = ("resolv.conf", "hosts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bind:
    """One folder or file of the host shown inside."""

    source: str
    target: str
    writable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RootFolder:
    """A root folder on the host, shared read-only by all sandboxes of its kind, and the host paths shown over it."""

    path: Path
    binds: tuple[Bind, ...]

    def add_mount_point(self, inside: str) -> None:
        """Make an empty folder to mount a working directory on.

        Raises:
            CapabilityError: that path can't be a working directory.
        """
        parts = inside.strip("/").split("/")
        if parts[0] in _RESERVED or any(inside == b.target or inside.startswith(b.target + "/") for b in self.binds):
            raise CapabilityError(
                f"{inside} can't be a working directory here: it belongs to the machine",
                hint=f"use the default, {WORKSPACE}, or a folder of your own such as /app",
            )
        (self.path / inside.lstrip("/")).mkdir(parents=True, exist_ok=True)


def _passwd(network: bool) -> dict[str, str]:
    plain = {
        "etc/passwd": (
            "root:x:0:0:root:/root:/bin/sh\n"
            f"{INSIDE_USER}:x:{INSIDE_UID}:{INSIDE_UID}::{HOME}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/:/bin/false\n"
        ),
        "etc/group": f"root:x:0:\n{INSIDE_USER}:x:{INSIDE_UID}:\nnogroup:x:65534:\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "etc/hostname": "sandbox\n",
    }
    if not network:
        plain["etc/hosts"] = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n"
    return plain


def make_root_folder(roots: Path, *, agent: Path, network: bool, read_only: Sequence[str]) -> RootFolder:
    """Make, or find, the root folder for these options below `roots`."""
    folders = {"usr", "proc", "dev", "run", "etc", "var/lib", "root", "mnt", "opt"}
    folders |= {inside.lstrip("/") for inside in WRITABLE}
    files = {name: text.encode() for name, text in _passwd(network).items()}
    links = {"var/tmp": "/tmp", "var/run": "/run", "etc/mtab": "/proc/self/mounts"}
    binds = [Bind(source="/usr", target="/usr")]
    for name in _MERGED:
        host = Path("/", name)
        if host.is_symlink():
            links[name] = str(host.readlink())
        elif host.is_dir():
            folders.add(name)
            binds.append(Bind(source=f"/{name}", target=f"/{name}"))
    for name in _COPIED + (_NETWORK_COPIED if network else ()):
        host = Path("/etc", name)
        if host.is_file():
            files[f"etc/{name}"] = host.read_bytes()
    for shown in (*_SHOWN, *read_only):
        # A link is resolved, so that what it leads to is shown under the name that programs use.
        if not Path(shown).exists() or posixpath.normpath(shown) == "/usr":
            continue
        target = posixpath.normpath(shown)
        if Path(shown).is_dir():
            folders.add(target.lstrip("/"))
        else:
            files.setdefault(target.lstrip("/"), b"")
        binds.append(Bind(source=os.path.realpath(shown), target=target))
    status = agent.stat()
    identity = repr(
        (sorted(folders), sorted(files.items()), sorted(links.items()), binds, status.st_size, status.st_mtime_ns)
    )
    path = roots / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not path.is_dir():
        _write(path, agent, folders, files, links)
    return RootFolder(path=path, binds=tuple(binds))


def _write(path: Path, agent: Path, folders: set[str], files: dict[str, bytes], links: dict[str, str]) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.mkdir(mode=0o755)
    try:
        for name in sorted(folders):
            _folder(fresh, name)
        for name, data in files.items():
            _folder(fresh, posixpath.dirname(name))
            (fresh / name).write_bytes(data)
            (fresh / name).chmod(0o644)
        for name, target in links.items():
            _folder(fresh, posixpath.dirname(name))
            (fresh / name).symlink_to(target)
        shutil.copyfile(agent, fresh / AGENT_PATH.lstrip("/"))
        (fresh / AGENT_PATH.lstrip("/")).chmod(0o755)
        fresh.chmod(0o755)
        fresh.rename(path)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        # Another process was quicker.
        if not path.is_dir():
            raise


def _folder(root: Path, name: str) -> None:
    here = root
    for part in Path(name).parts:
        here = here / part
        if not here.is_dir():
            here.mkdir()
            here.chmod(0o755)
