"""Text actions: what is read, what is malformed, and that reading is linear."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard_api.sandbox import ExecResult
from orchard_harnesses.actions import Edit, Malformed, Shell, Submit, parse_actions, render_action
from orchard_harnesses.tool_parsers import visible_text
from orchard_harnesses.toolbox import Limits, describe_result, shorten

READ = [
    ("<shell>ls</shell>", [Shell(command="ls")]),
    ("I look.\n<shell>\nls | wc\n</shell> then <submit/>", [Shell(command="ls | wc\n"), Submit()]),
    ("<submit>42</submit>", [Submit(answer="42")]),
    ("<submit></submit>", [Submit()]),
    ("<submit />", [Submit()]),
    ('<edit path="a b"><old>x</old><new>y</new></edit>', [Edit(path="a b", old="x", new="y")]),
    ('<edit path="a">\n<old>\nx\n</old>\n<new>\ny\n</new>\n</edit>', [Edit(path="a", old="x\n", new="y\n")]),
    ('<edit path="a"><new><old>is text here</old></new></edit>', [Edit(path="a", new="<old>is text here</old>")]),
    ('<shell>echo "<submit/>"</shell>', [Shell(command='echo "<submit/>"')]),
    ("nothing to do", []),
    ("<shell>ls", [Malformed(problem="<shell> is not closed by </shell>")]),
    ("<shell>a</shell><shell>b", [Shell(command="a"), Malformed(problem="<shell> is not closed by </shell>")]),
    ('<edit path="a">x</edit>', [Malformed(problem="<edit> of a has no <new>…</new>")]),
    ('<edit path=""><new>x</new></edit>', [Malformed(problem="<edit> has an empty path")]),
]


@pytest.mark.parametrize(("text", "actions"), READ)
def test_actions_are_read_in_order(text: str, actions: list[object]) -> None:
    assert parse_actions(text) == actions


_plain = st.text(alphabet=st.characters(blacklist_characters='<>"', blacklist_categories=["Cs"]), max_size=30)


@given(
    st.one_of(
        st.builds(Shell, command=_plain),
        st.builds(Edit, path=_plain.filter(bool), new=_plain, old=st.none() | _plain),
        st.builds(Submit, answer=_plain.map(str.strip)),
    )
)
def test_what_an_expert_writes_is_read_back(action: Shell | Edit | Submit) -> None:
    assert parse_actions(render_action(action)) == [action]


def test_reading_is_linear_in_the_reply() -> None:
    text = "<shell>" * 200_000
    start = time.perf_counter()
    parse_actions(text)
    assert time.perf_counter() - start < 0.5


def test_reasoning_is_not_acted_on() -> None:
    assert visible_text("<think>maybe <shell>rm -r .</shell></think><shell>ls</shell>") == "<shell>ls</shell>"
    assert visible_text("<think>maybe <shell>rm -r .</shell>") == ""
    assert visible_text("<shell>ls</shell>") == "<shell>ls</shell>"


RESULTS = [
    (ExecResult(exit_code=0, stdout=b"a\n"), "a"),
    (ExecResult(exit_code=0), "[no output]"),
    (ExecResult(exit_code=1, stdout=b"a\n", stderr=b"b\n"), "a\nb\n[exit 1]"),
    (ExecResult(exit_code=137), "[exit 137]"),
    (ExecResult(exit_code=None, signal=9, timed_out=True, stdout=b"part\n"), "part\n[timed out after 5s]"),
    (ExecResult(exit_code=None, signal=11), "[killed by signal 11]"),
    (ExecResult(exit_code=None, signal=9, oom_killed=True), "[killed by signal 9]\n[out of memory]"),
    (ExecResult(exit_code=0, stdout=b"headtail", stdout_dropped=90), "head\n[90 bytes dropped]\ntail"),
    (ExecResult(exit_code=0, stdout=b"\xff\xfeok"), "��ok"),
]


@pytest.mark.parametrize(("result", "text"), RESULTS)
def test_what_a_model_sees_of_a_command(result: ExecResult, text: str) -> None:
    assert describe_result(result, timeout_s=5.0, limits=Limits()) == text


def test_long_observations_keep_head_and_tail() -> None:
    assert shorten("a" * 10, 10) == "a" * 10
    assert shorten("abcdefghijk", 10) == "abcde\n[1 characters dropped]\nghijk"
