"""Advantages from the rewards of groups: episodes of one task, compared with each other.

Computed in float64. Episodes without a reward (None, NaN, infinite: a failure of harness or machine) leave their group
before anything is computed. A group with fewer than two scored episodes, or whose rewards differ by at most 1e-6, has
advantage 0 and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

SPREAD = 1e-6
EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """What a batch of groups was like.

    Attributes:
        groups: how many.
        single: groups with fewer than two scored episodes.
        flat: groups of two and more whose rewards don't differ.
        unscored: episodes without a reward.
    """

    groups: int
    single: int
    flat: int
    unscored: int


class GroupAdvantage:
    """Base: groups by id, leaves failures out, and asks `relative` for each group with spread.

    Args:
        config: none of these takes options.
    """

    def __init__(self, config: BaseModel | None = None) -> None:
        self.report = GroupReport(groups=0, single=0, flat=0, unscored=0)

    def __call__(self, rewards: Sequence[float | None], groups: Sequence[str]) -> list[float]:
        """One advantage per episode, in order; `report` then says what the groups were like.

        Raises:
            ValueError: `rewards` and `groups` differ in length.
        """
        members: dict[str, list[int]] = {}
        for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
            found = members.setdefault(group, [])
            if reward is not None and math.isfinite(reward):
                found.append(place)
        advantages = [0.0] * len(rewards)
        single = flat = 0
        for places in members.values():
            values = [float(reward) for place in places if (reward := rewards[place]) is not None]
            if len(values) < 2:
                single += 1
            elif max(values) - min(values) <= SPREAD:
                flat += 1
            else:
                for place, advantage in zip(places, self.relative(values), strict=True):
                    advantages[place] = advantage
        scored = sum(map(len, members.values()))
        self.report = GroupReport(groups=len(members), single=single, flat=flat, unscored=len(rewards) - scored)
        return advantages

    def relative(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group of two or more that differ."""
        mean = math.fsum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]


class DrGrpo(GroupAdvantage):
    """R - mean (Dr.GRPO, Liu et al. 2025)."""


class Grpo(GroupAdvantage):
    """(R - mean) / (std + 1e-6), std unbiased (GRPO, Shao et al. 2024)."""

    def relative(self, rewards: Sequence[float]) -> list[float]:
        """See `GroupAdvantage.relative`."""
        centred = super().relative(rewards)
        deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
        return [value / (deviation + EPSILON) for value in centred]


class Rloo(GroupAdvantage):
    """R - mean of the others = n / (n - 1) (R - mean) (RLOO, Ahmadian et al. 2024)."""

    def relative(self, rewards: Sequence[float]) -> list[float]:
        """See `GroupAdvantage.relative`."""
        count = len(rewards)
        return [value * count / (count - 1) for value in super().relative(rewards)]
