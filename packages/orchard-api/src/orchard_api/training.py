"""What a trainer is given and what it returns: rows of tokens with three weight streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from orchard_api.policy import ModelSource, PolicyVersion, WeightStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence of T tokens to learn from; every column has length T.

    A token's weights say how it is learnt from; all zero means that it is context. Losses linear in per-token terms
    need nothing else:

    * `rl`: advantage of a token that the engine sampled; its logprob and version are then present.
    * `ce`: weight of its cross entropy (SFT, distillation).
    * `ref_kl`: weight of its divergence from the reference policy.

    Attributes:
        ids: token ids.
        rl, ce, ref_kl: weights.
        logprobs: the engine's logprobs; 0 where `rl` is 0 and none was recorded.
        versions: the policy version that sampled each token; -1 where none did.
        mask: True where the token is a response; what lengths and means count.
        group_id, episode_id: where it comes from; several rows of one episode share both.
        pair_id: joins rows that a pairwise loss compares, or empty.
        values: a critic's values at sampling, or empty.
        images: references of images in it.
    """

    ids: Sequence[int]
    mask: Sequence[bool]
    rl: Sequence[float]
    ce: Sequence[float]
    ref_kl: Sequence[float]
    logprobs: Sequence[float]
    versions: Sequence[int]
    group_id: str = ""
    episode_id: str = ""
    pair_id: str = ""
    values: Sequence[float] = ()
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.ids)
        for name in ("mask", "rl", "ce", "ref_kl", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"row {self.episode_id!r}: {length} ids but {len(getattr(self, name))} {name}")
        if not any(self.mask) or all(self.mask):
            raise ValueError(f"row {self.episode_id!r}: the mask covers all tokens or none")
        for position, weight in enumerate(self.rl):
            if not math.isfinite(weight):
                raise ValueError(f"row {self.episode_id!r}: rl weight {weight} at token {position}")
            if weight != 0.0 and (self.versions[position] < 0 or not self.mask[position]):
                raise ValueError(
                    f"row {self.episode_id!r}: token {position} has an rl weight but was not sampled by an engine"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one optimizer step (or a few passes) learns from. Denominators are over the whole batch.

    Attributes:
        rows: the sequences.
        temperature: what they were sampled at; logprobs are compared at this temperature.
        sequences: number of episodes that they came from, where a mean is over sequences and some gave no row.
    """

    rows: Sequence[Row]
    temperature: float = 1.0
    sequences: int | None = None


Forward = Literal["logprobs", "reference_logprobs", "values"]
Columns = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        version: the policy version that the learner holds now.
        metrics: named numbers: losses, gradient norm, log ratios, staleness, ...
    """

    version: PolicyVersion
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerContext:
    """What a run gives a trainer at start.

    Attributes:
        asynchronous: whether rollouts may be older than the learner's version; a correction must then be named.
        run_dir: where it may keep files of its own.
    """

    model: ModelSource
    store: WeightStore
    run_dir: Path
    seed: int = 0
    asynchronous: bool = False


class Trainer(Protocol):
    """A learner: holds weights and optimizer state. Built from its config.

    None of its calls blocks the event loop. Cancelling a call waits for the step under way, so the state stays whole.
    """

    async def start(self, context: TrainerContext) -> None:
        """Load or make the weights; the first version is 0.

        Raises:
            ConfigError: an asynchronous run without a named correction, or options that contradict each other.
        """
        ...

    async def configure(self, options: Mapping[str, Any], *, updates: int) -> None:
        """Begin a stage: override options (learning rate, loss, ...) and restart the schedule over `updates` calls.

        Raises:
            ConfigError: an option is unknown or has the wrong type.
        """
        ...

    async def forward(self, batch: Batch, what: Forward) -> Columns:
        """Compute per-token columns, one list of length T per row, without changing anything."""
        ...

    async def update(self, batch: Batch) -> UpdateReport:
        """Learn from a batch; the version grows by one."""
        ...

    async def publish(self) -> PolicyVersion:
        """Put the weights into the store under the current version."""
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` continues from exactly: weights, optimizer, schedule, RNG, version."""
        ...

    async def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        ...

    async def aclose(self) -> None:
        """Free everything; idempotent."""
        ...


class Advantage(Protocol):
    """Turns the rewards of groups into advantages. Built from its config."""

    def __call__(self, rewards: Sequence[float | None], groups: Sequence[str]) -> Sequence[float]:
        """One advantage per episode; None (failed) episodes are outside the baseline and get 0.

        A group with fewer than two scored episodes, or without spread, gets 0.
        """
        ...


class Loss(Protocol):
    """A loss that isn't linear in per-token terms. Built from its config; tensors are the trainer's own kind."""

    def __call__(
        self, logprobs: Any, columns: Mapping[str, Any], totals: Mapping[str, float]
    ) -> tuple[Any, dict[str, float]]:
        """Loss of one micro-batch, already divided by the batch's global totals, and metrics.

        Args:
            logprobs: the learner's logprobs of the N tokens, differentiable.
            columns: N-long columns: `mask`, `rl`, `ce`, `ref_kl`, `behaviour_logprobs`, `proximal_logprobs`,
                `reference_logprobs`, `sequence` (index of the row), ...
            totals: sums over the whole batch: `tokens`, `sequences`, `rl`, `ce`, `ref_kl`.
        """
        ...
