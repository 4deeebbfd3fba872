"""The `weighted` reward: several rewards as one number, each a named component of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError
from orchard_api.nested import NestedReward
from orchard_api.registry import PluginConfig
from orchard_api.reward import Reward, deadline_s
from orchard_api.task import Task

Combination = Literal["sum", "mean", "min", "product"]


class PartConfig(PluginConfig):
    """One of `parts`: a reward with its own options, and what it counts for."""

    model_config = ConfigDict(populate_by_name=True)

    label: str = Field(alias="as", min_length=1, description="its name among the components; default: the reward's")
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    gate: float | None = Field(
        default=None, allow_inf_nan=False, description="where the part is below this, the whole is 0"
    )
    reward: NestedReward

    @model_validator(mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "reward" in value:
            return value
        own = {key: value[key] for key in ("as", "weight", "gate") if key in value}
        return {"as": value.get("name"), **own, "reward": {k: v for k, v in value.items() if k not in own}}


class WeightedConfig(PluginConfig):
    """Options of `weighted`."""

    parts: tuple[PartConfig, ...] = Field(min_length=1)
    combine: Combination = Field(
        default="mean", description="weighted mean or sum, smallest value, or product of values to the power of weights"
    )

    @field_validator("parts")
    @classmethod
    def _distinct(cls, parts: tuple[PartConfig, ...]) -> tuple[PartConfig, ...]:
        labels = [part.label for part in parts]
        if len(set(labels)) < len(labels):
            raise ValueError('two parts have one name; give one `as = "..."`')
        if not any(part.weight for part in parts):
            raise ValueError("every part has the weight 0")
        return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A reward that counts for `weight`; below `gate` it makes the whole 0."""

    name: str
    reward: Reward
    weight: float = 1.0
    gate: float | None = None


class WeightedReward:
    """Judges by all its parts. A part that can't judge leaves the episode unjudged: it is never taken for a 0."""

    Config = WeightedConfig

    def __init__(self, config: WeightedConfig) -> None:
        self._parts: Sequence[Part] = [
            Part(name=part.label, reward=part.reward.build(), weight=part.weight, gate=part.gate)
            for part in config.parts
        ]
        self._combine: Combination = config.combine

    @classmethod
    def of(cls, parts: Sequence[Part], *, combine: Combination = "mean") -> WeightedReward:
        """Compose rewards that exist already."""
        made = cls.__new__(cls)
        made._parts, made._combine = list(parts), combine
        return made

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`."""
        return [f"{part.name}: {problem}" for part in self._parts for problem in part.reward.missing(task)]

    def deadline_s(self, task: Task) -> float:
        """See `orchard_api.Reward`."""
        return sum(deadline_s(part.reward, task) for part in self._parts)

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`. One part after the other: they share a sandbox."""
        scores: dict[str, Score] = {}
        for part in self._parts:
            score = await part.reward.score(episode)
            if not math.isfinite(score.value):
                raise GraderError(f"part {part.name!r} returned {score.value}")
            scores[part.name] = score
        components = {name: score.value for name, score in scores.items()}
        for name, score in scores.items():
            components |= {f"{name}/{key}": value for key, value in score.components.items()}
        closed = [part.name for part in self._parts if part.gate is not None and scores[part.name].value < part.gate]
        return Score(
            name="weighted",
            value=0.0 if closed else self._value({part.name: scores[part.name].value for part in self._parts}),
            components=components,
            evidence={
                "combine": self._combine,
                "closed_gates": closed,
                **{name: dict(score.evidence) for name, score in scores.items()},
            },
            policy_version=episode.policy_version,
        )

    def _value(self, values: Mapping[str, float]) -> float:
        weights = {part.name: part.weight for part in self._parts}
        if self._combine == "min":
            return min(values.values())
        if self._combine == "product":
            negative = [name for name, value in values.items() if value < 0]
            if negative:
                raise GraderError(f"part {negative[0]!r} is negative; a product needs values of at least 0")
            return float(math.prod(value ** weights[name] for name, value in values.items()))
        total = sum(weights[name] * value for name, value in values.items())
        return total if self._combine == "sum" else total / sum(weights.values())
