"""Trees flatten so that each response is trained on exactly once."""

from __future__ import annotations

import math

import pytest

from orchard_api.messages import Message
from orchard_api.training import Row
from orchard_api.trajectory import Trajectory, Turn

ANSWER = Message(role="assistant", content="x")


def turn(
    index: int, parent: int | None, prompt: tuple[int, ...], response: tuple[int, ...], *, exact: bool = True
) -> Turn:
    count = len(response) if exact else 0
    return Turn(
        index=index,
        parent=parent,
        messages=(),
        response=ANSWER,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=(-0.5,) * count,
        versions=(index,) * count,
        exact=exact,
    )


def test_a_chain_is_one_segment_with_observations_masked() -> None:
    trajectory = Trajectory(turns=(turn(0, None, (1, 2), (3,)), turn(1, 0, (4,), (5, 6))))
    (segment,) = trajectory.segments()
    assert segment.ids == (1, 2, 3, 4, 5, 6)
    assert segment.mask == (False, False, True, False, True, True)
    assert segment.versions == (-1, -1, 0, -1, 1, 1)
    assert segment.turns == (0, 1)
    assert trajectory.full_ids(1) == segment.ids


def test_a_shared_response_is_trained_on_in_the_first_branch_alone() -> None:
    trajectory = Trajectory(
        turns=(turn(0, None, (1,), (2,)), turn(1, 0, (3,), (4,)), turn(2, 0, (5,), (6,)), turn(3, None, (7,), (8,)))
    )
    segments = trajectory.segments()
    assert [segment.ids for segment in segments] == [(1, 2, 3, 4), (1, 2, 5, 6), (7, 8)]
    assert [segment.mask for segment in segments] == [
        (False, True, False, True),
        (False, False, False, True),
        (False, True),
    ]


def test_expert_tokens_are_marked_inexact() -> None:
    (segment,) = Trajectory(turns=(turn(0, None, (1,), (2, 3), exact=False),)).segments()
    assert segment.exact == (False, False, False)
    assert segment.mask == (False, True, True)
    assert segment.versions == (-1, -1, -1)


def test_an_exact_turn_without_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="as many of each"):
        Turn(
            index=0,
            parent=None,
            messages=(),
            response=ANSWER,
            response_ids=(1, 2),
            logprobs=(-1.0,),
            versions=(0, 0),
            exact=True,
        )


def test_a_parent_must_come_earlier() -> None:
    with pytest.raises(ValueError, match="earlier turn"):
        turn(1, 1, (1,), (2,))


GOOD = {
    "ids": (1, 2, 3),
    "mask": (False, True, True),
    "rl": (0.0, 1.0, 1.0),
    "ce": (0.0,) * 3,
    "ref_kl": (0.0,) * 3,
    "logprobs": (0.0, -1.0, -1.0),
    "versions": (-1, 0, 0),
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mask": (False, True)}, "3 ids but 2 mask"),
        ({"mask": (True, True, True), "versions": (0, 0, 0)}, "all tokens or none"),
        ({"mask": (False, False, False), "rl": (0.0,) * 3}, "all tokens or none"),
        ({"versions": (-1, -1, 0)}, "not sampled by an engine"),
        ({"rl": (1.0, 1.0, 1.0), "versions": (0, 0, 0)}, "not sampled by an engine"),
        ({"rl": (0.0, math.nan, 0.0)}, "rl weight nan"),
    ],
)
def test_a_row_that_would_train_on_the_wrong_tokens_is_refused(change: dict[str, object], match: str) -> None:
    Row(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=match):
        Row(**{**GOOD, **change})  # type: ignore[arg-type]
