"""The weighted reward: how parts become one number, in Python and in a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reward_fakes import episode

from orchard_api.config import choose_plugin
from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError, SandboxGone
from orchard_api.plugins import PluginHost
from orchard_api.reward import deadline_s
from orchard_api.task import Check, Task
from orchard_rewards.weighted import Part, WeightedReward


class Fixed:
    def __init__(self, value: float, problems: list[str] | None = None, **components: float) -> None:
        self.value, self.problems, self.components = value, problems or [], components

    def missing(self, task: Task) -> list[str]:
        return self.problems

    def deadline_s(self, task: Task) -> float:
        return 7.0

    async def score(self, episode: Episode) -> Score:
        return Score(name="fixed", value=self.value, components=self.components, evidence={"why": self.value})


class Failing(Fixed):
    async def score(self, episode: Episode) -> Score:
        raise SandboxGone("the sandbox is gone")


def parts(*values: float, weights: tuple[float, ...] = (3.0, 1.0), gate: float | None = None) -> list[Part]:
    return [
        Part(name=f"p{n}", reward=Fixed(value), weight=weight, gate=gate if n == 0 else None)
        for n, (value, weight) in enumerate(zip(values, weights, strict=True))
    ]


@pytest.mark.parametrize(("combine", "expected"), [("mean", 0.625), ("sum", 2.5), ("min", 0.5), ("product", 0.125)])
async def test_values_are_combined(combine: Any, expected: float) -> None:
    score = await WeightedReward.of(parts(0.5, 1.0), combine=combine).score(episode(None))
    assert score.value == pytest.approx(expected)
    assert score.components == {"p0": 0.5, "p1": 1.0}
    assert score.evidence["p1"] == {"why": 1.0}
    assert score.policy_version == 4


@pytest.mark.parametrize(("first", "expected", "closed"), [(0.9, 0.0, ["p0"]), (1.0, 1.0, [])])
async def test_a_gate_makes_the_whole_nothing(first: float, expected: float, closed: list[str]) -> None:
    score = await WeightedReward.of(parts(first, 1.0, gate=1.0)).score(episode(None))
    assert (score.value, score.evidence["closed_gates"]) == (expected, closed)


async def test_components_of_parts_keep_their_names() -> None:
    reward = WeightedReward.of([Part(name="tests", reward=Fixed(1.0, passed=3.0)), Part(name="b", reward=Fixed(0.0))])
    assert (await reward.score(episode(None))).components == {"tests": 1.0, "tests/passed": 3.0, "b": 0.0}


async def test_a_part_that_fails_is_never_a_zero() -> None:
    with pytest.raises(SandboxGone):
        await WeightedReward.of([Part(name="a", reward=Failing(1.0)), *parts(1.0, 1.0)]).score(episode(None))
    with pytest.raises(GraderError, match="part 'p0' returned nan"):
        await WeightedReward.of(parts(float("nan"), 1.0)).score(episode(None))
    with pytest.raises(GraderError, match="negative"):
        await WeightedReward.of(parts(-0.5, 1.0), combine="product").score(episode(None))


def test_what_parts_lack_is_named_and_their_time_adds_up() -> None:
    reward = WeightedReward.of([Part(name="a", reward=Fixed(1.0, ["no key"])), Part(name="b", reward=Fixed(1.0))])
    task = episode(None).task
    assert reward.missing(task) == ["a: no key"]
    assert deadline_s(reward, task) == 14.0


def choose(options: dict[str, Any], problems: list[str]) -> Any:
    registry = PluginHost().registry
    choice = choose_plugin(
        "reward", {"name": "weighted", **options}, registry, base=Path(), path="rewards.0", problems=problems
    )
    return choice and (choice, choice.build(registry))


async def test_a_run_file_composes_by_name() -> None:
    problems: list[str] = []
    choice, reward = choose(
        {
            "combine": "sum",
            "parts": [
                {"name": "exact", "weight": 2, "casefold": True},
                {"name": "json_schema", "as": "form", "gate": 1, "inline": {"type": "integer"}},
            ],
        },
        problems,
    )
    assert problems == []
    score = await reward.score(episode(None, answer="42", expected="42"))
    assert (score.value, score.components) == (3.0, {"exact": 1.0, "form": 1.0})
    assert (await reward.score(episode(None, answer="4x", expected="4X"))).value == 0.0
    again: list[str] = []
    table = choice.to_dict()
    assert table["parts"][0]["reward"]["casefold"] is True
    assert choose({key: table[key] for key in ("parts", "combine")}, again) is not None and again == []


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "rewards.0.parts: "),
        ([{"name": "exakt"}], "did you mean 'exact'"),
        ([{"name": "exact", "casefolds": True}], "casefolds: unknown key"),
        ([{"weight": 2}], "rewards.0.parts.0"),
        ([{"name": "exact", "weight": -1}], "rewards.0.parts.0.weight"),
        ([{"name": "exact"}, {"name": "exact"}], "two parts have one name"),
        ([{"name": "exact", "weight": 0}], "every part has the weight 0"),
        (["exact"], "rewards.0.parts.0"),
    ],
)
def test_a_run_file_that_composes_wrongly_is_refused_with_the_place(tables: list[Any], words: str) -> None:
    problems: list[str] = []
    assert choose({"parts": tables}, problems) is None
    assert any(words in problem for problem in problems), problems


def test_the_time_limit_of_others_is_their_check() -> None:
    class Plain:
        def missing(self, task: Task) -> list[str]:
            return []

        async def score(self, episode: Episode) -> Score:
            raise NotImplementedError

    assert deadline_s(Plain(), episode(None, Check(command="true", timeout_s=9)).task) == 9.0
    assert deadline_s(Plain(), episode(None).task) == 0.0
