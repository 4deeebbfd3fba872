"""Harnesses without a model: `scripted` plays a task's own solution, `noop` does nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchard_api.archive import TarWriter
from orchard_api.episode import HarnessResult, Outcome
from orchard_api.errors import Failure, HarnessError, OrchardError
from orchard_api.messages import Message
from orchard_api.policy import PolicyEndpoint
from orchard_api.registry import PluginConfig
from orchard_api.sandbox import Sandbox
from orchard_api.task import Solution, Task
from orchard_api.trajectory import Trajectory
from orchard_harnesses.actions import Shell, Submit
from orchard_harnesses.formats import ActionFormat
from orchard_harnesses.loop import Loop, LoopConfig
from orchard_harnesses.recorder import Recorder, Reply
from orchard_harnesses.template_lint import checked_template
from orchard_harnesses.toolbox import Toolbox

SOLUTION_FOLDER = "/solution"


class ScriptedConfig(LoopConfig):
    """Options of `scripted`; what is written and seen must be what the `react` that learns from it writes and sees."""

    policy: str = "main"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expert:
    """Says a solution's steps, one per turn; the last one submits."""

    solution: Solution
    recorder: Recorder
    form: ActionFormat

    async def __call__(self, messages: Sequence[Message], *, remaining_s: float, turn: int) -> Reply | Outcome:
        steps = self.solution.steps
        step = steps[turn] if turn < len(steps) else None
        actions: list[Shell | Submit] = [] if step is None else [Shell(command=line) for line in step.commands]
        if turn + 1 >= len(steps):
            actions.append(Submit())
        text = self.form.write("" if step is None else step.thought, actions)
        return self.recorder.add_expert(messages, text, tools=self.form.tools)


class ScriptedHarness:
    """Plays `task.solution` through the loop of `react`: same prompt, same format, same observations.

    With the run's model at hand (`policies["main"].info.model_path`) the replies are tokenised once by its template and
    marked as not exact, so that they may feed `ce`; else they are kept as messages.
    """

    Config = ScriptedConfig
    needs: tuple[str, ...] = ()

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        """Play the solution; see `orchard_api.Harness`."""
        solution = task.solution
        try:
            if solution is None:
                raise HarnessError(f"task {task.task_id} has no solution to play")
            loop = self._loop(task, solution, policies.get(self._config.policy))
            if solution.folder is not None:
                await put_folder(sandbox, solution.folder, SOLUTION_FOLDER)
        except OrchardError as error:
            return HarnessResult(
                trajectory=Trajectory(), outcome="failed", failure=Failure.from_exception(error, phase="harness")
            )
        limits = self._config.model_copy(
            update={"shell_timeout_s": math.inf, "shell_timeout_limit_s": math.inf}
        ).limits()
        return await loop.play(
            lambda remaining: Toolbox(sandbox=sandbox, limits=limits, remaining_s=remaining, env=solution.env)
        )

    def _loop(self, task: Task, solution: Solution, endpoint: PolicyEndpoint | None) -> Loop:
        turns = max(len(solution.steps), 1)
        config = self._config.model_copy(update={"max_turns": turns, "max_idle_replies": turns + 1})
        path = None if endpoint is None else endpoint.info.model_path
        template = None if path is None else checked_template(path)
        form = config.action_format(template)
        recorder = Recorder(
            None,
            template=template,
            parser=getattr(form, "parser", None),
            options=config.template_options,
            role=config.policy,
        )
        speaker = _Expert(solution=solution, recorder=recorder, form=form)
        return Loop(config=config, task=task, recorder=recorder, form=form, template=template, speaker=speaker)


async def put_folder(sandbox: Sandbox, folder: Path, target: str) -> None:
    """Copy a local folder into a sandbox; `._*` and `.DS_Store` are left out.

    Raises:
        HarnessError: the folder can't be read, or part of it was refused.
    """
    try:
        data = await asyncio.to_thread(_tar, folder)
    except OSError as error:
        raise HarnessError(f"can't read {folder}: {error}") from error
    await sandbox.make_dir(target)
    report = await sandbox.put_tar(target, data)
    if report.skipped:
        name, reason = report.skipped[0]
        raise HarnessError(f"{len(report.skipped)} files of {folder} were refused, the first {name!r}: {reason}")


def _tar(folder: Path) -> bytes:
    writer = TarWriter()
    writer.tree(folder)
    return writer.getvalue()


class NoopHarness:
    """Submits at once, without a model: what a task scores when nothing is done."""

    Config = PluginConfig
    needs: tuple[str, ...] = ()

    def __init__(self, config: PluginConfig) -> None:
        self._config = config

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        """Do nothing; see `orchard_api.Harness`."""
        return HarnessResult(trajectory=Trajectory(), outcome="submitted")
