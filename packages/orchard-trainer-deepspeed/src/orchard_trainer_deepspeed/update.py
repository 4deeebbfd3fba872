"""The learner's arithmetic: log probabilities of a batch, and the optimizer steps that learn from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchard_api.errors import OrchardError
from orchard_api.training import Batch, Loss
from orchard_trainer_deepspeed.config import TorchTrainerConfig
from orchard_trainer_deepspeed.corrections import effective_sample_share, token_tis
from orchard_trainer_deepspeed.flat_batch import FlatBatch, Step, plan_step
from orchard_trainer_deepspeed.logprobs import token_logprobs
from orchard_trainer_deepspeed.losses import cross_entropy, present, reference_divergence
from orchard_trainer_deepspeed.model import Decoder
from orchard_trainer_deepspeed.schedule import learning_rate, micro_batches, minibatches


class NonFiniteUpdateError(OrchardError):
    """A loss or gradient became NaN or infinite; that optimizer step was not taken."""


@dataclass(kw_only=True, slots=True)
class LearnerState:
    """What learns: replaced piece by piece under the learner's own thread."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    config: TorchTrainerConfig
    loss: Loss
    generator: torch.Generator
    reference: Decoder | None = None
    version: int = 0
    updates_done: int = 0
    updates_planned: int | None = None


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over the micro-batches and steps of an update; `maxima` keeps the largest."""

    sums: dict[str, float] = field(default_factory=dict)
    log_ratios: list[Tensor] = field(default_factory=list)
    entropy: float = 0.0
    entropy_tokens: int = 0

    def add(self, name: str, value: float) -> None:
        """Add to a named sum."""
        self.sums[name] = self.sums.get(name, 0.0) + value


def make_optimizer(model: Decoder, config: TorchTrainerConfig) -> torch.optim.Optimizer:
    """AdamW over float32 master weights; decay on matrices alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def logprobs_of(
    model: Decoder, flat: FlatBatch, rows: Sequence[int], config: TorchTrainerConfig, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities and entropies of some rows' wanted tokens, and their flat places; see `token_logprobs`."""
    places = flat.tokens_of(rows)
    local = flat.wanted[places].nonzero()[:, 0]
    chosen = places[local]
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=config.dtype == "bfloat16"):
        hidden = model.hidden(flat.ids[places], flat.layout(rows))
    predicting = hidden.index_select(0, local - 1)
    logprobs, entropies = token_logprobs(
        predicting, model.output_matrix, flat.ids[chosen], temperature=temperature, chunk=config.logits_chunk
    )
    return logprobs, entropies, chosen


@torch.no_grad()
def compute_logprobs(
    model: Decoder, flat: FlatBatch, rows: Sequence[int], config: TorchTrainerConfig, temperature: float
) -> Tensor:
    """[N] log probabilities of the wanted tokens of some rows, 0 elsewhere."""
    found = torch.zeros_like(flat.rl)
    for part in micro_batches([flat.lengths[row] for row in rows], config.micro_batch_tokens):
        logprobs, _, chosen = logprobs_of(model, flat, [rows[place] for place in part], config, temperature)
        found[chosen] = logprobs.float()
    return found


