"""How an episode is judged."""

from __future__ import annotations

from typing import Protocol

from orchard_api.episode import Episode, Score
from orchard_api.task import Task


class Reward(Protocol):
    """Judges episodes. Built from its config; one object serves all episodes at once.

    Optional: `deadline_s(task) -> float`, the seconds that judging may take, where that isn't the check's timeout.
    """

    def missing(self, task: Task) -> list[str]:
        """Say what this task lacks to be judged by it (a check, an answer, a variable); checked before start."""
        ...

    async def score(self, episode: Episode) -> Score:
        """Judge one episode. The sandbox is still alive, the agent's processes are gone.

        Nothing that the agent could have written decides the score, except as the data under test.

        Raises:
            GraderError: it can't be judged; the episode is masked.
        """
        ...


def deadline_s(reward: Reward, task: Task) -> float:
    """Seconds that a reward may take for an episode of `task`: what it says itself, else the check's timeout."""
    own = getattr(reward, "deadline_s", None)
    if own is not None:
        return float(own(task))
    return task.check.timeout_s if task.check is not None else 0.0
