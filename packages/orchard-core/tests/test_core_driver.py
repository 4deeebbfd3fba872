"""Training over fakes: the order of stages, versions, accounting, and what is refused before it starts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_fakes import CountingTrainer, DictEnvironment, Numbered

from orchard_api.config import check_run
from orchard_api.errors import (
    CapabilityError,
    ConfigError,
    PolicyServerError,
    SandboxCreateError,
    SandboxDeleteError,
    TaskError,
)
from orchard_api.registry import Registry
from orchard_api.sandbox import SandboxSpec
from orchard_api.schema import read_episodes
from orchard_api.task import Task
from orchard_core import driver
from orchard_core import run as run_module
from orchard_core.progress import PlainProgress
from orchard_core.run import NothingScoredError
from orchard_core.run_dir import RunDir

RUN: dict[str, Any] = {
    "model": {"path": "."},
    "tasks": {"name": "core_fakes:Numbered"},
    "environment": {"backend": "core_fakes:DictEnvironment"},
    "harness": {"name": "core_fakes:Ask"},
    "expert": {"name": "core_fakes:Expert"},
    "rewards": [{"name": "core_fakes:Alternate", "as": "main"}],
    "rollout": {"engine": "asyncio", "concurrency": 4, "backoff_s": 0.0, "infra_retries": 0},
    "policies": {"main": {"server": "core_fakes:VersionServer"}},
    "trainer": {"name": "core_fakes:CountingTrainer"},
    "advantage": {"name": "core_fakes:MeanBaseline"},
    "weight_store": {"name": "core_fakes:MemoryStore"},
}
DISTIL = {"kind": "distil", "name": "distil", "episodes": 6, "keep": "all"}
SFT = {"kind": "sft", "name": "sft", "data": "distil", "epochs": 2, "rows_per_update": 4}
RL = {"kind": "rl", "name": "rl", "steps": 3, "groups_per_step": 2, "group_size": 8, "trainer": {"rate": 0.5}}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    Numbered.splits = {}
    CountingTrainer.made.clear()
    DictEnvironment.made.clear()


def registry() -> Registry:
    from orchard_api.plugins import PluginHost

    return PluginHost().registry


class Trained:
    """A run that ended: its summary, metrics and fakes."""

    def __init__(self, folder: Path, summary: dict[str, Any]) -> None:
        self.folder = folder
        self.summary = summary

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return RunDir(self.folder).read_metrics()

    @property
    def trainer(self) -> CountingTrainer:
        return CountingTrainer.made[-1]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == kind]


async def train(tmp_path: Path, *stages: dict[str, Any], action: Any = driver.train, **changes: Any) -> Trained:
    from rich.console import Console

    config = check_run({**RUN, "stages": stages, **changes}, registry(), base=tmp_path)
    folder = RunDir.create(config, path=tmp_path / "out", overwrite=True)
    with contextlib.closing(folder), PlainProgress(Console(quiet=True)) as progress:
        summary = await action(config, registry(), folder, progress)
    return Trained(folder.path, summary)


async def test_all_stages_leave_the_summary_that_the_recipe_promises(tmp_path: Path) -> None:
    done = await train(tmp_path, DISTIL, SFT, RL)
    summary = json.loads((done.folder / "summary.json").read_text())
    told = json.loads(json.dumps(done.summary))
    assert {**summary, "wall_seconds": 0} == {**told, "wall_seconds": 0}
    assert list(summary["stages"]) == ["untrained", "distil", "sft", "rl"]
    for stage in ("untrained", "sft", "rl"):
        assert summary["stages"][stage]["heldout_success"] == 1.0
    assert summary["heldout_tasks"] == 5
    assert summary["failures"] == {"policy": 0, "harness": 0, "infra": 0}
    assert (summary["seed"], summary["status"], summary["policy_version"]) == (0, "done", 2 * 2 + 3)
    assert done.trainer.saved == ["sft", "rl"]
    assert done.trainer.closed
    assert done.trainer.configured[-2:] == [({}, 4), ({"rate": 0.5}, 3)]
    assert DictEnvironment.made[-1].alive == {}
    assert len(list(read_episodes(done.folder / "episodes" / "rl"))) == 3 * 16
    assert {p.name for p in (done.folder / "episodes").iterdir()} == {
        *("untrained-heldout", "distil", "sft-heldout", "rl", "rl-heldout")
    }


async def test_each_step_is_sampled_by_the_version_that_the_last_one_published(tmp_path: Path) -> None:
    done = await train(tmp_path, RL)
    assert [(line["sampled_version"], line["version"]) for line in done.lines("step")] == [(0, 1), (1, 2), (2, 3)]
    for step, batch in enumerate(done.trainer.batches):
        assert {v for row in batch.rows for v in row.versions if v >= 0} == {step}
        assert batch.sequences == 16
    episodes = list(read_episodes(done.folder / "episodes" / "rl-heldout"))
    assert {episode.policy_version for episode in episodes} == {3}


async def test_a_server_that_did_not_swap_is_not_learnt_from(tmp_path: Path) -> None:
    policies = {"main": {"server": "core_fakes:VersionServer", "stuck": True}}
    with pytest.raises(PolicyServerError, match="sampled with version 0 though 1 was loaded"):
        await train(tmp_path, RL, policies=policies)


async def test_a_policy_without_token_ids_is_refused_for_rl(tmp_path: Path) -> None:
    policies = {"main": {"server": "core_fakes:VersionServer", "exact": False}}
    with pytest.raises(ConfigError, match="no token ids and logprobs"):
        await train(tmp_path, RL, policies=policies)
    assert CountingTrainer.made[-1].batches == []


def dead_groups(broken: int) -> None:
    """Make all episodes of the first `broken` groups lose their sandbox."""

    def tasks(seed: int) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(task_id=f"t{number}", instruction="do", metadata={"breaks": number < broken})

    Numbered.splits["train"] = tasks


async def test_one_dead_group_is_dropped_and_the_step_completes(tmp_path: Path) -> None:
    """Case 94: 8 of 8 die; the rate is reported, the other group is learnt from."""
    dead_groups(broken=1)
    done = await train(tmp_path, {**RL, "steps": 1})
    (line,) = done.lines("step")
    assert (line["groups"], line["dropped_groups"], line["masked_episodes"]) == (2, 1, 8)
    assert line["infra_failed_rate"] == 0.5
    assert line["reward_mean"] == 0.5
    (batch,) = done.trainer.batches
    assert {row.group_id for row in batch.rows} == {"rl/1/1"}
    assert batch.sequences == 8
    assert done.summary["failures"]["infra"] == 8


async def test_a_step_without_a_single_score_does_not_move_the_policy(tmp_path: Path) -> None:
    """Case 94: all die; the step is counted and the next one goes on."""
    dead_groups(broken=2)
    done = await train(tmp_path, {**RL, "steps": 2})
    first, second = done.lines("step")
    assert (first["version"], first["infra_failed_rate"], first["reward_mean"]) == (0, 1.0, None)
    assert second["version"] == 1


async def test_steps_that_all_die_end_the_run(tmp_path: Path) -> None:
    dead_groups(broken=10**9)
    with pytest.raises(NothingScoredError, match=r"last 3 steps.*harness: SandboxGone \(evicted\)"):
        await train(tmp_path, {**RL, "steps": 50})
    summary = RunDir(tmp_path / "out").read_json("summary.json")
    assert (summary["status"], summary["failures"]["infra"]) == ("failed", 48)


async def test_an_evaluation_without_a_single_score_ends_the_run_before_it_learns(tmp_path: Path) -> None:
    Numbered.splits["heldout"] = lambda seed: iter([Task(task_id="h", instruction="do", metadata={"breaks": True})])
    with pytest.raises(NothingScoredError, match="stage 'untrained'"):
        await train(tmp_path, RL)
    assert CountingTrainer.made[-1].batches == []


async def test_shuffled_rewards_keep_their_sum_and_lose_their_place(tmp_path: Path) -> None:
    plain = [row.rl[-1] for b in (await train(tmp_path, RL)).trainer.batches for row in b.rows]
    shuffled = await train(tmp_path, {**RL, "reward_control": "shuffled"})
    weights = [row.rl[-1] for b in shuffled.trainer.batches for row in b.rows]
    assert sum(weights) == pytest.approx(0.0)
    assert weights != plain
    rewards = [episode.reward for episode in read_episodes(shuffled.folder / "episodes" / "rl")]
    assert sorted(set(rewards)) == [0.0, 1.0], "what is recorded is what was scored"


async def test_only_solved_expert_episodes_are_kept_unless_all_are_wanted(tmp_path: Path) -> None:
    Numbered.splits["clerk"] = lambda seed: (
        Task(task_id=f"c{n}", instruction="do", metadata={"value": float(n % 3 == 0)}) for n in itertools.count()
    )
    stage = {**DISTIL, "split": "clerk", "keep": "solved", "episodes": 9}
    done = await train(tmp_path, stage, SFT)
    assert done.summary["stages"]["distil"]["kept"] == 3
    assert {row.group_id for b in done.trainer.batches for row in b.rows} == {f"distil/{n:06}" for n in (0, 3, 6)}
    for batch in done.trainer.batches:
        assert batch.sequences == len(batch.rows)
        assert all(row.ce[-2:] == (1.0, 1.0) and not any(row.rl) for row in batch.rows)


async def test_an_expert_that_solves_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    Numbered.splits["clerk"] = lambda seed: iter([Task(task_id="c", instruction="do", metadata={"value": 0.0})])
    with pytest.raises(ConfigError, match="the expert solved none of 1 tasks"):
        await train(tmp_path, {**DISTIL, "split": "clerk", "keep": "solved"}, SFT)


async def test_fine_tuning_on_a_file_of_episodes(tmp_path: Path) -> None:
    first = await train(tmp_path, DISTIL, SFT)
    file = next((first.folder / "episodes" / "distil").glob("*.parquet")).rename(tmp_path / "expert.parquet")
    done = await train(tmp_path, {**SFT, "data": file.name})
    assert sum(len(batch.rows) for batch in done.trainer.batches) == 2 * 6
    with pytest.raises(ConfigError, match=r"stages\.0\.data: there is no file"):
        await train(tmp_path, {**SFT, "data": "nowhere.parquet"})


@pytest.mark.parametrize(
    ("stage", "done"),
    [
        ({**RL, "steps": 1000, "trainer": {"update_s": 0.05}}, "steps"),
        ({**SFT, "data": "expert.parquet", "epochs": 1000, "trainer": {"update_s": 0.05}}, "updates"),
    ],
)
async def test_a_stage_ends_at_its_max_seconds(tmp_path: Path, stage: dict[str, Any], done: str) -> None:
    first = await train(tmp_path, DISTIL, SFT)
    next((first.folder / "episodes" / "distil").glob("*.parquet")).rename(tmp_path / "expert.parquet")
    async with asyncio.timeout(20):
        result = await train(tmp_path, {**stage, "max_seconds": 0.3})
    told = result.summary["stages"][stage["name"]]
    assert 0.3 <= told["seconds"] < 5
    assert done in told["cut_short"]
    assert told["heldout_success"] == 1.0
    assert told["policy_version"] == result.trainer.version > 0


async def test_a_measurement_ends_at_its_max_seconds_and_is_incomplete(tmp_path: Path) -> None:
    Numbered.splits["heldout"] = lambda seed: (
        Task(task_id=f"h{n}", instruction="do", metadata={"seconds": 0.1}) for n in range(200)
    )
    done = await train(tmp_path, {"kind": "eval", "name": "look", "max_seconds": 0.3})
    numbers = done.summary["stages"]["look"]["evaluation"]
    assert 0 < numbers["scored"] < 200 == numbers["planned"]
    assert done.summary["incomplete"]
    assert DictEnvironment.made[-1].alive == {}


@pytest.mark.parametrize(
    ("stages", "changes", "match"),
    [
        ([], {}, "at least one of"),
        ([RL], {"sampling": {"top_p": 0.9}}, "expected top_p = 1"),
        ([RL], {"sampling": {"temperature": 0}}, "a temperature above 0"),
        ([{**RL, "name": "untrained"}], {}, "'untrained' is the name"),
        ([{"kind": "eval", "name": "e", "evaluate": False}], {}, "only measures"),
        ([DISTIL, SFT, {**RL, "trainer": {"rates": 1}}], {}, "trainer.rates: unknown key"),
        ([DISTIL, SFT, {**RL, "split": "nope"}], {}, "unknown split 'nope'"),
        ([DISTIL, SFT, RL], {"evaluation": {"split": "nope"}}, "unknown split 'nope'"),
        ([RL], {"evaluation": {"split": "train"}}, "has more than 50 tasks, or no end"),
        ([RL], {"evaluation": {"split": "empty"}}, "has no task"),
        ([RL], {"evaluation": {"split": "twice"}}, "two tasks of the split 'twice' have the id 'same'"),
        ([RL], {"policies": {"main": {"server": "core_fakes:VersionServer"}}, "harness": {"name": "core_fakes:Judged"}},
         "calls the policy 'judge'"),
    ],
)  # fmt: skip
async def test_what_can_not_work_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: list[dict[str, Any]], changes: dict[str, Any], match: str
) -> None:
    import core_fakes

    monkeypatch.setattr(run_module, "MOST_TASKS", 50)
    monkeypatch.setattr(core_fakes, "Judged", type("Judged", (core_fakes.Ask,), {"needs": ("judge",)}), raising=False)
    Numbered.splits["empty"] = lambda seed: iter(())
    Numbered.splits["twice"] = lambda seed: iter([Task(task_id="same", instruction=text) for text in "ab"])
    with pytest.raises((ConfigError, TaskError), match=match):
        await train(tmp_path, *stages, **changes)
    assert all(environment.created == 0 for environment in DictEnvironment.made)


@pytest.mark.parametrize("split", ["heldout", "train"])
async def test_tasks_that_can_not_be_played_here_are_all_named_at_the_start(tmp_path: Path, split: str) -> None:
    image = SandboxSpec(image="debian:12")
    tasks = [Task(task_id="fine", instruction="do"), Task(task_id="late", instruction="do", sandbox=image)]
    tasks.append(Task(task_id="bare", instruction="do", metadata={"lacks": ["no check"]}))
    if split == "train":
        tasks.reverse()
    Numbered.splits[split] = lambda seed: iter(tasks)
    expected = "(?s)late.*debian:12.*bare.*'main': no check" if split == "heldout" else "bare.*"
    with pytest.raises(CapabilityError, match=expected):
        await train(tmp_path, RL)
    assert DictEnvironment.made[-1].created == 0


async def test_a_cancelled_run_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    Numbered.splits["train"] = lambda seed: (
        Task(task_id=f"t{n}", instruction="do", metadata={"seconds": 600}) for n in itertools.count()
    )
    training = asyncio.create_task(train(tmp_path, RL))
    async with asyncio.timeout(20):
        while not (DictEnvironment.made and DictEnvironment.made[-1].created == 5 + 4):
            await asyncio.sleep(0.01)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    summary = RunDir(tmp_path / "out").read_json("summary.json")
    assert (summary["status"], summary["episodes"]) == ("interrupted", 5)
    assert DictEnvironment.made[-1].alive == {}
    assert CountingTrainer.made[-1].closed


async def test_a_sandbox_that_could_not_be_removed_at_first_is_swept_at_the_end(tmp_path: Path) -> None:
    async def play(config: Any, registry: Registry, folder: RunDir, progress: Any) -> dict[str, Any]:
        async with run_module.open_run(config, registry, folder, progress) as run:
            environment = DictEnvironment.made[-1]
            environment.delete_errors = [SandboxDeleteError("busy") for _ in range(3)]
            await run.workshop.serve()
            await run.evaluate("eval")
            assert len(run.undeleted) == len(environment.alive) == 1
        return run.summary()

    done = await train(tmp_path, action=play, rollout={"engine": "asyncio", "concurrency": 1})
    assert done.summary["undeleted_sandboxes"] == {}
    assert DictEnvironment.made[-1].alive == {}


async def test_one_dead_episode_leaves_statistics_of_the_other_seven(tmp_path: Path) -> None:
    """Case 94, through the engine: 1 of 8 sandboxes can't be had."""
    original = DictEnvironment.create

    async def create(self: DictEnvironment, spec: SandboxSpec, *, sandbox_id: str) -> Any:
        if self.created == 5:
            self.create_errors = [SandboxCreateError("no room")]
        return await original(self, spec, sandbox_id=sandbox_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DictEnvironment, "create", create)
        done = await train(tmp_path, {**RL, "steps": 1, "groups_per_step": 1})
    (line,) = done.lines("step")
    assert (line["masked_episodes"], line["infra_failed_rate"]) == (1, 1 / 8)
    (batch,) = done.trainer.batches
    rewards = [episode.reward for episode in read_episodes(done.folder / "episodes" / "rl") if not episode.failure]
    mean = sum(rewards) / 7
    assert sorted(row.rl[-1] for row in batch.rows) == pytest.approx(sorted(reward - mean for reward in rewards))
    assert len(batch.rows) == batch.sequences == 7
