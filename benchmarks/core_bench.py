"""The command line's start and the rollout engine's own cost."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bars import row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packages" / "orchard-core" / "tests"))

HELP_RUNS, EPISODES, ROUNDS, CONCURRENCY = 15, 400, 7, 16
HEAVY = ("torch", "pyarrow", "docker", "transformers")


def rows() -> list[dict[str, Any]]:
    """Measure both, baseline and ours in turn."""
    return [help_ms(), asyncio.run(overhead_ms())]


def help_ms() -> dict[str, Any]:
    """`orchard --help` over `python -c pass`, medians of alternating runs."""
    orchard = str(Path(sys.executable).with_name("orchard"))
    ours, plain = [], []
    for _ in range(HELP_RUNS):
        plain.append(_seconds([sys.executable, "-c", "pass"]))
        ours.append(_seconds([orchard, "--help"]))
    check = f"import sys, orchard_core.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    heavy = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.strip()
    base = statistics.median(plain) * 1000
    result = row("help-ms", statistics.median(ours) * 1000 - base, baseline=base, heavy_imports=heavy)
    return {**result, "ok": result["ok"] and heavy == "[]"}


def _seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


async def overhead_ms() -> dict[str, Any]:
    """Milliseconds per episode over a bare asyncio loop that plays the same no-op harness on the same environment."""
    from core_fakes import DictEnvironment, Fixed, Play, engine_with

    from orchard_api.rollout import GroupRequest
    from orchard_api.sandbox import SandboxSpec
    from orchard_api.task import Task

    async def bare() -> float:
        environment, harness = DictEnvironment(), Play()
        free = asyncio.Semaphore(CONCURRENCY)

        async def one(number: int) -> None:
            async with free:
                name = f"s{number}"
                sandbox = await environment.create(SandboxSpec(), sandbox_id=name)
                await harness.run(Task(task_id=name, instruction="do"), sandbox, {})
                await environment.delete(name)

        begun = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(EPISODES)))
        return time.perf_counter() - begun

    async def ours() -> float:
        engine = await engine_with(DictEnvironment(), Play(), Fixed(), concurrency=CONCURRENCY)
        requests = [
            GroupRequest(group_id=f"g{number}", task=Task(task_id=f"t{number}", instruction="do"))
            for number in range(EPISODES)
        ]
        begun = time.perf_counter()
        async for _ in engine.run(requests):
            pass
        return time.perf_counter() - begun

    pairs = [(await bare(), await ours()) for _ in range(ROUNDS)]
    base = statistics.median(pair[0] for pair in pairs) / EPISODES * 1000
    mine = statistics.median(pair[1] for pair in pairs) / EPISODES * 1000
    return row("rollout-overhead-ms", mine - base, baseline=base)
