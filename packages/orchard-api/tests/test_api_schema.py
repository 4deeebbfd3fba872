"""What is written to Parquet is what is read back, and what isn't ours is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard_api.episode import Episode, Score
from orchard_api.errors import Failure, FailureClass
from orchard_api.messages import ImagePart, Message, TextPart, Tool, ToolCall
from orchard_api.schema import (
    EpisodeWriter,
    StoredDataError,
    episodes_to_table,
    read_episodes,
    rows_to_table,
    table_to_episodes,
    table_to_rows,
    write_episodes,
)
from orchard_api.task import Task
from orchard_api.training import Row
from orchard_api.trajectory import Trajectory, Turn

text = st.text(max_size=20)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=text
    | st.lists(st.builds(TextPart, text=text) | st.builds(ImagePart, reference=text), min_size=1, max_size=3).map(
        tuple
    ),
    reasoning=st.none() | text,
    tool_calls=st.lists(st.builds(ToolCall, id=text, name=text, arguments=text), max_size=2).map(tuple),
    tool_call_id=st.none() | text,
)


@st.composite
def turns(draw: st.DrawFn, index: int) -> Turn:
    response = draw(ids)
    exact = draw(st.booleans())
    floats = st.floats(allow_nan=False, max_value=0)
    count = len(response) if exact else 0
    return Turn(
        index=index,
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        messages=tuple(draw(st.lists(messages, max_size=2))),
        response=draw(messages),
        prompt_ids=draw(ids),
        response_ids=response,
        logprobs=tuple(draw(st.lists(floats, min_size=count, max_size=count))),
        versions=tuple(draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count))),
        exact=exact,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        tools=draw(st.just(()) | st.just((Tool(name="shell", description="runs", parameters={"type": "object"}),))),
        flags=tuple(draw(st.lists(text, max_size=2))),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    failed = draw(st.booleans())
    score = Score(name="check", value=0.5, components={"a": 1.0}, evidence={"exit_code": 1}, policy_version=3)
    return Episode(
        episode_id=draw(text),
        group_id=draw(text),
        task=Task(task_id="family/1", instruction=draw(text), metadata={"level": 2}),
        trajectory=Trajectory(turns=tuple(draw(turns(i)) for i in range(draw(st.integers(0, 3))))),
        outcome="failed" if failed else "submitted",
        scores=() if failed else (score,),
        failure=Failure(failure_class=FailureClass.INFRA, kind="SandboxGone", message="gone", phase="harness")
        if failed
        else None,
        timings={"create": 0.25},
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(episodes(), max_size=2))
def test_episodes_survive_a_round_trip(given_episodes: list[Episode]) -> None:
    assert list(table_to_episodes(episodes_to_table(given_episodes))) == given_episodes


def _episode(number: int = 0, **changes: object) -> Episode:
    values = {
        "episode_id": f"e{number}",
        "group_id": "g",
        "task": Task(task_id="t", instruction="do"),
        "trajectory": Trajectory(),
        "outcome": "submitted",
        **changes,
    }
    return Episode(**values)  # type: ignore[arg-type]


def test_lone_surrogates_from_a_model_are_replaced_not_fatal() -> None:
    (back,) = table_to_episodes(episodes_to_table([_episode(answer="a\ud800b")]))
    assert back.answer.startswith("a")
    assert back.answer.endswith("b")
    back.answer.encode()


def test_streams_say_that_only_exact_tokens_may_feed_rl() -> None:
    message = Message(role="assistant", content="x")
    exact = Turn(
        index=0,
        parent=None,
        messages=(),
        response=message,
        response_ids=(5,),
        logprobs=(-1.0,),
        versions=(0,),
        exact=True,
    )
    expert = Turn(index=1, parent=0, messages=(), response=message, response_ids=(5, 6))
    table = episodes_to_table([_episode(trajectory=Trajectory(turns=(exact, expert)))])
    assert [turn["streams"] for turn in table.to_pylist()[0]["turns"]] == [[7], [2, 2]]


def test_writer_makes_whole_parts_and_continues_numbering(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path, part_episodes=2)
    for number in range(3):
        writer.append(_episode(number))
    assert [file.name for file in tmp_path.iterdir()] == ["part-000001.parquet"]
    writer.flush()
    again = EpisodeWriter(tmp_path, part_episodes=2)
    again.append(_episode(3))
    again.flush()
    assert [episode.episode_id for episode in read_episodes(tmp_path)] == ["e0", "e1", "e2", "e3"]


def test_a_part_that_cannot_be_written_leaves_no_file_and_keeps_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EpisodeWriter(tmp_path)
    writer.append(_episode())

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    writer.flush()
    assert len(list(read_episodes(tmp_path))) == 1


def test_foreign_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"a": [1]}), foreign)
    with pytest.raises(StoredDataError, match="no column"):
        list(read_episodes(foreign))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 not really")
    with pytest.raises(StoredDataError, match=r"broken\.parquet"):
        list(read_episodes(broken))


def test_rows_survive_a_round_trip(tmp_path: Path) -> None:
    row = Row(
        ids=(1, 2, 3),
        mask=(False, True, True),
        rl=(0.0, 0.5, 0.5),
        ce=(0.0, 0.0, 0.0),
        ref_kl=(0.0, 0.0, 0.0),
        logprobs=(0.0, -0.1, -0.2),
        versions=(-1, 4, 4),
        group_id="g",
        episode_id="e",
    )
    assert list(table_to_rows(rows_to_table([row]))) == [row]


def test_write_episodes_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    write_episodes(path, [_episode(1)])
    write_episodes(path, [_episode(2)])
    assert [episode.episode_id for episode in read_episodes(path)] == ["e2"]
    assert list(tmp_path.iterdir()) == [path]
