"""The quickstart on three seeds, against its two controls: continued SFT of equal time, and shuffled rewards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bars import row

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = ROOT / "recipes" / "quickstart" / "run.toml"
SEEDS = (0, 1, 2)
RL_STAGE = 2


def rows() -> list[dict[str, Any]]:
    """Run everything, one after the other, and compare."""
    folder = Path(tempfile.mkdtemp(prefix="orchard-quickstart-"))
    try:
        runs = [train(folder / f"seed-{seed}", seed) for seed in SEEDS]
        after_rl = [success(run, "rl") for run in runs]
        after_sft = [success(run, "sft") for run in runs]
        untrained = [success(run, "untrained") for run in runs]
        seconds = [run["wall_seconds"] for run in runs]
        rl_seconds = runs[0]["stages"]["rl"]["seconds"]
        longer_sft = (
            f'stages.{RL_STAGE}={{kind="sft", name="sft-longer", data="distil", epochs=1000, rows_per_update=32,'
            f" max_seconds={rl_seconds:.0f}}}"
        )
        more_sft = success(train(folder / "more-sft", 0, longer_sft), "sft-longer")
        shuffled = success(train(folder / "shuffled", 0, f"stages.{RL_STAGE}.reward_control=shuffled"), "rl")
        tasks = runs[0]["heldout_tasks"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        row(
            "quickstart", min(after_rl), baseline=after_sft[after_rl.index(min(after_rl))], seeds=after_rl, tasks=tasks
        ),
        row("quickstart-untrained", untrained),
        row("quickstart-sft-low", after_sft),
        row("quickstart-sft-high", after_sft),
        row("quickstart-seconds", seconds),
        row("quickstart-over-sft", after_rl[0] - more_sft, baseline=more_sft, seconds=rl_seconds),
        row("quickstart-shuffled", shuffled - after_sft[0], baseline=after_sft[0]),
    ]


def train(folder: Path, seed: int, *overrides: str) -> dict[str, Any]:
    """Run the recipe in a process of its own and return its summary."""
    command = [
        str(Path(sys.executable).with_name("orchard")),
        "train",
        str(RUN_FILE),
        "--run-dir",
        str(folder),
        "--plain",
    ]
    for override in (f"seed={seed}", *overrides):
        command += ["--set", override]
    subprocess.run(command, check=True, timeout=1200, stdout=subprocess.DEVNULL)
    return dict(json.loads((folder / "summary.json").read_text()))


def success(summary: dict[str, Any], stage: str) -> float:
    """Held-out success after a stage."""
    return float(summary["stages"][stage]["heldout_success"])
