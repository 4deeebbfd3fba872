"""Episodes and training rows as Arrow tables and Parquet files. The only module here that imports pyarrow.

Per response token an episode's table holds id, logprob, policy version and `streams`, a bit mask of the weight
streams that may train on it: 1 `rl`, 2 `ce`, 4 `ref_kl`. Logprobs are float64, so that what an engine gave is what is
read back. Images are references. A task is stored by id, instruction and metadata; its files are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchard_api.episode import Episode, Score
from orchard_api.errors import Failure, FailureClass, OrchardError
from orchard_api.messages import ImagePart, Message, Part, TextPart, Tool, ToolCall
from orchard_api.task import Task
from orchard_api.training import Row
from orchard_api.trajectory import Trajectory, Turn

FORMAT_VERSION = b"1"
RL, CE, REF_KL = 1, 2, 4

_NUMBERS = pa.map_(pa.string(), pa.float64())
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("parts", pa.list_(pa.struct([("text", pa.string()), ("image", pa.string())]))),
        ("reasoning", pa.string()),
        ("tool_calls", pa.list_(pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())]))),
        ("tool_call_id", pa.string()),
    ]
)
_TURN = pa.struct(
    [
        ("index", pa.int32()),
        ("parent", pa.int32()),
        ("messages", pa.list_(_MESSAGE)),
        ("response", _MESSAGE),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("streams", pa.list_(pa.uint8())),
        ("exact", pa.bool_()),
        ("finish_reason", pa.string()),
        ("tools", pa.string()),
        ("started_at", pa.float64()),
        ("duration_s", pa.float64()),
        ("flags", pa.list_(pa.string())),
        ("policy", pa.string()),
    ]
)
_SCORE = pa.struct(
    [
        ("name", pa.string()),
        ("value", pa.float64()),
        ("weight", pa.float64()),
        ("components", _NUMBERS),
        ("evidence", pa.string()),
        ("policy_version", pa.int64()),
    ]
)
_FAILURE = pa.struct(
    [("failure_class", pa.string()), ("kind", pa.string()), ("message", pa.string()), ("phase", pa.string())]
)
EPISODE_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("instruction", pa.string()),
        ("task_metadata", pa.string()),
        ("outcome", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),
        ("policy_version", pa.int64()),
        ("attempt", pa.int32()),
        ("started_at", pa.float64()),
        ("timings", _NUMBERS),
        ("failure", _FAILURE),
        ("scores", pa.list_(_SCORE)),
        ("turns", pa.list_(_TURN)),
    ],
    metadata={b"orchard.episodes": FORMAT_VERSION},
)
ROW_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("pair_id", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        ("rl", pa.list_(pa.float32())),
        ("ce", pa.list_(pa.float32())),
        ("ref_kl", pa.list_(pa.float32())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("values", pa.list_(pa.float32())),
        ("images", pa.list_(pa.string())),
    ],
    metadata={b"orchard.rows": FORMAT_VERSION},
)


class StoredDataError(OrchardError):
    """A Parquet file that isn't ours, or not of a version that we read."""


def episodes_to_table(episodes: Iterable[Episode]) -> pa.Table:
    """Arrow table of `EPISODE_SCHEMA`; text that is not valid Unicode has its lone surrogates replaced."""
    return pa.Table.from_pylist([_episode_to_dict(episode) for episode in episodes], schema=EPISODE_SCHEMA)


def table_to_episodes(table: pa.Table) -> Iterator[Episode]:
    """Episodes of a table, one batch in memory at a time.

    Raises:
        StoredDataError: the table has another schema.
    """
    for batch in table.to_batches():
        yield from _episodes(batch)


def rows_to_table(rows: Iterable[Row]) -> pa.Table:
    """Arrow table of `ROW_SCHEMA`."""
    columns = ROW_SCHEMA.names
    return pa.Table.from_pylist(
        [{name: _plain(getattr(row, name)) for name in columns} for row in rows], schema=ROW_SCHEMA
    )


def table_to_rows(table: pa.Table) -> Iterator[Row]:
    """Rows of a table; each is checked as it is made."""
    for record in table.select(ROW_SCHEMA.names).to_pylist():
        columns: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in record.items()}
        yield Row(**columns)


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """Write one Parquet file; it appears whole or not at all."""
    _write_file(path, episodes_to_table(episodes))


