"""Options of the asyncio rollout engine."""

from __future__ import annotations

from pydantic import Field

from orchard_api.registry import PluginConfig


class AsyncioEngineConfig(PluginConfig):
    """`[rollout]` with `engine = "asyncio"`."""

    concurrency: int = Field(default=16, ge=1, description="sandboxes alive at once, deletion included")
    infra_retries: int = Field(
        default=2, ge=0, description="further attempts after an infra failure, each in a fresh sandbox"
    )
    backoff_s: float = Field(
        default=0.5, ge=0, description="pause before the first retry; doubles, with jitter, up to 30 s"
    )
    setup_timeout_s: float = Field(default=300.0, gt=0, description="seconds for a task's files and setup line")
    grace_s: float = Field(
        default=30.0, gt=0, description="seconds beyond a phase's own limit before the engine cuts it"
    )
    delete_timeout_s: float = Field(default=60.0, gt=0, description="seconds for removing a sandbox")
    max_agent_s: float = Field(default=7200.0, gt=0, description="cap on any task's agent timeout")
