"""The quickstart's tasks and model folder: tasks can be solved, splits don't meet, tokens lose nothing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchard_api.errors import TaskError
from orchard_api.messages import Message
from orchard_api.task import Task
from orchard_harnesses.template import load_template
from orchard_harnesses.template_lint import lint_template

FOLDER = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


desk = load("tasks")


def take(split: str, count: int, *, seed: int = 0, **options: float) -> list[Task]:
    taskset = desk.DeskTaskset(desk.DeskConfig(**options))
    return list(itertools.islice(taskset.tasks(split, seed=seed), count))


def play(task: Task, folder: Path, *, steps: int = 2, extra: str = "true") -> bool:
    folder.mkdir()
    for name, data in task.files.items():
        (folder / name).write_bytes(data)
    assert task.solution is not None and task.check is not None
    for step in task.solution.steps[:steps]:
        for command in step.commands:
            subprocess.run(["sh", "-c", command], cwd=folder, check=True, capture_output=True)
    subprocess.run(["sh", "-c", extra], cwd=folder, check=True)
    env = {"WORKDIR": str(folder), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    return subprocess.run(["sh", "-c", task.check.command], cwd="/", env=env).returncode == 0


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_solutions_solve_the_tasks(split: str, tmp_path: Path) -> None:
    assert all(play(task, tmp_path / str(number)) for number, task in enumerate(take(split, 40)))


def test_a_task_is_not_solved_before_or_beyond_its_orders(tmp_path: Path) -> None:
    for number, task in enumerate(take("train", 10)):
        assert not play(task, tmp_path / f"looked-{number}", steps=1)
        assert not play(task, tmp_path / f"more-{number}", extra="touch more")


def test_each_order_changes_something_and_its_mix_up_something_else() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        laid = desk.lay_out(rng)
        for order in laid.orders:
            right, wrong = dict(laid.files), dict(laid.files)
            order.carry_out(right)
            order.mixed_up().carry_out(wrong)
            assert laid.files != right != wrong


def test_the_clerk_is_right_as_often_as_said(tmp_path: Path) -> None:
    right = [play(task, tmp_path / str(number)) for number, task in enumerate(take("clerk", 150))]
    assert 0.25 < sum(right) / len(right) < 0.57


def test_a_careful_clerk_is_always_right(tmp_path: Path) -> None:
    assert all(play(task, tmp_path / str(n)) for n, task in enumerate(take("clerk", 20, carelessness=0)))


def keys(tasks: list[Task]) -> set[tuple[str, ...]]:
    return {(task.instruction, *task.metadata["orders"]) for task in tasks}


def test_heldout_tasks_are_never_trained_on() -> None:
    held_out = keys(take("heldout", 1000))
    assert len(held_out) >= 999
    assert not held_out & keys(take("train", 4000) + take("clerk", 1000))


def test_a_split_depends_on_its_seed_alone() -> None:
    assert take("train", 20, seed=3) == take("train", 20, seed=3)
    assert not keys(take("train", 20, seed=3)) & keys(take("train", 20, seed=4))
    assert len({task.task_id for split in ("train", "heldout", "clerk") for task in take(split, 50)}) == 150


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(TaskError, match="heldout"):
        take("test", 1)


def test_the_model_folder_is_what_the_script_writes() -> None:
    sys.modules["tasks"] = desk
    try:
        files = load("make_model").make_files()
    finally:
        del sys.modules["tasks"]
    for name, text in files.items():
        written = (FOLDER / "model" / name).read_text("utf-8")
        if name.endswith(".json"):
            assert json.loads(written) == json.loads(text)
        else:
            assert written == text


def test_tokens_lose_nothing() -> None:
    template = load_template(FOLDER / "model")
    unknown = template.tokenizer.token_to_id("<unk>")
    for task in take("heldout", 50):
        assert task.solution is not None
        look, act = (step.commands[0] for step in task.solution.steps)
        talk = (
            Message(role="user", content=task.instruction),
            Message(role="assistant", content=f"<shell>{look}</shell>"),
            Message(role="tool", content="\n".join(task.metadata["orders"]), tool_call_id="call_0"),
            Message(role="assistant", content=f"<shell>{act}</shell>\n<submit/>"),
        )
        text = template.render(talk)
        ids = template.encode(text)
        assert template.decode(ids) == text
        assert unknown not in ids
        assert len(ids) < 50


def test_the_template_extends_earlier_turns() -> None:
    assert lint_template(load_template(FOLDER / "model")) == []