def read_episodes(path: Path) -> Iterator[Episode]:
    """Stream the episodes of a Parquet file, or of all `*.parquet` files of a folder in name order.

    Raises:
        StoredDataError: not there, not readable as Parquet, or not of our schema.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    for file in files:
        try:
            source = pq.ParquetFile(file)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoredDataError(f"can't read {file} as Parquet: {error}") from None
        with source:
            for batch in source.iter_batches(batch_size=256):
                yield from _episodes(batch)


class EpisodeWriter:
    """Appends episodes to a folder as numbered Parquet parts, each written whole; safe against a kill.

    Args:
        folder: made if missing; parts already there are kept and numbering goes on.
        part_episodes: episodes held in memory before a part is written.
    """

    def __init__(self, folder: Path, *, part_episodes: int = 256) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limit = part_episodes
        self._pending: list[dict[str, Any]] = []
        self._part = max((int(file.stem.rpartition("-")[2]) for file in folder.glob("part-*.parquet")), default=0)

    def append(self, episode: Episode) -> None:
        """Add one episode; every `part_episodes`-th call writes a part.

        Raises:
            OSError: the part could not be written (disk full); its episodes stay pending.
        """
        self._pending.append(_episode_to_dict(episode))
        if len(self._pending) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        table = pa.Table.from_pylist(self._pending, schema=EPISODE_SCHEMA)
        _write_file(self._folder / f"part-{self._part + 1:06d}.parquet", table)
        self._part += 1
        self._pending = []


def _write_file(path: Path, table: pa.Table) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _episodes(batch: pa.RecordBatch) -> Iterator[Episode]:
    missing = set(EPISODE_SCHEMA.names) - set(batch.schema.names)
    if missing:
        raise StoredDataError(f"not a table of episodes: it has no column {', '.join(sorted(missing))}")
    for record in batch.to_pylist():
        yield _dict_to_episode(record)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return value


def _json(value: Any) -> str:
    return _text(json.dumps(value, default=_json_default, ensure_ascii=False))


def _json_default(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _message_to_dict(message: Message) -> dict[str, Any]:
    parts = None
    if not isinstance(message.content, str):
        parts = [
            {"text": _text(part.text), "image": None}
            if isinstance(part, TextPart)
            else {"text": None, "image": _text(part.reference)}
            for part in message.content
        ]
    return {
        "role": message.role,
        "content": _text(message.content) if isinstance(message.content, str) else None,
        "parts": parts,
        "reasoning": None if message.reasoning is None else _text(message.reasoning),
        "tool_calls": [
            {"id": _text(call.id), "name": _text(call.name), "arguments": _text(call.arguments)}
            for call in message.tool_calls
        ],
        "tool_call_id": None if message.tool_call_id is None else _text(message.tool_call_id),
    }


def _dict_to_message(record: Mapping[str, Any]) -> Message:
    content: str | tuple[Part, ...] = record["content"] or ""
    if record["parts"] is not None:
        content = tuple(
            TextPart(text=part["text"]) if part["image"] is None else ImagePart(reference=part["image"])
            for part in record["parts"]
        )
    return Message(
        role=record["role"],
        content=content,
        reasoning=record["reasoning"],
        tool_calls=tuple(ToolCall(**call) for call in record["tool_calls"] or ()),
        tool_call_id=record["tool_call_id"],
    )


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    tools = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in turn.tools]
    return {
        "index": turn.index,
        "parent": turn.parent,
        "messages": [_message_to_dict(message) for message in turn.messages],
        "response": _message_to_dict(turn.response),
        "prompt_ids": list(turn.prompt_ids),
        "response_ids": list(turn.response_ids),
        "logprobs": list(turn.logprobs),
        "versions": list(turn.versions),
        "streams": [RL | CE | REF_KL if turn.exact else CE] * len(turn.response_ids),
        "exact": turn.exact,
        "finish_reason": turn.finish_reason,
        "tools": _json(tools) if tools else None,
        "started_at": turn.started_at,
        "duration_s": turn.duration_s,
        "flags": list(turn.flags),
        "policy": turn.policy,
    }


def _dict_to_turn(record: Mapping[str, Any]) -> Turn:
    return Turn(
        index=record["index"],
        parent=record["parent"],
        messages=tuple(_dict_to_message(message) for message in record["messages"]),
        response=_dict_to_message(record["response"]),
        prompt_ids=tuple(record["prompt_ids"]),
        response_ids=tuple(record["response_ids"]),
        logprobs=tuple(record["logprobs"]),
        versions=tuple(record["versions"]),
        exact=record["exact"],
        finish_reason=record["finish_reason"],
        tools=tuple(Tool(**tool) for tool in json.loads(record["tools"] or "[]")),
        started_at=record["started_at"],
        duration_s=record["duration_s"],
        flags=tuple(record["flags"]),
        policy=record["policy"],
    )


def _episode_to_dict(episode: Episode) -> dict[str, Any]:
    failure = episode.failure
    return {
        "episode_id": episode.episode_id,
        "group_id": episode.group_id,
        "task_id": episode.task.task_id,
        "instruction": _text(episode.task.instruction),
        "task_metadata": _json(episode.task.metadata),
        "outcome": episode.outcome,
        "answer": _text(episode.answer),
        "reward": episode.reward,
        "policy_version": episode.policy_version,
        "attempt": episode.attempt,
        "started_at": episode.started_at,
        "timings": list(episode.timings.items()),
        "failure": None
        if failure is None
        else {
            "failure_class": failure.failure_class.value,
            "kind": failure.kind,
            "message": _text(failure.message),
            "phase": failure.phase,
        },
        "scores": [
            {
                "name": score.name,
                "value": score.value,
                "weight": score.weight,
                "components": list(score.components.items()),
                "evidence": _json(score.evidence),
                "policy_version": score.policy_version,
            }
            for score in episode.scores
        ],
        "turns": [_turn_to_dict(turn) for turn in episode.trajectory.turns],
    }


def _dict_to_episode(record: Mapping[str, Any]) -> Episode:
    failure = record["failure"]
    return Episode(
        episode_id=record["episode_id"],
        group_id=record["group_id"],
        task=Task(
            task_id=record["task_id"],
            instruction=record["instruction"],
            metadata=json.loads(record["task_metadata"]),
        ),
        trajectory=Trajectory(turns=tuple(_dict_to_turn(turn) for turn in record["turns"])),
        outcome=record["outcome"],
        answer=record["answer"],
        scores=tuple(
            Score(
                name=score["name"],
                value=score["value"],
                weight=score["weight"],
                components=dict(score["components"]),
                evidence=json.loads(score["evidence"]),
                policy_version=score["policy_version"],
            )
            for score in record["scores"]
        ),
        failure=None
        if failure is None
        else Failure(
            failure_class=FailureClass(failure["failure_class"]),
            kind=failure["kind"],
            message=failure["message"],
            phase=failure["phase"],
        ),
        attempt=record["attempt"],
        started_at=record["started_at"],
        timings=dict(record["timings"]),
    )
