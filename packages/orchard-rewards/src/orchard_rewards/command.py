"""The `command` reward: a check of the task's author, run where the agent could not have written."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError
from orchard_api.registry import PluginConfig
from orchard_api.sandbox import ExecResult
from orchard_api.task import Task
from orchard_rewards.check_run import CheckFolder, check_folder, check_problems, fresh_folder, tail
from orchard_rewards.verdict import VERIFIER_FOLDER, read_reward


class CheckConfig(PluginConfig):
    """Where a check is run."""

    base: str = Field(default="/tmp", pattern=r"^(/[^/\n]+)+$", description="where inside the check's folder is made")


class CommandConfig(CheckConfig):
    """Options of `command`."""

    key: str = Field(default="reward", description="which number of a reward.json object is the score")


class CommandReward:
    """Runs `task.check` and takes its verdict.

    A check that reaches its timeout, or writes no verdict where it must write one, has said nothing about the agent:
    that is a `GraderError`, not a score of 0.
    """

    Config = CommandConfig

    def __init__(self, config: CommandConfig) -> None:
        self._config = config

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`; values of variables are not shown."""
        return check_problems(task)

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`."""
        async with check_folder(episode, base=self._config.base) as place:
            if place.check.verdict == "reward_file":
                await fresh_folder(place.sandbox, VERIFIER_FOLDER)
            result = await place.run()
            if result.timed_out:
                raise GraderError(
                    f"the check reached its timeout of {place.check.timeout_s:g} s: "
                    + tail(place.env.scrub(result.stdout_text), 500),
                    hint="a check should bound the program under test itself, so that a slow one scores 0",
                )
            values = await self._values(place, result)
            evidence = {**place.evidence(result), "verdict": place.check.verdict}
        return Score(
            name="command",
            value=self._pick(values),
            components=values if len(values) > 1 else {},
            evidence=evidence,
            policy_version=episode.policy_version,
        )

    async def _values(self, place: CheckFolder, result: ExecResult) -> Mapping[str, float]:
        if place.check.verdict == "exit_code":
            return {self._config.key: 1.0 if result.ok else 0.0}
        await place.sandbox.kill_processes()
        return await read_reward(place.sandbox)

    def _pick(self, values: Mapping[str, float]) -> float:
        if self._config.key in values:
            return values[self._config.key]
        if len(values) == 1:
            return next(iter(values.values()))
        raise GraderError(
            f"reward.json has no {self._config.key!r}; it has {', '.join(values)}",
            hint='say which one is the score: key = "..." in the reward\'s section',
        )
