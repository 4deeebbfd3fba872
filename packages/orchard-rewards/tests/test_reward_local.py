"""Rewards in real sandboxes on this machine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from reward_fakes import episode
from reward_places import Place, assert_not_forged, need
from reward_tricks import TRICKS

from orchard_api.errors import GraderError, PluginError
from orchard_api.plugins import PluginHost
from orchard_api.sandbox import SandboxSpec
from orchard_api.task import Check
from orchard_rewards.command import CommandConfig, CommandReward
from orchard_rewards.exact import ExactConfig, ExactReward
from orchard_rewards.unit_tests import UnitTestsConfig, UnitTestsReward

pytestmark = pytest.mark.real
REWARD = CommandReward(CommandConfig())
Make = Callable[..., Awaitable[Any]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes sandboxes of the `local` environment."""
    try:
        entry = PluginHost().registry.get("environment", "local")
    except PluginError:
        pytest.skip("pip install orchard-agent")
    environment = entry.build(entry.config_model()())
    await environment.start()

    async def create(**spec: Any) -> Any:
        sandbox = await environment.create(SandboxSpec(**spec), sandbox_id=f"reward-test-{uuid.uuid4().hex[:12]}")
        made.append(sandbox)
        return sandbox

    made: list[Any] = []
    yield create
    for sandbox in made:
        await sandbox.aclose()
        await environment.delete(sandbox.sandbox_id)
    await environment.aclose()


async def listing(sandbox: Any, folder: str = "/tmp") -> list[str]:
    return [info.name for info in await sandbox.list_dir(folder)]


async def test_a_check_passes_fails_and_leaves_nothing(make: Make) -> None:
    """OpenEnv#972."""
    sandbox = await make()
    await sandbox.write_file("out.txt", b"hello\n")
    before = await listing(sandbox)
    for expected, value in ((b"hello\n", 1.0), (b"zebra\n", 0.0)):
        check = Check(command='cmp "$WORKDIR/out.txt" expected', files={"expected": expected})
        score = await REWARD.score(episode(sandbox, check))
        assert score.value == value, score.evidence
        assert await listing(sandbox) == before
    found = await sandbox.exec("grep -rls zebra /tmp /home $PWD; true")
    assert found.stdout == b""


@pytest.mark.parametrize("name", TRICKS)
async def test_a_trick_does_not_forge_the_verdict(name: str, make: Make) -> None:
    trick = TRICKS[name]
    need(trick.needs)
    probe = await make()
    where = (await probe.exec('printf "%s\\n" "$PWD" "$HOME"')).stdout_text.split("\n")
    place = Place(sandbox=probe, work=where[0], home=where[1], tmp="/tmp")
    if trick.env:
        env = {key: place.at(value) for key, value in trick.env.items()}
        place = Place(sandbox=await make(env=env), work=where[0], home=where[1], tmp="/tmp")
    await assert_not_forged(trick, place)


LURK = b"""while :; do
  for f in /tmp/orchard-*/check/check.sh; do
    [ -e $f ] || continue
    grep -qs 'exit 0' $f || echo exit 0 > $f
  done
done
"""


async def test_a_process_that_waits_for_the_check_is_gone(make: Make) -> None:
    sandbox = await make()
    await sandbox.write_file("/tmp/lurk.sh", LURK)
    await sandbox.exec("setsid sh /tmp/lurk.sh >/dev/null 2>&1 &")
    await sandbox.exec("mkdir -p /tmp/orchard-control/check; touch /tmp/orchard-control/check/check.sh")
    await asyncio.sleep(0.2)
    assert await sandbox.read_file("/tmp/orchard-control/check/check.sh") == b"exit 0\n", "it did not even live"
    check = Check(command="sleep 0.2; sh check.sh", files={"check.sh": b"exit 1\n"})
    score = await REWARD.score(episode(sandbox, check))
    assert (score.value, score.evidence["exit_code"]) == (0.0, 1)


async def test_a_target_that_the_agent_prepared_is_made_anew(make: Make) -> None:
    sandbox = await make()
    check = Check(command="ls -A; sh test.sh", files={"test.sh": b"exit 1\n"}, target="/tmp/deep/tests")
    for trap in (
        "mkdir -p /tmp/deep/tests && touch /tmp/deep/tests/conftest.py",
        "rm -rf /tmp/deep; ln -s $PWD /tmp/deep; mkdir -p tests",
        "rm -rf /tmp/deep; mkdir /tmp/deep; ln -s $PWD /tmp/deep/tests",
        "rm -rf /tmp/deep; touch /tmp/deep",
        "rm -rf /tmp/deep; mkdir -p /tmp/deep/tests/a/b; chmod 000 /tmp/deep/tests/a",
        "rm -rf /tmp/deep; mkfifo /tmp/deep",
    ):
        assert (await sandbox.exec(trap)).ok
        score = await REWARD.score(episode(sandbox, check))
        assert (score.value, score.evidence["stdout"]) == (0.0, "test.sh\n"), trap


HARBOR = Check(
    command="bash /tests/test.sh",
    files={"test.sh": b'echo "$(cat "$WORKDIR/score")" > /logs/verifier/reward.txt\n'},
    target="/tests",
    verdict="reward_file",
)


async def test_a_harbor_check_has_its_places(make: Make) -> None:
    sandbox = await make()
    await sandbox.write_file("score", b"0.25")
    assert (await REWARD.score(episode(sandbox, HARBOR))).value == 0.25
    assert await sandbox.list_dir("/tests") == []


