"""The json_schema reward: what is valid, and what a hostile answer or schema can't do."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from reward_fakes import FolderSandbox, episode

from orchard_api.errors import GraderError
from orchard_rewards.json_schema import JsonSchemaConfig, JsonSchemaReward

SCHEMA = {
    "type": "object",
    "required": ["name", "count"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}, "count": {"type": "integer", "minimum": 0}},
}


async def value(text: str, **options: Any) -> float:
    reward = JsonSchemaReward(JsonSchemaConfig(**{"inline": SCHEMA, **options}))
    return (await reward.score(episode(None, answer=text))).value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "aa", "count": 1}', 1.0),
        ('  {"count": 0, "name": "a"}\n', 1.0),
        ('{"name": "aa", "count": 1.5}', 0.0),
        ('{"name": "aa"}', 0.0),
        ('{"name": "aa", "count": 1, "more": 1}', 0.0),
        ('{"name": "b", "count": 1}', 0.0),
        ("", 0.0),
        ("not json", 0.0),
        ('{"name": "aa", "count": NaN}', 0.0),
        ('{"name": "aa", "count": 1e999}', 0.0),
        ('{"name": "aa", "count": ' + "9" * 5000 + "}", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
async def test_an_answer_is_valid_or_not(text: str, expected: float) -> None:
    assert await value(text) == expected


async def test_what_is_wrong_is_evidence_with_its_place() -> None:
    reward = JsonSchemaReward(JsonSchemaConfig(inline=SCHEMA))
    score = await reward.score(episode(None, answer='{"name": "aa", "count": -1}'))
    assert score.value == 0.0
    (problem,) = score.evidence["errors"]
    assert problem.startswith("count: ") and "minimum" in problem
    assert (score.name, score.policy_version) == ("json_schema", 4)


async def test_errors_are_bounded() -> None:
    reward = JsonSchemaReward(JsonSchemaConfig(inline={"items": {"type": "string"}}))
    score = await reward.score(episode(None, answer=json.dumps(list(range(10_000)))))
    assert len(score.evidence["errors"]) == 10 and len(score.evidence["answer"]) == 2000


async def test_a_hostile_text_takes_bounded_time() -> None:
    """A backtracking matcher would take longer than the universe."""
    begun = time.monotonic()
    assert await value(json.dumps({"name": "a" * 100_000 + "!", "count": 1})) == 0.0
    assert time.monotonic() - begun < 5


async def test_a_fenced_block_counts_where_asked_for() -> None:
    text = 'Here:\n```json\n{"name": "b"}\n```\nor rather\n```json\n{"name": "a", "count": 2}\n```\nDone.'
    assert await value(text) == 0.0
    assert await value(text, fenced=True) == 1.0
    assert await value('{"name": "a", "count": 2}', fenced=True) == 1.0


async def test_a_file_of_the_sandbox(box: FolderSandbox) -> None:
    reward = JsonSchemaReward(JsonSchemaConfig(inline=SCHEMA, file="out.json", limit_bytes=100))
    for data, expected, problem in (
        (b'{"name": "a", "count": 2}', 1.0, []),
        (b"\xff", 0.0, ["not UTF-8 text"]),
        (b" " * 101, 0.0, ["too large"]),
    ):
        (box.work / "out.json").write_bytes(data)
        score = await reward.score(episode(box))
        assert (score.value, score.evidence["errors"]) == (expected, problem)
    (box.work / "out.json").unlink()
    assert (await reward.score(episode(box))).evidence["errors"] == ["not found"]
    with pytest.raises(GraderError, match="no live sandbox"):
        await reward.score(episode(None))


async def test_an_answer_over_the_limit_is_not_valid() -> None:
    assert await value('{"name": "a", "count": 2}', limit_bytes=10) == 0.0


async def test_a_task_brings_its_own_schema() -> None:
    reward = JsonSchemaReward(JsonSchemaConfig())
    plain = episode(None, answer="3")
    assert "no metadata.json_schema" in reward.missing(plain.task)[0]
    with pytest.raises(GraderError, match=r"no metadata\.json_schema"):
        await reward.score(plain)
    own = replace(plain, task=replace(plain.task, metadata={"json_schema": {"type": "integer"}}))
    assert reward.missing(own.task) == []
    assert (await reward.score(own)).value == 1.0
    odd = replace(plain, task=replace(plain.task, metadata={"json_schema": {"type": "nope"}}))
    assert "not a JSON Schema" in reward.missing(odd.task)[0]


def test_a_schema_is_checked_and_fetches_nothing(tmp_path: Path) -> None:
    task = episode(None).task
    for schema, words in (({"$ref": "http://127.0.0.1:9/x"}, "JSON Schema"), ({"pattern": "("}, "JSON Schema")):
        (problem,) = JsonSchemaReward(JsonSchemaConfig(inline=schema)).missing(task)
        assert words in problem
    file = tmp_path / "schema.json"
    assert "can't be read" in JsonSchemaReward(JsonSchemaConfig(schema_file=file)).missing(task)[0]
    file.write_text("{")
    assert "not JSON" in JsonSchemaReward(JsonSchemaConfig(schema_file=file)).missing(task)[0]
    file.write_text(json.dumps(SCHEMA))
    assert JsonSchemaReward(JsonSchemaConfig(schema_file=file)).missing(task) == []
    with pytest.raises(ValidationError, match="not both"):
        JsonSchemaConfig(schema_file=file, inline=SCHEMA)
