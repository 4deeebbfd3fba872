"""Tool calls in sampled text."""

from __future__ import annotations

import json

import pytest
from harness_fakes import CHATML, HERMES, make_tokenizer

from orchard_api.errors import ConfigError
from orchard_harnesses.template import ChatTemplate
from orchard_harnesses.tool_parsers import TOOL_PARSERS, find_parser, parse_hermes, render_hermes


def call(arguments: object, *, close: bool = True, name: str = "shell") -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n" + ("</tool_call>" if close else "")


ARGUMENTS = [
    {"cmd": "mkdir -p t/{a,b"},
    {"cmd": "echo ä 漢 😀"},
    {"cmd": json.dumps({"nested": '"}</tool_call>'})},
    {"cmd": "echo '</tool_call>'"},
    {},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("close", [True, False])
def test_a_call_is_read_whatever_is_in_its_strings(arguments: dict[str, str], close: bool) -> None:
    """Braces, unicode and JSON in a string; a missing closing tag at the end (vllm#9693, #17790, #21544)."""
    parsed = parse_hermes("before " + call(arguments, close=close))
    assert parsed.problems == () and parsed.content == "before"
    assert [(c.name, c.parsed()) for c in parsed.calls] == [("shell", arguments)]


def test_two_calls_and_text_around_them() -> None:
    parsed = parse_hermes(f"a {call({'x': 1})} b {call({'y': 2}, name='edit')} c")
    assert [(c.id, c.name, c.parsed()) for c in parsed.calls] == [
        ("call_0", "shell", {"x": 1}),
        ("call_1", "edit", {"y": 2}),
    ]
    assert parsed.content == "a  b  c" and parsed.problems == ()


MALFORMED = [
    "<tool_call>{'name': 'shell'}</tool_call>",
    '<tool_call>{"name": "shell", "arguments": {"command": "ls"</tool_call>',
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"name": "shell", "arguments": [1]}</tool_call>',
    "<tool_call>",
    '<tool_call>{"name": "shell", "arguments": {}} and more text',
    "<tool_call>" + "[" * 100_000,
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_is_a_problem(text: str) -> None:
    assert parse_hermes(text).problems


def test_reasoning_holds_no_calls() -> None:
    assert parse_hermes(f"<think>{call({})}</think>done").calls == ()


def test_what_is_rendered_is_read_back() -> None:
    calls = parse_hermes(call({"command": "ls"}) + call({"path": "a"}, name="edit")).calls
    assert parse_hermes(render_hermes(calls)).calls == calls


def test_the_family_is_found_in_the_template() -> None:
    tokenizer = make_tokenizer()
    assert find_parser("auto", ChatTemplate(tokenizer=tokenizer, source=HERMES)) is TOOL_PARSERS["hermes"]
    plain = ChatTemplate(tokenizer=tokenizer, source=CHATML)
    assert find_parser("hermes", plain) is TOOL_PARSERS["hermes"]
    with pytest.raises(ConfigError, match="no tool calls"):
        find_parser("auto", plain)
    with pytest.raises(ConfigError, match="expected one of auto, hermes"):
        find_parser("klingon", plain)
