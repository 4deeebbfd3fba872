"""Tool calls in sampled text, per model family."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchard_api.errors import ConfigError
from orchard_api.messages import ToolCall
from orchard_harnesses.template import ChatTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """Sampled text, taken apart.

    Attributes:
        content: the text outside of tool calls.
        calls: the well-formed calls, in order; ids are `call_0`, `call_1`, ...
        problems: one line per malformed call; then the whole text stays what the program sees.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolParser:
    """How one model family writes tool calls.

    Attributes:
        marks: what a chat template of that family contains.
        parse: reads sampled text.
        render: writes calls as the family does; what an expert says.
    """

    marks: str
    parse: Callable[[str], ParsedText]
    render: Callable[[Sequence[ToolCall]], str]


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder(strict=False)


def visible_text(text: str) -> str:
    """What a response says after its reasoning; nothing when the reasoning was cut off."""
    before, found, after = text.rpartition("</think>")
    if found:
        return after
    return "" if before == "" and text.lstrip().startswith("<think>") else text


def parse_hermes(text: str) -> ParsedText:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    The JSON's own end counts, so braces and tags may stand in its strings. A call whose closing tag is missing at the
    end of the text is well-formed when its JSON is complete.
    """
    shown = visible_text(text)
    content: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    at = 0
    while (start := shown.find(_OPEN, at)) >= 0:
        content.append(shown[at:start])
        body = start + len(_OPEN)
        body += len(shown[body:]) - len(shown[body:].lstrip())
        try:
            value, at = _DECODER.raw_decode(shown, body)
            calls.append(_call(value, number=len(calls)))
        except (ValueError, RecursionError) as error:
            problems.append(_problem(error))
            close = shown.find(_CLOSE, body)
            at = close if close >= 0 else len(shown)
        rest = shown[at:].lstrip()
        if rest.startswith(_CLOSE):
            at = len(shown) - len(rest) + len(_CLOSE)
        elif rest and not problems:
            problems.append(f"the call {len(calls)} has no {_CLOSE}")
    content.append(shown[at:])
    return ParsedText(content="".join(content).strip(), calls=tuple(calls), problems=tuple(problems))


def _problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _call(value: object, *, number: int) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('expected an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        text = arguments
    elif isinstance(arguments, dict):
        text = json.dumps(arguments, ensure_ascii=False)
    else:
        raise ValueError('"arguments" is not an object')
    return ToolCall(id=f"call_{number}", name=value["name"], arguments=text)


def render_hermes(calls: Sequence[ToolCall]) -> str:
    """Write calls as Hermes and Qwen models do."""
    parts = []
    for call in calls:
        arguments = call.parsed()
        value = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
        parts.append(f"{_OPEN}\n{json.dumps(value, ensure_ascii=False)}\n{_CLOSE}")
    return "\n".join(parts)


TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": ToolParser(marks=_OPEN, parse=parse_hermes, render=render_hermes),
}


def find_parser(name: str, template: ChatTemplate) -> ToolParser:
    """The parser of that name; `auto` picks the family whose mark the chat template contains.

    Raises:
        ConfigError: no such parser, or none fits the template.
    """
    if name != "auto":
        try:
            return TOOL_PARSERS[name]
        except KeyError:
            known = ", ".join(["auto", *TOOL_PARSERS])
            raise ConfigError(f"tool_parser: {name!r} is unknown; expected one of {known}") from None
    for parser in TOOL_PARSERS.values():
        if parser.marks in template.source:
            return parser
    raise ConfigError(
        "the model's chat template has no tool calls of a known family",
        hint='use actions = "text", or name the family: tool_parser = "hermes"',
    )
