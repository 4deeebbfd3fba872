"""Episodes to training rows: advantages per group, weights per token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchard_api.episode import Episode
from orchard_api.training import Advantage, Batch, Row
from orchard_api.trajectory import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    """What became of a batch's groups.

    Attributes:
        groups: groups that were played.
        dropped_groups: those with no scored episode at all.
        flat_groups: those with scored episodes but no advantage: fewer than two, or all rewards equal.
        masked: episodes without a reward.
    """

    groups: int
    dropped_groups: int
    flat_groups: int
    masked: int


def rl_batch(
    episodes: Sequence[Episode], advantage: Advantage, *, temperature: float, shuffle: random.Random | None = None
) -> tuple[Batch, GroupStatistics]:
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
            for segment in episode.trajectory.segments():
                row = _row(episode, segment, rl=value)
                if row is not None:
                    rows.append(row)
    by_group: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        by_group.setdefault(group, []).append(number)
    alive = {g: [n for n in members if rewards[n] is not None] for g, members in by_group.items()}
    statistics = GroupStatistics(
        groups=len(by_group),
        dropped_groups=sum(not members for members in alive.values()),
        flat_groups=sum(bool(members) and not any(advantages[n] for n in members) for members in alive.values()),
        masked=sum(reward is None for reward in rewards),
    )
    scored_count = sum(reward is not None for reward in rewards)
    return Batch(rows=rows, temperature=temperature, sequences=scored_count), statistics


def sft_rows(episode: Episode) -> list[Row]:
    """Rows with `ce` weight 1 on every response token, the end of turn included."""
    rows = (_row(episode, segment, ce=1.0) for segment in episode.trajectory.segments())
    return [row for row in rows if row is not None]


def _row(episode: Episode, segment: Segment, *, rl: float = 0.0, ce: float = 0.0) -> Row | None:
    if not any(segment.mask) or all(segment.mask):
        return None
    length = len(segment.ids)
    trained = [mask and exact for mask, exact in zip(segment.mask, segment.exact, strict=True)]
    return Row(
        ids=segment.ids,
        mask=segment.mask,
        rl=tuple(rl if flag else 0.0 for flag in trained),
        ce=tuple(ce if flag else 0.0 for flag in segment.mask),
        ref_kl=(0.0,) * length,
        logprobs=segment.logprobs,
        versions=segment.versions,
        group_id=episode.group_id,
        episode_id=episode.episode_id,
    )


def with_sequences(batch: Batch, sequences: int) -> Batch:
    """The same rows, counted as `sequences` episodes."""
    return replace(batch, sequences=sequences)
