"""Starts that are cut short at any moment leave no process, also in the moment in which bubblewrap can't clean up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import SandboxCreateError
from orchard_api.sandbox import SandboxSpec

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def processes_of(base: Path) -> list[str]:
    """Command lines that show a sandbox's folder below `base`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{base}/boxes/".encode() in line:
                found.append(f"{folder.name} {line[:80]!r}")
    return found


def wait_until_none(base: Path, seconds: float) -> list[str]:
    """What is left of a base's processes after at most that long."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(base)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


async def test_starts_cancelled_at_any_moment_leave_no_process(base: Path) -> None:
    """Case 4."""
    moments = random.Random(0)
    environment = LocalEnvironment(LocalConfig(base=base))
    await environment.start()
    try:
        for start in range(0, 80, 8):
            creations = [
                asyncio.create_task(environment.create(SandboxSpec(), sandbox_id=f"c{number}"))
                for number in range(start, start + 8)
            ]
            await asyncio.sleep(moments.uniform(0.0, 0.08))
            for creation in creations:
                creation.cancel()
            ended = await asyncio.gather(*creations, return_exceptions=True)
            for number, result in zip(range(start, start + 8), ended, strict=True):
                if not isinstance(result, BaseException):
                    await result.aclose()
                    await environment.delete(f"c{number}")
            assert processes_of(base) == []
    finally:
        await environment.aclose()
    assert not base.exists()


CLIENT = """
import asyncio, sys
from pathlib import Path
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.sandbox import SandboxSpec

async def main():
    environment = LocalEnvironment(LocalConfig(base=Path(sys.argv[1])))
    await environment.start()
    print("started", flush=True)
    await asyncio.gather(*(environment.create(SandboxSpec(), sandbox_id=f"c{sys.argv[2]}-{n}") for n in range(12)))
    print("made", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_client_killed_while_it_starts_sandboxes_leaves_none(base: Path) -> None:
    """Cases 3 and 6."""
    moments = random.Random(1)
    seen = 0
    for number in range(8):
        client = subprocess.Popen([sys.executable, "-c", CLIENT, str(base), str(number)], stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        time.sleep(moments.uniform(0.0, 0.12))
        seen += len(processes_of(base))
        os.kill(client.pid, signal.SIGKILL)
        client.wait(10)
        client.stdout.close()
        assert wait_until_none(base, 10) == []
    assert seen, "there must have been something to clean up"
    assert wait_for(lambda: not list(base.glob("boxes/*")), 10)


async def test_the_janitor_of_a_dead_client_spares_who_takes_the_names_again(base: Path) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(base), "0"], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"started\n"
    assert client.stdout.readline() == b"made\n"
    client.kill()
    client.wait(10)
    client.stdout.close()
    environment = LocalEnvironment(LocalConfig(base=base))
    await environment.start()
    try:
        sandboxes = [await _make(environment, f"c0-{number}") for number in range(12)]
        await asyncio.sleep(2.0)
        for sandbox in sandboxes:
            assert (await sandbox.exec("true")).ok
            await sandbox.aclose()
            await environment.delete(sandbox.sandbox_id)
    finally:
        await environment.aclose()


async def _make(environment: LocalEnvironment, name: str) -> AgentSandbox:
    """Make a sandbox, again while what is left of its namesake is being removed."""
    for _ in range(200):
        try:
            return await environment.create(SandboxSpec(), sandbox_id=name)
        except SandboxCreateError:
            await asyncio.sleep(0.05)
    raise AssertionError(f"{name} could not be made")


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
