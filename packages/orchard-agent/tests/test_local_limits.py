"""Limits of local sandboxes, by control groups and by rlimits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from orchard_agent.local.box_folder import groups_of
from orchard_agent.local.environment import LocalEnvironment
from orchard_agent.local.limits import find_limits
from orchard_api.errors import CapabilityError
from orchard_api.sandbox import AllowedProgram, Resources, SandboxSpec

HOG = ["python3", "-c", "x = bytearray({} << 20); print('got it')"]


PIECES = """
import os, time
for i in range(6):
    if os.fork() == 0:
        x = bytearray(40 << 20)
        time.sleep(2)
        os._exit(0)
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)])
"""
BOMB = """
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        n += 1
except OSError:
    pass
print(n)
"""


def hog(megabytes: int) -> list[str]:
    return [HOG[0], HOG[1], HOG[2].format(megabytes)]


Make = Callable[..., Awaitable[LocalEnvironment]]


@pytest.fixture
def grouped() -> str:
    limits = find_limits("cgroups")
    if limits is None or not {"memory_mb", "pids", "cpus"} <= limits.enforced:
        pytest.skip("needs control groups that can be made: run the tests as root with a writable /sys/fs/cgroup")
    return "cgroups"


async def test_memory_by_groups(environments: Make, grouped: str) -> None:
    environment = await environments(limits=grouped)
    box = await environment.create(SandboxSpec(resources=Resources(memory_mb=100)), sandbox_id="small")
    groups = groups_of(Path(str((await box.status()).details["folder"])))
    assert any("memory" in str(group) or (group / "memory.max").exists() for group in groups)
    assert (await box.exec(hog(40))).stdout_text == "got it\n"
    result = await box.exec(hog(300))
    assert result.oom_killed
    assert result.signal == 9
    again = await box.exec(hog(40))
    assert (again.stdout_text, again.oom_killed) == ("got it\n", False)
    # The limit is the sandbox's, not each process's.
    pieces = await box.exec(["python3", "-c", PIECES])
    assert "-9" in pieces.stdout_text
    assert pieces.oom_killed
    await box.aclose()
    await environment.delete("small")
    assert not [group for group in groups if group.exists()]


async def test_processes_by_groups(environments: Make, grouped: str) -> None:
    environment = await environments(limits=grouped)
    box = await environment.create(SandboxSpec(resources=Resources(pids=20)), sandbox_id="few")
    made = int((await box.exec(["python3", "-c", BOMB])).stdout_text)
    assert 15 <= made <= 60
    await box.kill_processes()
    assert (await box.exec("echo fine")).stdout_text == "fine\n"
    await box.aclose()


async def test_cpus_by_groups(environments: Make, grouped: str) -> None:
    environment = await environments(limits=grouped)
    box = await environment.create(SandboxSpec(resources=Resources(cpus=0.2)), sandbox_id="slow")
    spin = "import time\nend=time.monotonic()+2\nwhile time.monotonic()<end: pass\nprint(time.process_time())"
    used = float((await box.exec(["python3", "-c", spin])).stdout_text)
    assert used < 1.0
    await box.aclose()


async def test_forks_have_the_limits_too(environments: Make, grouped: str) -> None:
    environment = await environments(limits=grouped)
    box = await environment.create(SandboxSpec(resources=Resources(memory_mb=100)), sandbox_id="first")
    (fork,) = await box.fork(["second"])
    assert (await fork.exec(hog(300))).oom_killed
    for one in (box, fork):
        await one.aclose()


async def test_rlimits_where_there_are_no_groups(environments: Make) -> None:
    environment = await environments(limits="rlimits")
    assert environment.capabilities.limits == {"memory_mb", "pids"}
    with pytest.raises(CapabilityError, match="cpus"):
        await environment.create(SandboxSpec(resources=Resources(cpus=1)), sandbox_id="no")
    spec = SandboxSpec(resources=Resources(memory_mb=300, pids=30))
    box = await environment.create(spec, sandbox_id="limited")
    assert (await box.exec(hog(40))).stdout_text == "got it\n"
    result = await box.exec(hog(400))
    assert "MemoryError" in result.stderr_text
    assert int((await box.exec(["python3", "-c", BOMB])).stdout_text) <= 40
    await box.kill_processes()
    missing = await box.exec(["/nowhere"])
    assert (missing.exit_code, missing.stderr_text) == (127, "/nowhere: no such file or directory\n")
    assert (await box.exec(["/etc/passwd"])).exit_code == 126
    assert (await box.exec("exit 3")).exit_code == 3
    process_id = await box.start_process("ulimit -v")
    await box.wait_process(process_id, timeout_s=10)
    assert (await box.read_output(process_id, offset=0, wait_s=5)).data == b"%d\n" % (300 << 10)
    await box.aclose()


async def test_rlimits_and_a_list_of_programs(environments: Make) -> None:
    environment = await environments(limits="rlimits")
    shell = str(Path("/bin/sh").resolve())
    spec = SandboxSpec(resources=Resources(memory_mb=300), programs=(AllowedProgram(path=shell),))
    box = await environment.create(spec, sandbox_id="both")
    results = await asyncio.gather(*(box.exec("echo ok") for _ in range(30)))
    assert {one.stdout_text for one in results} == {"ok\n"}
    assert (await box.exec("sleep 20; echo $?")).stdout_text == "137\n"
    await box.aclose()
