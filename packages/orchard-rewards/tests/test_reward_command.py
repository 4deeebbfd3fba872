"""The command reward: where the check runs, what it gets, and what its verdict is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from reward_fakes import FolderSandbox, episode

from orchard_api.errors import GraderError, SandboxFileError, SandboxGone, SandboxRequestError
from orchard_api.sandbox import ExecResult
from orchard_api.task import Check
from orchard_rewards.command import CommandConfig, CommandReward
from orchard_rewards.substitution import fill


def command(box: FolderSandbox, **options: Any) -> CommandReward:
    return CommandReward(CommandConfig(base=str(box.tmp), **options))


async def score(box: FolderSandbox, check: Check, **options: Any) -> Any:
    return await command(box, **options).score(episode(box, check))


@pytest.mark.parametrize(("line", "value"), [("true", 1.0), ("false", 0.0), ("exit 7", 0.0), ("kill -9 $$", 0.0)])
async def test_the_exit_code_is_the_verdict(line: str, value: float, box: FolderSandbox) -> None:
    assert (await score(box, Check(command=line))).value == value


async def test_a_check_sees_its_files_and_the_working_directory(box: FolderSandbox) -> None:
    (box.work / "out.txt").write_text("hello\n")
    check = Check(
        command='cmp "$WORKDIR/out.txt" expected/a && ./run.sh',
        files={"expected/a": b"hello\n", "run.sh": b'test -x run.sh && test -z "$FROM_AGENT"\n'},
    )
    result = await score(box, check)
    assert result.value == 1.0
    assert result.evidence["command"] == check.command and result.evidence["exit_code"] == 0
    assert (result.name, result.policy_version, result.components) == ("command", 4, {})


async def test_evidence_has_the_output_bounded(box: FolderSandbox) -> None:
    result = await score(box, Check(command="seq 10000; echo oops >&2; exit 3"))
    assert result.evidence["stdout"].startswith("[") and result.evidence["stdout"].endswith("\n10000\n")
    assert len(result.evidence["stdout"]) < 4100
    assert (result.evidence["stderr"], result.evidence["exit_code"], result.evidence["signal"]) == ("oops\n", 3, None)
    assert result.evidence["duration_s"] >= 0


@pytest.mark.parametrize("line", ["true", "false", "sleep 9"])
async def test_nothing_of_the_check_is_left(line: str, box: FolderSandbox) -> None:
    """OpenEnv#972: test sources and expected values must not be readable afterwards."""
    check = Check(command=line, files={"secret": b"expected value"}, timeout_s=0.3)
    if line == "sleep 9":
        with pytest.raises(GraderError, match=r"timeout of 0\.3 s"):
            await score(box, check)
    else:
        await score(box, check)
    assert list(box.tmp.iterdir()) == []


async def test_it_is_removed_when_scoring_is_cancelled(box: FolderSandbox) -> None:
    task = asyncio.create_task(score(box, Check(command="touch $WORKDIR/started; sleep 9", files={"a": b""})))
    while not (box.work / "started").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(box.tmp.iterdir()) == []


async def test_processes_are_killed_before_the_folder_is_made(box: FolderSandbox) -> None:
    class Watching(FolderSandbox):
        async def kill_processes(self) -> int:
            assert list(self.tmp.iterdir()) == []
            return await super().kill_processes()

    (box.top / "w").mkdir()
    watching = Watching(box.top / "w")
    await score(watching, Check(command="true"))
    assert watching.kills == 1


async def test_the_checks_own_timeout_counts(box: FolderSandbox) -> None:
    """NeMo-Gym#2296: the default limit of an exec must not cut a slow verifier."""
    await score(box, Check(command="true", timeout_s=1234.0))
    assert box.execs[0]["timeout_s"] == 1234.0


