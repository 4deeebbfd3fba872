"""Numbers of a set of episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from orchard_api.episode import Episode
from orchard_api.errors import FailureClass

OUTCOMES_OF_POLICY = ("turn_limit", "token_limit", "context_overflow", "timeout", "stopped")


def wilson_interval(successes: int, count: int, *, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927); (0, 1) without observations."""
    if not count:
        return 0.0, 1.0
    share = successes / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


@dataclass(slots=True)
class Tally:
    """Counts episodes as they end.

    Attributes:
        solved_at: a reward of at least this is a success.
        last_failure: text of the newest failure.
    """

    solved_at: float = 1.0
    episodes: int = 0
    scored: int = 0
    solved: int = 0
    reward_sum: float = 0.0
    turns: int = 0
    response_tokens: int = 0
    retried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    failure_kinds: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""

    def add_all(self, episodes: Iterable[Episode]) -> None:
        """Count several episodes."""
        for episode in episodes:
            self.add(episode)

    def add(self, episode: Episode) -> None:
        """Count one episode."""
        self.episodes += 1
        self.retried += episode.attempt > 0
        self.outcomes[episode.outcome] += 1
        self.turns += len(episode.trajectory.turns)
        self.response_tokens += sum(len(turn.response_ids) for turn in episode.trajectory.turns)
        if episode.failure is not None:
            self.failures[episode.failure.failure_class.value] += 1
            self.failure_kinds[f"{episode.failure.phase}: {episode.failure.kind}"] += 1
            self.last_failure = episode.failure.message.partition("\n")[0][:300]
        elif episode.outcome in OUTCOMES_OF_POLICY:
            self.failures[FailureClass.POLICY.value] += 1
        reward = episode.reward
        if reward is not None:
            self.scored += 1
            self.reward_sum += reward
            self.solved += reward >= self.solved_at

    @property
    def success(self) -> float | None:
        """Share of scored episodes that were solved; None without any."""
        return self.solved / self.scored if self.scored else None

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of scored episodes; None without any."""
        return self.reward_sum / self.scored if self.scored else None

    def failure_counts(self) -> dict[str, int]:
        """Failures by class, zeros included."""
        return {each.value: self.failures[each.value] for each in FailureClass}

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        low, high = wilson_interval(self.solved, self.scored)
        masked = self.episodes - self.scored
        return {
            "episodes": self.episodes,
            "scored": self.scored,
            "solved": self.solved,
            "success": self.success,
            "success_interval": [low, high],
            "reward_mean": self.reward_mean,
            "turns": self.turns,
            "response_tokens": self.response_tokens,
            "retried": self.retried,
            "outcomes": dict(self.outcomes),
            "failures": self.failure_counts(),
            "failure_kinds": dict(self.failure_kinds),
            "infra_failed_rate": self.failures["infra"] / self.episodes if self.episodes else 0.0,
            "incomplete": masked > 0,
        }
