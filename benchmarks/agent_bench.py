"""The agent and its client: exec against a plain subprocess, start, memory, files."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bars import row

from orchard_agent import AgentSandbox, UnixTransport
from orchard_agent.local.binary import agent_binary
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import TransportError
from orchard_api.sandbox import SandboxInfo, SandboxSpec, SandboxState

EXECS = 400
AT_ONCE = 32
ROUNDS_AT_ONCE = 12
FILE_BYTES = 100_000_000


async def plain_true() -> None:
    process = await asyncio.create_subprocess_exec(
        "/bin/true", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await process.communicate()


async def seconds(call: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def measure_exec(sandbox: AgentSandbox) -> list[dict[str, Any]]:
    async def ours() -> None:
        result = await sandbox.exec(["/bin/true"])
        assert result.ok

    for _ in range(30):
        await ours()
        await plain_true()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(EXECS):
        times[0].append(await seconds(ours))
        times[1].append(await seconds(plain_true))
    own, baseline = (statistics.median(each) * 1e3 for each in times)
    rows = [row("exec-ratio", own / baseline, baseline=baseline, own_ms=own, difference_ms=own - baseline)]
    rates: tuple[list[float], list[float]] = ([], [])

    async def many(call: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(call() for _ in range(AT_ONCE)))

    await many(ours)
    for _ in range(ROUNDS_AT_ONCE):
        rates[0].append(AT_ONCE / await seconds(lambda: many(ours)))
        rates[1].append(AT_ONCE / await seconds(lambda: many(plain_true)))
    own, baseline = (statistics.median(each) for each in rates)
    rows.append(row("exec-32", own / baseline, baseline=baseline, own_per_s=own))
    return rows


def memory_mb(pid: int, name: str) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def start_agent(path: Path, token: str) -> subprocess.Popen[bytes]:
    argv = [str(agent_binary()), "serve", "-listen", f"unix:{path}"]
    return subprocess.Popen(argv, env={"ORCHARD_AGENT_TOKEN": token})


async def first_answer(sandbox: AgentSandbox) -> None:
    for _ in range(10_000):
        try:
            return await sandbox.wait_ready()
        except TransportError:
            await asyncio.sleep(0.0002)
    raise TimeoutError


async def measure_start() -> list[dict[str, Any]]:
    times: list[float] = []
    plain: list[float] = []
    resident: list[float] = []
    for _ in range(20):
        plain.append(await seconds(plain_true))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "socket"
            token = secrets.token_hex(16)
            start = time.perf_counter()
            process = start_agent(path, token)
            info = SandboxInfo(sandbox_id="bench", state=SandboxState.READY)
            sandbox = AgentSandbox(UnixTransport(path), token=token, info=info)
            try:
                await first_answer(sandbox)
                times.append(time.perf_counter() - start)
                await asyncio.sleep(0.05)
                resident.append(memory_mb(process.pid, "VmRSS"))
            finally:
                await sandbox.aclose()
                process.kill()
                process.wait()
    return [
        row("agent-start-ms", statistics.median(times) * 1e3, baseline=statistics.median(plain) * 1e3),
        row("agent-rss-mb", statistics.median(resident)),
    ]


async def measure_output(sandbox: AgentSandbox, pid: int) -> dict[str, Any]:
    result = await sandbox.exec("yes | head -c 100000000", output_limit=1 << 20, timeout_s=60)
    assert result.ok
    assert result.stdout_dropped == 100_000_000 - (1 << 20)
    return row("stdout-100mb-rss", memory_mb(pid, "VmHWM"), baseline=100.0)


async def measure_files(sandbox: AgentSandbox) -> dict[str, Any]:
    data = os.urandom(FILE_BYTES)
    up: list[float] = []
    down: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            up.append(await seconds(lambda: sandbox.write_file("big", data)))
            start = time.perf_counter()
            copy = await sandbox.read_file("big", limit=2 * FILE_BYTES)
            down.append(time.perf_counter() - start)
            assert copy == data
            start = time.perf_counter()
            (Path(folder) / "big").write_bytes(data)
            assert len((Path(folder) / "big").read_bytes()) == FILE_BYTES
            plain.append(time.perf_counter() - start)
            await sandbox.remove("big")
    speeds = [FILE_BYTES / 1e6 / statistics.median(each) for each in (up, down)]
    return row("file-mb-s", speeds, baseline=2 * FILE_BYTES / 1e6 / statistics.median(plain))


async def rows() -> list[dict[str, Any]]:
    """All rows, measured in one local sandbox."""
    environment = LocalEnvironment(LocalConfig())
    await environment.start()
    try:
        sandbox = await environment.create(SandboxSpec(), sandbox_id=f"bench-{secrets.token_hex(4)}")
        pid = (await sandbox.status()).details["pid"]
        found = await measure_exec(sandbox)
        found += await measure_start()
        found += [await measure_output(sandbox, pid), await measure_files(sandbox)]
        await sandbox.aclose()
        return found
    finally:
        await environment.aclose()
