"""The stages of a training run: play an expert, fine-tune on it, improve by reinforcement learning."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from orchard_api.config import DistilStage, RlStage, SftStage
from orchard_api.episode import Episode
from orchard_api.errors import ConfigError, PolicyServerError
from orchard_api.rollout import GroupRequest
from orchard_api.task import Task
from orchard_api.training import Advantage, Trainer
from orchard_core.batching import RlBatch, rl_batch, sft_batch, sft_rows
from orchard_core.run import Run, nothing_scored

Learning = SftStage | RlStage
MOST_DEAD_STEPS = 3


async def publish(run: Run, trainer: Trainer) -> None:
    """Bring the learner's weights to the server of `main`; rollouts after it are of that version."""
    run.version = await trainer.publish()
    await run.workshop.servers["main"].load(run.version)
    if run.workshop.store is not None and run.version > 0:
        await run.workshop.store.release(run.version - 1)


async def run_stage(run: Run, trainer: Trainer, stage: DistilStage | SftStage | RlStage) -> None:
    """Run one stage to its end or its `max_seconds`."""
    if isinstance(stage, DistilStage):
        await _distil(run, stage)
    elif isinstance(stage, SftStage):
        await _sft(run, trainer, stage)
    else:
        await _rl(run, trainer, stage)


async def _distil(run: Run, stage: DistilStage) -> None:
    expert = run.workshop.expert
    if expert is None:
        raise ConfigError("a distil stage needs an [expert]")
    tasks = itertools.islice(run.workshop.taskset.tasks(stage.split, seed=run.config.seed), stage.episodes)
    requests = (GroupRequest(group_id=f"{stage.name}/{n:06}", task=task) for n, task in enumerate(tasks))
    run.progress.phase(stage.name, "playing the expert", total=stage.episodes)
    kept: list[Episode] = []
    tally = run.tally()
    deadline = _deadline(stage)
    async with contextlib.aclosing(run.play(stage.name, requests, expert)) as groups:
        async for group in groups:
            tally.add_all(group.episodes)
            for episode in group.episodes:
                reward = episode.reward
                if reward is not None and (stage.keep == "all" or reward >= run.config.evaluation.solved_at):
                    kept.append(episode)
            if time.monotonic() > deadline and tally.episodes < stage.episodes:
                _cut(run, stage, f"{tally.episodes} of {stage.episodes} episodes")
                break
    kept.sort(key=lambda episode: episode.group_id)
    run.stages.setdefault(stage.name, {}).update(kept=len(kept), expert=tally.to_dict())
    run.record("distil", stage.name, kept=len(kept), **tally.to_dict())
    if not tally.scored:
        raise nothing_scored(f"stage {stage.name!r}", tally)
    if not kept:
        raise ConfigError(
            f"stage {stage.name!r}: the expert solved none of {tally.scored} tasks",
            hint='its episodes are in the report; keep = "all" keeps unsolved ones',
        )
    run.distilled[stage.name] = kept


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
    for step in range(1, updates + 1):
        epoch, part = divmod(step - 1, per_epoch)
        if part == 0:
            order.shuffle(rows)
        start = part * stage.rows_per_update
        begun = time.monotonic()
        report = await trainer.update(sft_batch(rows[start : start + stage.rows_per_update]))
        run.progress.update(step, report)
        run.record(
            "update",
            stage.name,
            step=step,
            epoch=epoch,
            version=report.version,
            update_seconds=time.monotonic() - begun,
            **report.metrics,
        )
        if time.monotonic() > deadline:
            _cut(run, stage, f"{step} of {updates} updates")
            break
    await publish(run, trainer)


def _data(run: Run, stage: SftStage) -> Sequence[Episode]:
    if stage.data in run.distilled:
        return run.distilled[stage.data]
    from orchard_api.schema import read_episodes

    return [episode for episode in read_episodes(run.config.base / stage.data) if episode.failure is None]


