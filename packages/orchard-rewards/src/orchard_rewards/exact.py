"""The `exact` reward: the answer, or a file that the agent left, is the expected text."""

from __future__ import annotations

from pydantic import Field

from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError
from orchard_api.registry import PluginConfig
from orchard_api.task import Task
from orchard_rewards.answer import read_answer

_SHOWN = 2000


class ExactConfig(PluginConfig):
    """Options of `exact`."""

    file: str | None = Field(default=None, description="compare this file (relative to the workdir), not the answer")
    strip: bool = Field(default=True, description="leave white space at both ends out of the comparison")
    casefold: bool = Field(default=False, description="leave upper and lower case out of the comparison")
    limit_bytes: int = Field(default=1 << 20, ge=1, description="a larger file is not equal to anything")


class ExactReward:
    """Scores 1 where the text is the task's `expected`, else 0."""

    Config = ExactConfig

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`."""
        return [] if task.expected is not None else [f"task {task.task_id} has no `expected` answer to compare with"]

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`."""
        expected = episode.task.expected
        if expected is None:
            raise GraderError(f"task {episode.task.task_id} has no `expected` answer")
        evidence: dict[str, object] = {"expected": expected[:_SHOWN]}
        answer = await read_answer(episode, self._config.file, limit=self._config.limit_bytes)
        if self._config.file is not None:
            evidence["file"] = self._config.file
        if answer.problem:
            evidence["problem"] = answer.problem
        text = answer.text
        if text is not None:
            evidence["answer"] = text[:_SHOWN]
        equal = text is not None and self._normal(text) == self._normal(expected)
        return Score(name="exact", value=float(equal), evidence=evidence, policy_version=episode.policy_version)

    def _normal(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.casefold else text
