"""A long run in real sandboxes: memory and open files must stay flat, and nothing may be left.

Writes `benchmarks/results/soak.json`; exits 1 where a bar is missed. `--episodes N` sets the length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bars import row
from rich.console import Console
from run import HERE, machine, show

from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.config import choose_plugin
from orchard_api.plugins import plugin_host
from orchard_api.rollout import GroupRequest, RolloutContext, WeightedReward
from orchard_core.engine import AsyncioRolloutEngine
from orchard_core.engine_config import AsyncioEngineConfig
from orchard_harnesses.scripted import ScriptedConfig, ScriptedHarness
from orchard_rewards.command import CommandConfig, CommandReward

RECIPE = HERE.parent / "recipes" / "quickstart"
CONCURRENCY = 16


def memory_mb() -> float:
    """Resident memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def processes_of(base: Path) -> int:
    """Processes whose command line shows our folder of sandboxes."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                count += f"{base}/".encode() in (folder / "cmdline").read_bytes()
            except OSError:
                continue
    return count


async def soak(episodes: int, console: Console) -> list[dict[str, Any]]:
    """Play that many episodes and compare the second half with the first."""
    registry = plugin_host().registry
    choice = choose_plugin(
        "taskset", {"name": "tasks.py:DeskTaskset"}, registry, base=RECIPE, path="tasks", problems=[]
    )
    assert choice is not None
    tasks = choice.build(registry, base=RECIPE).tasks("train", seed=0)
    above = Path(tempfile.mkdtemp(prefix="orchard-soak-"))
    above.chmod(0o755)
    base = above / "base"
    environment = LocalEnvironment(LocalConfig(base=base))
    await environment.start()
    engine = AsyncioRolloutEngine(AsyncioEngineConfig(concurrency=CONCURRENCY))
    reward = WeightedReward(name="command", weight=1.0, reward=CommandReward(CommandConfig()))
    harness = ScriptedHarness(ScriptedConfig(system_prompt=""))
    await engine.start(
        RolloutContext(environment=environment, harness=harness, rewards=[reward], policies={}, owner="soak")
    )
    requests = (GroupRequest(group_id=str(n), task=task) for n, task in enumerate(itertools.islice(tasks, episodes)))
    solved = failed = done = 0
    memory: list[float] = []
    files: list[int] = []
    begun = printed = time.monotonic()
    async with aclosing(engine.run(requests)) as groups:
        async for group in groups:
            done += 1
            solved += sum(episode.reward == 1.0 for episode in group.episodes)
            failed += sum(episode.failure is not None for episode in group.episodes)
            memory.append(memory_mb())
            files.append(open_files())
            if time.monotonic() - printed > 10:
                printed = time.monotonic()
                console.print(f"{done}/{episodes} episodes, {memory[-1]:.0f} MiB, {files[-1]} open files")
    seconds = time.monotonic() - begun
    left = len(await environment.list())
    await environment.aclose()
    await asyncio.sleep(1)
    left += processes_of(base) + len(list(above.iterdir())) + len(engine.undeleted)
    shutil.rmtree(above)
    half, tenth = len(memory) // 2, max(len(memory) // 10, 1)
    return [
        row("soak-solved", solved / episodes, episodes=episodes, failed=failed, per_second=episodes / seconds),
        row("soak-memory-mb", max(memory[-tenth:]) - max(memory[half : half + tenth]), baseline=max(memory[:half])),
        row("soak-files", max(files[-tenth:]) - max(files[half : half + tenth]), baseline=max(files[:half])),
        row("soak-left", left),
    ]


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    episodes = parser.parse_args().episodes
    console = Console()
    rows = asyncio.run(soak(episodes, console))
    for each in rows:
        verdict = "ok" if each["ok"] else "MISSED"
        console.print(f"{each['id']:16} {show(each['value']):>10} {each['unit']:10} bar {each['bar']:10} {verdict}")
    result = {"machine": machine(), "rows": rows}
    (HERE / "results" / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(each["ok"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
