from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox
from orchard_agent.local.config import DEFAULT_UID
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import CapabilityError, InfraError
from orchard_api.sandbox import NetworkRule, Resources, SandboxSpec

LONG = f"5{os.getpid()}"
Make = Callable[..., Awaitable[LocalEnvironment]]


@pytest.fixture(params=["bubblewrap", "unshare"])
async def enclosed(request: pytest.FixtureRequest, environments: Make) -> AsyncIterator[LocalEnvironment]:
    """Both ways to enclose keep the same promises."""
    os.environ["HOST_SECRET"] = "seen"
    try:
        yield await environments(isolation=request.param)
    finally:
        del os.environ["HOST_SECRET"]


@pytest.fixture
async def inside(enclosed: LocalEnvironment) -> AsyncIterator[AgentSandbox]:
    sandbox = await enclosed.create(SandboxSpec(), sandbox_id="inside")
    yield sandbox
    await sandbox.aclose()


async def out(sandbox: AgentSandbox, line: str) -> str:
    result = await sandbox.exec(line)
    return result.stdout_text.strip() or result.stderr_text.strip()


async def test_it_has_no_privileges(inside: AgentSandbox) -> None:
    assert await out(inside, "id -u; id -g") == "1000\n1000"
    status = await out(inside, "cat /proc/self/status")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(lines[name], 16) == 0
    assert lines["NoNewPrivs"] == "1"
    assert (await inside.exec("unshare --user true")).exit_code != 0
    assert (await inside.exec("mount -t tmpfs tmpfs /tmp")).exit_code != 0
    assert (await inside.exec("find / -xdev -perm -4000 -user 1000 2>/dev/null")).stdout == b""


async def test_its_host_user_is_no_root(inside: AgentSandbox) -> None:
    pid = (await inside.status()).details["pid"]
    uids = {int(field) for field in _status(pid, "Uid").split()} | {int(field) for field in _status(pid, "Gid").split()}
    assert uids == ({DEFAULT_UID} if os.geteuid() == 0 else {os.geteuid(), os.getegid()})
    assert _status(pid, "Groups").split() in ([], [str(os.getegid())])


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith(name + ":"))


async def test_the_host_is_out_of_sight(inside: AgentSandbox) -> None:
    """Cases 68 and 99: no file, secret, process or variable of the host."""
    assert "HOST_SECRET" not in await out(inside, "env")
    for path in ("/etc/shadow", "/etc/ssh", "/var/run/secrets", "/sys/kernel", str(Path(__file__).parent)):
        assert (await inside.exec(["ls", "-d", path])).exit_code != 0, path
    assert await out(inside, "ls -A /root /home/agent /tmp /workspace") == (
        "/home/agent:\n\n/root:\n\n/tmp:\n\n/workspace:"
    )
    pids = (await out(inside, "ls /proc | grep -c '^[0-9]'")).strip()
    assert int(pids) < 8
    assert await out(inside, "hostname") == "sandbox"


async def test_only_its_own_folders_are_writable(inside: AgentSandbox) -> None:
    for folder in ("/workspace", "/tmp", "/home/agent", "/dev/shm"):
        assert (await inside.exec(f"echo x > {folder}/f && cat {folder}/f")).stdout == b"x\n"
    for path in ("/f", "/usr/f", "/etc/f", "/dev/f", "/run/f", "/orchard-agent", "/proc/sys/kernel/hostname"):
        assert (await inside.exec(f"echo x > {path}")).exit_code != 0, path
    assert (await inside.exec("echo x > /dev/null; head -c 4 /dev/urandom | wc -c")).stdout.strip() == b"4"


async def test_the_agents_secrets_are_out_of_reach(inside: AgentSandbox) -> None:
    """Neither its environment, memory, descriptors and arguments, nor a debugger gives the token away."""
    token = inside._pool._headers[1][1].split()[1].decode()
    assert len(token) >= 32
    everything = await out(
        inside, "cat /proc/*/cmdline /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; env; ls -l /proc/*/fd"
    )
    assert token not in everything
    for name in ("environ", "mem", "maps", "auxv"):
        assert (await inside.exec(["cat", f"/proc/1/{name}"])).exit_code != 0, name
    assert (await inside.exec("ls /proc/1/fd/ || cat /proc/1/fd/0")).exit_code != 0
    attach = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\nprint(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())"
    )
    assert (await inside.exec(["python3", "-c", attach])).stdout == b"-1 1\n"