async def _rl(run: Run, trainer: Trainer, stage: RlStage) -> None:
    advantage = run.workshop.advantage
    if advantage is None:
        raise ConfigError("an rl stage needs an [advantage]")
    await trainer.configure(stage.trainer, updates=stage.steps)
    shuffle = random.Random(run.config.seed) if stage.reward_control == "shuffled" else None
    tasks = _again(run, stage.split)
    deadline = _deadline(stage)
    dead_steps = 0
    for step in range(1, stage.steps + 1):
        scored = await _step(run, trainer, stage, step, tasks, advantage, shuffle)
        dead_steps = 0 if scored else dead_steps + 1
        if dead_steps == MOST_DEAD_STEPS:
            raise nothing_scored(f"stage {stage.name!r}, the last {MOST_DEAD_STEPS} steps", run.total)
        if time.monotonic() > deadline and step < stage.steps:
            _cut(run, stage, f"{step} of {stage.steps} steps")
            return


async def _step(
    run: Run,
    trainer: Trainer,
    stage: RlStage,
    step: int,
    tasks: Iterator[Task],
    advantage: Advantage,
    shuffle: random.Random | None,
) -> int:
    """Play one step's groups with the current version and learn from them; returns how many were scored."""
    begun = time.monotonic()
    requests = (
        GroupRequest(group_id=f"{stage.name}/{step}/{n}", task=next(tasks), size=stage.group_size)
        for n in range(stage.groups_per_step)
    )
    run.progress.phase(stage.name, f"step {step}/{stage.steps}", total=stage.groups_per_step * stage.group_size)
    episodes: list[Episode] = []
    async with contextlib.aclosing(run.play(stage.name, requests, run.workshop.harness)) as groups:
        async for group in groups:
            episodes += group.episodes
    episodes.sort(key=lambda episode: episode.group_id)
    played = time.monotonic()
    tally = run.tally()
    tally.add_all(episodes)
    made = rl_batch(episodes, advantage, temperature=run.config.sampling.temperature, shuffle=shuffle)
    if tally.scored and tally.turns:
        _check_tokens(run, stage, made)
    sampled, metrics = run.version, {}
    if made.learns:
        report = await trainer.update(made.batch)
        metrics = dict(report.metrics)
        await publish(run, trainer)
        run.progress.update(step, report)
    run.record(
        "step",
        stage.name,
        step=step,
        version=run.version,
        sampled_version=sampled,
        reward_mean=tally.reward_mean,
        success=tally.success,
        failures=tally.failure_counts(),
        infra_failed_rate=tally.failures["infra"] / max(tally.episodes, 1),
        groups=made.groups,
        dropped_groups=made.dropped_groups,
        flat_groups=made.flat_groups,
        masked_episodes=made.masked,
        turns_mean=tally.turns / max(tally.episodes, 1),
        response_tokens=tally.response_tokens,
        rollout_seconds=played - begun,
        update_seconds=time.monotonic() - played,
        tokens_per_second=tally.response_tokens / max(played - begun, 1e-9),
        **{f"trainer/{key}": value for key, value in metrics.items()},
    )
    run.write_summary()
    return tally.scored


def _check_tokens(run: Run, stage: RlStage, made: RlBatch) -> None:
    """Law 4 and 5: what is learnt from was sampled by the engine, by the version that was loaded."""
    if not made.versions:
        raise ConfigError(
            f"stage {stage.name!r}: the policy's answers have no token ids and logprobs, so rl can't learn from them",
            hint='use an exact policy server, such as server = "in_process"',
        )
    if made.versions - {run.version}:
        raise PolicyServerError(
            f"stage {stage.name!r}: the policy server sampled with version {min(made.versions)} "
            f"though {run.version} was loaded"
        )


def _again(run: Run, split: str) -> Iterator[Task]:
    """The tasks of a split, over and over, each pass in another order, none kept in memory."""
    for pass_number in itertools.count():
        empty = True
        for task in run.workshop.taskset.tasks(split, seed=run.config.seed + 1 + pass_number):
            empty = False
            yield task
        if empty:
            raise ConfigError(f"the split {split!r} has no task")


def _cut(run: Run, stage: DistilStage | SftStage | RlStage, after: str) -> None:
    run.stages.setdefault(stage.name, {})["cut_short"] = f"by max_seconds, after {after}"
    run.progress.note(f"{stage.name}: ended by max_seconds, after {after}")


def _deadline(stage: DistilStage | SftStage | RlStage) -> float:
    return float("inf") if stage.max_seconds is None else time.monotonic() + stage.max_seconds
