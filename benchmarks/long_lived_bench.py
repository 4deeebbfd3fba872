"""Many local sandboxes alive at once, and forks of one."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import row

from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_agent.local.sandbox import LocalSandbox
from orchard_api.sandbox import SandboxSpec

ALIVE = 500
STARTING = 8
FORKS = 15
WORKDIR_MB = 50


async def alive() -> list[dict[str, Any]]:
    """All are made, then each is asked, then all are deleted."""
    environment = LocalEnvironment(LocalConfig())
    await environment.start()
    tag = secrets.token_hex(4)
    slots = asyncio.Semaphore(STARTING)
    made: list[LocalSandbox] = []

    async def make(number: int) -> None:
        async with slots:
            made.append(
                await environment.create(SandboxSpec(labels={"bench": tag}), sandbox_id=f"bench-{tag}-{number}")
            )

    async def answers(box: LocalSandbox) -> bool:
        async with slots:
            name = box.sandbox_id
            result = await box.exec(["sh", "-c", f"echo {name} > mine; cat mine"])
            return result.stdout_text == f"{name}\n"

    begin = time.perf_counter()
    try:
        await asyncio.gather(*(make(number) for number in range(ALIVE)))
        seconds = time.perf_counter() - begin
        listed = len(await environment.list({"bench": tag}))
        share = sum(await asyncio.gather(*(answers(box) for box in made))) / ALIVE
        for box in made:
            await box.aclose()
            await environment.delete(box.sandbox_id)
        left = len(await environment.list({"bench": tag}))
    finally:
        await environment.aclose()
    assert listed == ALIVE
    return [row("local-500", share, create_all_s=round(seconds, 1)), row("local-500-left", left)]


async def forks() -> list[dict[str, Any]]:
    """Forks of a 50 MB workdir, one at a time; the baselines are an empty sandbox and a plain copy of the folder."""
    environment = LocalEnvironment(LocalConfig())
    await environment.start()
    fork_s: list[float] = []
    create_s: list[float] = []
    copy_s: list[float] = []
    try:
        box = await environment.create(SandboxSpec(), sandbox_id=f"bench-{secrets.token_hex(6)}")
        made = await box.exec(
            f"for i in $(seq {WORKDIR_MB}); do mkdir -p d$i; head -c 1000000 /dev/urandom > d$i/f; done", timeout_s=60
        )
        assert made.ok
        folder = Path(str((await box.status()).details["folder"])) / "workspace"
        for _ in range(FORKS):
            name = f"bench-{secrets.token_hex(6)}"
            begin = time.perf_counter()
            (fork,) = await box.fork([name])
            fork_s.append(time.perf_counter() - begin)
            assert (await fork.exec("ls | wc -l")).stdout_text.strip() == str(WORKDIR_MB)
            await fork.aclose()
            await environment.delete(name)
            begin = time.perf_counter()
            other = await environment.create(SandboxSpec(), sandbox_id=name)
            create_s.append(time.perf_counter() - begin)
            await other.aclose()
            await environment.delete(name)
            with tempfile.TemporaryDirectory() as temporary:
                begin = time.perf_counter()
                shutil.copytree(folder, Path(temporary) / "copy")
                copy_s.append(time.perf_counter() - begin)
        await box.aclose()
    finally:
        await environment.aclose()
    return [
        row(
            "fork-ms",
            statistics.median(fork_s) * 1e3,
            baseline=statistics.median(copy_s) * 1e3,
            create_ms=statistics.median(create_s) * 1e3,
        )
    ]


async def rows() -> list[dict[str, Any]]:
    """All rows."""
    return [*await forks(), *await alive()]
