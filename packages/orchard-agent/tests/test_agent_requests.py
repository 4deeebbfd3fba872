"""The agent against clients that are hostile: whatever comes, it answers or closes, and goes on."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox, TcpTransport
from orchard_agent.local.binary import agent_binary
from orchard_agent.streams import connect_unix
from orchard_api.errors import OverloadedError, SandboxRequestError
from orchard_api.sandbox import SandboxInfo, SandboxState

TOKEN = "secret-of-this-test-0123456789"
LONG = f"6{os.getpid()}"
INFO = SandboxInfo(sandbox_id="bare", state=SandboxState.READY)


class Agent:
    """A bare agent of this machine, outside of any sandbox."""

    def __init__(self, folder: Path, *flags: str, **settings: object) -> None:
        self.path = folder / "socket"
        (folder / "settings").write_text(json.dumps({"token": TOKEN, "workdir": str(folder), **settings}))
        argv = [str(agent_binary()), "serve", "-listen", f"unix:{self.path}", "-settings", str(folder / "settings")]
        self.process = subprocess.Popen([*argv, *flags], env={"PATH": "/usr/bin:/bin", "IMAGE_VARIABLE": "kept"})
        while True:
            try:
                self.connect().close()
                break
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.001)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        try:
            connect_unix(connection, self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def send(self, raw: bytes, *, half_close: bool = True) -> bytes:
        """Send bytes and read all that comes back.

        A half-close reads as a client that went away: what is under way is then cancelled.
        """
        with self.connect() as connection:
            try:
                connection.sendall(raw)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            answer = b""
            try:
                while chunk := connection.recv(65536):
                    answer += chunk
            except ConnectionResetError:
                pass
            return answer

    def request(self, method: str, target: str, body: bytes = b"", token: str = TOKEN, headers: str = "") -> bytes:
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n{headers}"
        )
        return self.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, half_close=False)

    def exec(self, head: object, rest: bytes = b"") -> bytes:
        text = json.dumps(head).encode()
        return self.request("POST", "/v1/exec", struct.pack(">I", len(text)) + text + rest)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    one = Agent(tmp_path)
    yield one
    assert one.process.poll() is None, "the agent did not survive"
    one.process.terminate()
    assert one.process.wait(10) == 0


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def test_only_the_token_opens_it(agent: Agent) -> None:
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x"):
        assert status(agent.request("GET", "/v1/health", token=token)) == 401
    assert status(agent.send(b"GET /v1/health HTTP/1.1\r\nHost: a\r\n\r\n")) == 401
    assert status(agent.request("GET", "/v1/health")) == 200
    assert status(agent.request("GET", "/anything")) == 404
    assert status(agent.request("DELETE", "/v1/file")) == 404


HEAD = {"timeout_ms": 1000, "output_limit": 10, "line": 4}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ({**HEAD, "timeout_ms": 0}, 400),
        ({**HEAD, "timeout_ms": -1}, 400),
        ({**HEAD, "timeout_ms": 1e18}, 400),
        ({**HEAD, "timeout_ms": "soon"}, 400),
        ({**HEAD, "output_limit": -1}, 413),
        ({**HEAD, "output_limit": 1 << 40}, 413),
        ({**HEAD, "line": -1}, 413),
        ({**HEAD, "line": 1 << 40}, 413),
        ({**HEAD, "env": 1 << 30}, 413),
        ({**HEAD, "cwd": 1 << 20}, 413),
        ({**HEAD, "stdin": -5}, 413),
        ({**HEAD, "stdin": 1 << 50}, 413),
        ({**HEAD, "argv": [1] * 3}, 400),
        ({"timeout_ms": 1000, "output_limit": 10}, 400),
        ({"timeout_ms": 1000, "output_limit": 10, "argv": [-1]}, 413),
        ({"timeout_ms": 1000, "output_limit": 10, "argv": [1 << 25] * 5}, 413),
        ({**HEAD, "key": "k" * 300}, 400),
        ({**HEAD, "user": "no-such-user"}, 422),
        ({**HEAD, "line": 400}, 400),
        ([], 400),
        ("x" * 300_000, 413),
    ],
)
def test_each_limit_of_an_exec_has_a_clear_status(agent: Agent, head: object, expected: int) -> None:
    answer = agent.exec(head, b"true")
    assert status(answer) == expected
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["message"]


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/v1/file", 400),
        ("GET", "/v1/file?path=%zz", 400),
        ("GET", "/v1/file?path=a%00b", 400),
        ("GET", "/v1/file?path=/dev/null&offset=-1", 400),
        ("GET", "/v1/file?path=/etc/passwd&offset=99999999999999999999999", 400),
        ("PUT", "/v1/file?path=x&mode=9", 400),
        ("PUT", "/v1/file?path=x&mode=77777", 400),
        ("PUT", "/v1/file?path=x&owner=nobody-at-all", 422),
        ("GET", "/v1/list?path=/&limit=x", 400),
        ("GET", "/v1/list?path=/etc/passwd", 409),
        ("POST", "/v1/renew?ttl_s=nan", 400),
        ("POST", "/v1/renew?ttl_s=-1", 400),
        ("POST", "/v1/cancel", 400),
        ("GET", "/v1/tar?path=/nowhere", 404),
    ],
)
def test_each_bad_parameter_has_a_clear_status(agent: Agent, method: str, target: str, expected: int) -> None:
    assert status(agent.request(method, target)) == expected


def test_headers_have_a_limit(agent: Agent) -> None:
    assert status(agent.request("GET", "/v1/health", headers=f"X: {'y' * 100_000}\r\n")) == 431


def test_random_bytes_and_cut_requests(agent: Agent) -> None:
    noise = random.Random(7)
    whole = b"POST /v1/exec HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + TOKEN.encode()
    whole += b"\r\nContent-Length: 60\r\n\r\n\0\0\0\x30" + json.dumps(HEAD).encode()
    for _ in range(60):
        agent.send(noise.randbytes(noise.randrange(2000)))
        agent.send(whole[: noise.randrange(len(whole))])
        spoiled = bytearray(whole)
        for _ in range(4):
            spoiled[noise.randrange(len(spoiled))] = noise.randrange(256)
        agent.send(bytes(spoiled))
    for size in (0, 3, 4, 100, 2**31, 2**32 - 1):
        body = struct.pack(">I", size) + b"{}"
        assert status(agent.request("POST", "/v1/exec", body)) in (400, 413)
    assert status(agent.request("GET", "/v1/health")) == 200


def test_half_open_connections_do_not_block_others(agent: Agent) -> None:
    """Case 10, what of it concerns the agent."""
    idle = [agent.connect() for _ in range(200)]
    for connection in idle[:100]:
        connection.sendall(b"GET /v1/health HT")
    assert status(agent.request("GET", "/v1/health")) == 200
    for connection in idle:
        connection.close()


def test_an_aborted_upload_leaves_no_file(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    head = f"PUT /v1/file?path=f HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\n"
    answer = agent.send(head.encode() + b"new")
    assert status(answer) == 400
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".orchard")] == []


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    started: list[Agent] = []

    def make(*flags: str, **settings: object) -> Agent:
        started.append(Agent(tmp_path, *flags, **settings))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.wait()


def handle(agent: Agent) -> AgentSandbox:
    from orchard_agent import UnixTransport

    return AgentSandbox(UnixTransport(agent.path), token=TOKEN, info=INFO)


async def test_too_many_commands_at_once_are_refused(bare: Callable[..., Agent]) -> None:
    import asyncio

    sandbox = handle(bare(max_execs=2))
    running = [asyncio.create_task(sandbox.exec("sleep 0.5")) for _ in range(2)]
    await asyncio.sleep(0.2)
    with pytest.raises(OverloadedError, match="limit is 2"):
        await sandbox.exec("true", key="again")
    assert all(result.ok for result in await asyncio.gather(*running))
    assert (await sandbox.exec("true", key="again")).ok
    await sandbox.aclose()


async def test_the_images_environment_is_seen_and_the_token_is_not(bare: Callable[..., Agent]) -> None:
    """Case 99."""
    sandbox = handle(bare(env={"SET": "yes"}))
    text = (await sandbox.exec("env")).stdout_text
    assert "IMAGE_VARIABLE=kept" in text
    assert "SET=yes" in text
    assert TOKEN not in text
    await sandbox.aclose()


async def test_orphans_of_an_agent_that_is_not_pid_1_are_reaped_and_end_with_it(
    bare: Callable[..., Agent], host_processes: Callable[[str], list[int]]
) -> None:
    import asyncio

    agent = bare("-ttl", "1")
    sandbox = handle(agent)
    for _ in range(5):
        await sandbox.exec(f"setsid sleep {LONG} & (sleep 0.01 &)")
    await asyncio.sleep(0.1)
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children]
    assert "Z" not in states
    assert len(host_processes(f"sleep\0{LONG}")) == 5
    assert agent.process.wait(5) == 75
    assert host_processes(f"sleep\0{LONG}") == []
    await sandbox.aclose()


@pytest.mark.skipif("__import__('os').geteuid() != 0", reason="an agent that is root is needed: run the tests as root")
async def test_a_privileged_agent_switches_users(bare: Callable[..., Agent], tmp_path: Path) -> None:
    """Case 102: files belong to the user that commands run as."""
    sandbox = handle(bare(user="65534:65534"))
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    assert (await sandbox.exec("id -u; id -g; id -G", cwd="/")).stdout == b"65534\n65534\n65534\n"
    assert (await sandbox.exec("id -un; echo $HOME", user="root", cwd="/")).stdout == b"root\n/root\n"
    await sandbox.write_file("d/f", b"x", mode=0o600)
    assert ((tmp_path / "d/f").stat().st_uid, (tmp_path / "d").stat().st_uid) == (65534, 65534)
    await sandbox.write_file("g", b"x", owner="root")
    assert (tmp_path / "g").stat().st_uid == 0
    assert (await sandbox.exec("cat d/f && echo y >> d/f")).ok
    with pytest.raises(SandboxRequestError, match="no user"):
        await sandbox.exec("id", user="stranger")
    await sandbox.aclose()


async def test_tcp(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "token").write_text(TOKEN + "\n")
    argv = [str(agent_binary()), "serve", "-listen", f"tcp:127.0.0.1:{port}", "-token-file", str(tmp_path / "token")]
    process = subprocess.Popen(argv)
    sandbox = AgentSandbox(TcpTransport("127.0.0.1", port), token=TOKEN, info=INFO)
    try:
        assert (await sandbox.exec("cat", stdin=b"x" * 300_000)).stdout == b"x" * 300_000
        path = str(tmp_path / "big")
        await sandbox.write_file(path, b"y" * 3_000_000)
        assert await sandbox.read_file(path) == b"y" * 3_000_000
    finally:
        await sandbox.aclose()
        process.kill()
        process.wait()


async def test_the_streams_of_a_process_carry_it(bare: Callable[..., Agent]) -> None:
    """`serve -listen stdio`, and `connect` for an agent that runs already."""
    agent = bare()
    for argv, env in (
        ([str(agent_binary()), "serve", "-listen", "stdio"], {"ORCHARD_AGENT_TOKEN": TOKEN}),
        ([str(agent_binary()), "connect", "-to", f"unix:{agent.path}"], {}),
    ):
        sandbox = AgentSandbox(_StdioTransport(argv, env), token=TOKEN, info=INFO)
        assert (await sandbox.exec("cat; env", stdin=b"through a pipe\n")).stdout.startswith(b"through a pipe\n")
        assert TOKEN.encode() not in (await sandbox.exec("env")).stdout
        await sandbox.aclose()


class _StdioTransport:
    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._argv, self._env = argv, env

    async def connect(self) -> _StdioStream:
        import asyncio

        pipe = asyncio.subprocess.PIPE
        return _StdioStream(await asyncio.create_subprocess_exec(*self._argv, env=self._env, stdin=pipe, stdout=pipe))

    async def aclose(self) -> None:
        pass


class _StdioStream:
    def __init__(self, process: object) -> None:
        self._process = process

    async def read(self, limit: int) -> bytes:
        return await self._process.stdout.read(limit)  # type: ignore[attr-defined, no-any-return]

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._process.stdin.write(bytes(data))  # type: ignore[attr-defined]
        await self._process.stdin.drain()  # type: ignore[attr-defined]

    async def write_eof(self) -> None:
        self._process.stdin.write_eof()  # type: ignore[attr-defined]

    async def aclose(self) -> None:
        self._process.stdin.close()  # type: ignore[attr-defined]
        await self._process.wait()  # type: ignore[attr-defined]


def test_a_token_is_needed_and_never_taken_from_arguments() -> None:
    argv = [str(agent_binary()), "serve", "-listen", "stdio"]
    done = subprocess.run(argv, capture_output=True, text=True, env={}, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "bearer token" in done.stderr
    assert (
        "token"
        not in subprocess.run(
            [sys.executable, "-c", f"import subprocess; print(subprocess.run([{argv[0]!r}]).returncode)"],
            capture_output=True,
            text=True,
        ).stdout
    )
