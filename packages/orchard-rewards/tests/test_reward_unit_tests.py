"""The unit_tests reward: report and exit code cross-checked, files restored, skipped and missing tests fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reward_fakes import FolderSandbox, episode

from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError
from orchard_api.task import Check
from orchard_rewards.junit import JunitError, parse_junit, report_name
from orchard_rewards.originals import matches
from orchard_rewards.unit_tests import UnitTestsConfig, UnitTestsReward

TESTS = ("tests/test_sum.py::test_a", "tests/test_sum.py::TestB::test_b[1-2]")


def report(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def case(name: str, inner: str = "", module: str = "tests.test_sum") -> str:
    return f'<testcase classname="{module}" name="{name}">{inner}</testcase>'


A, B = case("test_a"), case("test_b[1-2]", module="tests.test_sum.TestB")
GOOD = report(A, B)


def check(text: str | None, code: int = 0, tests: tuple[str, ...] = TESTS, before: str = "") -> Check:
    """A check that writes this report and exits so."""
    write = "cp report.xml $JUNIT; " if text is not None else ": no $JUNIT; "
    files = {} if text is None else {"report.xml": text.encode()}
    return Check(command=f"{before}{write}exit {code}", files=files, tests=tests)


async def score(box: FolderSandbox, it: Check | Episode, **options: Any) -> Score:
    reward = UnitTestsReward(UnitTestsConfig(base=str(box.tmp), **options))
    return await reward.score(it if isinstance(it, Episode) else episode(box, it))


async def test_all_passed(box: FolderSandbox) -> None:
    found = await score(box, check(GOOD))
    assert found.value == 1.0, found.evidence
    assert found.components == {"passed": 2.0, "failed": 0.0, "skipped": 0.0, "missing": 0.0}
    assert (found.name, found.policy_version) == ("unit_tests", 4)
    assert list(box.tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        (report(A, case("test_b[1-2]", "<failure/>", "tests.test_sum.TestB")), 1, ""),
        (report(A, case("test_b[1-2]", "<error/>", "tests.test_sum.TestB")), 1, ""),
        (report(A, case("test_b[1-2]", "<skipped/>", "tests.test_sum.TestB")), 0, ""),
        (report(A), 0, ""),
        (report(A, B, case("test_a", "<failure/>")), 1, ""),
        (report(A, B, case("test_c", "<failure/>")), 0, "their exit code is 0"),
        (GOOD, 1, "exit code is 1"),
        (GOOD, 137, "exit code is 137"),
        (report(), 0, ""),
        (None, 0, "no report was written"),
        (None, 1, "no report was written"),
        ("", 0, "not XML"),
        ("<testsuites>", 0, "not XML"),
        (GOOD + "x", 0, "not XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>' + GOOD, 0, "not XML"),
        ("<testsuite>" * 100 + "</testsuite>" * 100, 0, "nested too deeply"),
        (report(A.replace("testcase", "passedcase"), B), 0, ""),
    ],
)
async def test_what_is_not_proven_has_not_passed(text: str | None, code: int, problem: str, box: FolderSandbox) -> None:
    """SWE-bench#601, #620: exit code cross-check; SWE-smith#24: a test absent from the report has not passed."""
    found = await score(box, check(text, code))
    assert found.value == 0.0
    assert problem in found.evidence["problem"] and (problem or found.evidence["not_passed"])


async def test_other_tests_may_fail_where_the_wanted_ones_pass(box: FolderSandbox) -> None:
    other = report(A, B, case("test_c", "<failure/>"))
    assert (await score(box, check(other, 1))).value == 1.0
    assert (await score(box, check(other, 1, tests=()))).value == 0.0
    assert (await score(box, check(GOOD, 0, tests=()))).value == 1.0
    assert (await score(box, check(report(), 5, tests=()))).evidence["problem"] == "the report has no test"


async def test_a_share_of_them(box: FolderSandbox) -> None:
    half = report(A, case("test_b[1-2]", "<failure/>", "tests.test_sum.TestB"))
    found = await score(box, check(half, 1), value="share")
    assert (found.value, found.evidence["not_passed"]) == (0.5, ["failed: tests.test_sum.TestB::test_b[1-2]"])
    assert (await score(box, check(half, 0), value="share")).value == 0.0
    assert (await score(box, check(report(A)), value="share")).value == 0.5


async def test_a_timeout_is_the_agents_fault(box: FolderSandbox) -> None:
    """Its code runs in the tests: what never ends is scored, not masked."""
    found = await score(box, replace(check(GOOD, before="cp report.xml $JUNIT; sleep 30; "), timeout_s=0.3))
    assert found.value == 0.0 and "reached 0.3 s" in found.evidence["problem"]