async def test_no_signal_from_inside_ends_the_agent(inside: AgentSandbox) -> None:
    for number in range(1, 65):
        await inside.exec(f"kill -{number} 1")
    assert await out(inside, "echo alive") == "alive"


async def test_without_network_only_a_loopback_of_its_own(inside: AgentSandbox) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        port = listener.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert "Connection refused" in await out(inside, f'python3 -c "{connect}"')
        reach = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
        assert "Network is unreachable" in await out(inside, f'python3 -c "{reach}"')
    finally:
        listener.close()
    serve = "import socket; s=socket.create_server(('127.0.0.1', 9)); c=socket.create_connection(('127.0.0.1', 9))"
    assert "Permission" in await out(inside, f'python3 -c "{serve}"')
    assert await out(inside, f'python3 -c "{serve.replace("9)", "9000)")}; print(1)"') == "1"


async def test_full_network_reaches_the_host(enclosed: LocalEnvironment) -> None:
    sandbox = await enclosed.create(SandboxSpec(network=NetworkRule(mode="full")), sandbox_id="networked")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2); print(1)"
        assert await out(sandbox, f'python3 -c "{connect}"') == "1"
    if Path("/etc/resolv.conf").is_file():
        assert await out(sandbox, "cat /etc/resolv.conf") == Path("/etc/resolv.conf").read_text().strip()
    await sandbox.aclose()


async def test_two_sandboxes_do_not_meet(enclosed: LocalEnvironment) -> None:
    one, other = [await enclosed.create(SandboxSpec(), sandbox_id=name) for name in ("one", "other")]
    await one.exec("setsid sleep 5555 & echo mine > /tmp/f; echo mine > f; echo mine > /dev/shm/f")
    assert await out(other, "ls -A /tmp /workspace /dev/shm") == "/dev/shm:\n\n/tmp:\n\n/workspace:"
    assert "5555" not in await out(other, "ps -ef")
    folder = (await one.status()).details["folder"]
    assert (await other.exec(["ls", folder])).exit_code != 0
    await other.exec("kill -9 -1")
    assert "5555" in await out(one, "ps -ef")
    listen = "import socket,time; s=socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen()"
    listen += "; print(1, flush=True); time.sleep(5)"
    await one.exec(["sh", "-c", f'python3 -c "{listen}" > started &'])
    while (await one.exec("cat started")).stdout != b"1\n":
        await asyncio.sleep(0.02)
    knock = "import socket; socket.socket(socket.AF_UNIX).connect('\\0meet')"
    assert "refused" in await out(other, f'python3 -c "{knock}"')
    assert (await one.exec(["python3", "-c", knock])).ok
    for sandbox in (one, other):
        await sandbox.aclose()


