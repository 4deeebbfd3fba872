"""The `json_schema` reward: the answer, or a file that the agent left, is JSON of the wanted form."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
from pydantic import Field, model_validator

from orchard_api.config import RunPath
from orchard_api.episode import Episode, Score
from orchard_api.errors import ConfigError, GraderError
from orchard_api.registry import PluginConfig
from orchard_api.task import Task
from orchard_rewards.answer import read_answer

METADATA_KEY = "json_schema"
_FENCE = re.compile(r"^```[a-zA-Z0-9]*[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_SHOWN, _ERRORS = 300, 10


class JsonSchemaConfig(PluginConfig):
    """Options of `json_schema`; without a schema here, each task has its own in `metadata.json_schema`."""

    schema_file: RunPath | None = Field(default=None, description="JSON Schema that every answer must meet")
    inline: dict[str, Any] | None = Field(default=None, description="the same, in the run file")
    file: str | None = Field(default=None, description="check this file (relative to the workdir), not the answer")
    fenced: bool = Field(default=False, description="take the last fenced block of the text, where it has one")
    limit_bytes: int = Field(default=1 << 20, ge=1, description="a larger file or answer is not valid")

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaConfig:
        if self.schema_file is not None and self.inline is not None:
            raise ValueError("give schema_file or inline, not both")
        return self


class JsonSchemaReward:
    """Scores 1 where the text is JSON that meets the schema, else 0. The draft is the schema's `$schema`."""

    Config = JsonSchemaConfig

    def __init__(self, config: JsonSchemaConfig) -> None:
        self._config = config

    @cached_property
    def _shared(self) -> jsonschema_rs.Validator | None:
        if self._config.inline is not None:
            return _validator(self._config.inline, "inline")
        if self._config.schema_file is not None:
            return _validator(_load(self._config.schema_file), str(self._config.schema_file))
        return None

    def _for(self, task: Task) -> jsonschema_rs.Validator:
        if self._shared is not None:
            return self._shared
        schema = task.metadata.get(METADATA_KEY)
        if schema is None:
            raise ConfigError(f"task {task.task_id} has no metadata.{METADATA_KEY}, and the reward no schema")
        return _validator(schema, f"task {task.task_id}: metadata.{METADATA_KEY}")

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`."""
        try:
            self._for(task)
        except ConfigError as error:
            return [error.message]
        return []

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`."""
        try:
            validator = self._for(episode.task)
        except ConfigError as error:
            raise GraderError(error.message) from error
        answer = await read_answer(episode, self._config.file, limit=self._config.limit_bytes)
        problems = [answer.problem] if answer.problem else []
        if answer.text is not None:
            problems = await asyncio.to_thread(self._problems, validator, answer.text)
        evidence: dict[str, object] = {"errors": problems[:_ERRORS]}
        if answer.text is not None:
            evidence["answer"] = answer.text[:2000]
        return Score(
            name="json_schema", value=float(not problems), evidence=evidence, policy_version=episode.policy_version
        )

    def _problems(self, validator: jsonschema_rs.Validator, text: str) -> list[str]:
        """What keeps a text from being valid; a hostile one takes a bounded time."""
        if self._config.fenced and (blocks := _FENCE.findall(text)):
            text = blocks[-1]
        try:
            value = json.loads(text, parse_constant=_constant)
        except (ValueError, RecursionError) as error:
            return [f"not JSON: {str(error)[:_SHOWN]}"]
        found = []
        try:
            for problem in validator.iter_errors(value):
                where = "/".join(str(part) for part in problem.instance_path)
                found.append(f"{where or 'the whole'}: {problem.message}"[:_SHOWN])
                if len(found) == _ERRORS:
                    break
        except (ValueError, RecursionError) as error:
            # Integers beyond the validator's range, nesting beyond its stack.
            return [f"can't be validated: {str(error)[:_SHOWN]}"]
        return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the schema {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the schema {path} is not JSON: {error}") from error


def _validator(schema: Any, where: str) -> jsonschema_rs.Validator:
    """A validator that fetches nothing and whose patterns take linear time."""
    try:
        return jsonschema_rs.validator_for(schema, retriever=_offline, pattern_options=jsonschema_rs.RegexOptions())
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where} is not a JSON Schema that can be used: {str(error)[:_SHOWN]}") from error


def _offline(uri: str) -> NoReturn:
    raise ValueError(f"{uri}: other documents are not fetched; put the definition into $defs")
