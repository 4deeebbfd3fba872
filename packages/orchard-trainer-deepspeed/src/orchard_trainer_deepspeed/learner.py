"""The `torch` trainer: one process, CPU or one GPU."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from orchard_api.config import choose_plugin, describe
from orchard_api.errors import ConfigError, OrchardError
from orchard_api.plugins import plugin_host
from orchard_api.policy import PolicyVersion
from orchard_api.training import Batch, Columns, Forward, Loss, TrainerContext, UpdateReport
from orchard_trainer_deepspeed import losses
from orchard_trainer_deepspeed.checkpoint import build_model, export_weights
from orchard_trainer_deepspeed.config import CispoConfig, PpoClipConfig, TorchTrainerConfig
from orchard_trainer_deepspeed.device import choose_device, choose_threads
from orchard_trainer_deepspeed.flat_batch import FlatBatch
from orchard_trainer_deepspeed.training_state import load_state, read_record, save_state
from orchard_trainer_deepspeed.update import LearnerState, compute_logprobs, make_optimizer, run_update

T = TypeVar("T")
FIXED = ("device", "threads", "dtype")
OWN_LOSSES: dict[str, tuple[type[Any], type[Any] | None]] = {
    "ppo_clip": (losses.PpoClip, PpoClipConfig),
    "cispo": (losses.Cispo, CispoConfig),
    "policy_gradient": (losses.PolicyGradient, None),
}


def build_loss(section: Mapping[str, Any]) -> Loss:
    """Make the loss that a `loss` table names; others than this package's come from the installed plugins.

    Raises:
        ConfigError: it is unknown or its options are wrong.
    """
    name = section.get("name")
    options = {key: value for key, value in section.items() if key != "name"}
    if name in OWN_LOSSES:
        kind, model = OWN_LOSSES[str(name)]
        if model is None:
            if options:
                raise ConfigError(f"trainer.loss: {name} takes no options, got {', '.join(options)}")
            return kind(None)  # type: ignore[no-any-return]
        try:
            return kind(model.model_validate(options))  # type: ignore[no-any-return]
        except ValidationError as error:
            raise ConfigError("\n".join(describe(error, prefix="trainer.loss"))) from None
    problems: list[str] = []
    registry = plugin_host().registry
    choice = choose_plugin("loss", section, registry, base=None, path="trainer.loss", problems=problems)
    if choice is None:
        raise ConfigError("\n".join(problems))
    built: Loss = choice.build(registry)
    return built


class TorchTrainer:
    """A learner in this process. All of its work happens in one thread of its own, so calls never overlap.

    A cancelled call returns when the optimizer step under way is done: an update stops there, with the steps taken so
    far applied and, if there are any, the version one higher. So a deadline put around a call is exceeded by one
    optimizer step at most.

    Args:
        config: its options.
    """

    def __init__(self, config: TorchTrainerConfig) -> None:
        self._base = config
        self._stage: dict[str, Any] = {}
        self._state: LearnerState | None = None
        self._context: TrainerContext | None = None
        self._stop = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._loss = build_loss(config.loss)

    async def start(self, context: TrainerContext) -> None:
        """See `Trainer.start`."""
        self._check(self._base, context.asynchronous)
        self._context = context
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orchard-learner")
        try:
            self._state = await self._call(lambda: self._make(context))
        except BaseException:
            await self.aclose()
            raise

    def _make(self, context: TrainerContext) -> LearnerState:
        model = build_model(context.model, choose_device(self._base.device))
        torch.set_num_threads(choose_threads(self._base.threads, model.shape))
        state = LearnerState(
            model=model,
            optimizer=make_optimizer(model, self._base),
            config=self._base,
            loss=self._loss,
            generator=torch.Generator().manual_seed(context.seed),
        )
        if self._base.reference == "stage":
            state.reference = copy.deepcopy(model)
        return state

    @staticmethod
    def _check(config: TorchTrainerConfig, asynchronous: bool) -> None:
        if asynchronous and config.correction is None:
            raise ConfigError(
                "trainer.correction: an asynchronous run trains on samples of older policies; name its correction",
                hint='correction = "token_tis" (decoupled, truncated), or "bypass" (ratio against the engine)',
            )

    async def configure(self, options: Mapping[str, Any], *, updates: int) -> None:
        """See `Trainer.configure`; options not named are those of the run file, not of the stage before.

        With `reset_optimizer` (the default) AdamW's moments start afresh.
        """
        context, state = self._started()
        config = self._merged(options)
        self._check(config, context.asynchronous)
        loss = build_loss(config.loss)
        await self._call(lambda: self._configure(state, config, loss, updates))
        self._stage = dict(options)

    def _merged(self, options: Mapping[str, Any]) -> TorchTrainerConfig:
        fixed = [name for name in FIXED if name in options]
        if fixed:
            raise ConfigError(f"trainer.{fixed[0]}: a stage can't change it; set it in [trainer]")
        try:
            return TorchTrainerConfig.model_validate({**self._base.model_dump(), **options})
        except ValidationError as error:
            raise ConfigError("\n".join(describe(error, prefix="trainer"))) from None

    @staticmethod
    def _configure(state: LearnerState, config: TorchTrainerConfig, loss: Loss, updates: int | None) -> None:
        fresh = make_optimizer(state.model, config)
        if not config.reset_optimizer:
            fresh.state.update(state.optimizer.state)
        state.optimizer = fresh
        state.config, state.loss = config, loss
        state.updates_done, state.updates_planned = 0, updates
        state.reference = copy.deepcopy(state.model) if config.reference == "stage" else None

    async def forward(self, batch: Batch, what: Forward) -> Columns:
        """See `Trainer.forward`. A row's first token has no logprob: 0. Values need a critic, which this one lacks."""
        _, state = self._started()
        if what == "values":
            raise ConfigError("the torch trainer has no critic; values can't be computed")
        model = state.model if what == "logprobs" else state.reference
        if model is None:
            raise ConfigError('trainer.reference: reference logprobs need reference = "stage"')
        return await self._call(lambda: {what: self._forward(state, model, batch)})

    @staticmethod
    def _forward(state: LearnerState, model: Any, batch: Batch) -> list[list[float]]:
        if not batch.rows:
            return []
        flat = FlatBatch.of(batch.rows, model.shape, model.device)
        flat.wanted.fill_(True)
        flat.wanted[list(flat.starts)] = False
        rows = range(len(flat.lengths))
        found = compute_logprobs(model, flat, rows, state.config, batch.temperature).cpu()
        return [part.tolist() for part in torch.split(found, list(flat.lengths))]

    async def update(self, batch: Batch) -> UpdateReport:
        """See `Trainer.update`; a batch with nothing to learn takes no step, and the version still grows.

        Raises:
            ValueError: a row can't be learnt from; nothing was changed.
            NonFiniteUpdateError: loss or gradient is not finite; that step was not taken.
        """
        _, state = self._started()
        self._stop.clear()
        return await self._call(lambda: self._update(state, batch))

    def _update(self, state: LearnerState, batch: Batch) -> UpdateReport:
        before = state.version
        steps, metrics = run_update(state, batch, self._stop.is_set)
        if steps or not self._stop.is_set():
            state.version = before + 1
            state.updates_done += 1
        return UpdateReport(version=state.version, metrics=metrics)

    async def publish(self) -> PolicyVersion:
        """See `Trainer.publish`."""
        context, state = self._started()
        version, weights = await self._call(lambda: (state.version, export_weights(state.model)))
        await context.store.put(version, weights)
        return version

    async def save(self, folder: Path) -> None:
        """See `Trainer.save`; the folder is also a model folder that other tools load."""
        context, state = self._started()
        stage = dict(self._stage)
        await self._call(lambda: save_state(state, folder, source=context.model.path, stage=stage))

    async def load(self, folder: Path) -> None:
        """See `Trainer.load`; the stage that was under way goes on, without another `configure`."""
        context, state = self._started()
        record = read_record(folder)
        config = self._merged(record.get("stage") or {})
        self._check(config, context.asynchronous)
        loss = build_loss(config.loss)

        def restore() -> None:
            self._configure(state, config, loss, None)
            load_state(state, folder, record)

        await self._call(restore)
        self._stage = dict(record.get("stage") or {})

    async def aclose(self) -> None:
        """See `Trainer.aclose`."""
        thread, self._thread, self._state = self._thread, None, None
        if thread is not None:
            self._stop.set()
            await asyncio.to_thread(thread.shutdown)

    @property
    def version(self) -> PolicyVersion:
        """The policy version that the learner holds."""
        return self._started()[1].version

    def _started(self) -> tuple[TrainerContext, LearnerState]:
        if self._context is None or self._state is None:
            raise OrchardError("the trainer is not started, or closed")
        return self._context, self._state

    async def _call(self, work: Callable[[], T]) -> T:
        """Run in the learner's thread; a cancellation asks it to stop, waits for it, and is then raised."""
        if self._thread is None:
            raise OrchardError("the trainer is not started, or closed")
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                if future.cancelled():
                    raise
                cancelled = error
                self._stop.set()
            except Exception:
                break
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()
