"""From `orchard init` to a judged episode in a real sandbox, with a real HTTP endpoint that plays the model."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_api import ModelApi

from orchard_api.schema import read_episodes

ORCHARD = str(Path(sys.executable).with_name("orchard"))
KEY = "sk-secret-of-the-test"

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def orchard(folder: Path, api: ModelApi | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "120", "OPENAI_API_KEY": KEY}
    if api is not None:
        env["OPENAI_BASE_URL"] = api.base_url
    return subprocess.run([ORCHARD, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=100)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    assert orchard(tmp_path, None, "init", "demo").returncode == 0
    return tmp_path


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder of our own for sandboxes, so that those of others on this machine are not counted."""
    folder = Path(tempfile.mkdtemp(prefix="orchard-test-"))
    folder.chmod(0o755)
    yield folder / "base"
    shutil.rmtree(folder)


def running(text: str) -> set[str]:
    """Processes whose command line has this text, by pid and command line."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if text in line:
                found.add(f"{folder.name} {line}")
    return found


def test_init_then_eval_solves_the_task_and_keeps_the_key_out_of_the_records(
    project: Path, model_api: ModelApi, base: Path
) -> None:
    begun = time.monotonic()
    arguments = ["--run-dir", "out", "--set", f"environment.base={base}"]
    done = orchard(project, model_api, "eval", "demo/run.toml", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begun < 30
    summary = json.loads((project / "out" / "summary.json").read_text())
    assert summary["stages"]["eval"]["heldout_success"] == 1.0
    (episode,) = read_episodes(project / "out" / "episodes" / "eval")
    assert episode.outcome == "submitted"
    assert episode.scores[0].evidence["exit_code"] == 0
    assert model_api.authorizations == [f"Bearer {KEY}"] * 2
    for file in (project / "out").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    assert KEY not in done.stdout + done.stderr
    assert not running(str(base))
    assert not base.exists()


def test_a_wrong_answer_is_a_reward_of_0_and_a_dead_endpoint_is_not(project: Path, model_api: ModelApi) -> None:
    model_api.answer = lambda _messages: "<submit/>"
    done = orchard(project, model_api, "eval", "demo/run.toml", "--run-dir", "wrong")
    assert done.returncode == 0
    (wrong,) = read_episodes(project / "wrong" / "episodes" / "eval")
    assert wrong.reward == 0.0
    model_api.answer = lambda _messages: 500
    arguments = ["--set", "rollout.infra_retries=0", "--run-dir", "dead"]
    done = orchard(project, model_api, "eval", "demo/run.toml", *arguments)
    assert done.returncode == 1
    (dead,) = read_episodes(project / "dead" / "episodes" / "eval")
    assert dead.reward is None
    assert dead.failure is not None
    assert dead.failure.failure_class == "infra"


def test_the_oracle_solves_it_and_doing_nothing_does_not(project: Path) -> None:
    for name, reward in (("scripted", 1.0), ("noop", 0.0)):
        done = orchard(project, None, "eval", "demo/run.toml", "--set", f'harness={{name="{name}"}}', "--run-dir", name)
        assert done.returncode == 0, done.stderr
        (episode,) = read_episodes(project / name / "episodes" / "eval")
        assert episode.reward == reward


def test_what_only_an_image_can_give_is_refused_before_anything_starts(project: Path, model_api: ModelApi) -> None:
    toml = project / "demo" / "tasks" / "hello" / "task.toml"
    toml.write_text(toml.read_text() + 'docker_image = "debian:12"\n')
    done = orchard(project, model_api, "eval", "demo/run.toml")
    assert done.returncode == 2
    assert "demo/hello" in done.stderr
    assert "an image ('debian:12')" in done.stderr
    assert model_api.requests == []


def _wait_for(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code", "seconds"), [(signal.SIGINT, 130, 15), (signal.SIGTERM, 130, 15), (signal.SIGKILL, -9, 5)]
)
def test_however_the_client_ends_no_sandbox_is_left(
    project: Path, model_api: ModelApi, base: Path, number: signal.Signals, code: int, seconds: float
) -> None:
    """Cases 2 and 6: eight episodes sleep in their sandboxes when the signal comes."""
    nap = f"sleep {random.randint(100_000, 999_999)}"
    model_api.answer = lambda _messages: f"<shell>setsid {nap} & {nap}</shell>"
    command = [ORCHARD, "eval", "demo/run.toml", "--set", "evaluation.attempts=8", "--run-dir", "out"]
    command += ["--set", f"environment.base={base}"]
    env = {**os.environ, "OPENAI_BASE_URL": model_api.base_url, "OPENAI_API_KEY": KEY}
    process = subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _wait_for(lambda: len(running(f"{nap} ")) >= 16, 30, "there must be something to clean up")
        assert len(running(f"{base}/")) >= 8
        process.send_signal(number)
        process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
    _wait_for(lambda: not running(f"{base}/") and not running(nap), 5, f"left: {running(str(base)) | running(nap)}")
    _wait_for(lambda: not list(base.glob("boxes/*")), 5, "folders of sandboxes are left")
