"""Options of the `local` environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from orchard_api.registry import PluginConfig

DEFAULT_UID = 411_000
"""Host uid and gid that sandboxes run as when the client is root; in a range that no distribution hands out."""


class LocalConfig(PluginConfig):
    """`[environment]` with `backend = "local"`."""

    isolation: Literal["auto", "bubblewrap", "unshare", "none"] = Field(
        default="auto", description="`auto` takes bubblewrap where it works, else the kernel's namespaces directly"
    )
    allow_unisolated: bool = Field(
        default=False, description="run commands as plain processes of this machine where isolation can't be had"
    )
    uid: int = Field(
        default=DEFAULT_UID, ge=1, lt=2**31, description="host uid and gid of sandboxes when the client is root"
    )
    base: Path | None = Field(default=None, description="folder of sandboxes; by default in the temporary folder")
    read_only: tuple[str, ...] = Field(default=(), description="more paths of this machine to show, read-only")
    env: dict[str, str] = Field(default_factory=dict, description="environment of every command")
    file_size_mb: int | None = Field(default=None, ge=1, description="largest file a process may write (rlimit)")
    open_files: int | None = Field(default=None, ge=64, description="descriptors a process may hold (rlimit)")
    limits: Literal["auto", "cgroups", "rlimits"] = Field(
        default="auto", description="how memory, processes and cpus are limited: `auto` takes cgroups where it can"
    )
    shm_mb: int = Field(default=64, ge=1, description="size of /dev/shm")

    @field_validator("read_only")
    @classmethod
    def _absolute(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not an absolute path without '..'")
        return paths
