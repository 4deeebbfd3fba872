"""The `judge` reward: a model scores the work by a rubric, over any OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from orchard_api.config import describe
from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError, OrchardError, OverloadedError
from orchard_api.openai_address import ApiOptions, is_loopback
from orchard_api.openai_http import ApiClient
from orchard_api.task import Task
from orchard_rewards.answer import read_answer
from orchard_rewards.rubric import (
    Criterion,
    Opinion,
    UnreadableError,
    conversation,
    middle_cut,
    read_verdict,
    transcript,
)

METADATA_KEY = "rubric"


class JudgeConfig(ApiOptions):
    """Options of `judge`; without a rubric here, each task has its own in `metadata.rubric`."""

    model: str = Field(min_length=1, description="the judge's model name")
    rubric: tuple[Criterion, ...] = Field(default=(), description="tables of name, text and weight")
    scale: int = Field(default=10, ge=1, le=1000, description="a score is 0 to this, and divided by it")
    show: tuple[Literal["answer", "transcript"], ...] = Field(
        default=("answer",), description="what the judge sees besides the task and the files"
    )
    files: tuple[str, ...] = Field(default=(), description="files inside that it sees too")
    guidance: str = Field(default="", description="further instructions to it")
    limit_chars: int = Field(default=40_000, ge=100, description="of each text; the middle of a longer one is cut")
    temperature: float | None = Field(default=0.0, ge=0, description="left out of the request when none")
    max_tokens: int = Field(default=2048, ge=1)
    unreadable_retries: int = Field(default=2, ge=0, description="times to ask again for an answer in the form wanted")
    deadline_s: float = Field(default=300.0, gt=0, description="seconds that a verdict may take, retries included")

    @field_validator("rubric")
    @classmethod
    def _distinct(cls, rubric: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
        names = [criterion.name for criterion in rubric]
        if len(set(names)) < len(names):
            raise ValueError("two criteria have one name")
        return rubric


class JudgeReward:
    """Scores the weighted mean of the criteria, 0 to 1, each a component.

    A judge that can't be reached, refuses, or doesn't answer in the form asked for has failed: the episode is masked,
    never scored 0.
    """

    Config = JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrency)

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`."""
        problems = []
        try:
            self._rubric(task)
            if not is_loopback(url := self._config.address()) and self._config.key() is None:
                problems.append(f"{url} needs a key, and ${self._config.api_key_env} is not set on this machine")
        except OrchardError as error:
            problems.append(error.message)
        return problems

    def deadline_s(self, task: Task) -> float:
        """See `orchard_api.Reward`."""
        return self._config.deadline_s

    def _rubric(self, task: Task) -> Sequence[Criterion]:
        if self._config.rubric:
            return self._config.rubric
        table = task.metadata.get(METADATA_KEY)
        if not isinstance(table, (list, tuple)) or not table:
            raise GraderError(f"task {task.task_id} has no metadata.{METADATA_KEY}, and the judge no rubric")
        try:
            return JudgeConfig(model="-", rubric=tuple(table)).rubric
        except ValidationError as error:
            raise GraderError(f"task {task.task_id}: metadata.{'; '.join(describe(error))}") from None

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`."""
        rubric = self._rubric(episode.task)
        try:
            async with asyncio.timeout(self._config.deadline_s):
                messages = await self._messages(episode, rubric)
                opinions, usage = await self._ask(messages, rubric)
        except (GraderError, OverloadedError):
            raise
        except TimeoutError:
            raise GraderError(f"the judge gave no verdict within {self._config.deadline_s:g} s") from None
        except OrchardError as error:
            raise GraderError(f"the judge failed: {error.message}", hint=error.hint) from error
        scale, weights = self._config.scale, {criterion.name: criterion.weight for criterion in rubric}
        values = {name: opinion.score / scale for name, opinion in opinions.items()}
        return Score(
            name="judge",
            value=sum(weights[name] * value for name, value in values.items()) / sum(weights.values()),
            components=values,
            evidence={
                "model": self._config.model,
                "reasons": {name: opinion.reason for name, opinion in opinions.items()},
                "usage": usage,
            },
            policy_version=episode.policy_version,
        )

    async def _messages(self, episode: Episode, rubric: Sequence[Criterion]) -> list[dict[str, str]]:
        config, limit = self._config, self._config.limit_chars
        material = {"The task": middle_cut(episode.task.instruction, limit)}
        if "transcript" in config.show:
            material["What the agent did"] = middle_cut(transcript(episode.trajectory), limit)
        if "answer" in config.show:
            material["The agent's answer"] = middle_cut(episode.answer, limit)
        for path in config.files:
            answer = await read_answer(episode, path, limit=16 * limit)
            text = f"({answer.problem})" if answer.text is None else middle_cut(answer.text, limit)
            material[f"The file {path}"] = text
        return conversation(rubric, scale=config.scale, material=material, guidance=config.guidance)

    async def _ask(
        self, messages: list[dict[str, str]], rubric: Sequence[Criterion]
    ) -> tuple[dict[str, Opinion], dict[str, Any]]:
        config = self._config
        end = time.monotonic() + config.deadline_s
        problem = ""
        client = ApiClient(config, url=config.address(), key=config.key(), slots=self._slots)
        try:
            for _ in range(config.unreadable_retries + 1):
                body = {
                    "model": config.model,
                    "messages": messages,
                    config.max_tokens_field: config.max_tokens,
                    **({} if config.temperature is None else {"temperature": config.temperature}),
                    **config.extra_body,
                }
                answer = await client.post("/chat/completions", body, deadline_s=max(end - time.monotonic(), 0.001))
                text, usage = _reply(answer)
                try:
                    return read_verdict(text, rubric, config.scale), usage
                except UnreadableError as error:
                    problem = str(error)
                    messages = [
                        *messages[:2],
                        {"role": "assistant", "content": text[:4000]},
                        {
                            "role": "user",
                            "content": f"That can't be used: {problem}. Answer with the JSON object only.",
                        },
                    ]
        finally:
            await client.aclose()
        raise GraderError(
            f"the judge {config.model} did not answer in the form asked for: {problem}",
            hint="raise max_tokens if its answers are cut, or use a model that follows instructions better",
        )


def _reply(answer: Any) -> tuple[str, dict[str, Any]]:
    """The text of a completion, and the token counts that came with it."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, TypeError, IndexError):
        raise GraderError("the judge's answer is no chat completion") from None
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    kept = {name: counts.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return text if isinstance(text, str) else "", {name: count for name, count in kept.items() if type(count) is int}