@pytest.mark.parametrize(
    "trap",
    [
        "echo 1 > /logs/verifier/reward.json",
        "rm -rf /logs/verifier; ln -s $PWD /logs/verifier; echo 1 > reward.json",
        "mkfifo /logs/verifier/reward.json",
        "head -c 5000000 /dev/zero > /logs/verifier/reward.json",
        "mkdir -p /logs/verifier/reward.json/x; chmod 000 /logs/verifier/reward.json",
    ],
)
async def test_a_reward_file_of_the_agent_does_not_count(trap: str, make: Make) -> None:
    sandbox = await make()
    await sandbox.exec("mkdir -p /logs/verifier")
    assert (await sandbox.exec(trap)).ok
    await sandbox.write_file("score", b"0")
    start = time.monotonic()
    assert (await REWARD.score(episode(sandbox, HARBOR))).value == 0.0
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "write", ["mkfifo R", "head -c 5000000 /dev/zero > R", "ln -s /dev/zero R", "printf '\\377' > R"]
)
async def test_a_reward_file_that_is_none_is_no_verdict(write: str, make: Make) -> None:
    sandbox = await make()
    check = Check(command=write.replace("R", "/logs/verifier/reward.json"), verdict="reward_file")
    start = time.monotonic()
    with pytest.raises(GraderError):
        await REWARD.score(episode(sandbox, check))
    assert time.monotonic() - start < 5


async def test_a_check_that_hangs_is_no_verdict_and_its_processes_are_gone(make: Make) -> None:
    sandbox = await make()
    check = Check(command="setsid sleep 77 & sleep 78", timeout_s=0.5)
    with pytest.raises(GraderError, match="timeout"):
        await REWARD.score(episode(sandbox, check))
    left = await sandbox.exec("for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p; echo; done")
    assert "sleep 7" not in left.stdout_text


async def test_a_check_that_cannot_be_placed_is_not_a_zero(make: Make) -> None:
    sandbox = await make()
    check = Check(command="true", files={"a": b"x"}, target="/proc/tests")
    with pytest.raises(GraderError, match="could not be run"):
        await REWARD.score(episode(sandbox, check))


async def test_an_answer_file_is_read_without_trust(make: Make) -> None:
    sandbox = await make()
    reward = ExactReward(ExactConfig(file="answer.txt", limit_bytes=1000))
    for write, value in (
        ("printf 42 > answer.txt", 1.0),
        ("rm answer.txt; mkfifo answer.txt", 0.0),
        ("rm answer.txt; ln -s /dev/zero answer.txt", 0.0),
        ("rm answer.txt; head -c 100000 /dev/zero > answer.txt", 0.0),
        ("rm answer.txt; mkdir answer.txt", 0.0),
    ):
        assert (await sandbox.exec(write)).ok
        assert (await reward.score(episode(sandbox, expected="42"))).value == value, write


async def test_a_small_check_is_quick(make: Make) -> None:
    """The quickstart plays thousands of episodes; the bound is loose because machines differ."""
    sandbox = await make()
    await sandbox.write_file("out.txt", b"hello\n")
    check = Check(command='cmp -s "$WORKDIR/out.txt" expected', files={"expected": b"hello\n"})
    took = []
    for _ in range(20):
        start = time.perf_counter()
        assert (await REWARD.score(episode(sandbox, check))).value == 1.0
        took.append(time.perf_counter() - start)
    assert sorted(took)[10] < 0.05


RUNNER = b"""import importlib.util, os, sys, traceback, xml.sax.saxutils as x
rows, bad = [], 0
path = os.environ["WORKDIR"] + "/test_sum.py"
spec = importlib.util.spec_from_file_location("test_sum", path)
module = importlib.util.module_from_spec(spec)
sys.path.insert(0, os.environ["WORKDIR"])
spec.loader.exec_module(module)
for name in sorted(n for n in vars(module) if n.startswith("test_")):
    inner = ""
    try:
        getattr(module, name)()
    except Exception:
        bad, inner = 1, "<failure>" + x.escape(traceback.format_exc()) + "</failure>"
    rows.append(f'<testcase classname="test_sum" name="{name}">{inner}</testcase>')
open(os.environ["JUNIT"], "w").write("<testsuite>" + "".join(rows) + "</testsuite>")
sys.exit(bad)
"""
TEST = b"import adder\ndef test_a(): assert adder.add(1, 2) == 3\n"


@pytest.mark.parametrize(
    ("source", "value", "problem"),
    [
        ("def add(a, b): return a + b", 1.0, ""),
        ("def add(a, b): return a - b", 0.0, ""),
        ("import os; os._exit(0)", 0.0, "no report was written"),
        ("import sys; sys.exit(0)", 0.0, "no report was written"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 0.0, "no report was written"),
        ("def add(a, b):\n  while True: pass", 0.0, "reached"),
        (
            "import os\nopen(os.environ['JUNIT'], 'w').write('<testsuite><testcase name=\"x\"/></testsuite>')\n"
            "os._exit(0)",
            0.0,
            "",
        ),
    ],
)
async def test_unit_tests_of_the_agents_code(source: str, value: float, problem: str, make: Make) -> None:
    """The agent weakened the test and left its code; the task's own test is what runs."""
    sandbox = await make()
    await sandbox.write_file("test_sum.py", b"def test_a(): pass\n")
    await sandbox.write_file("adder.py", source.encode())
    await sandbox.write_file("sitecustomize.py", b"import os; os._exit(0)\n")
    check = Check(
        command="python3 run.py  # writes $JUNIT",
        files={"run.py": RUNNER},
        tests=("test_sum.py::test_a",),
        timeout_s=5,
    )
    it = episode(sandbox, check)
    it = replace(it, task=replace(it.task, files={"test_sum.py": TEST}))
    score = await UnitTestsReward(UnitTestsConfig()).score(it)
    assert score.value == value, score.evidence
    assert problem in score.evidence["problem"]
    assert score.evidence["restored"] == 1 and score.evidence["removed"] == 1
