"""One attempt at one episode: sandbox made, task set up, harness run, agent's processes ended, scored, sandbox gone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from orchard_api.archive import TarWriter
from orchard_api.episode import Episode, HarnessResult, Outcome, Score
from orchard_api.errors import (
    DeadlineError,
    Failure,
    FailureClass,
    GraderError,
    HarnessError,
    InfraError,
    OrchardError,
    OverloadedError,
    StartTimeoutError,
)
from orchard_api.reward import deadline_s
from orchard_api.rollout import GroupRequest, RolloutContext
from orchard_api.sandbox import Sandbox
from orchard_api.task import Task
from orchard_api.trajectory import Trajectory
from orchard_core.engine_config import AsyncioEngineConfig
from orchard_core.settle import settle

logger = logging.getLogger("orchard_core")
_DELETE_TRIES, _DELETE_PAUSE_S, _CLOSE_S = 3, 0.2, 5.0


@dataclass(slots=True)
class EpisodeRun:
    """The state of one attempt while it runs.

    Attributes:
        undeleted: called with a sandbox's id and the reason when it could not be removed.
        retryable: whether another attempt may go better: an infra failure that isn't a bug in a plugin.
        retry_after_s: how long whoever was overloaded asked us to wait.
    """

    context: RolloutContext
    config: AsyncioEngineConfig
    request: GroupRequest
    episode_id: str
    attempt: int
    undeleted: Callable[[str, str], None]
    sandbox_id: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    phase: str = "create"
    result: HarnessResult | None = None
    retryable: bool = False
    retry_after_s: float = 0.0

    async def play(self) -> Episode:
        """Run all phases; failures end up in the episode, only cancellation is raised."""
        started = time.time()
        self.sandbox_id = f"orchard-{uuid.uuid4().hex[:20]}"
        failure: Failure | None = None
        scores: tuple[Score, ...] = ()
        try:
            async with self._sandbox() as sandbox:
                async with self._phase("setup", self.config.setup_timeout_s):
                    await set_up(self.request.task, sandbox)
                result = await self._harness(sandbox)
                failure = result.failure
                self.retryable = failure is not None and failure.failure_class is FailureClass.INFRA
                if failure is None:
                    scores = await self._score(sandbox, result)
        except Exception as error:
            failure = classify(error, self.phase)
            self.retryable = failure.failure_class is FailureClass.INFRA and isinstance(error, OrchardError)
            if isinstance(error, OverloadedError):
                self.retry_after_s = error.retry_after_s or 0.0
        return self._episode(started, scores, failure)

    def _episode(self, started: float, scores: tuple[Score, ...], failure: Failure | None) -> Episode:
        result = self.result
        outcome: Outcome = "failed" if failure is not None or result is None else result.outcome
        return Episode(
            episode_id=self.episode_id,
            group_id=self.request.group_id,
            task=self.request.task,
            trajectory=Trajectory() if result is None else result.trajectory,
            outcome=outcome,
            answer="" if result is None else result.answer,
            scores=() if failure is not None else scores,
            failure=failure,
            attempt=self.attempt,
            started_at=started,
            timings=self.timings,
        )

    @asynccontextmanager
    async def _phase(self, name: str, limit_s: float) -> AsyncIterator[None]:
        self.phase = name
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(limit_s) as scope:
                yield
        except TimeoutError as error:
            if scope.expired():
                raise _too_long(name, limit_s) from error
            raise
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - begun

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        """A live sandbox that is gone when the block ends, however it ends."""
        environment, task = self.context.environment, self.request.task
        labels = {**task.sandbox.labels, "orchard.owner": self.context.owner, "orchard.episode": self.episode_id}
        spec = replace(task.sandbox, labels=labels)
        sandbox: Sandbox | None = None
        try:
            async with self._phase("create", spec.start_timeout_s + self.config.grace_s):
                sandbox = await environment.create(spec, sandbox_id=self.sandbox_id)
            yield sandbox
        finally:
            await settle([asyncio.create_task(self._delete(sandbox))])

    async def _delete(self, sandbox: Sandbox | None) -> None:
        """Remove the sandbox, with a few tries; what can't be removed is reported, never raised."""
        begun = time.perf_counter()
        reason = "it took too long"
        if sandbox is not None:
            await _close_handle(sandbox)
        try:
            async with asyncio.timeout(self.config.delete_timeout_s):
                for left in reversed(range(_DELETE_TRIES)):
                    try:
                        await self.context.environment.delete(self.sandbox_id)
                        break
                    except InfraError as error:
                        reason = f"{type(error).__name__}: {error}"
                        if not left:
                            raise
                    await asyncio.sleep(_DELETE_PAUSE_S)
        except TimeoutError:
            self.undeleted(self.sandbox_id, f"not removed within {self.config.delete_timeout_s:g} s; {reason}")
        except Exception as error:
            self.undeleted(self.sandbox_id, f"{type(error).__name__}: {error}")
        self.timings["delete"] = time.perf_counter() - begun

    async def _harness(self, sandbox: Sandbox) -> HarnessResult:
        task = self.request.task
        limit = min(task.agent_timeout_s, self.config.max_agent_s)
        if limit != task.agent_timeout_s:
            task = replace(task, agent_timeout_s=limit)
        async with self._phase("harness", limit + self.config.grace_s):
            self.result = await self.context.harness.run(task, sandbox, self.context.policies)
        return self.result

    async def _score(self, sandbox: Sandbox, result: HarnessResult) -> tuple[Score, ...]:
        async with self._phase("reward", self.config.grace_s):
            await sandbox.kill_processes()
        task = self.request.task
        view = Episode(
            episode_id=self.episode_id,
            group_id=self.request.group_id,
            task=task,
            trajectory=result.trajectory,
            outcome=result.outcome,
            answer=result.answer,
            attempt=self.attempt,
            sandbox=sandbox,
        )
        scores = []
        for weighted in self.context.rewards:
            async with self._phase("reward", deadline_s(weighted.reward, task) + self.config.grace_s):
                score = await weighted.reward.score(view)
            if not math.isfinite(score.value):
                raise GraderError(f"reward {weighted.name!r} returned {score.value}")
            scores.append(replace(score, name=weighted.name, weight=weighted.weight))
        return tuple(scores)


