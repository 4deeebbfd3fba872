"""The `exact` reward: the answer, or a file that the agent left, is the expected text."""

from __future__ import annotations

from pydantic import Field

from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError, SandboxFileError
from orchard_api.registry import PluginConfig
from orchard_api.task import Task

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
        if self._config.file is None:
            text: str | None = episode.answer
        else:
            evidence["file"] = self._config.file
            text, problem = await self._read(episode, self._config.file)
            if problem:
                evidence["problem"] = problem
        if text is not None:
            evidence["answer"] = text[:_SHOWN]
        equal = text is not None and self._normal(text) == self._normal(expected)
        return Score(name="exact", value=float(equal), evidence=evidence, policy_version=episode.policy_version)

    async def _read(self, episode: Episode, path: str) -> tuple[str | None, str]:
        if episode.sandbox is None:
            raise GraderError("the episode has no live sandbox to read the answer from")
        try:
            data = await episode.sandbox.read_file(path, limit=self._config.limit_bytes)
        except SandboxFileError as error:
            return None, error.reason.replace("_", " ")
        try:
            return data.decode("utf-8"), ""
        except UnicodeDecodeError:
            return None, "not UTF-8 text"

    def _normal(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.casefold else text
