"""One attempt at a task: what happened, how it was judged, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchard_api.errors import Failure
from orchard_api.sandbox import Sandbox
from orchard_api.task import Task
from orchard_api.trajectory import Trajectory

Outcome = Literal["submitted", "stopped", "turn_limit", "token_limit", "context_overflow", "timeout", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A reward's output.

    Attributes:
        name: the reward's name in the run.
        value: the score; finite.
        components: named parts of it.
        evidence: what it was judged by (command, exit code, output); JSON values, bounded.
        weight: its share in the episode's reward.
        policy_version: newest version among the tokens it judges, or None for an outside policy.
    """

    name: str
    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    policy_version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessResult:
    """What a harness returns.

    Attributes:
        trajectory: what was recorded, also when it failed.
        outcome: how it ended; all but `failed` are scored.
        failure: set when `outcome` is `failed`.
        answer: the agent's final answer where the program has one.
    """

    trajectory: Trajectory
    outcome: Outcome
    failure: Failure | None = None
    answer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One attempt at a task.

    While rewards are computed, `sandbox` is the live sandbox with the agent's processes gone; in records it is None.

    Attributes:
        episode_id: unique over all runs.
        group_id: episodes of one task that are compared with each other share it.
        attempt: 0 for the first; infra failures are retried with a fresh sandbox.
        failure: why it can't be scored, or None. A failed episode has no reward: it is masked.
        timings: seconds per phase: `create`, `setup`, `harness`, `reward`, `delete`.
        started_at: seconds since the epoch.
    """

    episode_id: str
    group_id: str
    task: Task
    trajectory: Trajectory
    outcome: Outcome
    answer: str = ""
    scores: tuple[Score, ...] = ()
    failure: Failure | None = None
    attempt: int = 0
    started_at: float = 0.0
    timings: Mapping[str, float] = field(default_factory=dict)
    sandbox: Sandbox | None = None

    @property
    def reward(self) -> float | None:
        """The weighted sum of its scores; None when it failed or nothing scored it."""
        if self.failure is not None or not self.scores:
            return None
        return sum(score.weight * score.value for score in self.scores)

    @property
    def policy_version(self) -> int | None:
        """The newest policy version among its sampled tokens; None when there are none."""
        versions = [turn.versions[-1] for turn in self.trajectory.turns if turn.versions]
        return max(versions, default=None)
