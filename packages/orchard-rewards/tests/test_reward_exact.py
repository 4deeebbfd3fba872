"""The exact reward."""

from __future__ import annotations

from typing import Any

import pytest
from reward_fakes import FolderSandbox, episode

from orchard_api.errors import GraderError
from orchard_rewards.exact import ExactConfig, ExactReward


def exact(**options: Any) -> ExactReward:
    return ExactReward(ExactConfig(**options))


CASES = [
    ("42", "42", {}, 1.0),
    (" 42\n", "42", {}, 1.0),
    (" 42\n", "42", {"strip": False}, 0.0),
    ("Yes", "yes", {}, 0.0),
    ("Yes", "yes", {"casefold": True}, 1.0),
    ("", "42", {}, 0.0),
    ("", "", {}, 1.0),
]


@pytest.mark.parametrize(("answer", "expected", "options", "value"), CASES)
async def test_the_answer_is_compared(answer: str, expected: str, options: Any, value: float) -> None:
    score = await exact(**options).score(episode(None, answer=answer, expected=expected))
    assert (score.value, score.policy_version) == (value, 4)
    assert score.evidence == {"expected": expected, "answer": answer}


async def test_a_file_is_compared(box: FolderSandbox) -> None:
    reward = exact(file="out.txt", limit_bytes=10)
    assert (await reward.score(episode(box, expected="42"))).evidence["problem"] == "not found"
    for data, value, problem in [
        (b"42\n", 1.0, None),
        (b"43", 0.0, None),
        (b"4" * 11, 0.0, "too large"),
        (b"\xff", 0.0, "not UTF-8 text"),
    ]:
        (box.work / "out.txt").write_bytes(data)
        score = await reward.score(episode(box, expected="42"))
        assert (score.value, score.evidence.get("problem")) == (value, problem)
    (box.work / "out.txt").unlink()
    (box.work / "out.txt").mkdir()
    assert (await reward.score(episode(box, expected="42"))).value == 0.0


async def test_evidence_is_bounded() -> None:
    score = await exact().score(episode(None, answer="a" * 10_000, expected="b" * 10_000))
    assert {len(str(value)) for value in score.evidence.values()} == {2000}


async def test_what_is_missing_is_said_before_start() -> None:
    task = episode(None).task
    assert exact().missing(task) == ["task t has no `expected` answer to compare with"]
    assert exact().missing(episode(None, expected="").task) == []
    with pytest.raises(GraderError):
        await exact().score(episode(None))
    with pytest.raises(GraderError, match="no live sandbox"):
        await exact(file="x").score(episode(None, expected="x"))
