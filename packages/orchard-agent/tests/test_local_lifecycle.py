from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox
from orchard_agent.local.environment import LocalEnvironment
from orchard_agent.local.processes import ProcessId
from orchard_api.errors import SandboxCreateError, SandboxDeleteError, SandboxGone, StartTimeoutError
from orchard_api.sandbox import SandboxSpec, SandboxState

Make = Callable[..., Awaitable[LocalEnvironment]]
Find = Callable[[str], list[int]]
Enclosed = Callable[[], list[int]]

NEVER = f"7{os.getpid()}"

CLIENT = """
import asyncio, signal, sys
from pathlib import Path
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.sandbox import SandboxSpec

async def main():
    environment = LocalEnvironment(LocalConfig(base=Path(sys.argv[1]), isolation=sys.argv[2]))
    await environment.start()
    for name in sys.argv[3].split(","):
        sandbox = await environment.create(SandboxSpec(labels={"owner": "client"}), sandbox_id=name)
        await sandbox.exec(f"setsid sleep 600 & sleep 600 & touch /workspace/{name}", timeout_s=10)
    print("ready", flush=True)
    await asyncio.sleep(60)

# A shell starts background jobs with SIGINT ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
"""


def start_client(base: Path, names: str, isolation: str = "auto") -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", CLIENT, str(base), isolation, names]
    client = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    client.stdout.close()
    return client


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("isolation", ["bubblewrap", "unshare"])
async def test_sigkill_of_the_client_leaves_nothing(
    base: Path, host_processes: Find, enclosed_processes: Enclosed, isolation: str
) -> None:
    """Cases 2 and 6: no process, `setsid` ones included, and no folder, though nobody could clean up."""
    client = start_client(base, "a,b", isolation)
    assert len(enclosed_processes()) >= 6
    client.kill()
    client.wait(20)
    await until(lambda: not enclosed_processes())
    await until(lambda: not list((base / "boxes").iterdir()))
    await until(lambda: not host_processes(str(base / "boxes")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_client_that_ends_by_a_signal_leaves_nothing(
    base: Path, enclosed_processes: Enclosed, number: int
) -> None:
    """Case 2."""
    client = start_client(base, "a")
    assert enclosed_processes()
    client.send_signal(number)
    client.wait(20)
    # After SIGINT the client cleans up by itself, and its base folder goes as well.
    await until(lambda: not enclosed_processes() and not list(base.glob("boxes/*")))


async def test_what_a_dead_client_left_is_swept_and_a_live_ones_is_not(base: Path, environments: Make) -> None:
    """Case 6: a second live client's sandboxes are untouched."""
    mine = await environments()
    sandbox = await mine.create(SandboxSpec(), sandbox_id="alive")
    dead = base / "boxes" / "dead"
    (dead / "workspace").mkdir(parents=True)
    (dead / "owner").write_text("999999999.1.abc")
    other = await environments()
    assert [info.sandbox_id for info in await other.list()] == ["alive"]
    assert (await sandbox.exec("echo hi")).stdout == b"hi\n"
    assert not dead.exists()
    await sandbox.aclose()


async def test_episodes_leave_an_empty_listing(environment: LocalEnvironment, base: Path) -> None:
    """Case 1."""
    for number in range(5):
        sandbox = await environment.create(SandboxSpec(), sandbox_id=f"e{number}")
        assert (await sandbox.exec("echo hi > f")).ok
        await sandbox.aclose()
        await environment.delete(f"e{number}")
    assert await environment.list() == []
    assert list((base / "boxes").iterdir()) == []
    await environment.delete("e0")


async def test_the_last_environment_removes_the_base(base: Path, environments: Make) -> None:
    one, other = await environments(), await environments()
    await one.aclose()
    assert base.is_dir()
    await other.aclose()
    assert not base.exists()


async def test_closing_the_environment_deletes_what_lives(base: Path, environments: Make) -> None:
    environment = await environments()
    sandbox = await environment.create(SandboxSpec(), sandbox_id="left")
    await environment.aclose()
    with pytest.raises(SandboxGone):
        await sandbox.exec("true")
    assert not base.exists()


async def test_cancelling_a_creation_leaves_nothing(
    environment: LocalEnvironment, enclosed_processes: Enclosed
) -> None:
    """Cases 3 and 4 (a), at many moments of the creation."""
    for step in range(20):
        call = asyncio.create_task(environment.create(SandboxSpec(), sandbox_id=f"c{step}"))
        await asyncio.sleep(step * 0.001)
        call.cancel()
        done = (await asyncio.gather(call, return_exceptions=True))[0]
        if isinstance(done, AgentSandbox):
            await done.aclose()
            await environment.delete(f"c{step}")
        else:
            assert isinstance(done, asyncio.CancelledError)
        assert await environment.list() == []
    assert await environment.list() == []
    await until(lambda: not enclosed_processes())


async def test_a_strangers_folder_of_the_same_name_survives(environment: LocalEnvironment, base: Path) -> None:
    """Case 4 (b)."""
    stranger = base / "boxes" / "taken"
    stranger.mkdir()
    (stranger / "owner").write_text("somebody else")
    (stranger / "file").write_text("precious")
    with pytest.raises(SandboxCreateError, match="being made by another"):
        await environment.create(SandboxSpec(), sandbox_id="taken")
    assert (stranger / "file").read_text() == "precious"
    (stranger / "file").unlink()
    (stranger / "owner").unlink()
    stranger.rmdir()


async def test_creating_twice_adopts_the_first(environment: LocalEnvironment) -> None:
    """Case 50."""
    first = await environment.create(SandboxSpec(), sandbox_id="same")
    await first.write_file("marker", b"1")
    handles = await asyncio.gather(*(environment.create(SandboxSpec(), sandbox_id="same") for _ in range(5)))
    assert [await handle.read_file("marker") for handle in handles] == [b"1"] * 5
    assert len(await environment.list()) == 1
    for handle in (first, *handles):
        await handle.aclose()


async def test_another_process_attaches_lists_and_deletes(
    base: Path, environments: Make, enclosed_processes: Enclosed
) -> None:
    client = start_client(base, "theirs")
    try:
        environment = await environments()
        (info,) = await environment.list({"owner": "client"})
        assert (info.sandbox_id, info.state) == ("theirs", SandboxState.READY)
        assert await environment.list({"owner": "another"}) == []
        sandbox = await environment.attach("theirs")
        assert [entry.name for entry in await sandbox.list_dir("/workspace")] == ["theirs"]
        await environment.renew("theirs", 100)
        assert (await sandbox.status()).details["ttl_s"] == 100
        await environment.delete("theirs")
        assert enclosed_processes() == []
        with pytest.raises(SandboxGone):
            await sandbox.exec("true")
        with pytest.raises(SandboxGone, match="no local sandbox"):
            await environment.attach("theirs")
    finally:
        client.kill()
        client.wait(20)


async def test_a_delete_that_fails_is_loud_and_stays_listed(
    environment: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 8."""
    sandbox = await environment.create(SandboxSpec(), sandbox_id="stuck")
    await sandbox.aclose()

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("orchard_agent.local.box_folder.remove_tree", refuse)
        with pytest.raises(SandboxDeleteError, match="Operation not permitted"):
            await environment.delete("stuck")
        (info,) = await environment.list()
        assert (info.state, "not permitted" in info.reason) == (SandboxState.LOST, True)
    await environment.delete("stuck")
    assert await environment.list() == []


async def test_folders_that_resist_are_removed(environment: LocalEnvironment) -> None:
    """Rights taken away, depth beyond any path, links to the host: all of it goes, and nothing else."""
    sandbox = await environment.create(SandboxSpec(), sandbox_id="resists")
    script = (
        "import os\nos.makedirs('a/b/c'); open('a/b/f', 'w'); os.symlink('/', 'root'); os.symlink('..', 'a/up')\n"
        "os.chdir('a/b/c')\nfor _ in range(2500):\n    os.mkdir('d'); os.chdir('d')\n"
        "for place in ('.', '/workspace/a/b', '/workspace/a', '/workspace', '/tmp'):\n    os.chmod(place, 0)\n"
    )
    assert (await sandbox.exec(["python3", "-c", script])).ok
    await sandbox.aclose()
    await environment.delete("resists")
    assert await environment.list() == []


async def test_a_dead_sandbox_is_gone_at_once(environment: LocalEnvironment) -> None:
    """Case 45: in the middle of a command and between two."""
    sandbox = await environment.create(SandboxSpec(), sandbox_id="dies")
    pid = (await sandbox.status()).details["pid"]
    call = asyncio.create_task(sandbox.exec("sleep 60"))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxGone, match="gone"):
        await call
    assert time.monotonic() - start < 2
    for attempt in (sandbox.exec("true"), sandbox.read_file("f"), sandbox.status(), sandbox.list_dir("/")):
        with pytest.raises(SandboxGone):
            await attempt
    (info,) = await environment.list()
    assert info.state == SandboxState.LOST
    with pytest.raises(SandboxGone):
        await environment.attach("dies")


async def test_a_frozen_sandbox_is_noticed_while_a_command_runs(environment: LocalEnvironment) -> None:
    """A machine that stops without closing its connections, as a lost host does."""
    from dataclasses import replace

    sandbox = await environment.create(SandboxSpec(), sandbox_id="frozen")
    sandbox._limits = replace(sandbox._limits, heartbeat_s=0.3)
    pid = (await sandbox.status()).details["pid"]
    call = asyncio.create_task(sandbox.exec("sleep 60"))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandboxGone, match="no longer answers"):
        await asyncio.wait_for(call, 5)


async def test_its_time_to_live_runs_out_by_itself(environment: LocalEnvironment) -> None:
    """Case 12."""
    sandbox = await environment.create(SandboxSpec(ttl_s=1.0), sandbox_id="brief")
    await sandbox.exec("setsid sleep 60 & true")
    for _ in range(4):
        await asyncio.sleep(0.4)
        await sandbox.status()
    call = await sandbox.exec("sleep 1.5; echo a running command is a sign of life")
    assert call.ok
    process = ProcessId.of((await sandbox.status()).details["pid"])
    assert process is not None
    await until(lambda: not process.alive, seconds=3)
    with pytest.raises(SandboxGone, match="time to live"):
        await sandbox.exec("true")


async def test_an_agent_that_never_answers_is_a_start_timeout(
    environment: LocalEnvironment, monkeypatch: pytest.MonkeyPatch, host_processes: Find
) -> None:
    """Case 14."""
    monkeypatch.setattr("orchard_agent.local.isolation.Isolation.argv", lambda *_: ["sleep", NEVER])
    start = time.monotonic()
    with pytest.raises(StartTimeoutError, match=r"did not answer within|was not ready in"):
        await environment.create(SandboxSpec(start_timeout_s=0.5), sandbox_id="never")
    assert time.monotonic() - start < 5
    assert host_processes(f"sleep\0{NEVER}") == []
    assert await environment.list() == []


async def test_an_agent_that_fails_says_why(environment: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchard_agent.local.isolation.Isolation.argv", lambda *_: ["sh", "-c", "echo no such luck >&2; exit 3"]
    )
    with pytest.raises(SandboxCreateError, match="no such luck"):
        await environment.create(SandboxSpec(), sandbox_id="fails")
    assert await environment.list() == []


@pytest.mark.parametrize("sandbox_id", ["", "../up", "a/b", ".hidden", "a" * 129, "sp ace"])
async def test_ids_that_cannot_be_folders(environment: LocalEnvironment, sandbox_id: str) -> None:
    with pytest.raises(SandboxCreateError, match="can't be a sandbox id"):
        await environment.create(SandboxSpec(), sandbox_id=sandbox_id)


async def test_many_at_once_answer_and_descriptors_come_back(environment: LocalEnvironment) -> None:
    """Cases 28 and 54."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    sandboxes: list[AgentSandbox] = await asyncio.gather(
        *(environment.create(SandboxSpec(), sandbox_id=f"m{number}") for number in range(24))
    )
    results = await asyncio.gather(*(sandbox.exec("echo hi") for sandbox in sandboxes))
    assert [result.stdout for result in results] == [b"hi\n"] * 24
    for sandbox in sandboxes:
        await sandbox.aclose()
    await asyncio.gather(*(environment.delete(sandbox.sandbox_id) for sandbox in sandboxes))
    assert abs(len(list(Path("/proc/self/fd").iterdir())) - before) <= 2
    assert await environment.list() == []


async def test_ctrl_c_in_the_clients_terminal_does_not_reach_sandboxes(environment: LocalEnvironment) -> None:
    """They are not of the client's process group: the client decides what ends when."""
    sandbox = await environment.create(SandboxSpec(), sandbox_id="apart")
    pid = (await sandbox.status()).details["pid"]
    assert os.getpgid(pid) != os.getpgid(0)
    await sandbox.aclose()
