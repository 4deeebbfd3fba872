"""The conformance suites: their rules, good fakes that pass, and for each check a mutant that it catches."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
from suite_fakes import (
    GoodHarness,
    GoodHarnessSuite,
    GoodReward,
    GoodRewardSuite,
    GoodTrainer,
    GoodTrainerSuite,
    MemoryEnvironment,
    memory_environment,
)

from orchard_api.episode import Episode, HarnessResult, Score
from orchard_api.errors import InfraError, OrchardError
from orchard_api.task import Task
from orchard_api.testing import BackendChecks, Override, PluginSuite, Suite, checks_of, needs
from orchard_api.testing import reward as reward_module
from orchard_api.training import UpdateReport
from orchard_api.trajectory import Trajectory, Turn

# --- the rules -----------------------------------------------------------------------------------------------------


class Checks(BackendChecks):
    """A suite of two checks."""

    environment = staticmethod(memory_environment)

    async def check_right(self, subject: Any) -> None:
        assert subject.environment

    async def check_wrong(self, subject: Any) -> None:
        raise AssertionError("wrong")

    @needs("Pty")
    async def check_with_a_terminal(self, subject: Any) -> None:
        raise AssertionError("never run")


def test_each_check_is_a_test() -> None:
    assert checks_of(Checks) == ["right", "with_a_terminal", "wrong"]
    Checks().test_right()  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="wrong"):
        Checks().test_wrong()  # type: ignore[attr-defined]


def test_what_a_backend_does_not_declare_is_skipped_and_what_it_declares_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(pytest.skip.Exception, match="does not have: Pty"):
        Checks().test_with_a_terminal()  # type: ignore[attr-defined]
    able = type(MemoryEnvironment.capabilities)(powers=frozenset({"Pty"}))
    monkeypatch.setattr(MemoryEnvironment, "capabilities", able)
    with pytest.raises(AssertionError, match="never run"):
        Checks().test_with_a_terminal()  # type: ignore[attr-defined]


@pytest.mark.parametrize("reason", ["", "   ", "todo"])
def test_an_override_needs_a_reason(reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Override(reason)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"overrides": {"rihgt": Override("this name does not exist")}}, "'rihgt', which is not a check"),
        ({"overrides": {"wrong": "a text"}}, "without a reason"),
        ({"check_wrong": lambda self, subject: None}, "may not replace check_wrong"),
        ({"test_wrong": lambda self: None}, "may not replace test_wrong"),
        ({"test_wrong": None}, "may not replace test_wrong"),
    ],
)
def test_a_check_is_not_lost_by_accident(body: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("TestMine", (Checks,), body)


def test_an_override_is_a_strict_xfail(pytester: pytest.Pytester) -> None:
    """A check that fails as said is xfailed; one that passes though it is said to fail is a failure."""
    pytester.makepyfile(
        """
        from contextlib import asynccontextmanager
        from orchard_api.testing import Override, Suite

        class Two(Suite):
            async def check_right(self): assert True
            async def check_wrong(self): assert False
            async def check_other(self): assert True

        class TestMine(Two):
            overrides = {
                "wrong": Override("this backend can not do it"),
                "other": Override("this used to fail, long ago"),
            }
        """
    )
    result = pytester.runpytest_subprocess("-rx", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*long ago*"])


def test_what_is_not_said_is_asked_for() -> None:
    class Silent(BackendChecks):
        async def check_any(self, subject: Any) -> None: ...

    with pytest.raises(NotImplementedError, match="asynccontextmanager named `environment`"):
        Silent().test_any()  # type: ignore[attr-defined]


async def test_a_check_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Suite):
        async def check_long(self) -> None:
            await asyncio.sleep(600)

    monkeypatch.setattr("orchard_api.testing.suite.CHECK_S", 0.1)
    with pytest.raises(TimeoutError):
        await Hangs().run_check("long")


# --- good fakes ----------------------------------------------------------------------------------------------------

GOOD: tuple[type[Suite], ...] = (GoodHarnessSuite, GoodRewardSuite, GoodTrainerSuite)


@pytest.mark.parametrize(
    ("suite", "check"), [pytest.param(suite, name, id=name) for suite in GOOD for name in checks_of(suite)]
)
async def test_a_good_plugin_passes(suite: type[Suite], check: str) -> None:
    await suite().run_check(check)


# --- mutants: one fault each, and the check that must see it --------------------------------------------------------

MUTANTS: dict[tuple[type[Suite], str], type] = {}


def mutant(suite: type[Suite], check: str) -> Callable[[type], type]:
    def register(made: type) -> type:
        assert (suite, check) not in MUTANTS
        MUTANTS[suite, check] = made
        return made

    return register


@mutant(GoodHarnessSuite, "an_episode_is_whole")
class BadIndices(GoodHarness):
    async def run(self, *args: Any) -> HarnessResult:
        result = await super().run(*args)
        return HarnessResult(trajectory=Trajectory(turns=result.trajectory.turns[1:]), outcome=result.outcome)


@mutant(GoodHarnessSuite, "it_needs_what_it_is_given")
class UndeclaredJudge(GoodHarness):
    async def run(self, task: Task, sandbox: Any, policies: Mapping[str, Any]) -> HarnessResult:
        return await super().run(task, sandbox, {"main": policies["judge"]})


@mutant(GoodHarnessSuite, "episodes_run_side_by_side")
class SharedTurns(GoodHarness):
    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def play(self, task: Any, sandbox: Any, policy: Any, turns: list[Turn]) -> None:
        await super().play(task, sandbox, policy, self.turns)
        turns[:] = self.turns


@mutant(GoodHarnessSuite, "a_policy_that_is_down_is_an_infra_failure")
class Raises(GoodHarness):
    def on_error(self, error: OrchardError, turns: list[Turn]) -> HarnessResult:
        raise error


@mutant(GoodHarnessSuite, "a_sandbox_that_is_cut_off_is_an_infra_failure")
class ShowsInfra(GoodHarness):
    async def act(self, sandbox: Any, command: str) -> str:
        try:
            return await super().act(sandbox, command)
        except InfraError as error:
            return str(error)


@mutant(GoodHarnessSuite, "the_agents_time_is_kept")
class LateIsFailed(GoodHarness):
    def on_timeout(self) -> Any:
        return "failed"


@mutant(GoodHarnessSuite, "a_cancelled_episode_ends_at_once")
class SwallowsCancel(GoodHarness):
    async def run(self, *args: Any) -> HarnessResult:
        try:
            return await super().run(*args)
        except asyncio.CancelledError:
            return HarnessResult(trajectory=Trajectory(), outcome="stopped")


@mutant(GoodRewardSuite, "good_is_better_than_bad")
class AlwaysOne(GoodReward):
    async def score(self, episode: Episode) -> Score:
        await super().score(episode)
        return Score(name="fake", value=1.0)


@mutant(GoodRewardSuite, "a_score_is_well_formed")
class NotANumber(GoodReward):
    async def score(self, episode: Episode) -> Score:
        score = await super().score(episode)
        return Score(name="fake", value=score.value, components={"tests": float("nan")})


@mutant(GoodRewardSuite, "it_says_the_same_twice")
class EatsTheEvidence(GoodReward):
    async def score(self, episode: Episode) -> Score:
        score = await super().score(episode)
        await episode.sandbox.write_file("answer.txt", b"")  # type: ignore[union-attr]
        return score


@mutant(GoodRewardSuite, "it_judges_side_by_side")
class OneForAll(GoodReward):
    async def score(self, episode: Episode) -> Score:
        self.episode = episode
        await asyncio.sleep(0.01)
        return await super().score(self.episode)


@mutant(GoodRewardSuite, "what_a_task_lacks_is_said_before")
class AsksNothing(GoodReward):
    def missing(self, task: Task) -> list[str]:
        return []


@mutant(GoodRewardSuite, "an_outage_is_not_a_score")
class OutageIsZero(GoodReward):
    async def score(self, episode: Episode) -> Score:
        try:
            return await super().score(episode)
        except InfraError:
            return Score(name="fake", value=0.0)


@mutant(GoodRewardSuite, "its_time_is_bounded")
class Unbounded(GoodReward):
    def deadline_s(self, task: Task) -> float:
        return float("inf")


@mutant(GoodTrainerSuite, "versions_grow_by_one")
class SkipsVersions(GoodTrainer):
    async def update(self, batch: Any) -> UpdateReport:
        await super().update(batch)
        return await super().update(batch)


@mutant(GoodTrainerSuite, "it_learns")
class Unlearns(GoodTrainer):
    async def update(self, batch: Any) -> UpdateReport:
        self.version += 1
        self.logprob -= 0.01
        return UpdateReport(version=self.version)


@mutant(GoodTrainerSuite, "forward_changes_nothing")
class ForwardDraws(GoodTrainer):
    async def forward(self, batch: Any, what: Any) -> Any:
        self.logprob += 1e-6
        return await super().forward(batch, what)


@mutant(GoodTrainerSuite, "a_checkpoint_continues_exactly")
class ForgetsMomentum(GoodTrainer):
    def state(self) -> dict[str, float]:
        return {**super().state(), "momentum": 0.0}


@mutant(GoodTrainerSuite, "published_weights_are_in_the_store")
class PublishesThePast(GoodTrainer):
    async def publish(self) -> int:
        await self.store.put(self.version, {"logprob": -3.0})
        return self.version


@mutant(GoodTrainerSuite, "unknown_options_are_refused")
class TakesAnything(GoodTrainer):
    async def configure(self, options: Any, *, updates: int) -> None:
        pass


@mutant(GoodTrainerSuite, "the_event_loop_is_free")
class Blocks(GoodTrainer):
    async def update(self, batch: Any) -> UpdateReport:
        for _ in itertools.repeat(None, 30_000_000):
            pass
        return await super().update(batch)


@mutant(GoodTrainerSuite, "closing_twice_is_fine")
class ClosesOnce(GoodTrainer):
    async def aclose(self) -> None:
        await super().aclose()
        if self.closed == 2:
            raise RuntimeError("closed already")


@pytest.mark.parametrize(
    ("suite", "check"), [pytest.param(suite, name, id=name) for suite in GOOD for name in checks_of(suite)]
)
async def test_each_check_catches_its_mutant(suite: type[Suite], check: str) -> None:
    wrong = suite()
    wrong.made = MUTANTS[suite, check]  # type: ignore[attr-defined]
    with pytest.raises((AssertionError, InfraError, RuntimeError, ValueError, KeyError, pytest.fail.Exception)):
        await wrong.run_check(check)


async def test_skipping_is_only_for_what_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that does look into the sandbox may not say that it doesn't: its other checks would still see it."""
    suite = GoodRewardSuite()
    suite.uses_sandbox = False
    with pytest.raises(pytest.skip.Exception):
        await suite.run_check("an_outage_is_not_a_score")
    assert reward_module.RewardSuite.uses_sandbox
    harness = GoodHarnessSuite()
    monkeypatch.setattr(GoodHarness, "needs", ())
    with pytest.raises(pytest.skip.Exception):
        await harness.run_check("a_cancelled_episode_ends_at_once")


