"""The loops in real sandboxes on this machine."""

from __future__ import annotations

import asyncio
import resource
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import ChatEngine, ExactEngine, policies

from orchard_api.errors import FailureClass, PluginError
from orchard_api.messages import Message, ToolCall
from orchard_api.plugins import PluginHost
from orchard_api.policy import ChatReply, ChatRequest
from orchard_api.sandbox import SandboxSpec
from orchard_api.task import Solution, SolutionStep, Task
from orchard_harnesses.react import ReactConfig, ReactHarness
from orchard_harnesses.scripted import ScriptedConfig, ScriptedHarness
from orchard_harnesses.template import load_template

pytestmark = pytest.mark.real
TASK = Task(task_id="t", instruction="list the files")


@pytest.fixture
async def environment() -> AsyncIterator[Any]:
    """The `local` environment."""
    try:
        entry = PluginHost().registry.get("environment", "local")
    except PluginError:
        pytest.skip("pip install orchard-agent")
    made = entry.build(entry.config_model()())
    await made.start()
    yield made
    await made.aclose()


@pytest.fixture
async def sandbox(environment: Any) -> AsyncIterator[Any]:
    name = f"harness-test-{uuid.uuid4().hex[:12]}"
    box = await environment.create(SandboxSpec(), sandbox_id=name)
    yield box
    await box.aclose()
    await environment.delete(name)


async def test_an_episode_changes_real_files(sandbox: Any, model_folder: Path) -> None:
    template = load_template(model_folder)
    says = [
        '<edit path="a/b.txt"><new>\none\ntwo\n</new></edit>',
        '<edit path="a/b.txt"><old>two</old><new>three</new></edit><shell>cat a/b.txt; cat none; exit 3</shell>',
        "<submit>done</submit>",
    ]
    engine = ExactEngine(model_folder, template, says)
    result = await ReactHarness(ReactConfig(system_prompt="")).run(TASK, sandbox, policies(engine))
    assert (result.outcome, result.answer, result.failure) == ("submitted", "done", None)
    turns = result.trajectory.turns
    assert turns[1].messages[0].text == "[wrote a/b.txt]"
    lines = turns[2].messages[0].text.split("\n")
    assert lines[:3] == ["[edited a/b.txt]", "one", "three"] and lines[-1] == "[exit 3]" and "none" in lines[3]
    assert [turn.response_ids for turn in turns] == engine.sent
    assert await sandbox.read_file("a/b.txt") == b"one\nthree\n"


async def test_an_edit_keeps_a_files_mode(sandbox: Any) -> None:
    await sandbox.write_file("run.sh", b"#!/bin/sh\necho a\n", mode=0o755)
    engine = ChatEngine(
        ['<edit path="run.sh"><old>echo a</old><new>echo b</new></edit><shell>./run.sh</shell>', "<submit/>"]
    )
    await ReactHarness(ReactConfig()).run(TASK, sandbox, policies(engine))
    assert engine.requests[-1].messages[-1].text == "[edited run.sh]\nb"


async def test_yes_without_a_timeout_is_capped_in_time_and_size(sandbox: Any) -> None:
    """evalscope#1688."""
    call = ToolCall(id="c", name="shell", arguments='{"command": "yes", "timeout_s": -1}')
    engine = ChatEngine([Message(role="assistant", tool_calls=(call,)), "a", "a", "a"])
    config = ReactConfig(actions="tool_calls", shell_timeout_s=1, shell_output_bytes=4096, max_observation_chars=2000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    result = await ReactHarness(config).run(TASK, sandbox, policies(engine))
    assert time.monotonic() - start < 5
    shown = result.trajectory.turns[1].messages[0].text
    assert len(shown) < 2100 and shown.endswith("[timed out after 1s]") and "characters dropped" in shown
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_000


@pytest.mark.parametrize("command", ["mkfifo f", "mkdir f", "ln -s /dev/zero f", "printf '\\377\\376' > f"])
async def test_an_edit_of_what_is_no_file_is_an_observation(command: str, sandbox: Any) -> None:
    engine = ChatEngine([f'<shell>{command}</shell><edit path="f"><old>x</old><new>y</new></edit>', "<submit/>"])
    result = await ReactHarness(ReactConfig()).run(TASK, sandbox, policies(engine))
    assert result.outcome == "submitted"
    assert "[error]" in engine.requests[-1].messages[-1].text


async def test_a_script_without_exec_right_is_an_observation(sandbox: Any) -> None:
    """inspect_ai#4740's control: exit 126 is the command's, not the sandbox's."""
    engine = ChatEngine(["<shell>echo x > s; ./s</shell>", "<submit/>"])
    await ReactHarness(ReactConfig()).run(TASK, sandbox, policies(engine))
    assert engine.requests[-1].messages[-1].text.endswith("[exit 126]")


async def test_a_sandbox_that_dies_ends_the_episode_within_a_step(sandbox: Any, environment: Any) -> None:
    """mini-swe-agent#803."""

    class Killing(ChatEngine):
        async def chat(self, request: ChatRequest) -> ChatReply:
            if len(self.requests) == 1:
                await environment.delete(sandbox.sandbox_id)
            return await super().chat(request)

    engine = Killing(["<shell>echo a</shell>"] * 9)
    result = await ReactHarness(ReactConfig()).run(TASK, sandbox, policies(engine))
    assert result.failure is not None and result.failure.failure_class is FailureClass.INFRA
    assert result.failure.kind == "SandboxGone"
    assert len(engine.requests) == 2 and len(result.trajectory.turns) == 2


async def test_the_agents_limit_kills_its_command(sandbox: Any) -> None:
    engine = ChatEngine(["<shell>touch started; sleep 66; touch ended</shell>"])
    task = Task(task_id="t", instruction="x", agent_timeout_s=0.7)
    start = time.monotonic()
    result = await ReactHarness(ReactConfig()).run(task, sandbox, policies(engine))
    assert (result.outcome, len(result.trajectory.turns)) == ("timeout", 1)
    assert time.monotonic() - start < 4
    left = await sandbox.exec("ls; for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p; echo; done")
    assert "started" in left.stdout_text and "sleep 66" not in left.stdout_text


async def test_a_solution_with_a_folder_is_played(sandbox: Any, tmp_path: Path) -> None:
    (tmp_path / "solve.sh").write_text('echo "$WHO" > out.txt\n')
    steps = (SolutionStep(commands=("sh /solution/solve.sh",)),)
    task = Task(task_id="t", instruction="x", solution=Solution(steps=steps, folder=tmp_path, env={"WHO": "me"}))
    result = await ScriptedHarness(ScriptedConfig()).run(task, sandbox, {})
    assert (result.outcome, result.failure) == ("submitted", None)
    assert await sandbox.read_file("out.txt") == b"me\n"


async def test_many_episodes_at_once(environment: Any) -> None:
    async def play(number: int) -> str:
        name = f"harness-test-{uuid.uuid4().hex[:12]}"
        box = await environment.create(SandboxSpec(), sandbox_id=name)
        engine = ChatEngine([f"<shell>echo {number} > n; cat n</shell>", "<submit/>"])
        await ReactHarness(ReactConfig()).run(TASK, box, policies(engine))
        await box.aclose()
        await environment.delete(name)
        return engine.requests[-1].messages[-1].text

    assert await asyncio.gather(*map(play, range(12))) == [str(number) for number in range(12)]
