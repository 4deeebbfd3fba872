"""Task folders in the Harbor format: read exactly, and refused by name where they can't be honoured."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchard_api.errors import TaskError
from orchard_core.directory_taskset import DirectoryConfig, DirectoryTaskset, read_task
from orchard_core.init import write_project

TOML = """
version = "1.0"
[metadata]
author_name = "A. Author"
difficulty = "easy"
[agent]
timeout_sec = 5.0
[verifier]
timeout_sec = 60.0
[environment]
docker_image = "debian:12"
memory = "2G"
storage = "512M"
cpus = 2
allow_internet = false
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    task = tmp_path / "tasks" / "one"
    (task / "tests").mkdir(parents=True)
    (task / "solution").mkdir()
    (task / "task.toml").write_text(TOML)
    (task / "instruction.md").write_text("Do it.\n")
    (task / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (task / "solution" / "solve.sh").write_text("true\n")
    return task


def test_a_task_of_terminal_bench_2_with_legacy_keys(folder: Path) -> None:
    """Case 96: the agent's and the verifier's timeouts come from their own tables."""
    task = read_task(folder)
    assert (task.task_id, task.instruction) == ("one", "Do it.")
    assert (task.agent_timeout_s, task.check.timeout_s) == (5.0, 60.0)
    assert task.sandbox.image == "debian:12"
    assert (task.sandbox.resources.memory_mb, task.sandbox.resources.disk_mb) == (2048, 512)
    assert task.sandbox.network.mode == "none"
    assert (task.check.target, task.check.verdict) == ("/tests", "reward_file")
    assert task.solution.folder == folder / "solution"
    assert task.metadata["difficulty"] == "easy"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("timeout_sec = 5.0", "timeout_sec = 'long'", r"agent\.timeout_sec: input should be a valid number"),
        ('memory = "2G"', 'memory = "2G"\nmemory_mb = 100', "memory and memory_mb contradict"),
        ('memory = "2G"', 'memory = "lots"', "expected a size like '2G'"),
        ("allow_internet = false", 'network_mode = "public"\nallowed_hosts = ["a.b"]', "allowed_hosts needs"),
        ("[metadata]", "[[steps]]\nname = 'a'\n[metadata]", "steps: part of the Harbor format, but not supported yet"),
        ("[verifier]", "[verifier]\nenvironment_mode = 'separate'", r"verifier\.environment_mode"),
        ('docker_image = "debian:12"', 'docker_image = "debian:12"\nos = "windows"', r"environment\.os"),
        ("[agent]", "[agent", "can't be read"),
    ],
)
def test_what_is_not_supported_or_wrong_names_file_and_field(folder: Path, old: str, new: str, match: str) -> None:
    file = folder / "task.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(TaskError, match=match) as caught:
        read_task(folder)
    assert "task.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("[verifier]", "user = 'root'"),
        ("[verifier]", "network_mode = 'public'"),
        ("[environment]", "skills_dir = '/s'"),
        ("[environment]", "healthcheck = {command = 'true'}"),
        ("[environment]", "mcp_servers = []"),
        ("[agent]", "allowed_hosts = ['a.b']"),
    ],
)
def test_what_the_format_has_and_we_do_not_is_refused_as_such(folder: Path, table: str, key: str) -> None:
    file = folder / "task.toml"
    file.write_text(file.read_text().replace(table, f"{table}\n{key}"))
    name = f"{table.strip('[]')}.{key.partition(' ')[0]}"
    with pytest.raises(TaskError, match=f"{name}: part of the Harbor format, but not supported yet"):
        read_task(folder)


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "trajectory.json"])
def test_files_that_change_what_is_asked_are_never_ignored(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    with pytest.raises(TaskError, match=f"{name}: tasks .* are not supported yet"):
        read_task(folder)


def test_gpus_are_passed_on_for_the_backend_to_refuse(folder: Path) -> None:
    from orchard_api.environment import Capabilities

    file = folder / "task.toml"
    file.write_text(file.read_text() + "gpus = 2\n")
    assert "2 GPU(s)" in Capabilities(images=True).missing(read_task(folder).sandbox)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(TaskError, match=missing):
        read_task(folder)


def test_host_variables_are_filled_in_and_an_unset_one_refuses_before_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 95."""
    file = folder / "task.toml"
    file.write_text(file.read_text() + '[environment.env]\nA = "x${FROM_HOST}"\nB = "${NOT_THERE:-fallback}"\n')
    monkeypatch.delenv("FROM_HOST", raising=False)
    with pytest.raises(TaskError, match=r"environment\.env: \$\{FROM_HOST\} is not set"):
        read_task(folder)
    monkeypatch.setenv("FROM_HOST", "1")
    assert dict(read_task(folder).sandbox.env) == {"A": "x1", "B": "fallback"}


def test_a_dockerfile_is_an_image_to_build_that_a_backend_without_images_refuses(folder: Path) -> None:
    from orchard_api.environment import Capabilities

    file = folder / "task.toml"
    file.write_text(file.read_text().replace('docker_image = "debian:12"\n', ""))
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM debian\n")
    spec = read_task(folder).sandbox
    assert any("an image" in problem for problem in Capabilities().missing(spec))


def test_splits_are_disjoint_and_depend_on_the_seed_alone(folder: Path) -> None:
    import shutil

    for number in range(30):
        shutil.copytree(folder, folder.parent / f"task-{number}")
    taskset = DirectoryTaskset(DirectoryConfig(path=folder.parent, heldout_share=0.3))
    ids = {split: [task.task_id for task in taskset.tasks(split, seed=1)] for split in ("all", "train", "heldout")}
    assert set(ids["train"]) | set(ids["heldout"]) == set(ids["all"])
    assert not set(ids["train"]) & set(ids["heldout"])
    assert ids["heldout"]
    assert ids["all"] == [task.task_id for task in taskset.tasks("all", seed=1)]
    assert ids["all"] != [task.task_id for task in taskset.tasks("all", seed=2)]
    with pytest.raises(TaskError, match="unknown split 'dev'"):
        list(taskset.tasks("dev", seed=1))


def test_a_folder_without_tasks_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="orchard init"):
        list(DirectoryTaskset(DirectoryConfig(path=tmp_path)).tasks("all", seed=0))


def test_what_init_writes_is_a_readable_task(tmp_path: Path) -> None:
    write_project(tmp_path / "demo")
    (task,) = DirectoryTaskset(DirectoryConfig(path=tmp_path / "demo" / "tasks")).tasks("all", seed=0)
    assert task.task_id == "demo/hello"
    assert task.sandbox.image is None
    from orchard_api.errors import ConfigError

    with pytest.raises(ConfigError, match="exists already"):
        write_project(tmp_path / "demo")
