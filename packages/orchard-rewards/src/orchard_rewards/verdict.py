"""Reward files, read as Harbor reads them, from a sandbox that is not trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

from orchard_api.errors import GraderError, SandboxFileError
from orchard_api.sandbox import Sandbox

VERIFIER_FOLDER = "/logs/verifier"
_LIMIT = 64 << 10
_SHOWN = 200


async def read_reward(sandbox: Sandbox, folder: str = VERIFIER_FOLDER) -> Mapping[str, float]:
    """The named numbers of `reward.json` (a number, or a flat object of finite numbers), else of `reward.txt`.

    Raises:
        GraderError: neither file is there, or the one that counts holds anything else.
    """
    text = await _read(sandbox, f"{folder}/reward.json")
    if text is not None:
        return parse_json(text)
    text = await _read(sandbox, f"{folder}/reward.txt")
    if text is not None:
        return {"reward": parse_number(text, "reward.txt")}
    raise GraderError(
        f"the check wrote neither reward.json nor reward.txt to {folder}",
        hint="a check with verdict `reward_file` must write one, also when the score is 0",
    )


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        data = await sandbox.read_file(path, limit=_LIMIT)
    except SandboxFileError as error:
        if error.reason == "not_found":
            return None
        raise GraderError(f"{path} can't be read: {error.reason.replace('_', ' ')}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GraderError(f"{path} is not UTF-8 text") from error


def parse_json(text: str) -> Mapping[str, float]:
    """Read `reward.json`.

    Raises:
        GraderError: not a number and not a flat object of finite numbers.
    """
    try:
        value = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise GraderError(f"reward.json is not JSON: {text[:_SHOWN]!r}") from error
    if not isinstance(value, dict):
        return {"reward": _finite(value, "reward.json")}
    if not value:
        raise GraderError("reward.json is an empty object")
    return {str(key): _finite(entry, f"reward.json, {key!r}") for key, entry in value.items()}


def parse_number(text: str, where: str) -> float:
    """Read one finite number.

    Raises:
        GraderError: it is none.
    """
    try:
        value = float(text.strip())
    except ValueError:
        raise GraderError(f"{where} is not a number: {text[:_SHOWN]!r}") from None
    return _finite(value, where)


def _constant(name: str) -> NoReturn:
    raise GraderError(f"reward.json holds {name}")


def _finite(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GraderError(f"{where}: expected a number, got {str(value)[:_SHOWN]!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise GraderError(f"{where}: expected a finite number")
    return number