async def test_host_variables_are_filled_in_and_never_shown(
    box: FolderSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers#1401."""
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-value")
    check = Check(
        command='echo "got $KEY at $URL"; test "${#KEY}" = 15',
        env={"KEY": "${JUDGE_KEY}", "URL": "http://${JUDGE_HOST:-localhost}/x"},
    )
    assert command(box).missing(episode(box, check).task) == []
    result = await score(box, check)
    assert result.value == 1.0
    assert result.evidence["stdout"] == "got *** at http://localhost/x\n"
    assert "sk-secret" not in repr(result)
    monkeypatch.delenv("JUDGE_KEY")
    assert command(box).missing(episode(box, check).task) == [
        "task t: check.env KEY: ${JUDGE_KEY} is not set on this machine"
    ]
    with pytest.raises(GraderError, match="JUDGE_KEY"):
        await score(box, check)


async def test_a_secret_is_not_in_the_message_of_a_timeout(box: FolderSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-value")
    check = Check(command='echo "got $KEY"; sleep 9', env={"KEY": "${JUDGE_KEY}"}, timeout_s=0.3)
    with pytest.raises(GraderError) as caught:
        await score(box, check)
    assert "got ***" in str(caught.value)


def test_substitution() -> None:
    host = {"A": "value", "EMPTY": "", "B": "x"}
    filled = fill({"1": "a${A}b${B}", "2": "${EMPTY:-d}${NO:-}", "3": "$A ${bad-name}", "4": "${NO}"}, host)
    assert filled.values == {"1": "avaluebx", "2": "d", "3": "$A ${bad-name}", "4": ""}
    assert filled.unset == ("4: ${NO}",)
    assert filled.scrub("a value") == "a ***" and "value" not in repr(filled).replace("FilledEnv", "")


def test_what_is_missing_is_said_before_start(box: FolderSandbox, tmp_path: Path) -> None:
    assert command(box).missing(episode(box).task) == ["task t has no check to run"]
    gone = Check(command="true", folder=tmp_path / "gone")
    assert "does not exist" in command(box).missing(episode(box, gone).task)[0]


async def test_a_folder_is_uploaded_without_sidecar_files(box: FolderSandbox, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    (folder / "deep").mkdir(parents=True)
    for name, text in {"test.sh": "ls -A . deep", "._test.sh": "x", ".DS_Store": "x", "deep/a": "1", "b": "2"}.items():
        (folder / name).write_text(text)
    (folder / "exe").write_text("")
    (folder / "exe").chmod(0o755)
    check = Check(command="./test.sh && test -x exe && ! test -x b", folder=folder, files={"b": b"3"})
    result = await score(box, check)
    assert result.evidence["stdout"] == ".:\nb\ndeep\nexe\ntest.sh\n\ndeep:\na\n"
    assert result.value == 1.0


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
async def test_files_stay_in_the_folder(name: str, box: FolderSandbox) -> None:
    with pytest.raises(GraderError, match="does not stay inside"):
        await score(box, Check(command="true", files={name: b""}))


async def test_refused_files_are_the_graders_failure(box: FolderSandbox) -> None:
    box.skipped = (("a", "no space"),)
    with pytest.raises(GraderError, match="'a': no space"):
        await score(box, Check(command="true", files={"a": b""}))


async def test_a_target_is_made_anew_whatever_is_there(box: FolderSandbox) -> None:
    for trap in ("symlink", "folder", "file", "nothing"):
        target = box.top / "tests"
        if trap == "symlink":
            target.symlink_to(box.work)
        elif trap == "folder":
            target.mkdir()
            (target / "conftest.py").write_text("trap")
        elif trap == "file":
            target.write_text("trap")
        result = await score(box, Check(command="pwd; ls -A", files={"test.sh": b""}, target=str(target)))
        assert result.evidence["stdout"] == f"{target}\ntest.sh\n", trap
        assert not target.exists() and not (box.work / "test.sh").exists()


async def test_a_planted_link_on_the_way_to_the_target_is_replaced(box: FolderSandbox) -> None:
    (box.top / "opt").symlink_to(box.work)
    await score(box, Check(command="true", files={"a": b""}, target=str(box.top / "opt" / "tests")))
    assert (box.top / "opt").is_dir() and not (box.top / "opt").is_symlink()
    assert not (box.work / "tests").exists()


VERDICTS = [
    ("printf 0.25 > R/reward.txt", 0.25, {}),
    ("printf ' 1\\n' > R/reward.txt; exit 5", 1.0, {}),
    ("printf 0.5 > R/reward.json; printf 1 > R/reward.txt", 0.5, {}),
    ('printf \'{"reward": 1, "style": 0.5}\' > R/reward.json', 1.0, {"reward": 1.0, "style": 0.5}),
    ("printf '{\"style\": 0.5}' > R/reward.json", 0.5, {}),
]


@pytest.mark.parametrize(("line", "value", "components"), VERDICTS)
async def test_reward_files(line: str, value: float, components: dict[str, float], box: FolderSandbox) -> None:
    folder = str(box.top / "logs" / "verifier")
    result = await score(box, Check(command=line.replace("R/", folder + "/"), verdict="reward_file"))
    assert (result.value, result.components) == (value, components)
    assert box.kills == 2


NO_VERDICT = [
    "true",
    "touch R/reward.txt",
    "touch R/reward.json",
    "printf nan > R/reward.txt",
    "printf inf > R/reward.txt",
    "printf yes > R/reward.txt",
    "printf NaN > R/reward.json",
    "printf '{\"reward\": Infinity}' > R/reward.json",
    'printf \'{"reward": "1"}\' > R/reward.json',
    'printf \'{"reward": {"a": 1}}\' > R/reward.json',
    "printf '{\"reward\": true}' > R/reward.json",
    "printf '{}' > R/reward.json",
    "printf '[1]' > R/reward.json",
    "printf null > R/reward.json",
    "printf '\\377' > R/reward.json",
    'printf \'{"a": 1, "b": 2}\' > R/reward.json',
    "printf 1e999 > R/reward.json",
    "(printf 1; head -c 70000 /dev/zero | tr '\\0' 0) > R/reward.json",
    "head -c 100000 /dev/zero > R/reward.txt",
    "mkdir R/reward.txt",
    "mkfifo R/reward.txt",
    "head -c 50000 /dev/zero | tr '\\0' '[' > R/reward.json",
]


@pytest.mark.parametrize("line", NO_VERDICT)
async def test_anything_else_is_no_verdict(line: str, box: FolderSandbox) -> None:
    folder = str(box.top / "logs" / "verifier")
    with pytest.raises(GraderError):
        await score(box, Check(command=line.replace("R/", folder + "/"), verdict="reward_file"))


@pytest.mark.parametrize("trap", ["file", "link to a folder", "link to a file", "logs is a link"])
async def test_a_reward_file_of_the_agent_does_not_count(trap: str, box: FolderSandbox) -> None:
    logs, forged = box.top / "logs", box.work / "forged"
    forged.mkdir()
    (forged / "reward.json").write_text("1")
    (forged / "reward.txt").write_text("1")
    if trap == "logs is a link":
        (box.work / "verifier").mkdir()
        (box.work / "verifier" / "reward.json").write_text("1")
        logs.symlink_to(box.work)
    else:
        logs.mkdir()
        if trap == "link to a folder":
            (logs / "verifier").symlink_to(forged)
        else:
            (logs / "verifier").mkdir()
            if trap == "link to a file":
                (logs / "verifier" / "reward.json").symlink_to(forged / "reward.json")
            else:
                (logs / "verifier" / "reward.json").write_text("1")
    line = f"printf 0 > {logs}/verifier/reward.txt"
    assert (await score(box, Check(command=line, verdict="reward_file"))).value == 0.0
    assert (forged / "reward.json").read_text() == "1" and (forged / "reward.txt").read_text() == "1"


async def test_the_key_of_a_reward_object_can_be_chosen(box: FolderSandbox) -> None:
    line = f'printf \'{{"a": 1, "b": 2}}\' > {box.top}/logs/verifier/reward.json'
    assert (await score(box, Check(command=line, verdict="reward_file"), key="b")).value == 2.0


async def test_refusals_are_the_graders_failure_and_a_dead_sandbox_is_its_own(box: FolderSandbox) -> None:
    class Failing(FolderSandbox):
        error: Exception = SandboxRequestError("the working directory is gone")

        async def exec(self, command: Any, **options: Any) -> ExecResult:
            raise self.error

    (box.top / "f").mkdir()
    failing = Failing(box.top / "f")
    with pytest.raises(GraderError, match="the working directory is gone"):
        await score(failing, Check(command="true"))
    failing.error = SandboxGone("killed")
    with pytest.raises(SandboxGone):
        await score(failing, Check(command="true"))


async def test_there_must_be_a_check_and_a_sandbox(box: FolderSandbox) -> None:
    with pytest.raises(GraderError, match="no check"):
        await command(box).score(episode(box))
    with pytest.raises(GraderError, match="no live sandbox"):
        await command(box).score(episode(None, Check(command="true")))


@pytest.mark.parametrize("base", ["tmp", "/", "/tmp/", "/a\nb", ""])
def test_the_base_is_an_absolute_folder(base: str) -> None:
    with pytest.raises(ValidationError):
        CommandConfig(base=base)


async def test_values_of_this_machine_do_not_reach_the_check(
    box: FolderSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    result = await score(box, Check(command="env"))
    assert "HOST_SECRET" not in result.evidence["stdout"] and os.environ["HOST_SECRET"] == "x"


async def test_a_target_that_is_a_mount_point_is_emptied(box: FolderSandbox) -> None:
    class Mounted(FolderSandbox):
        async def remove(self, path: str, *, recursive: bool = False) -> None:
            if path != str(self.top / "tests"):
                return await super().remove(path, recursive=recursive)
            for file in (self.top / "tests").iterdir():
                file.unlink()
            raise SandboxFileError("busy", reason="other", path=path)

    (box.top / "m").mkdir()
    mounted = Mounted(box.top / "m")
    target = mounted.top / "tests"
    target.mkdir()
    (target / "trap").touch()
    result = await score(mounted, Check(command="ls -A", files={"a": b""}, target=str(target)))
    assert result.evidence["stdout"] == "a\n" and list(target.iterdir()) == []