def run_update(state: LearnerState, batch: Batch, stop: Callable[[], bool]) -> tuple[int, dict[str, float]]:
    """Take the optimizer steps of one update.

    `stop` is asked before each step; what was done until then stays done.

    Returns:
        How many steps were taken, and metrics.

    Raises:
        ValueError: a row can't be learnt from.
        NonFiniteUpdateError: the loss or the gradient is not finite; steps before that one stay.
    """
    began = time.perf_counter()
    config, model = state.config, state.model
    flat = FlatBatch.of(batch.rows, model.shape, model.device)
    keep_all = not getattr(state.loss, "linear_in_advantage", False)
    used = [row for row, active in enumerate(flat.active) if active or keep_all]
    idle = [row for row in range(len(flat.lengths)) if not flat.active[row] and not keep_all]
    tally = Tally()
    steps = 0
    if used:
        count = config.epochs * min(config.minibatches, len({flat.episodes[row] for row in used}))
        reference = _reference_logprobs(state, flat, batch, used)
        proximal: Tensor | None = None
        if config.correction == "token_tis" and count > 1:
            proximal = compute_logprobs(model, flat, used, config, batch.temperature)
        share = 1.0 / count
        for number, plan in enumerate(_plan(state, flat, batch, used, idle)):
            if stop():
                break
            done = state.updates_done + number * share
            rate = learning_rate(config, done=done, step=share, updates=state.updates_planned)
            for group in state.optimizer.param_groups:
                group["lr"] = rate
            _take_step(state, flat, batch, plan, proximal, reference, tally, first=number == 0)
            steps += 1
    metrics = _metrics(state, flat, tally, steps)
    metrics["rows"] = float(len(flat.lengths))
    metrics["idle_rows"] = float(len(idle))
    metrics["seconds"] = time.perf_counter() - began
    metrics["tokens_per_second"] = sum(flat.lengths[row] for row in used) * config.epochs / metrics["seconds"]
    return steps, metrics


def _plan(
    state: LearnerState, flat: FlatBatch, batch: Batch, used: Sequence[int], idle: Sequence[int]
) -> Iterator[Step]:
    """The steps of all epochs; an episode's rows stay together."""
    config = state.config
    rows_of: dict[int, list[int]] = {}
    for row in (*used, *idle):
        rows_of.setdefault(flat.episodes[row], []).append(row)
    with_use = list(dict.fromkeys(flat.episodes[row] for row in used))
    without = [episode for episode in rows_of if episode not in set(with_use)]
    wanted = set(used)
    for _ in range(config.epochs):
        if config.minibatches > 1:
            with_use = [with_use[place] for place in _permutation(len(with_use), state.generator)]
            without = [without[place] for place in _permutation(len(without), state.generator)]
        for some, others in minibatches(with_use, without, config.minibatches):
            rows = [row for episode in some + others for row in rows_of[episode]]
            yield plan_step(
                flat,
                batch,
                rows=[row for row in rows if row in wanted],
                idle=[row for row in rows if row not in wanted],
                aggregation=config.aggregation,
                max_response_tokens=config.max_response_tokens,
            )


