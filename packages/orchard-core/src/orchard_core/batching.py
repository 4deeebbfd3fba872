"""Episodes to training rows: advantages per group, weights per token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from orchard_api.episode import Episode
from orchard_api.training import Advantage, Batch, Row
from orchard_api.trajectory import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class RlBatch:
    """A batch for reinforcement learning, and what became of its groups.

    Attributes:
        groups: groups that were played.
        dropped_groups: those with no scored episode at all.
        flat_groups: those with scored episodes but no advantage: fewer than two, or all rewards equal.
        masked: episodes without a reward.
        versions: policy versions of the tokens that an engine sampled.
    """

    batch: Batch
    groups: int
    dropped_groups: int
    flat_groups: int
    masked: int
    versions: frozenset[int]

    @property
    def learns(self) -> bool:
        """Whether any token has a weight."""
        return any(weight for row in self.batch.rows for weight in row.rl)


def rl_batch(
    episodes: Sequence[Episode], advantage: Advantage, *, temperature: float, shuffle: random.Random | None = None
) -> RlBatch:
    """Rows with `rl` weights: each token that an engine sampled gets its episode's advantage.

    Failed episodes leave their group before the baseline and give no row. An episode counts as one sequence, however
    many branches it has.

    Args:
        shuffle: permutes the rewards over the scored episodes first; a control that must not learn.
    """
    rewards = [episode.reward for episode in episodes]
    if shuffle is not None:
        scored = [reward for reward in rewards if reward is not None]
        shuffle.shuffle(scored)
        rewards = [None if reward is None else scored.pop() for reward in rewards]
    groups = [episode.group_id for episode in episodes]
    advantages = advantage(rewards, groups)
    rows: list[Row] = []
    for episode, reward, value in zip(episodes, rewards, advantages, strict=True):
        if reward is not None:
            rows += _rows(episode, rl=value)
    by_group: dict[str, list[int]] = {group: [] for group in groups}
    for number, group in enumerate(groups):
        if rewards[number] is not None:
            by_group[group].append(number)
    scored_count = sum(reward is not None for reward in rewards)
    return RlBatch(
        batch=Batch(rows=rows, temperature=temperature, sequences=scored_count),
        groups=len(by_group),
        dropped_groups=sum(not members for members in by_group.values()),
        flat_groups=sum(bool(members) and not any(advantages[n] for n in members) for members in by_group.values()),
        masked=len(episodes) - scored_count,
        versions=frozenset(version for row in rows for version in set(row.versions) if version >= 0),
    )


def sft_rows(episode: Episode) -> list[Row]:
    """Rows with `ce` weight 1 on every response token, the end of turn included."""
    return _rows(episode, ce=1.0)


def sft_batch(rows: Sequence[Row]) -> Batch:
    """A batch whose means are over episodes, however many rows each gave."""
    return Batch(rows=rows, sequences=len({row.episode_id for row in rows}))


def _rows(episode: Episode, *, rl: float = 0.0, ce: float = 0.0) -> list[Row]:
    rows = (_row(episode, segment, rl=rl, ce=ce) for segment in episode.trajectory.segments())
    return [row for row in rows if row is not None]


def _row(episode: Episode, segment: Segment, *, rl: float, ce: float) -> Row | None:
    if not any(segment.mask) or all(segment.mask):
        return None
    return Row(
        ids=segment.ids,
        mask=segment.mask,
        rl=tuple(rl if mask and exact else 0.0 for mask, exact in zip(segment.mask, segment.exact, strict=True)),
        ce=tuple(ce if flag else 0.0 for flag in segment.mask),
        ref_kl=(0.0,) * len(segment.ids),
        logprobs=segment.logprobs,
        versions=segment.versions,
        group_id=episode.group_id,
        episode_id=episode.episode_id,
    )
