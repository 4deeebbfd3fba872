"""The `unit_tests` reward: the tests that must pass did, by their report and by their exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from orchard_api.episode import Episode, Score
from orchard_api.errors import SandboxFileError
from orchard_api.sandbox import ExecResult
from orchard_api.task import Task
from orchard_rewards.check_run import CheckFolder, check_folder, check_problems
from orchard_rewards.command import CheckConfig
from orchard_rewards.junit import JunitError, JunitReport, parse_junit, report_name
from orchard_rewards.originals import TooManyFilesError, restore

_SHOWN = 20
_NAME = 300

PROTECTED = (
    *("conftest.py", "test_*.py", "*_test.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "tests/*", "test/*"),
)
"""What decides how Python's tests run."""


class UnitTestsConfig(CheckConfig):
    """Options of `unit_tests`."""

    protect: tuple[str, ...] = Field(
        default=PROTECTED,
        description="files in the working directory that are put back as the task has them, or removed where it has "
        "none; a name, or a path where the pattern holds a /",
    )
    value: Literal["all", "share"] = Field(
        default="all", description="1 when all pass, else 0; or the share of the wanted tests that passed"
    )
    report_bytes: int = Field(default=16 << 20, ge=1, description="a longer report counts as none")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    missing: int = 0
    problem: str = ""
    shown: tuple[str, ...] = ()

    @property
    def wanted(self) -> int:
        return self.passed + self.failed + self.skipped + self.missing


class UnitTestsReward:
    """Runs `task.check`, which writes a junit report to `$JUNIT`, and counts the tests that must pass.

    The tests run the agent's code, so what it does to them is its own fault: a crash, a timeout, a report that is
    not there or contradicts the exit code are a score of 0, not a grader's failure. Skipped and missing tests have not
    passed.
    """

    Config = UnitTestsConfig

    def __init__(self, config: UnitTestsConfig) -> None:
        self._config = config

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`."""
        problems = check_problems(task)
        check = task.check
        if check is not None and "JUNIT" not in check.command and not (check.files or check.folder):
            problems.append(
                f"task {task.task_id}: its check writes no report; its command must write a junit report to $JUNIT"
            )
        return problems

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`."""
        async with check_folder(episode, base=self._config.base) as place:
            try:
                changed = await restore(place.sandbox, episode.task, self._config.protect)
            except TooManyFilesError:
                verdict = _Verdict(problem="the agent left more files under protected names than can be looked at")
                return self._score(episode, verdict, {})
            report = f"{place.root}/junit.xml"
            result = await place.run({"JUNIT": report})
            # Whoever still runs could rewrite the report.
            await place.sandbox.kill_processes()
            verdict = self._judge(place, result, await self._read(place, report))
            return self._score(episode, verdict, {**changed, **place.evidence(result)})

    async def _read(self, place: CheckFolder, path: str) -> JunitReport | str:
        """The report, or what is wrong with it."""
        try:
            info = await place.sandbox.stat(path, follow=False)
            if info.kind != "file":
                return f"the report is a {info.kind}"
            return parse_junit(await place.sandbox.read_file(path, limit=self._config.report_bytes))
        except SandboxFileError as error:
            return "no report was written" if error.reason == "not_found" else f"the report: {error.reason}"
        except JunitError as error:
            return str(error)

    def _judge(self, place: CheckFolder, result: ExecResult, report: JunitReport | str) -> _Verdict:
        wanted = place.check.tests
        if result.timed_out:
            return _Verdict(missing=len(wanted), problem=f"the tests reached {place.check.timeout_s:g} s")
        if isinstance(report, str):
            return _Verdict(missing=len(wanted), problem=report)
        names = [report_name(test) for test in wanted] or list(report.outcomes)
        found = [report.outcomes.get(name) for name in names]
        count = {outcome: found.count(outcome) for outcome in ("passed", "failed", "skipped")}
        bad = tuple(
            f"{outcome or 'missing'}: {name[:_NAME]}"
            for name, outcome in zip(names, found, strict=True)
            if outcome != "passed"
        )
        problem = ""
        if not names:
            problem = "the report has no test"
        elif not result.ok and not report.count("failed"):
            problem = f"no test failed by the report, but the tests' exit code is {result.exit_code}"
        elif result.ok and report.count("failed"):
            problem = "tests failed by the report, but their exit code is 0"
        return _Verdict(**count, missing=found.count(None), problem=problem, shown=bad[:_SHOWN])

    def _score(self, episode: Episode, verdict: _Verdict, evidence: dict[str, object]) -> Score:
        share = verdict.passed / max(verdict.wanted, 1)
        if verdict.problem:
            share = 0.0
        value = share if self._config.value == "share" else float(share == 1.0)
        counts = ("passed", "failed", "skipped", "missing")
        return Score(
            name="unit_tests",
            value=value,
            components={name: float(getattr(verdict, name)) for name in counts},
            evidence={"problem": verdict.problem, "not_passed": list(verdict.shown), **evidence},
            policy_version=episode.policy_version,
        )
