"""A batch's rows as flat tensors, checked; and what one optimizer step takes from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from orchard_api.training import Batch, Row
from orchard_trainer_deepspeed.architecture import Architecture
from orchard_trainer_deepspeed.config import Aggregation
from orchard_trainer_deepspeed.losses import present
from orchard_trainer_deepspeed.model import Layout


def check_row(row: Row, shape: Architecture) -> None:
    """Refuse what can't be learnt from.

    Raises:
        ValueError: images, a token outside the vocabulary, more tokens than the context, a weight on the first token
            (nothing predicts it), a weight or an engine's logprob that isn't finite.
    """
    name = f"row {row.episode_id!r}"
    if row.images:
        raise ValueError(f"{name} has images; this learner has no vision")
    if len(row.ids) > shape.context:
        raise ValueError(f"{name} has {len(row.ids)} tokens; the context holds {shape.context}")
    if min(row.ids) < 0 or max(row.ids) >= shape.vocab:
        raise ValueError(f"{name} has a token outside the vocabulary of {shape.vocab}")
    if row.rl[0] or row.ce[0] or row.ref_kl[0]:
        raise ValueError(f"{name} has a weight on its first token, which nothing predicts")
    for stream in (row.ce, row.ref_kl):
        if not all(map(math.isfinite, stream)):
            raise ValueError(f"{name} has a ce or ref_kl weight that is not finite")
    for weight, logprob in zip(row.rl, row.logprobs, strict=True):
        if weight and not math.isfinite(logprob):
            raise ValueError(f"{name}: the engine's logprob {logprob} of a token to train on is not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatBatch:
    """All rows behind one another: N tokens.

    Attributes:
        lengths: tokens of each row.
        starts: where each row begins.
        ids, versions: [N] integers.
        mask: [N], response tokens.
        rl, ce, ref_kl: [N] weights.
        behaviour: [N] the engine's logprobs, 0 where there is none.
        rl_mask: [N], tokens of the rl stream: sampled responses that don't feed `ce` alone.
        wanted: [N], tokens whose logprob matters: responses and whatever has a weight, never a row's first token.
        episodes: number of the episode of each row.
        active: whether a row has any weight.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    ids: Tensor
    versions: Tensor
    mask: Tensor
    rl: Tensor
    ce: Tensor
    ref_kl: Tensor
    behaviour: Tensor
    rl_mask: Tensor
    wanted: Tensor
    episodes: tuple[int, ...]
    active: tuple[bool, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], shape: Architecture, device: torch.device) -> FlatBatch:
        """Check and flatten rows; see `check_row`."""
        for row in rows:
            check_row(row, shape)

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(chain.from_iterable(getattr(row, name) for row in rows)), dtype=dtype)

        lengths = tuple(len(row.ids) for row in rows)
        starts = (0, *accumulate(lengths[:-1])) if lengths else ()
        mask = column("mask", torch.bool)
        first = torch.zeros_like(mask)
        first[list(starts)] = True
        versions = column("versions", torch.int64)
        rl, ce, ref_kl = (column(name, torch.float32) for name in ("rl", "ce", "ref_kl"))
        sampled = mask & (versions >= 0)
        weighted = (rl != 0) | (ce != 0) | (ref_kl != 0)
        logprobs = column("logprobs", torch.float32)
        known = sampled & logprobs.isfinite()
        numbers: dict[str, int] = {}
        episodes = tuple(
            numbers.setdefault(row.episode_id or f"\0{place}", len(numbers)) for place, row in enumerate(rows)
        )
        active = tuple(bool(weighted[start : start + size].any()) for start, size in zip(starts, lengths, strict=True))
        return cls(
            lengths=lengths,
            starts=starts,
            ids=column("ids", torch.int64).to(device),
            versions=versions.to(device),
            mask=mask.to(device),
            rl=rl.to(device),
            ce=ce.to(device),
            ref_kl=ref_kl.to(device),
            behaviour=present(logprobs, known).to(device),
            rl_mask=(known & ((rl != 0) | (ce == 0)) & ~first).to(device),
            wanted=((mask | weighted) & ~first).to(device),
            episodes=episodes,
            active=active,
        )

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        """Flat places of the tokens of some rows, in that order."""
        device = self.ids.device
        spans = [torch.arange(self.starts[row], self.starts[row] + self.lengths[row], device=device) for row in rows]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device=device)

    def layout(self, rows: Sequence[int]) -> Layout:
        """How these rows lie for the model."""
        return Layout.of([self.lengths[row] for row in rows], self.ids.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one optimizer step learns from, over all of its micro-batches.

    Attributes:
        rows: the rows to compute; rows without any weight may be left out, their tokens still count below.
        scale: [N] weight of each token's term in the rl loss: aggregation and denominator in one.
        totals: `tokens`, `sequences`, and the number of tokens in each stream.
    """

    rows: tuple[int, ...]
    scale: Tensor
    totals: dict[str, float]


def plan_step(
    flat: FlatBatch,
    batch: Batch,
    *,
    rows: Sequence[int],
    idle: Sequence[int],
    aggregation: Aggregation,
    max_response_tokens: int | None,
) -> Step:
    """Global denominators of a step over `rows` (computed) and `idle` (counted only).

    With N tokens of the rl stream, B episodes and |m_i| tokens of episode i, a token's scale is 1/N (`token_mean`),
    1/(B |m_i|) (`seq_mean_token_mean`) or 1/(B * max_response_tokens) (`dr_grpo`).
    """
    everything = flat.tokens_of([*rows, *idle])
    rl_mask = flat.rl_mask[everything]
    per_episode: dict[int, float] = {}
    episode_of = {}
    for row in (*rows, *idle):
        start, end = flat.starts[row], flat.starts[row] + flat.lengths[row]
        count = float(flat.rl_mask[start:end].sum())
        episode_of[row] = flat.episodes[row]
        per_episode[flat.episodes[row]] = per_episode.get(flat.episodes[row], 0.0) + count
    with_tokens = sum(count > 0 for count in per_episode.values())
    sequences = float(with_tokens)
    if batch.sequences is not None and with_tokens:
        # Episodes that gave no row are shared out over the steps of the batch.
        sequences = batch.sequences * len(per_episode) / len(set(flat.episodes))
    totals = {
        "tokens": float(flat.mask[everything].sum()),
        "sequences": sequences,
        "rl": float(rl_mask.sum()),
        "ce": float((flat.ce[everything] != 0).sum()),
        "ref_kl": float((flat.ref_kl[everything] != 0).sum()),
    }
    scale = torch.zeros_like(flat.rl)
    for row in rows:
        start, end = flat.starts[row], flat.starts[row] + flat.lengths[row]
        if aggregation == "token_mean":
            below = totals["rl"]
        elif aggregation == "seq_mean_token_mean":
            below = sequences * per_episode[episode_of[row]]
        else:
            below = sequences * float(max_response_tokens or 1)
        scale[start:end] = 1.0 / max(below, 1.0)
    return Step(rows=tuple(rows), scale=scale, totals=totals)
