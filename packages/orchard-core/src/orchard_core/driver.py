"""`orchard eval` and `orchard train`: one owner of the order of phases."""

from __future__ import annotations

import time
from typing import Any

from orchard_api.config import EvalStage, RlStage, RunConfig
from orchard_api.errors import ConfigError
from orchard_api.registry import Registry
from orchard_api.training import Trainer, TrainerContext
from orchard_core.preflight import preflight
from orchard_core.run import Progress, Run, open_run
from orchard_core.run_dir import CHECKPOINTS, RunDir
from orchard_core.stages import Learning, publish, run_stage

UNTRAINED = "untrained"


async def evaluate(config: RunConfig, registry: Registry, run_dir: RunDir, progress: Progress) -> dict[str, Any]:
    """`orchard eval`: play the evaluation's tasks; returns the summary.

    Raises:
        NothingScoredError: not one episode could be scored.
    """
    async with open_run(config, registry, run_dir, progress) as run:
        run.heldout()
        await run.workshop.serve()
        await run.evaluate("eval", label="eval")
    return run.summary()


async def train(config: RunConfig, registry: Registry, run_dir: RunDir, progress: Progress) -> dict[str, Any]:
    """`orchard train`: run all stages; returns the summary.

    Rollouts of a learning step are sampled by the version that the step before it published.

    Raises:
        ConfigError: the file has no trainer or no stages, or stages that can't work.
        NothingScoredError: an evaluation, or several steps in a row, without a single score.
    """
    check_stages(config)
    async with open_run(config, registry, run_dir, progress) as run:
        learns = any(stage.kind in ("sft", "rl") for stage in config.stages)
        _look_ahead(run, learns)
        await run.workshop.serve()
        trainer = await _start_trainer(run)
        await publish(run, trainer)
        if learns:
            await run.evaluate(UNTRAINED)
        for stage in config.stages:
            begun = time.monotonic()
            if not isinstance(stage, EvalStage):
                await run_stage(run, trainer, stage)
                run.stages.setdefault(stage.name, {})["seconds"] = round(time.monotonic() - begun, 3)
            if stage.kind in ("sft", "rl"):
                await trainer.save(run_dir.path / CHECKPOINTS / stage.name)
            if isinstance(stage, EvalStage):
                await run.evaluate(stage.name, max_seconds=stage.max_seconds)
            elif stage.evaluate:
                await run.evaluate(stage.name)
    return run.summary()


def check_stages(config: RunConfig) -> None:
    """Refuse stages that can't work, before anything starts.

    Raises:
        ConfigError: says which and why.
    """
    if config.trainer is None or config.model is None or not config.stages:
        raise ConfigError("training needs [trainer], [model] and at least one of [[stages]]")
    for number, stage in enumerate(config.stages):
        where = f"stages.{number}"
        if stage.name == UNTRAINED:
            raise ConfigError(f"{where}.name: {UNTRAINED!r} is the name of the first measurement")
        if isinstance(stage, EvalStage) and not stage.evaluate:
            raise ConfigError(f"{where}.evaluate: a stage of kind 'eval' only measures; it can't be false")
        if isinstance(stage, RlStage) and (config.sampling.top_p != 1 or config.sampling.temperature == 0):
            raise ConfigError(
                "sampling: rl learns from samples of the whole distribution; "
                f"expected top_p = 1 and a temperature above 0, got {config.sampling.top_p:g} and "
                f"{config.sampling.temperature:g}",
                hint="evaluation.temperature may differ",
            )
        if stage.kind == "sft" and stage.data.endswith(".parquet") and not (config.base / stage.data).exists():
            raise ConfigError(f"{where}.data: there is no file {config.base / stage.data}")


def _look_ahead(run: Run, learns: bool) -> None:
    """Find what would only fail in a later stage: unknown splits, tasks that can't be played here."""
    if learns or any(stage.evaluate for stage in run.config.stages):
        run.heldout()
    for stage in run.config.stages:
        if stage.kind in ("distil", "rl"):
            first = next(iter(run.workshop.taskset.tasks(stage.split, seed=run.config.seed)), None)
            if first is None:
                raise ConfigError(f"stage {stage.name!r}: the split {stage.split!r} has no task")
            preflight([first], run.workshop.environment, run.workshop.rewards)


async def _start_trainer(run: Run) -> Trainer:
    config, store, model = run.config, run.workshop.store, run.workshop.model
    if config.trainer is None or store is None or model is None:
        raise ConfigError("training needs [trainer], a weight store and [model]")
    trainer: Trainer = run.workshop.build(config.trainer)
    run.workshop.stack.push_async_callback(trainer.aclose)
    await trainer.start(TrainerContext(model=model, store=store, run_dir=run.run_dir.path, seed=config.seed))
    for stage in config.stages:
        if isinstance(stage, Learning):
            await trainer.configure(stage.trainer, updates=1)
    return trainer
