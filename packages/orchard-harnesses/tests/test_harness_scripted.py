"""The expert says and sees exactly what react would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness_fakes import HERMES, ChatEngine, ExactEngine, MemorySandbox, make_model, policies

from orchard_api.registry import PluginConfig
from orchard_api.sandbox import ExecResult, TarReport
from orchard_api.task import Solution, SolutionStep, Task
from orchard_harnesses.react import ReactConfig, ReactHarness
from orchard_harnesses.scripted import NoopHarness, ScriptedConfig, ScriptedHarness
from orchard_harnesses.template import load_template

STEPS = (
    SolutionStep(thought="I look.", commands=("ls", "wc -l a")),
    SolutionStep(commands=("echo hello > out.txt",)),
)
TASK = Task(task_id="t", instruction="list the files", solution=Solution(steps=STEPS, env={"A": "b"}))


def scripted(**options: Any) -> ScriptedHarness:
    return ScriptedHarness(ScriptedConfig(**options))


@pytest.mark.parametrize("actions", ["text", "tool_calls"])
async def test_an_experts_episode_is_what_react_sees_for_the_same_replies(actions: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", HERMES)
    template = load_template(folder)
    options = {"actions": actions, "max_turns": 5, "empty_output": "."}
    silent = MemorySandbox(lambda command: ExecResult(exit_code=0))
    expert = await scripted(**options).run(TASK, silent, policies(ExactEngine(folder, template, [])))
    assert (expert.outcome, silent.commands) == ("submitted", ["ls", "wc -l a", "echo hello > out.txt"])
    said = [template.decode(turn.response_ids[:-1]) for turn in expert.trajectory.turns]
    engine = ExactEngine(folder, template, said)
    student = await ReactHarness(ReactConfig(**options)).run(
        TASK, MemorySandbox(lambda command: ExecResult(exit_code=0)), policies(engine)
    )
    (seen,), (shown,) = student.trajectory.segments(), expert.trajectory.segments()
    assert template.decode(seen.ids) == template.decode(shown.ids)
    assert [turn.prompt_ids for turn in student.trajectory.turns] == [t.prompt_ids for t in expert.trajectory.turns]
    assert not any(shown.exact) and any(shown.mask)
    assert all(turn.response_ids[-1] == template.end_id for turn in expert.trajectory.turns)


async def test_text_of_the_steps() -> None:
    result = await scripted().run(TASK, MemorySandbox(), {})
    assert [turn.response.text for turn in result.trajectory.turns] == [
        "I look.\n<shell>ls</shell>\n<shell>wc -l a</shell>",
        "<shell>echo hello > out.txt</shell>\n<submit/>",
    ]
    assert all(turn.response_ids == () and not turn.exact for turn in result.trajectory.turns)
    assert [turn.parent for turn in result.trajectory.turns] == [None, 0]


async def test_its_commands_have_the_solutions_variables_and_all_the_time_there_is() -> None:
    sandbox = MemorySandbox()
    task = Task(task_id="t", instruction="x", solution=TASK.solution, agent_timeout_s=2000)
    await scripted(shell_timeout_s=1).run(task, sandbox, policies(ChatEngine([])))
    assert sandbox.calls[0]["env"] == {"A": "b"}
    assert 1990 < sandbox.calls[0]["timeout_s"] <= 2000


async def test_a_folder_goes_to_solution_without_sidecar_files(tmp_path: Path) -> None:
    (tmp_path / "solve.sh").write_text("echo")
    (tmp_path / "._solve.sh").write_text("junk")
    (tmp_path / ".DS_Store").write_text("junk")
    sandbox = MemorySandbox()
    steps = (SolutionStep(commands=("sh /solution/solve.sh",)),)
    task = Task(task_id="t", instruction="x", solution=Solution(steps=steps, folder=tmp_path))
    assert (await scripted().run(task, sandbox, {})).outcome == "submitted"
    data = sandbox.files["/solution/tar"]
    assert b"solve.sh" in data and b"._solve" not in data and b"DS_Store" not in data


async def test_what_a_sandbox_refuses_of_the_folder_is_a_failure(tmp_path: Path) -> None:
    class Refusing(MemorySandbox):
        async def put_tar(self, path: str, data: bytes) -> TarReport:
            return TarReport(delivered=0, skipped=(("x", "unsafe"),))

    (tmp_path / "x").write_text("")
    task = Task(task_id="t", instruction="x", solution=Solution(steps=(), folder=tmp_path))
    result = await scripted().run(task, Refusing(), {})
    assert result.failure is not None and "'x': unsafe" in result.failure.message


async def test_a_solution_without_steps_submits() -> None:
    result = await scripted().run(Task(task_id="t", instruction="x", solution=Solution(steps=())), MemorySandbox(), {})
    assert (result.outcome, len(result.trajectory.turns)) == ("submitted", 1)


async def test_a_task_without_a_solution_is_a_failure() -> None:
    result = await scripted().run(Task(task_id="t", instruction="x"), MemorySandbox(), {})
    assert result.failure is not None and "task t has no solution" in result.failure.message


async def test_noop_submits_at_once() -> None:
    result = await NoopHarness(PluginConfig()).run(TASK, MemorySandbox(), {})
    assert (result.outcome, result.trajectory.turns) == ("submitted", ())
