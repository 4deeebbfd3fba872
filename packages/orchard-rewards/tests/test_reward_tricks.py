"""No file that an agent leaves turns a failing check into a passing one; each trick is first shown to work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reward_fakes import FolderSandbox, episode
from reward_tricks import FAILING, TRICKS, Trick

from orchard_api.task import Check
from orchard_rewards.command import CommandConfig, CommandReward

PYTHON_DIR = str(Path(sys.executable).parent)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A sandbox, where its places are, and how a check is run there without care."""

    sandbox: Any
    work: str
    home: str
    tmp: str

    def at(self, text: str) -> str:
        """A trick's text with this sandbox's places."""
        for name, path in (("WORK", self.work), ("HOME/", self.home + "/"), ("TMP", self.tmp)):
            text = text.replace(name, path)
        return text.replace("FILES", f"{self.tmp}/naive")

    async def leave(self, trick: Trick) -> None:
        """Do what the agent does."""
        if trick.needs == "git":
            await self.sandbox.exec(
                "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x; rm -f forged"
            )
        found = await self.sandbox.exec("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'")
        version = found.stdout_text.strip() or "3"
        for name, data in trick.files.items():
            path = self.at(name).replace("$V", version)
            if name == "WORK/config.add":
                await self.sandbox.exec(f"git config core.fsmonitor 'touch {self.work}/forged; true'")
                continue
            mode = 0o755 if data.startswith(b"#!") else 0o644
            await self.sandbox.write_file(path, self.at(data.decode()).encode(), mode=mode)

    async def naive(self, trick: Trick) -> int | None:
        """The check as one would run it without care: 0 means that the trick worked."""
        for name, data in FAILING.items():
            await self.sandbox.write_file(f"{self.tmp}/naive/{name}", data)
        env = {key: self.at(value) for key, value in trick.env.items()}
        result = await self.sandbox.exec(self.at(trick.naive), env={"HOME": self.home, **env})
        await self.sandbox.exec(f"rm -rf {self.tmp}/naive {self.work}/forged {self.work}/check.py")
        return result.exit_code


class WritableFolder(FolderSandbox):
    """The stand-in with what an agent needs; variables of `spec` are those of the task's sandbox."""

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        self.spec: dict[str, str] = {}

    async def exec(self, command: Any, *, env: Any = None, **options: Any) -> Any:
        return await super().exec(command, env={**self.spec, **(env or {})}, **options)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> int:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode)
        return len(data)


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    sandbox = WritableFolder(tmp_path)
    return Place(sandbox=sandbox, work=str(sandbox.work), home=str(sandbox.home), tmp=str(sandbox.tmp))


@pytest.mark.parametrize("name", TRICKS)
async def test_a_trick_does_not_forge_the_verdict(name: str, place: Place) -> None:
    trick = TRICKS[name]
    if shutil.which(trick.needs, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"install {trick.needs} to /usr/bin")
    await place.leave(trick)
    assert await place.naive(trick) == 0, "the trick itself does not work"
    place.sandbox.spec.update({key: place.at(value) for key, value in trick.env.items()})
    reward = CommandReward(CommandConfig(base=place.tmp))
    score = await reward.score(episode(place.sandbox, Check(command=trick.command, files=FAILING)))
    assert (score.value, score.evidence["exit_code"]) == (0.0, 1)


def test_pytest_reads_no_settings_from_above(tmp_path: Path) -> None:
    """SWE-bench#601: a conftest or settings above the check's folder must not decide what is run."""
    above = tmp_path / "tmp"
    check = above / "orchard-x" / "check"
    check.mkdir(parents=True)
    (check / "test_a.py").write_text("def test_a():\n    assert False\n")
    (above / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (above / "conftest.py").write_text("import os\nos._exit(0)\n")

    def run() -> int:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(argv, cwd=check, capture_output=True).returncode

    assert run() == 0, "the trick itself does not work"
    (above / "orchard-x" / "pytest.ini").touch()
    assert run() == 1
