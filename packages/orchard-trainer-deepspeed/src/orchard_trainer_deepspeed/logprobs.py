"""Log probabilities of given tokens without keeping logits: a few at a time, computed again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor, matrix: Tensor, targets: Tensor, *, temperature: float, chunk: int = 1 << 22
) -> tuple[Tensor, Tensor]:
    """Log probabilities and entropies at a temperature.

    Logits are made `chunk` elements at a time (two such buffers are alive), in both passes. Temperature 0 (greedy) is
    computed at 1, as the policy server does.

    Args:
        hidden: [N, d], the states that predict.
        matrix: [V, d].
        targets: [N] token ids.

    Returns:
        [N] log probabilities, differentiable, and [N] entropies in nats, not differentiable; both float32, or
        float64 where `hidden` is.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    rows = max(1, chunk // matrix.shape[0])
    logprobs, entropies = _TokenLogprobs.apply(hidden, matrix, targets, scale, rows)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, scale: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            return _TokenLogprobs._forward(ctx, hidden, matrix, targets, scale, rows)

    @staticmethod
    def _forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, scale: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        output = matrix.to(hidden.dtype).T
        logprobs, entropies, norms = [], [], []
        for states, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = _wide(states @ output).mul_(scale)
            peak = logits.amax(-1, keepdim=True)
            logits.sub_(peak)
            weights = logits.exp()
            total = weights.sum(-1)
            norm = total.log()
            logprobs.append(logits.gather(1, wanted[:, None])[:, 0] - norm)
            entropies.append(norm - torch.bmm(weights[:, None], logits[:, :, None])[:, 0, 0] / total)
            norms.append(norm + peak[:, 0])
        if not norms:
            empty = _wide(hidden.new_zeros(0))
            logprobs, entropies, norms = [empty], [empty.clone()], [empty]
        ctx.save_for_backward(hidden, matrix, targets, torch.cat(norms))
        ctx.scale, ctx.rows = scale, rows
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, matrix, targets, norms = ctx.saved_tensors
        cast = matrix.to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden)
        matrix_grad = torch.zeros_like(matrix)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            states = hidden[part]
            grad = _wide(grads[0][part])[:, None]
            local = _wide(states @ cast.T).mul_(ctx.scale).sub_(norms[part][:, None]).exp_()
            local.mul_(-grad).scatter_add_(1, targets[part][:, None], grad)
            local = local.mul_(ctx.scale).to(hidden.dtype)
            torch.mm(local, cast, out=hidden_grad[part])
            matrix_grad.add_((local.T @ states).to(matrix.dtype))
        return hidden_grad, matrix_grad, None, None, None
