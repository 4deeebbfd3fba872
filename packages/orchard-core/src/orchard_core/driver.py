"""Evaluation and training: the stages of a run, in order, with one owner of the order of phases."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchard_api.config import DistilStage, EvalStage, RlStage, RunConfig, SftStage, Stage
from orchard_api.episode import Episode
from orchard_api.errors import ConfigError
from orchard_api.harness import Harness
from orchard_api.registry import Registry
from orchard_api.rollout import Group, GroupRequest
from orchard_api.task import Task
from orchard_api.training import Advantage, Batch, Trainer, TrainerContext, UpdateReport
from orchard_core.batching import rl_batch, sft_rows
from orchard_core.recording import EpisodeLog
from orchard_core.run_dir import CHECKPOINTS, SUMMARY, RunDir
from orchard_core.statistics import Tally
from orchard_core.workshop import Workshop, open_workshop

UNTRAINED = "untrained"


class Progress(Protocol):
    """What the user is shown while a run goes on."""

    def phase(self, stage: str, what: str, *, total: int | None) -> None:
        """A phase begins; `total` episodes or updates are expected."""

    def episode(self, episode: Episode, tally: Tally) -> None:
        """An episode ended."""

    def update(self, step: int, report: UpdateReport) -> None:
        """The learner made a step."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@dataclass(slots=True)
class Run:
    """A run under way: its objects, its folder and what has been counted."""

    config: RunConfig
    workshop: Workshop
    run_dir: RunDir
    progress: Progress
    started: float = field(default_factory=time.monotonic)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    total: Tally = field(default_factory=Tally)
    version: int = 0
    undeleted: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    distilled: dict[str, list[Episode]] = field(default_factory=dict)

    async def play(
        self, label: str, requests: Iterator[GroupRequest], harness: Harness, *, temperature: float | None
    ) -> AsyncGenerator[Group, None]:
        """Play groups and record each episode in the folder `label`."""
        tally = Tally(solved_at=self.config.evaluation.solved_at)
        log = EpisodeLog(self.run_dir, label)

        def observe(episode: Episode) -> None:
            tally.add(episode)
            self.total.add(episode)
            log.append(episode)
            self.progress.episode(episode, tally)

        self.workshop.observers.append(observe)
        try:
            async with self.workshop.engine(harness, temperature=temperature) as engine:
                try:
                    async with contextlib.aclosing(engine.run(requests)) as groups:
                        async for group in groups:
                            yield group
                finally:
                    self.undeleted |= engine.undeleted
                    self.retries += engine.retries
        finally:
            self.workshop.observers.remove(observe)
            log.close()

    async def evaluate(self, stage: str, *, label: str | None = None) -> Tally:
        """Play the evaluation's tasks and record the success under the stage's name.

        Args:
            label: the folder of its episodes, `STAGE-heldout` by default.
        """
        label = label or f"{stage}-{self.config.evaluation.split}"
        section = self.config.evaluation
        tasks = self.tasks(section.split, section.tasks)
        requests = (
            GroupRequest(group_id=f"{stage}/{task.task_id}", task=task, size=section.attempts) for task in tasks
        )
        harness: Harness = self.workshop.build(self.config.harness)
        count = len(tasks) * section.attempts
        self.progress.phase(stage, "evaluating", total=count)
        begun = time.monotonic()
        tally = Tally(solved_at=section.solved_at)
        async with contextlib.aclosing(self.play(label, requests, harness, temperature=section.temperature)) as groups:
            async for group in groups:
                for episode in group.episodes:
                    tally.add(episode)
        seconds = time.monotonic() - begun
        numbers = tally.to_dict()
        self.stages.setdefault(stage, {}).update(
            heldout_success=tally.success, heldout_tasks=len(tasks), evaluation=numbers, policy_version=self.version
        )
        self.run_dir.metrics(
            kind="evaluation",
            stage=stage,
            version=self.version,
            seconds=seconds,
            **numbers,
            tokens_per_second=tally.response_tokens / max(seconds, 1e-9),
        )
        self.write_summary()
        return tally

    def tasks(self, split: str, limit: int | None) -> list[Task]:
        """The first tasks of a split.

        Raises:
            ConfigError: there is none.
        """
        tasks = list(itertools.islice(self.workshop.taskset.tasks(split, seed=self.config.seed), limit))
        if not tasks:
            raise ConfigError(f"the split {split!r} has no task")
        return tasks

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        failures = self.total.failure_counts()
        return {
            "name": self.config.name,
            "seed": self.config.seed,
            "stages": self.stages,
            "heldout_tasks": max((stage.get("heldout_tasks", 0) for stage in self.stages.values()), default=0),
            "wall_seconds": round(time.monotonic() - self.started, 3),
            "failures": failures,
            "failure_kinds": dict(self.total.failure_kinds),
            "infra_failed_rate": failures["infra"] / max(self.total.episodes, 1),
            "retries": self.retries,
            "incomplete": any(stage.get("evaluation", {}).get("incomplete") for stage in self.stages.values()),
            "undeleted_sandboxes": self.undeleted,
            "policy_version": self.version,
            "episodes": self.total.episodes,
        }

    def write_summary(self) -> None:
        """Write `summary.json` as of now."""
        self.run_dir.write_json(SUMMARY, self.summary())


