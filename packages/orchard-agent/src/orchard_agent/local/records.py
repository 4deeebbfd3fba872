"""What a sandbox's folder on the host says of it, for this process and for others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from orchard_agent.local.processes import ProcessId
from orchard_api.errors import SandboxCreateError
from orchard_api.sandbox import SandboxInfo, SandboxSpec, SandboxState

RECORD = "record.json"
FAILURE = "failure"
SOCKET = "socket"
LOG = "agent.log"
_HALF_MADE_S = 120.0
_SPEC = TypeAdapter(SandboxSpec)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sandbox, as written when its agent answered.

    Attributes:
        token: the agent's bearer token; the record is readable by the client's user alone.
        process: the agent, whose end is the sandbox's.
        owner: tag of the environment object that made it.
        created_at: seconds since the epoch.
    """

    sandbox_id: str
    token: str
    process: ProcessId
    owner: str
    created_at: float
    ttl_s: float
    workdir: str
    isolation: str
    labels: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)

    def sandbox_spec(self) -> SandboxSpec:
        """What it was made from."""
        return _SPEC.validate_python(self.spec)

    def write(self, folder: Path) -> None:
        """Write it in one step."""
        fresh = folder / (RECORD + ".new")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        fresh.rename(folder / RECORD)

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record of a folder, or None when it has none (yet)."""
        try:
            value: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return cls(**{**value, "process": ProcessId(**value["process"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def info(self, folder: Path) -> SandboxInfo:
        """How the listing shows it."""
        alive = self.process.alive
        failure = read_text(folder / FAILURE)
        reason = failure or ("" if alive else "its processes have ended; its folder is left")
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            state=SandboxState.READY if alive and not failure else SandboxState.LOST,
            labels=self.labels,
            created_at=self.created_at,
            reason=reason,
            details={
                "folder": str(folder),
                "workdir": self.workdir,
                "isolation": self.isolation,
                "owner": self.owner,
                "pid": self.process.pid,
                "ttl_s": self.ttl_s,
            },
        )


def read_text(path: Path) -> str:
    """A small file's text, or nothing."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")[:2000]
    return ""


def info_without_record(folder: Path) -> SandboxInfo | None:
    """How the listing shows a folder that has no record: being made, or left half-made."""
    try:
        changed = folder.stat().st_mtime
    except OSError:
        return None
    fresh = time.time() - changed < _HALF_MADE_S
    return SandboxInfo(
        sandbox_id=folder.name,
        state=SandboxState.STARTING if fresh else SandboxState.LOST,
        created_at=changed,
        reason=read_text(folder / FAILURE) or ("" if fresh else "its creation never ended; its folder is left"),
        details={"folder": str(folder)},
    )


def checked_id(sandbox_id: str) -> str:
    """A sandbox id that can be a folder's name.

    Raises:
        SandboxCreateError: this one can't.
    """
    if not _ID.fullmatch(sandbox_id):
        raise SandboxCreateError(
            f"{sandbox_id!r} can't be a sandbox id here: 1 to 128 letters, digits, '.', '_' and '-', no sign first"
        )
    return sandbox_id
