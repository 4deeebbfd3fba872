"""How a command line becomes one that runs enclosed: by bubblewrap, by the agent's own namespaces, or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from orchard_agent.local.root_folder import AGENT_PATH, INSIDE_UID, Bind

Mode = Literal["bubblewrap", "unshare", "none"]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOSTNAME = "sandbox"
_PROBE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Enclosure:
    """What one sandbox sees.

    Attributes:
        root: host folder that becomes `/`, read-only.
        binds: host folders over it, in mount order.
        network: whether it shares the host's network; else it has a loopback of its own and nothing more.
        workdir: where its program starts.
    """

    root: str
    binds: tuple[Bind, ...]
    network: bool
    workdir: str
    shm_mb: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """A way to start enclosed programs on this machine.

    Attributes:
        uid: host uid to become first, or None when the client is no root.
        agent: host path of the agent's binary, readable by that uid.
        nested_namespaces: whether programs inside can make user namespaces of their own.
    """

    mode: Mode
    uid: int | None
    agent: str
    bubblewrap: str = "bwrap"
    setpriv: str = "setpriv"
    nested_namespaces: bool = False

    @property
    def text(self) -> str:
        """One line for people."""
        if self.mode == "none":
            return "none: commands are plain processes of this machine, with its files and its network"
        who = f"host uid {self.uid}" if self.uid is not None else f"the client's own uid {os.getuid()}"
        nested = "; programs inside can nest user namespaces" if self.nested_namespaces else ""
        return f"{self.mode}: own user, mount, pid, ipc, uts and network namespaces, {who}, no capabilities{nested}"

    def argv(self, enclosure: Enclosure, program: Sequence[str]) -> list[str]:
        """The command line that runs `program`, its path as seen inside, enclosed."""
        argv: list[str] = []
        if self.uid is not None:
            # Before anything else: bubblewrap as root would keep the host's uid 0.
            argv += [self.setpriv, f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--inh-caps=-all"]
        if self.mode == "none":
            return [*argv, self.agent, *program[1:]]
        if self.mode == "bubblewrap":
            return [*argv, *self._bubblewrap(enclosure), *program]
        return [*argv, self.agent, "enclose", "-layout", _layout(enclosure), *program]

    def _bubblewrap(self, enclosure: Enclosure) -> list[str]:
        argv = [self.bubblewrap, "--die-with-parent", "--as-pid-1", "--unshare-user", "--unshare-pid", "--unshare-ipc"]
        argv += ["--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL", "--hostname", HOSTNAME]
        argv += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
        if not self.nested_namespaces:
            argv.append("--disable-userns")
        if not enclosure.network:
            argv.append("--unshare-net")
        argv += ["--ro-bind", enclosure.root, "/"]
        for bind in enclosure.binds:
            argv += ["--bind" if bind.writable else "--ro-bind", bind.source, bind.target]
        argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(enclosure.shm_mb << 20)]
        argv += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--chdir", enclosure.workdir]
        return argv


def _layout(enclosure: Enclosure) -> str:
    return json.dumps(
        {
            "root": enclosure.root,
            "hostname": HOSTNAME,
            "uid": INSIDE_UID,
            "gid": INSIDE_UID,
            "network": enclosure.network,
            "shm_bytes": enclosure.shm_mb << 20,
            "workdir": enclosure.workdir,
            "binds": [{"source": b.source, "target": b.target, "writable": b.writable} for b in enclosure.binds],
        }
    )


def find_program(name: str) -> str | None:
    """A tool on PATH or where systems keep it."""
    return shutil.which(name) or shutil.which(name, path=PATH)


@cache
def bubblewrap_version(program: str) -> tuple[int, ...]:
    """Bubblewrap's version; empty when it does not say one."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def candidate(mode: Mode, *, uid: int | None, agent: str) -> Isolation | str:
    """A way to try, or why this mode can't even be tried."""
    setpriv = find_program("setpriv")
    if uid is not None and setpriv is None:
        return "setpriv is missing, which gives up root before anything else"
    found = Isolation(mode=mode, uid=uid, agent=agent, setpriv=setpriv or "setpriv")
    if mode != "bubblewrap":
        return found
    program = find_program("bwrap")
    if program is None:
        return "bubblewrap is not installed"
    version = bubblewrap_version(program)
    if version < (0, 5):
        return f"bubblewrap {'.'.join(map(str, version)) or 'of unknown version'} is too old; 0.5 is needed"
    return Isolation(
        mode=mode,
        uid=uid,
        agent=agent,
        setpriv=setpriv or "setpriv",
        bubblewrap=program,
        nested_namespaces=version < (0, 8),
    )


def probe(isolation: Isolation, enclosure: Enclosure) -> str | None:
    """Run the agent's `version` enclosed; None when that works, else what went wrong."""
    argv = isolation.argv(enclosure, [AGENT_PATH, "version"])
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_S,
            env={"PATH": PATH},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and done.stdout.startswith("orchard-agent"):
        return None
    return (done.stderr.strip() or f"exit code {done.returncode}")[-500:]
