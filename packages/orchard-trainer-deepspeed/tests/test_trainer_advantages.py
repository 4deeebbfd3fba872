"""Advantages: the golden vectors, groups by id, failures outside the baseline."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard_trainer_deepspeed.advantages import DrGrpo, Grpo, Rloo

GROUPS = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())["groups"]
KINDS = {"grpo_std": Grpo, "dr_grpo": DrGrpo, "rloo": Rloo}


@pytest.mark.parametrize("name", KINDS)
def test_advantages_match_the_golden_vectors(name):
    made = KINDS[name]()
    got = made(GROUPS["inputs"]["rewards"], GROUPS["inputs"]["group"])
    assert got == pytest.approx(GROUPS["values"][name], abs=1e-6)
    assert (made.report.groups, made.report.single, made.report.flat) == (3, 1, 1)


@pytest.mark.parametrize("kind", KINDS.values())
@given(data=st.data())
def test_order_and_neighbours_do_not_matter(kind, data):
    # slime#1918: reshape(-1, n) with uneven groups mixes unrelated prompts.
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    reward = st.one_of(st.none(), st.floats(-10, 10), st.just(math.nan))
    items = [(f"g{n}", data.draw(reward)) for n, size in enumerate(sizes) for _ in range(size)]
    whole = kind()([reward for _, reward in items], [group for group, _ in items])
    order = data.draw(st.permutations(range(len(items))))
    shuffled = kind()([items[place][1] for place in order], [items[place][0] for place in order])
    assert [shuffled[order.index(place)] for place in range(len(items))] == pytest.approx(whole, abs=1e-9)
    for number in range(len(sizes)):
        places = [place for place, (group, _) in enumerate(items) if group == f"g{number}"]
        alone = kind()([items[place][1] for place in places], ["x"] * len(places))
        assert alone == pytest.approx([whole[place] for place in places])
        assert sum(alone) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS.values())
def test_constant_rewards_give_exactly_nothing(kind):
    # NeMo-RL#4158: float32 noise over a tiny deviation.
    rewards = [float(value) for value in numpy.full(8, 0.1, dtype=numpy.float32)]
    rewards[3] += 1e-9
    assert kind()(rewards, ["g"] * 8) == [0.0] * 8


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS.values())
def test_a_failed_episode_leaves_the_baseline(kind, missing):
    # trl#5775 and "a failure is not a reward of 0".
    made = kind()
    got = made([1.0, missing, 0.0], ["g"] * 3)
    without = kind()([1.0, 0.0], ["g"] * 2)
    assert got == [without[0], 0.0, without[1]]
    assert made.report.unscored == 1


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_group_of_one_gets_nothing_and_is_counted(kind):
    made = kind()
    assert made([0.3, 0.7, None], ["a", "b", "b"]) == [0.0, 0.0, 0.0]
    assert made.report.single == 2


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        Grpo()([1.0], ["a", "b"])
