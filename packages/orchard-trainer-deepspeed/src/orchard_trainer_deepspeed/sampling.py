"""One token for each of a batch of requests, each by its own parameters and its own random stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(
    logits: Tensor, *, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample by inverting the distribution function, so that a request's draw doesn't depend on its neighbours.

    Args:
        logits: [B, V].
        temperatures: one per row; 0 takes the likeliest token.
        top_ps: one per row; below 1, only the likeliest tokens that together reach it are kept.
        uniforms: one number in [0, 1) per row.

    Returns:
        Ids, and their logprobs under the distribution that they were sampled from, temperature and nucleus applied;
        for temperature 0, under that at temperature 1.
    """
    logits = logits.float()
    scaled = any(temperature not in (0.0, 1.0) for temperature in temperatures)
    if scaled:
        logits = logits / torch.tensor([[value or 1.0] for value in temperatures], device=logits.device)
    logprobs = torch.log_softmax(logits, -1)
    if any(top_p < 1.0 for top_p in top_ps):
        logprobs = _nucleus(logprobs, top_ps)
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0.0]
    if len(greedy) == len(temperatures):
        ids = logits.argmax(-1)
    else:
        mass = logprobs.exp().double().cumsum_(-1)
        draws = torch.tensor([[value] for value in uniforms], dtype=torch.float64, device=logits.device)
        # The last sum is what the probabilities really add up to; below it lies a token that has some.
        ids = torch.searchsorted(mass, draws * mass[:, -1:] * (1 - 2**-50), right=True)[:, 0]
        if greedy:
            ids[greedy] = logits[greedy].argmax(-1)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def _nucleus(logprobs: Tensor, top_ps: Sequence[float]) -> Tensor:
    """Renormalised over the smallest set of likeliest tokens whose mass reaches `top_p`; ties keep the lower id."""
    ordered, places = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    mass = ordered.exp()
    before = mass.cumsum(-1) - mass
    limits = torch.tensor([[value] for value in top_ps], device=logprobs.device)
    keep = torch.zeros_like(logprobs, dtype=torch.bool).scatter_(1, places, (before < limits) | (limits >= 1.0))
    return torch.log_softmax(logprobs.masked_fill(~keep, float("-inf")), -1)