def _permutation(count: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def _reference_logprobs(state: LearnerState, flat: FlatBatch, batch: Batch, used: Sequence[int]) -> Tensor:
    if state.reference is None:
        if bool((flat.ref_kl != 0).any()):
            raise ValueError('rows have ref_kl weights, but the trainer keeps no reference: set reference = "stage"')
        return torch.zeros_like(flat.rl)
    return compute_logprobs(state.reference, flat, used, state.config, batch.temperature)


def _take_step(
    state: LearnerState,
    flat: FlatBatch,
    batch: Batch,
    plan: Step,
    proximal: Tensor | None,
    reference: Tensor,
    tally: Tally,
    *,
    first: bool,
) -> None:
    config, model, optimizer = state.config, state.model, state.optimizer
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for part in micro_batches([flat.lengths[row] for row in plan.rows], config.micro_batch_tokens):
        rows = [plan.rows[place] for place in part]
        logprobs, entropies, chosen = logprobs_of(model, flat, rows, config, batch.temperature)
        columns = _columns(flat, plan, chosen, rows)
        columns["reference_logprobs"] = reference[chosen]
        before = logprobs.detach() if proximal is None else proximal[chosen]
        if config.correction == "token_tis":
            columns["proximal_logprobs"] = before
            columns["correction"] = token_tis(before, columns["behaviour_logprobs"], cap=config.tis_cap)
        else:
            columns["proximal_logprobs"] = columns["behaviour_logprobs"]
            columns["correction"] = torch.ones_like(before)
        parts: dict[str, Tensor] = {}
        if plan.totals["rl"] or not getattr(state.loss, "linear_in_advantage", False):
            parts["rl_loss"], extra = state.loss(logprobs, columns, plan.totals)
            for name, value in extra.items():
                tally.add(name, value)
        if plan.totals["ce"]:
            parts["ce_loss"] = cross_entropy(logprobs, columns, plan.totals)
        if plan.totals["ref_kl"]:
            parts["ref_kl_loss"] = reference_divergence(logprobs, columns, plan.totals, config.kl)
        loss = torch.stack([value.float() for value in parts.values()]).sum()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        for name, tensor in parts.items():
            tally.add(name, float(tensor.detach()))
        tally.entropy += float(entropies.sum())
        tally.entropy_tokens += entropies.numel()
        if first or proximal is not None:
            compared = columns["rl_mask"]
            tally.log_ratios.append((before - columns["behaviour_logprobs"])[compared])
    tally.add("loss", total)
    _apply(state, total, tally)


def _columns(flat: FlatBatch, plan: Step, chosen: Tensor, rows: Sequence[int]) -> dict[str, Tensor]:
    device = flat.ids.device
    lengths = torch.tensor([flat.lengths[row] for row in rows], device=device)
    sequence = torch.repeat_interleave(torch.tensor(list(rows), device=device), lengths)
    wanted = flat.wanted[flat.tokens_of(rows)]
    return {
        "mask": flat.mask[chosen],
        "rl_mask": flat.rl_mask[chosen],
        "rl": flat.rl[chosen],
        "ce": flat.ce[chosen],
        "ref_kl": flat.ref_kl[chosen],
        "behaviour_logprobs": flat.behaviour[chosen],
        "versions": flat.versions[chosen],
        "scale": plan.scale[chosen],
        "sequence": sequence[wanted],
    }


def _apply(state: LearnerState, loss: float, tally: Tally) -> None:
    weights = [weight for weight in state.model.parameters() if weight.grad is not None]
    limit = state.config.max_grad_norm
    norm = float(torch.nn.utils.clip_grad_norm_(weights, float("inf") if limit is None else limit))
    if not (norm == norm and abs(norm) != float("inf") and loss == loss and abs(loss) != float("inf")):
        state.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteUpdateError(
            f"the loss is {loss} and the gradient norm {norm}; the optimizer step was not taken",
            hint="lower the learning rate, or look for rewards and weights that are out of scale",
        )
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    tally.add("grad_norm", norm)


def _metrics(state: LearnerState, flat: FlatBatch, tally: Tally, steps: int) -> dict[str, float]:
    metrics = {name: value / max(steps, 1) for name, value in tally.sums.items()}
    metrics["optimizer_steps"] = float(steps)
    metrics["lr"] = float(state.optimizer.param_groups[0]["lr"]) if steps else 0.0
    metrics["entropy"] = tally.entropy / max(tally.entropy_tokens, 1)
    for name in ("rl", "ce", "ref_kl"):
        column = flat.rl_mask if name == "rl" else getattr(flat, name) != 0
        metrics[f"{name}_tokens"] = float(column.sum())
    ratios = torch.cat(tally.log_ratios) if tally.log_ratios else torch.empty(0)
    if ratios.numel():
        metrics["log_ratio_mean"] = float(ratios.mean())
        metrics["log_ratio_abs_mean"] = float(ratios.abs().mean())
        metrics["log_ratio_abs_max"] = float(ratios.abs().max())
        metrics["effective_sample_share"] = effective_sample_share(ratios)
        if state.config.correction == "token_tis":
            metrics["truncated_share"] = float((ratios.exp() > state.config.tis_cap).float().mean())
    sampled = flat.versions[present(flat.versions, flat.rl_mask, -1) >= 0]
    if sampled.numel():
        age = (state.version - sampled).float()
        metrics["staleness_mean"] = float(age.mean())
        metrics["staleness_max"] = float(age.max())
    return metrics