# --- plugins --------------------------------------------------------------------------------------------------------

GOOD_PLUGIN = """
from orchard_api.hookspecs import DoctorCheck, hookimpl

@hookimpl
def orchard_register(registrar):
    registrar.add("reward", "fake", "{name}_target:Target", config="{name}_target:Config",
                  summary="A reward that is a fake.")

@hookimpl
def orchard_doctor():
    return [DoctorCheck(name="fake", ok=False, detail="it is not there", fix="make it")]
"""
GOOD_TARGET = """
from orchard_api.registry import PluginConfig

class Config(PluginConfig):
    size: int = 1

class Target:
    def __init__(self, config): pass
"""
PLUGIN_MUTANTS = {
    "it_registers_something": (lambda text: text.replace("@hookimpl\ndef orchard_reg", "def orchard_reg"), None),
    "targets_can_be_imported": (None, lambda text: text.replace("class Target", "class Other")),
    "unknown_options_are_refused": (
        None,
        lambda text: text.replace(
            "orchard_api.registry import PluginConfig", "pydantic import BaseModel as PluginConfig"
        ),
    ),
    "each_says_what_it_is": (lambda text: text.replace("A reward that is a fake.", ""), None),
    "loading_is_light": (lambda text: "import pyarrow\n" + text, None),
    "the_doctor_answers": (lambda text: text.replace('fix="make it"', 'fix=""'), None),
}


