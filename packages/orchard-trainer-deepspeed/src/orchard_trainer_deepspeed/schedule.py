"""Learning rate over a stage, and rows into micro-batches: plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchard_trainer_deepspeed.config import TorchTrainerConfig


def learning_rate(config: TorchTrainerConfig, *, done: float, step: float, updates: int | None) -> float:
    """The learning rate of an optimizer step.

    It rises linearly over `warmup_updates`, then stays, falls in a line, or along half a cosine to
    `lr * min_lr_ratio` at the last of `updates`; it stays there afterwards.

    Args:
        config: the stage's options.
        done: updates of the stage that came before, fractions of the present one included.
        step: the share of an update that this step is.
        updates: how many the stage is planned to have; None keeps the rate constant after the warm-up.
    """
    warmup = config.warmup_updates
    if done + step <= warmup:
        return config.lr * (done + step) / warmup
    if config.schedule == "constant" or updates is None:
        return config.lr
    progress = min(max((done - warmup) / max(updates - warmup, 1), 0.0), 1.0)
    fall = progress if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return config.lr * (1 - (1 - config.min_lr_ratio) * fall)


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows in groups of similar length whose tokens sum to at most `budget`; a longer row is alone.

    Args:
        lengths: tokens of each row.
        budget: tokens computed at once.

    Returns:
        Indices into `lengths`, each exactly once, longest rows first; groups carry about the same number of tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    total = sum(lengths)
    target = total / max(1, math.ceil(total / budget))
    groups: list[list[int]] = []
    tokens = 0
    for row in order:
        length = lengths[row]
        if groups and tokens + length <= budget and tokens + length / 2 <= target:
            groups[-1].append(row)
            tokens += length
        else:
            groups.append([row])
            tokens = length
    return groups


def minibatches(used: Sequence[int], unused: Sequence[int], count: int) -> list[tuple[list[int], list[int]]]:
    """Deal the used and the unused items into at most `count` parts, each about as large as the others.

    Parts without a used item are left out, unless there is none at all.
    """
    count = max(1, min(count, len(used)))
    return [(list(used[part::count]), list(unused[part::count])) for part in range(count)]
