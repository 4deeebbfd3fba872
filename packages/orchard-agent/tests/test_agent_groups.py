"""The two ways to kill all that a command started, and what only the first one reaches."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox, UnixTransport
from orchard_agent.local.binary import agent_binary
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import TransportError
from orchard_api.sandbox import SandboxInfo, SandboxSpec, SandboxState

TOKEN = "secret-of-this-test-0123456789"
LONG = f"4{os.getpid()}"
# Twice forked, its own session, no marker: only its control group still says whose it is.
ESCAPE = f"(setsid env -i /bin/sleep {LONG} &); sleep 0.1; sleep 60"


def writable_group() -> Path | None:
    """A fresh cgroup v2 of this test's own, where this machine lets us make one."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (root / "cgroup.controllers").is_file() and os.access(root, os.W_OK):
            group = root / f"orchard-test-{os.getpid()}"
            group.mkdir()
            return group
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    found = writable_group()
    if found is None:
        pytest.skip("needs a cgroup v2 that can be written: run the tests as root on a machine that has one")
    yield found
    for _ in range(100):
        try:
            found.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"{found} is still in use")


@pytest.fixture
async def in_group(group: Path, tmp_path: Path) -> AsyncIterator[AgentSandbox]:
    """An agent that runs in a group which it may write."""
    (tmp_path / "settings").write_text(json.dumps({"token": TOKEN, "workdir": str(tmp_path)}))
    serve = f"{agent_binary()} serve -listen unix:{tmp_path}/socket -settings {tmp_path}/settings"
    process = subprocess.Popen(["sh", "-c", f"echo 0 > {group}/cgroup.procs; exec {serve}"])
    info = SandboxInfo(sandbox_id="grouped", state=SandboxState.READY)
    sandbox = AgentSandbox(UnixTransport(tmp_path / "socket"), token=TOKEN, info=info)
    for _ in range(500):
        try:
            await sandbox.wait_ready()
            break
        except TransportError:
            await asyncio.sleep(0.01)
    yield sandbox
    await sandbox.aclose()
    process.terminate()
    process.wait(10)


async def test_a_group_reaches_even_a_clean_daemon(
    in_group: AgentSandbox, group: Path, host_processes: Callable[[str], list[int]]
) -> None:
    call = asyncio.create_task(in_group.exec(ESCAPE, timeout_s=0.8))
    await asyncio.sleep(0.5)
    assert len(host_processes(f"sleep\0{LONG}")) == 1
    assert (await call).timed_out
    assert host_processes(f"sleep\0{LONG}") == []
    for _ in range(3):
        assert (await in_group.exec("true")).ok
    assert list(group.glob("orchard-*")) == []


async def test_background_children_outlive_their_group_and_are_not_killed_by_another(
    in_group: AgentSandbox, group: Path, host_processes: Callable[[str], list[int]]
) -> None:
    assert (await in_group.exec(f"sleep {LONG} & echo hi")).stdout == b"hi\n"
    assert (await in_group.exec("sleep 60", timeout_s=0.2)).timed_out
    assert len(host_processes(f"sleep\0{LONG}")) == 1
    assert len(list(group.glob("orchard-*"))) == 1
    assert await in_group.kill_processes() == 1
    assert (await in_group.exec("true")).ok
    assert list(group.glob("orchard-*")) == []


async def test_without_a_group_a_clean_daemon_escapes_a_timeout_but_not_grading(environment: LocalEnvironment) -> None:
    """What the documentation says of this mode."""
    environment._groups = None
    box = await environment.create(SandboxSpec(), sandbox_id="ungrouped")
    assert (await box.exec(ESCAPE, timeout_s=0.8)).timed_out
    assert f"sleep {LONG}" in (await box.exec("ps -eo args")).stdout_text
    assert await box.kill_processes() == 1
    assert f"sleep {LONG}" not in (await box.exec("ps -eo args")).stdout_text
    await box.aclose()


@pytest.mark.parametrize("isolation", ["bubblewrap", "unshare"])
async def test_local_sandboxes_have_groups_where_they_can_be_made(
    environments: Callable[..., Awaitable[LocalEnvironment]], isolation: str
) -> None:
    environment = await environments(isolation=isolation)
    if environment._groups is None:
        pytest.skip("needs a cgroup v2 that can be written: run the tests as root on a machine that has one")
    box = await environment.create(SandboxSpec(), sandbox_id="grouped")
    folder = Path((await box.status()).details["folder"])
    group = Path((folder / "owner").read_text().partition("\n")[2])
    assert (await box.exec(ESCAPE, timeout_s=0.8)).timed_out
    assert f"sleep {LONG}" not in (await box.exec("ps -eo args")).stdout_text
    await box.exec("setsid sleep 60 & true")
    assert len(list(group.glob("orchard-*"))) == 1
    assert (await box.exec("ls /sys /proc/1/fd")).exit_code != 0
    await box.aclose()
    await environment.delete("grouped")
    assert not group.exists()


async def test_the_janitor_removes_groups_too(environment: LocalEnvironment, base: Path, group: Path) -> None:
    below = group / "orchard-box"
    (below / "orchard-1").mkdir(parents=True)
    folder = base / "boxes" / "left"
    folder.mkdir()
    (folder / "owner").write_text(f"{environment._owner}\n{below}")
    await environment.aclose()
    assert not below.exists()
    assert not base.exists()