@contextlib.asynccontextmanager
async def open_run(config: RunConfig, registry: Registry, run_dir: RunDir, progress: Progress) -> AsyncIterator[Run]:
    """Bring up a run; its summary is written however it ends."""
    async with open_workshop(config, registry) as workshop:
        run = Run(config=config, workshop=workshop, run_dir=run_dir, progress=progress)
        run.total.solved_at = config.evaluation.solved_at
        try:
            yield run
        finally:
            run.write_summary()


async def evaluate(config: RunConfig, registry: Registry, run_dir: RunDir, progress: Progress) -> dict[str, Any]:
    """`orchard eval`: play the evaluation's tasks; returns the summary."""
    async with open_run(config, registry, run_dir, progress) as run:
        await run.evaluate("eval", label="eval")
    return run.summary()


async def train(config: RunConfig, registry: Registry, run_dir: RunDir, progress: Progress) -> dict[str, Any]:
    """`orchard train`: run all stages; returns the summary.

    Raises:
        ConfigError: the file has no trainer or no stages.
    """
    if config.trainer is None or config.model is None or not config.stages:
        raise ConfigError("training needs [trainer], [model] and at least one of [[stages]]")
    async with open_run(config, registry, run_dir, progress) as run:
        store, model = run.workshop.store, run.workshop.model
        if store is None or model is None:
            raise ConfigError("training needs a weight store and a model")
        trainer: Trainer = run.workshop.build(config.trainer)
        run.workshop.stack.push_async_callback(trainer.aclose)
        await trainer.start(
            TrainerContext(model=model, store=store, run_dir=run_dir.path, seed=config.seed, asynchronous=False)
        )
        await _publish(run, trainer)
        if any(stage.kind in ("sft", "rl") for stage in config.stages):
            await run.evaluate(UNTRAINED)
        for stage in config.stages:
            begun = time.monotonic()
            await _stage(run, trainer, stage)
            run.stages.setdefault(stage.name, {})["seconds"] = round(time.monotonic() - begun, 3)
            if stage.kind in ("sft", "rl"):
                await trainer.save(run_dir.path / CHECKPOINTS / stage.name)
            if stage.evaluate:
                await run.evaluate(stage.name)
    return run.summary()


async def _publish(run: Run, trainer: Trainer) -> None:
    """Bring the learner's weights to the server of `main`; rollouts after it are of that version."""
    run.version = await trainer.publish()
    await run.workshop.servers["main"].load(run.version)
    if run.workshop.store is not None and run.version > 0:
        await run.workshop.store.release(run.version - 1)


async def _stage(run: Run, trainer: Trainer, stage: Stage) -> None:
    if isinstance(stage, DistilStage):
        await _distil(run, stage)
    elif isinstance(stage, SftStage):
        await _sft(run, trainer, stage)
    elif isinstance(stage, RlStage):
        await _rl(run, trainer, stage)
    elif isinstance(stage, EvalStage) and not stage.evaluate:
        raise ConfigError(f"stage {stage.name!r} measures, but has evaluate = false")


async def _distil(run: Run, stage: DistilStage) -> None:
    expert = run.config.expert
    if expert is None:
        raise ConfigError("a distil stage needs an [expert]")
    harness: Harness = run.workshop.build(expert)
    tasks = itertools.islice(run.workshop.taskset.tasks(stage.split, seed=run.config.seed), stage.episodes)
    requests = (GroupRequest(group_id=f"{stage.name}/{n}", task=task) for n, task in enumerate(tasks))
    run.progress.phase(stage.name, "playing the expert", total=stage.episodes)
    kept: list[Episode] = []
    tally = Tally(solved_at=run.config.evaluation.solved_at)
    deadline = _deadline(stage)
    async with contextlib.aclosing(run.play(stage.name, requests, harness, temperature=None)) as groups:
        async for group in groups:
            for episode in group.episodes:
                tally.add(episode)
                solved = (episode.reward or 0.0) >= run.config.evaluation.solved_at
                if episode.failure is None and (stage.keep == "all" or solved):
                    kept.append(episode)
            if time.monotonic() > deadline:
                break
    kept.sort(key=lambda episode: episode.group_id)
    if not kept:
        raise ConfigError(
            f"stage {stage.name!r}: none of {tally.episodes} expert episodes can be learnt from",
            hint='look at the report; keep = "all" keeps unsolved ones',
        )
    run.distilled[stage.name] = kept
    run.stages[stage.name] = {"kept": len(kept), "expert": tally.to_dict()}
    run.run_dir.metrics(kind="distil", stage=stage.name, kept=len(kept), **tally.to_dict())


