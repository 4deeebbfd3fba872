"""The main job end to end: a model learns in real sandboxes, and its run folder tells so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchard_api.schema import read_episodes

ROOT = Path(__file__).resolve().parent.parent
ORCHARD = str(Path(sys.executable).with_name("orchard"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    command = [ORCHARD, "train", str(ROOT / "recipes" / "quickstart" / "run.toml"), "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def test_success_on_held_out_tasks_rises_as_promised(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    stages = summary["stages"]
    assert summary["heldout_tasks"] >= 200
    assert stages["untrained"]["heldout_success"] < 0.1
    assert 0.2 <= stages["sft"]["heldout_success"] <= 0.7
    assert stages["rl"]["heldout_success"] >= 0.9
    assert summary["failures"]["infra"] == 0
    assert summary["failures"]["harness"] == 0
    assert summary["policy_version"] > 30
    assert summary["undeleted_sandboxes"] == {}


def test_what_was_trained_on_is_what_was_sampled(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    episodes = [episode for episode in read_episodes(run_dir / "episodes" / "rl") if episode.failure is None]
    assert len(episodes) == sum(line["groups"] * 4 for line in steps)
    versions = {line["step"]: line["version"] for line in steps}
    for episode in episodes:
        step = int(episode.group_id.split("/")[1])
        for turn in episode.trajectory.turns:
            assert turn.exact
            assert len(turn.response_ids) == len(turn.logprobs) == len(turn.versions) > 0
            assert set(turn.versions) == {versions[step] - 1}


def test_the_learner_agrees_with_the_engine_on_every_step(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["trainer/log_ratio_abs_max"] for line in lines if line["kind"] == "step" and "trainer/loss" in line]
    assert gaps
    assert max(gaps) < 1e-3


def test_the_report_is_one_file_with_curves_and_episodes(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    assert "<polyline" in page
    assert "Carry out the orders in the note" in page
    assert "http" not in page.replace("http-equiv", "")
