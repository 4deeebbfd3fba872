"""Reads what an OpenAI-compatible API answers; whatever can't be used is a `PolicyServerError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchard_api.errors import PolicyServerError
from orchard_api.policy import FinishReason

_FINISH: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "abort": "abort",
    "function_call": "tool_calls",
    "content_filter": "stop",
    "eos": "stop",
    "max_tokens": "length",
}


def model_names(answer: Any) -> list[str]:
    """The ids in an answer of `/models`."""
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]


def first_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one completion that was asked for."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise PolicyServerError("the policy server's answer has no choices")
    return choices[0]


def finish_reason(choice: Mapping[str, Any]) -> FinishReason:
    """Why a completion ended."""
    reason = choice.get("finish_reason") or "stop"
    if reason not in _FINISH:
        raise PolicyServerError(f"the policy server ended with the unknown finish_reason {reason!r}")
    return _FINISH[reason]


def token_count(usage: Any, name: str) -> int:
    """A number of the usage block; 0 where it has none."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0


def integers(value: Any, name: str) -> tuple[int, ...]:
    """A list of token ids or versions."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise PolicyServerError(
            f"the policy server returned no {name}",
            hint="exact = true needs a server with return_token_ids, such as vLLM or Orchard's in-process server",
        )
    return tuple(value)


def sampled_logprobs(choice: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """One logprob per sampled token."""
    block = choice.get("logprobs")
    values = block.get("token_logprobs") if isinstance(block, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        raise PolicyServerError("the policy server returned no logprobs of the sampled tokens")
    if len(values) != count:
        raise PolicyServerError(f"the policy server returned {count} token ids and {len(values)} logprobs")
    return tuple(map(float, values))


def token_versions(choice: Mapping[str, Any], answer: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """One policy version per token: a list, or spans of `[start, end)` by label, or 0 where none is reported."""
    listed = choice.get("token_versions")
    if isinstance(listed, list):
        versions = integers(listed, "token_versions")
        if len(versions) != count:
            raise PolicyServerError(f"the policy server returned {count} token ids and {len(versions)} versions")
        return versions
    spans = choice.get("weight_versions", answer.get("weight_versions"))
    if not spans:
        return (0,) * count
    found: list[int | None] = [None] * count
    for label, start, end in _spans(spans):
        found[start:end] = [label] * (min(end, count) - start)
    if any(version is None for version in found):
        raise PolicyServerError("the policy server's weight_versions don't cover every token")
    return tuple(version for version in found if version is not None)


def _spans(value: Any) -> Sequence[tuple[int, int, int]]:
    try:
        return [(int(str(span["version"]).lstrip("v")), int(span["start"]), int(span["end"])) for span in value]
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyServerError(f"the policy server's weight_versions can't be read: {error!r}") from error