async def _sft(run: Run, trainer: Trainer, stage: SftStage) -> None:
    rows = [row for episode in _data(run, stage) for row in sft_rows(episode)]
    if not rows:
        raise ConfigError(f"stage {stage.name!r}: its data has no tokens to learn from")
    order = random.Random(run.config.seed)
    per_epoch = -(-len(rows) // stage.rows_per_update)
    updates = per_epoch * stage.epochs
    await trainer.configure(stage.trainer, updates=updates)
    run.progress.phase(stage.name, "fine-tuning", total=updates)
    deadline = _deadline(stage)
    step = 0
    for epoch in range(stage.epochs):
        order.shuffle(rows)
        for start in range(0, len(rows), stage.rows_per_update):
            report = await trainer.update(Batch(rows=rows[start : start + stage.rows_per_update]))
            step += 1
            run.progress.update(step, report)
            run.run_dir.metrics(
                kind="update", stage=stage.name, step=step, epoch=epoch, version=report.version, **report.metrics
            )
            if time.monotonic() > deadline:
                await _publish(run, trainer)
                return
    await _publish(run, trainer)


def _data(run: Run, stage: SftStage) -> Sequence[Episode]:
    if stage.data in run.distilled:
        return run.distilled[stage.data]
    from orchard_api.schema import read_episodes

    return [episode for episode in read_episodes(run.config.base / stage.data) if episode.failure is None]


async def _rl(run: Run, trainer: Trainer, stage: RlStage) -> None:
    choice = run.config.advantage
    assert choice is not None
    advantage: Advantage = run.workshop.build(choice)
    harness: Harness = run.workshop.build(run.config.harness)
    await trainer.configure(stage.trainer, updates=stage.steps)
    shuffle = random.Random(run.config.seed) if stage.reward_control == "shuffled" else None
    tasks = _again(run, stage.split)
    temperature = run.config.sampling.temperature
    deadline = _deadline(stage)
    for step in range(1, stage.steps + 1):
        begun = time.monotonic()
        requests = (
            GroupRequest(group_id=f"{stage.name}/{step}/{n}", task=next(tasks), size=stage.group_size)
            for n in range(stage.groups_per_step)
        )
        total = stage.groups_per_step * stage.group_size
        run.progress.phase(stage.name, f"step {step}/{stage.steps}", total=total)
        episodes: list[Episode] = []
        async with contextlib.aclosing(run.play(stage.name, requests, harness, temperature=None)) as groups:
            async for group in groups:
                episodes += group.episodes
        episodes.sort(key=lambda episode: episode.group_id)
        played = time.monotonic()
        batch, statistics = rl_batch(episodes, advantage, temperature=temperature, shuffle=shuffle)
        counted = Tally(solved_at=run.config.evaluation.solved_at)
        for episode in episodes:
            counted.add(episode)
        metrics: dict[str, float] = {}
        if any(weight for row in batch.rows for weight in row.rl):
            report = await trainer.update(batch)
            metrics = dict(report.metrics)
            await _publish(run, trainer)
            run.progress.update(step, report)
        run.run_dir.metrics(
            kind="step",
            stage=stage.name,
            step=step,
            version=run.version,
            reward_mean=counted.reward_mean,
            success=counted.success,
            failures=counted.failure_counts(),
            infra_failed_rate=counted.failures["infra"] / max(counted.episodes, 1),
            groups=statistics.groups,
            dropped_groups=statistics.dropped_groups,
            flat_groups=statistics.flat_groups,
            masked_episodes=statistics.masked,
            rollout_seconds=played - begun,
            update_seconds=time.monotonic() - played,
            tokens_per_second=counted.response_tokens / max(played - begun, 1e-9),
            **{f"trainer/{key}": value for key, value in metrics.items()},
        )
        run.write_summary()
        if time.monotonic() > deadline:
            return


def _again(run: Run, split: str) -> Iterator[Task]:
    """The tasks of a split, over and over, each pass in another order, none kept in memory."""
    for pass_number in itertools.count():
        empty = True
        for task in run.workshop.taskset.tasks(split, seed=run.config.seed + 1 + pass_number):
            empty = False
            yield task
        if empty:
            raise ConfigError(f"the split {split!r} has no task")


def _deadline(stage: Stage) -> float:
    return float("inf") if stage.max_seconds is None else time.monotonic() + stage.max_seconds
