"""`task.toml` of the Harbor format (`schema_version` 1.x), as far as one sandbox goes; the rest is refused by name.

Source: the task format of Harbor 0.26 (Terminal-Bench 2).
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

UNSUPPORTED = (
    "steps",
    "artifacts",
    "multi_step_reward_strategy",
    "agent.network_mode",
    "agent.allowed_hosts",
    "verifier.user",
    "verifier.network_mode",
    "verifier.allowed_hosts",
    "verifier.environment",
    "verifier.collect",
    "environment.tpu",
    "environment.mcp_servers",
    "environment.skills_dir",
    "environment.healthcheck",
)
"""What the format has and we don't honour yet; a task that asks for it is refused, never played without it."""

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMG])i?B?\s*$", re.IGNORECASE)
_TO_MB = {"K": 1 / 1024, "M": 1, "G": 1024}


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskTable(_Table):
    """`[task]`."""

    name: str | None = None
    version: str | None = None
    description: str | None = None
    authors: list[dict[str, Any]] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)


class AgentTable(_Table):
    """`[agent]`."""

    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class VerifierTable(_Table):
    """`[verifier]`."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared"] = "shared"


class EnvironmentTable(_Table):
    """`[environment]`."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int = Field(default=0, ge=0)
    gpu_types: list[str] = Field(default_factory=list)
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _legacy(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        table = dict(value)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in table:
                size = _megabytes(table.pop(old), old)
                if table.setdefault(new, size) != size:
                    raise ValueError(f"{old} and {new} contradict each other")
        if "allow_internet" in table:
            allowed = table.pop("allow_internet")
            table.setdefault("network_mode", "public" if allowed else "no-network")
        return table

    @model_validator(mode="after")
    def _hosts(self) -> EnvironmentTable:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self


class SolutionTable(_Table):
    """`[solution]`."""

    env: dict[str, str] = Field(default_factory=dict)


class TaskToml(_Table):
    """The whole file. Tables that we don't support yet (steps, artifacts, ...) are unknown keys, hence errors."""

    schema_version: str = "1.0"
    source: str | None = None
    task: TaskTable = TaskTable()
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()

    @model_validator(mode="before")
    @classmethod
    def _version(cls, value: Any) -> Any:
        if isinstance(value, dict) and "version" in value:
            table = dict(value)
            table.setdefault("schema_version", table.pop("version"))
            return table
        return value


def _megabytes(text: Any, name: str) -> int:
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{name}: expected a size like '2G' or '512M', got {text!r}")
    return max(int(float(match[1]) * _TO_MB[match[2].upper()]), 1)