async def test_the_folders_on_the_host_are_private(inside: AgentSandbox) -> None:
    folder = Path((await inside.status()).details["folder"])
    assert stat.S_IMODE(folder.stat().st_mode) & 0o007 == 0
    assert stat.S_IMODE((folder / "record.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.parent.stat().st_mode) & 0o007 == 0


async def test_workdir_user_and_environment_of_the_spec(enclosed: LocalEnvironment) -> None:
    """Case 102: the working directory exists and is writable, wherever it is."""
    for number, workdir in enumerate(("/app/src", "/workspace/a/b", "/tmp/w")):
        spec = SandboxSpec(workdir=workdir, env={"FOO": "1", "PATH": "/x:/usr/bin:/bin"})
        sandbox = await enclosed.create(spec, sandbox_id=f"w{number}")
        assert await out(sandbox, "pwd; echo $FOO $PATH; echo hi > f; cat f") == f"{workdir}\n1 /x:/usr/bin:/bin\nhi"
        await sandbox.aclose()
    for workdir in ("/usr/local/app", "/etc", "/proc/x", "relative", "/"):
        with pytest.raises(CapabilityError, match="working directory"):
            await enclosed.create(SandboxSpec(workdir=workdir), sandbox_id="refused")


async def test_more_of_the_host_can_be_shown_read_only(
    environments: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = Path("/usr/share/zoneinfo")
    environment = await environments(read_only=(str(shown), "/etc/fstab"), env={"EXTRA": "yes"})
    sandbox = await environment.create(SandboxSpec(), sandbox_id="shown")
    assert (await sandbox.read_file("/etc/fstab")) == Path("/etc/fstab").read_bytes()
    assert await out(sandbox, "echo $EXTRA") == "yes"
    await sandbox.aclose()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (SandboxSpec(image="python:3.12"), "image"),
        (SandboxSpec(network=NetworkRule(mode="allowlist", allow=("example.org",))), "allowlist"),
        (SandboxSpec(resources=Resources(disk_mb=64)), "disk_mb"),
        (SandboxSpec(resources=Resources(gpus=1)), "GPU"),
        (SandboxSpec(architecture="riscv64"), "riscv64"),
        (SandboxSpec(user="root"), "root"),
        (SandboxSpec(extra={"privileged": True}), "privileged"),
    ],
)
async def test_what_it_cannot_give_is_refused(environment: LocalEnvironment, spec: SandboxSpec, text: str) -> None:
    """Case 107 among them: an image's architecture is refused with its name."""
    with pytest.raises(CapabilityError, match=text):
        await environment.create(spec, sandbox_id="refused")
    assert await environment.list() == []


async def test_limits_of_processes(environments: Make) -> None:
    environment = await environments(file_size_mb=1, open_files=100)
    sandbox = await environment.create(SandboxSpec(), sandbox_id="limited")
    assert (await sandbox.exec("head -c 2000000 /dev/zero > f")).exit_code != 0
    assert (await sandbox.stat("f")).size == 1 << 20
    assert await out(sandbox, "ulimit -n; ulimit -c") == "100\n0"
    with pytest.raises(Exception, match="too large"):
        await sandbox.write_file("g", bytes(2_000_000))
    assert await out(sandbox, "ls") == "f"
    await sandbox.aclose()


async def test_without_isolation_it_refuses_and_says_what_to_do(
    environments: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchard_agent.local.selection.probe", lambda *_: "Operation not permitted")
    with pytest.raises(InfraError, match=r"bubblewrap: .*unshare: .*not permitted[^$]*allow_unisolated = true"):
        await environments()
    with pytest.raises(InfraError, match="allow_unisolated"):
        await environments(isolation="none")


async def test_unisolated_when_allowed(
    environments: Make, monkeypatch: pytest.MonkeyPatch, host_processes: Callable[[str], list[int]]
) -> None:
    monkeypatch.setattr("orchard_agent.local.selection.probe", lambda *_: "Operation not permitted")
    environment = await environments(allow_unisolated=True)
    assert environment.capabilities.isolation.startswith("none")
    sandbox = await environment.create(SandboxSpec(), sandbox_id="open")
    folder = (await sandbox.status()).details["folder"]
    assert await out(sandbox, "pwd") == f"{folder}/workspace"
    assert await out(sandbox, "id -u") == str(DEFAULT_UID if os.geteuid() == 0 else os.geteuid())
    await sandbox.exec(f"setsid sleep {LONG} >/dev/null 2>&1 &")
    assert f"sleep {LONG}" in await out(sandbox, "ps -eo args")
    assert await sandbox.kill_processes() == 1
    assert f"sleep {LONG}" not in (await sandbox.exec(f"ps -eo args | grep -v grep | grep {LONG}")).stdout_text
    await sandbox.exec(f"setsid sleep {LONG} >/dev/null 2>&1 &")
    await sandbox.aclose()
    await environment.delete("open")
    for _ in range(100):
        if not host_processes(f"sleep\0{LONG}"):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a process outlived its sandbox")