class OnePlugin(PluginSuite):
    """Not collected: its checks are run by name."""

    name = ""
    distribution: ClassVar[str] = "none"

    def points(self) -> list[EntryPoint]:
        return [EntryPoint(name="fake", value=f"{self.name}_plugin", group="orchard")]


def write_plugin(folder: Path, name: str, changes: tuple[Any, Any]) -> OnePlugin:
    plugin, target = (change or (lambda text: text) for change in changes)
    (folder / f"{name}_plugin.py").write_text(plugin(GOOD_PLUGIN.replace("{name}", name)))
    (folder / f"{name}_target.py").write_text(target(GOOD_TARGET))
    suite = OnePlugin()
    suite.name = name
    return suite


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("check", checks_of(PluginSuite))
async def test_plugins_good_and_wrong(check: str, folder: Path) -> None:
    good, wrong = f"good_{check}", f"wrong_{check}"
    await write_plugin(folder, good, (None, None)).run_check(check)
    with pytest.raises((AssertionError, OrchardError)):
        await write_plugin(folder, wrong, PLUGIN_MUTANTS[check]).run_check(check)
    for module in [name for name in sys.modules if name.startswith((good, wrong))]:
        del sys.modules[module]


async def test_a_doctor_that_fails_is_seen(folder: Path) -> None:
    fails = write_plugin(
        folder, "failing", (lambda text: text.replace("    return [Doctor", "    1 / 0; [Doctor"), None)
    )
    with pytest.raises(AssertionError, match="its check failed: ZeroDivisionError"):
        await fails.run_check("the_doctor_answers")
