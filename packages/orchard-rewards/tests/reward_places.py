"""Where tricks are tried: a sandbox with what an agent leaves in it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reward_fakes import FolderSandbox, episode
from reward_tricks import FAILING, Trick

from orchard_api.task import Check
from orchard_rewards.command import CommandConfig, CommandReward


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


def need(program: str) -> None:
    """Skip where a trick's program is not installed for everybody."""
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"install {program} to /usr/bin")


async def assert_not_forged(trick: Trick, place: Place) -> None:
    """Leave a trick's files, see that it works where nothing is done against it, and that the reward isn't fooled."""
    await place.leave(trick)
    assert await place.naive(trick) == 0, "the trick itself does not work"
    reward = CommandReward(CommandConfig(base=place.tmp))
    score = await reward.score(episode(place.sandbox, Check(command=trick.command, files=FAILING)))
    assert (score.value, score.evidence["exit_code"]) == (0.0, 1), score.evidence