@pytest.mark.parametrize("make", ["ln -s report.xml $JUNIT", "mkfifo $JUNIT", "mkdir $JUNIT"])
async def test_a_report_that_is_no_file_is_none(make: str, box: FolderSandbox) -> None:
    found = await score(box, Check(command=f"{make}; exit 0", files={"report.xml": GOOD.encode()}, tests=TESTS))
    assert found.value == 0.0 and found.evidence["problem"]


async def test_a_report_over_the_limit_is_none(box: FolderSandbox) -> None:
    found = await score(box, check(GOOD), report_bytes=50)
    assert (found.value, found.evidence["problem"]) == (0.0, "the report: too_large")


async def test_test_files_are_put_back_and_others_removed(box: FolderSandbox, tmp_path: Path) -> None:
    """verifiers#1212: the agent's edits of tests are undone, those of the source are kept."""
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_sum.py").write_text("assert add(1, 2) == 3\n")
    (folder / "tests" / "data.json").write_text("{}")
    (folder / "sum.py").write_text("def add(): ...\n")
    work = box.work
    (work / "elsewhere").mkdir()
    (work / "tests").symlink_to("elsewhere")
    (work / "elsewhere" / "test_sum.py").write_text("assert True\n")
    (work / "conftest.py").write_text("forge()\n")
    (work / "pkg").mkdir()
    (work / "pkg" / "evil.pth").write_text("import forge\n")
    (work / "sum.py").write_text("def add(a, b): return a + b\n")
    (work / "test_top.py").mkdir()
    line = (
        'cd "$WORKDIR"; test ! -L tests && cat tests/test_sum.py tests/data.json sum.py test_top.py; '
        "find . -name conftest.py -o -name '*.pth' -o -path ./elsewhere/test_sum.py; cp $OLDPWD/report.xml $JUNIT"
    )
    it = episode(box, Check(command=line, files={"report.xml": GOOD.encode()}, tests=TESTS))
    it = replace(it, task=replace(it.task, folder=folder, files={"test_top.py": b"top\n"}))
    found = await score(box, it)
    assert found.value == 1.0, found.evidence
    assert found.evidence["stdout"] == "assert add(1, 2) == 3\n{}def add(a, b): return a + b\ntop\n"
    assert (found.evidence["restored"], found.evidence["removed"]) == (3, 3)


async def test_nothing_is_protected_where_nothing_is_asked_to_be(box: FolderSandbox) -> None:
    (box.work / "conftest.py").write_text("mine")
    found = await score(box, check(GOOD), protect=())
    assert found.value == 1.0 and (box.work / "conftest.py").read_text() == "mine"


async def test_more_files_than_can_be_looked_at_score_nothing(box: FolderSandbox) -> None:
    for number in range(1001):
        (box.work / f"test_{number}.py").touch()
    found = await score(box, check(GOOD))
    assert found.value == 0.0 and "more files" in found.evidence["problem"]


async def test_without_a_sandbox_or_a_check_nothing_is_judged(box: FolderSandbox) -> None:
    for it in (episode(None, check(GOOD)), episode(box)):
        with pytest.raises(GraderError):
            await score(box, it)


def test_what_a_task_lacks_is_said_before_start() -> None:
    reward = UnitTestsReward(UnitTestsConfig())
    assert "no check" in reward.missing(episode(None).task)[0]
    assert "$JUNIT" in reward.missing(episode(None, Check(command="pytest")).task)[0]
    assert reward.missing(episode(None, check(GOOD)).task) == []


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/test_a.py::test_b", "tests.test_a::test_b"),
        ("tests/test_a.py::TestC::test_b[x/y.py::z]", "tests.test_a.TestC::test_b[x/y.py::z]"),
        ("test_a.py::test_b", "test_a::test_b"),
        ("pkg.ClassTest::method", "pkg.ClassTest::method"),
    ],
)
def test_names_of_reports(test: str, name: str) -> None:
    assert report_name(test) == name


def test_a_bomb_is_refused_at_once() -> None:
    bomb = '<!DOCTYPE b [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY a{n} "{"&a" + str(n - 1) + ";" if n else "&a;"}{"&a;" * 9}">' for n in range(20)
    )
    with pytest.raises(JunitError):
        parse_junit(f"{bomb}]><testsuite>&a19;</testsuite>".encode())


def test_patterns_are_for_names_or_paths() -> None:
    assert matches("a/b/conftest.py", ("conftest.py",)) and matches("tests/a/b.txt", ("tests/*",))
    assert not matches("src/tests.py", ("tests/*",)) and not matches("a/tests/b", ("tests/*",))
