"""Weights go to the tokens that were sampled; failed episodes are absent, not zero."""

from __future__ import annotations

import random

import pytest
from core_fakes import MeanBaseline, turn
from hypothesis import given
from hypothesis import strategies as st

from orchard_api.episode import Episode, Score
from orchard_api.errors import Failure, FailureClass
from orchard_api.task import Task
from orchard_api.trajectory import Trajectory, Turn
from orchard_core.batching import rl_batch, sft_rows
from orchard_core.statistics import Tally, wilson_interval

mean_baseline = MeanBaseline()


def episode(number: int, group: str, reward: float | None, turns: tuple[Turn, ...] | None = None) -> Episode:
    failure = None
    if reward is None:
        failure = Failure(failure_class=FailureClass.INFRA, kind="SandboxGone", message="gone", phase="harness")
    return Episode(
        episode_id=f"e{number}",
        group_id=group,
        task=Task(task_id="t", instruction="do"),
        trajectory=Trajectory(turns=turns if turns is not None else (turn(),)),
        outcome="failed" if failure else "submitted",
        scores=() if failure else (Score(name="s", value=reward),),
        failure=failure,
    )


def test_one_of_eight_dead_leaves_a_baseline_of_seven() -> None:
    """Case 94."""
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, None]
    made = rl_batch([episode(n, "g", r) for n, r in enumerate(rewards)], mean_baseline, temperature=1.0)
    assert len(made.batch.rows) == made.batch.sequences == 7
    assert made.batch.rows[0].rl == pytest.approx((0.0, 0.0, 4 / 7, 4 / 7))
    assert (made.masked, made.dropped_groups) == (1, 0)


def test_a_group_that_died_is_dropped_and_the_step_goes_on() -> None:
    """Case 94."""
    episodes = [episode(n, "dead", None) for n in range(8)] + [episode(8, "g", 1.0), episode(9, "g", 0.0)]
    made = rl_batch(episodes, mean_baseline, temperature=1.0)
    assert {row.group_id for row in made.batch.rows} == {"g"}
    assert (made.groups, made.dropped_groups, made.masked) == (2, 1, 8)
    counted = Tally()
    counted.add_all(episodes)
    assert counted.to_dict()["infra_failed_rate"] == 0.8


def test_expert_tokens_never_get_an_rl_weight() -> None:
    expert = Turn(
        index=0,
        parent=None,
        messages=(),
        response=turn().response,
        prompt_ids=(1,),
        response_ids=(3, 4),
    )
    made = rl_batch([episode(0, "g", 1.0, (expert,)), episode(1, "g", 0.0)], mean_baseline, temperature=1.0)
    assert made.batch.rows[0].rl == (0.0, 0.0, 0.0)
    (row,) = sft_rows(episode(0, "g", 1.0, (expert,)))
    assert row.ce == (0.0, 1.0, 1.0)


def test_branches_of_an_episode_are_several_rows_of_one_sequence() -> None:
    second = Turn(
        index=1,
        parent=None,
        messages=(),
        response=turn().response,
        prompt_ids=(9,),
        response_ids=(8,),
        logprobs=(-1.0,),
        versions=(7,),
        exact=True,
    )
    made = rl_batch([episode(0, "g", 1.0, (turn(), second)), episode(1, "g", 0.0)], mean_baseline, temperature=1.0)
    assert len(made.batch.rows) == 3
    assert made.batch.sequences == 2


def test_an_episode_without_a_turn_gives_no_row() -> None:
    made = rl_batch([episode(0, "g", 1.0, ()), episode(1, "g", 0.0)], mean_baseline, temperature=1.0)
    assert [row.episode_id for row in made.batch.rows] == ["e1"]


def test_shuffled_rewards_are_a_permutation() -> None:
    episodes = [episode(n, "g", float(n)) for n in range(6)]
    made = rl_batch(episodes, mean_baseline, temperature=1.0, shuffle=random.Random(0))
    weights = [row.rl[-1] for row in made.batch.rows]
    assert sorted(weights) == pytest.approx([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert weights != sorted(weights)


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_interval_holds_the_share(successes: int, more: int) -> None:
    low, high = wilson_interval(successes, successes + more)
    assert 0.0 <= low <= high <= 1.0
    if successes + more:
        assert low - 1e-9 <= successes / (successes + more) <= high + 1e-9
