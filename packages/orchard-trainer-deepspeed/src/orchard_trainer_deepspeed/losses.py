"""Losses of the `rl` stream, as plugins of kind `loss`, and the two linear streams that the learner adds.

Every loss is a weighted sum of per-token terms. The weight of a token, `columns["scale"]`, holds the whole of
aggregation and denominator, both over the optimizer step, so that the sum over micro-batches is the loss of the step.
Masked means absent: a value at a token outside the stream is replaced before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel
from torch import Tensor

from orchard_trainer_deepspeed.config import CispoConfig, PpoClipConfig
from orchard_trainer_deepspeed.corrections import clamped_exp, kl_terms

Columns = Mapping[str, Tensor]
Totals = Mapping[str, float]
Result = tuple[Tensor, dict[str, float]]


def present(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """The values where the mask is set, `fill` elsewhere, with no gradient there, whatever stood there."""
    return torch.where(mask, values, torch.full_like(values, fill))


def ppo_terms(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); for A < 0 at most -A * dual_clip. And where clipping was active.

    r = exp(logprobs - proximal). Schulman et al. 2017; the dual clip is Ye et al. 2020.
    """
    ratio = clamped_exp(logprobs - proximal)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(plain, clipped)
    active = clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (terms > bound)
        terms = torch.where(bounded, bound, terms)
        active = active | bounded
    return terms, active


class PpoClip:
    """The clipped surrogate; decoupled where the anchor is the learner's own policy (Hilton et al. 2022).

    The ratio is against `proximal_logprobs`; each term is weighted by `correction`.
    """

    linear_in_advantage = True

    def __init__(self, config: BaseModel | None = None) -> None:
        self._config = PpoClipConfig() if config is None else PpoClipConfig.model_validate(config.model_dump())

    def __call__(self, logprobs: Tensor, columns: Columns, totals: Totals) -> Result:
        """See `orchard_api.training.Loss`."""
        mask, config = columns["rl_mask"], self._config
        terms, active = ppo_terms(
            present(logprobs, mask),
            present(columns["proximal_logprobs"], mask),
            present(columns["rl"], mask),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        loss = (terms * present(columns["correction"] * columns["scale"], mask)).sum()
        clipped = float((active & mask).sum()) / max(totals["rl"], 1.0)
        return loss, {"clip_fraction": clipped}


class PolicyGradient:
    """-A log p, weighted by `correction` (REINFORCE); right for one step on fresh samples."""

    linear_in_advantage = True

    def __init__(self, config: BaseModel | None = None) -> None:
        self._config = config

    def __call__(self, logprobs: Tensor, columns: Columns, totals: Totals) -> Result:
        """See `orchard_api.training.Loss`."""
        mask = columns["rl_mask"]
        weights = present(columns["rl"] * columns["correction"] * columns["scale"], mask)
        return -(present(logprobs, mask) * weights).sum(), {}


class Cispo:
    """-A clip(r) log p with the clipped ratio detached, so that no token loses its gradient (MiniMax-M1, 2025)."""

    linear_in_advantage = True

    def __init__(self, config: BaseModel | None = None) -> None:
        self._config = CispoConfig() if config is None else CispoConfig.model_validate(config.model_dump())

    def __call__(self, logprobs: Tensor, columns: Columns, totals: Totals) -> Result:
        """See `orchard_api.training.Loss`."""
        mask, config = columns["rl_mask"], self._config
        logprobs = present(logprobs, mask)
        ratio = clamped_exp(logprobs - present(columns["proximal_logprobs"], mask)).detach()
        held = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        weights = present(columns["rl"] * columns["correction"] * columns["scale"], mask)
        clipped = float(((held != ratio) & mask).sum()) / max(totals["rl"], 1.0)
        return -(held * logprobs * weights).sum(), {"clip_fraction": clipped}


def cross_entropy(logprobs: Tensor, columns: Columns, totals: Totals) -> Tensor:
    """The `ce` stream: sum of -weight * log p over the step's number of tokens with a weight."""
    mask = columns["ce"] != 0
    return -(present(logprobs, mask) * columns["ce"]).sum() / max(totals["ce"], 1.0)


def reference_divergence(logprobs: Tensor, columns: Columns, totals: Totals, estimator: str) -> Tensor:
    """The `ref_kl` stream: sum of weight * divergence estimate over the step's number of tokens with a weight."""
    mask = columns["ref_kl"] != 0
    terms = kl_terms(present(logprobs, mask), present(columns["reference_logprobs"], mask), estimator)
    return (terms * columns["ref_kl"]).sum() / max(totals["ref_kl"], 1.0)