async def _close_handle(sandbox: Sandbox) -> None:
    """Close a handle; one that can't be closed keeps nobody from removing its sandbox."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await sandbox.aclose()
    except Exception as error:
        logger.warning("handle of sandbox %s: %s: %s", sandbox.sandbox_id, type(error).__name__, error)


def classify(error: Exception, phase: str) -> Failure:
    """Whose fault an escaped exception is: infra outside the harness, whatever class the error has elsewhere.

    In the harness only an infra error stays one; another that escapes means that the harness did not handle it.
    """
    failure = Failure.from_exception(error, phase=phase)
    infra = phase != "harness" or failure.failure_class is FailureClass.INFRA
    return replace(failure, failure_class=FailureClass.INFRA if infra else FailureClass.HARNESS)


def _too_long(phase: str, limit_s: float) -> OrchardError:
    if phase == "create":
        return StartTimeoutError(f"the sandbox was not ready within {limit_s:g} s")
    if phase == "harness":
        return HarnessError(f"the harness did not return within {limit_s:g} s, its task's timeout and grace")
    return DeadlineError(f"phase {phase!r} took longer than {limit_s:g} s")


async def set_up(task: Task, sandbox: Sandbox) -> None:
    """Put a task's folder and files into the working directory and run its setup line.

    Raises:
        InfraError: the setup line failed or a file was refused.
    """
    if task.folder is not None or len(task.files) > 1:
        report = await sandbox.put_tar(".", await asyncio.to_thread(_pack, task) if task.folder else _pack(task))
        if report.skipped:
            raise InfraError(f"task {task.task_id}: some of its files were refused: {report.skipped[:3]}")
    else:
        for path, data in task.files.items():
            await sandbox.write_file(path, data)
    if task.setup is not None:
        done = await sandbox.exec(task.setup, timeout_s=3600.0)
        if not done.ok:
            raise InfraError(
                f"task {task.task_id}: its setup line exited {done.exit_code}: "
                f"{done.stderr_text[-500:] or done.stdout_text[-500:]}"
            )


def _pack(task: Task) -> bytes:
    """A task's folder and files as one tar, so that many small files cost one request."""
    writer = TarWriter()
    if task.folder is not None:
        writer.tree(task.folder, without=task.files)
    for path, data in task.files.items():
        writer.file(path, data)
    return writer.getvalue()
