"""How far apart engine and learner are, and the weights that correct for it."""

from __future__ import annotations

import torch
from torch import Tensor

CLAMP = 20.0


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """Exponential with the exponent held in [-20, 20], so that a ratio is always finite."""
    return log_ratio.clamp(-CLAMP, CLAMP).exp()


def token_tis(proximal: Tensor, behaviour: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling per token: min(exp(proximal - behaviour), cap), detached.

    Args:
        proximal: [N] the learner's logprobs before the update.
        behaviour: [N] the engine's logprobs at sampling.
        cap: the truncation C (2 in verl, slime, SkyRL).
    """
    return clamped_exp((proximal - behaviour).detach()).clamp(max=cap)


def effective_sample_share(log_ratio: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of w = exp(log_ratio): 1 where engine and learner agree, towards 0 as they part."""
    if log_ratio.numel() == 0:
        return 1.0
    weights = clamped_exp(log_ratio.double())
    return float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of the divergence from the reference, on d = logprobs - reference.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d held in [-20, 20] and the result in [-10, 10]. The gradient of
    k2 is that of the divergence; as a loss, k1's is zero in expectation and k3's is biased (Schulman 2020).

    Raises:
        ValueError: the estimator is unknown.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        held = difference.clamp(-CLAMP, CLAMP)
        return (torch.exp(-held) - 1 + held).clamp(-10, 10)
    raise ValueError(f"unknown divergence estimator {estimator!r}; k1, k2, k3 are known")
