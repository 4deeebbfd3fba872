"""A run under way: plays groups, records and counts episodes, measures, and knows its own summary."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchard_api.config import RunConfig
from orchard_api.episode import Episode
from orchard_api.errors import ConfigError, OrchardError, TaskError
from orchard_api.harness import Harness
from orchard_api.registry import Registry
from orchard_api.rollout import Group, GroupRequest
from orchard_api.task import Task
from orchard_api.training import UpdateReport
from orchard_core.preflight import preflight
from orchard_core.recording import EpisodeLog
from orchard_core.run_dir import SUMMARY, RunDir
from orchard_core.settle import settle
from orchard_core.statistics import Tally
from orchard_core.workshop import Workshop, open_workshop

MOST_TASKS = 100_000


class NothingScoredError(OrchardError):
    """Episodes were played, and not one could be scored."""


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
    """A run's objects, its folder and what has been counted.

    Attributes:
        status: `running`, `done`, `failed` or `interrupted`.
        distilled: kept episodes by the name of their distil stage.
    """

    config: RunConfig
    workshop: Workshop
    run_dir: RunDir
    progress: Progress
    started: float = field(default_factory=time.monotonic)
    status: str = "running"
    error: str = ""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    total: Tally = field(default_factory=Tally)
    version: int = 0
    undeleted: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    distilled: dict[str, list[Episode]] = field(default_factory=dict)
    _heldout: list[Task] = field(default_factory=list)

    def tally(self) -> Tally:
        """A new count, with the run's idea of success."""
        return Tally(solved_at=self.config.evaluation.solved_at)

    def record(self, kind: str, stage: str, **values: Any) -> None:
        """Add a line to `metrics.jsonl`."""
        elapsed = round(time.monotonic() - self.started, 3)
        self.run_dir.metrics(kind=kind, stage=stage, elapsed_seconds=elapsed, **values)

    async def play(
        self, label: str, requests: Iterable[GroupRequest], harness: Harness, *, temperature: float | None = None
    ) -> AsyncGenerator[Group, None]:
        """Play groups and record each episode in the folder `label`."""
        tally = self.tally()
        log = EpisodeLog(self.run_dir, label)

        def observe(episode: Episode) -> None:
            tally.add(episode)
            self.total.add(episode)
            log.append(episode)
            self.progress.episode(episode, tally)

        try:
            async with self.workshop.engine(harness, observe=observe, temperature=temperature) as engine:
                try:
                    async with contextlib.aclosing(engine.run(requests)) as groups:
                        async for group in groups:
                            yield group
                finally:
                    self.undeleted |= engine.undeleted
                    self.retries += engine.retries
        finally:
            log.close()

    def heldout(self) -> list[Task]:
        """The evaluation's tasks, the same each time; all can be played here.

        Raises:
            ConfigError: there is none, or no end of them.
            TaskError: two have one id.
            CapabilityError: some need what this run can't give.
        """
        if not self._heldout:
            section = self.config.evaluation
            endless = section.tasks is None
            limit = MOST_TASKS + 1 if section.tasks is None else section.tasks
            tasks = list(itertools.islice(self.workshop.taskset.tasks(section.split, seed=self.config.seed), limit))
            if not tasks:
                raise ConfigError(f"evaluation.split: the split {section.split!r} has no task")
            if endless and len(tasks) > MOST_TASKS:
                raise ConfigError(
                    f"evaluation.tasks: the split {section.split!r} has more than {MOST_TASKS} tasks, or no end",
                    hint="say how many to play: --set evaluation.tasks=200",
                )
            seen: set[str] = set()
            for task in tasks:
                if task.task_id in seen:
                    raise TaskError(f"two tasks of the split {section.split!r} have the id {task.task_id!r}")
                seen.add(task.task_id)
            preflight(tasks, self.workshop.environment, self.workshop.rewards)
            self._heldout = tasks
        return self._heldout

    async def evaluate(self, stage: str, *, label: str | None = None, max_seconds: float | None = None) -> Tally:
        """Play the evaluation's tasks and record the success under the stage's name.

        Args:
            label: the folder of its episodes, `STAGE-SPLIT` by default.
            max_seconds: leave the rest unplayed after this time.

        Raises:
            NothingScoredError: not one episode could be scored.
        """
        section = self.config.evaluation
        label = label or f"{stage}-{section.split}"
        tasks = self.heldout()
        requests = (
            GroupRequest(group_id=f"{stage}/{task.task_id}", task=task, size=section.attempts) for task in tasks
        )
        planned = len(tasks) * section.attempts
        self.progress.phase(stage, "evaluating", total=planned)
        begun = time.monotonic()
        tally = self.tally()
        played = self.play(label, requests, self.workshop.harness, temperature=section.temperature)
        async with contextlib.aclosing(played) as groups:
            async for group in groups:
                tally.add_all(group.episodes)
                if max_seconds is not None and time.monotonic() - begun > max_seconds:
                    break
        seconds = time.monotonic() - begun
        numbers = {**tally.to_dict(), "planned": planned, "seconds": round(seconds, 3)}
        numbers["incomplete"] = tally.scored < planned
        self.stages.setdefault(stage, {}).update(
            heldout_success=tally.success, heldout_tasks=len(tasks), evaluation=numbers, policy_version=self.version
        )
        speed = tally.response_tokens / max(seconds, 1e-9)
        self.record("evaluation", stage, version=self.version, **numbers, tokens_per_second=speed)
        self.write_summary()
        if not tally.scored:
            raise nothing_scored(f"stage {stage!r}", tally)
        return tally

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        failures = self.total.failure_counts()
        return {
            "name": self.config.name,
            "seed": self.config.seed,
            "status": self.status,
            "error": self.error,
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
            "response_tokens": self.total.response_tokens,
        }

    def write_summary(self) -> None:
        """Write `summary.json` as of now."""
        self.run_dir.write_json(SUMMARY, self.summary())

    async def sweep(self) -> None:
        """Remove sandboxes that are still listed as ours, and keep account of those that resist."""
        self.undeleted = await self.workshop.sweep(self.undeleted)


def nothing_scored(where: str, tally: Tally) -> NothingScoredError:
    """The error for a phase without a single score; says what failed most."""
    kind, count = next(iter(tally.failure_kinds.most_common(1)), ("nothing was played", 0))
    return NothingScoredError(
        f"{where}: no episode could be scored; {count} of {tally.episodes} failed with {kind}"
        + (f" ({tally.last_failure})" if tally.last_failure else "")
    )


@contextlib.asynccontextmanager
async def open_run(config: RunConfig, registry: Registry, run_dir: RunDir, progress: Progress) -> AsyncIterator[Run]:
    """Bring up a run. However it ends, its sandboxes are gone and its summary says how it ended."""
    async with open_workshop(config, registry) as workshop:
        run = Run(config=config, workshop=workshop, run_dir=run_dir, progress=progress)
        run.total.solved_at = config.evaluation.solved_at
        try:
            yield run
            run.status = "done"
        except asyncio.CancelledError:
            run.status = "interrupted"
            raise
        except Exception as error:
            run.status, run.error = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            await settle([asyncio.create_task(run.sweep())])
            if run.stages or run.total.episodes or run.status != "failed":
                run.write_summary()
