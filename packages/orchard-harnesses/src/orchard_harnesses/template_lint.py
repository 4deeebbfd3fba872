"""What a chat template does to earlier turns, found out by rendering a few conversations."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchard_api.errors import HarnessError
from orchard_api.messages import Message
from orchard_harnesses.template import ChatTemplate, load_template

logger = logging.getLogger("orchard_harnesses")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateNote:
    """One thing that a template does and that a training run should know of.

    Attributes:
        kind: `no_end_of_turn`, `strips_reasoning`, `rewrites_history`, `rewrites_answer`, `generation_prompt`,
            `refuses_system`, `refuses_tool`.
        detail: for people.
    """

    kind: str
    detail: str


_USER = Message(role="user", content="Count the files.")
_ANSWER = Message(role="assistant", content=" I look.\n<shell>ls</shell>")
_THOUGHT = Message(role="assistant", content="<think>\nhm\n</think>\n\nI look.")
_NEXT = Message(role="user", content="a b")
_SYSTEM = Message(role="system", content="Be brief.")
_TOOL = Message(role="tool", content="a b", tool_call_id="call_0")


def lint_template(template: ChatTemplate, **options: Any) -> list[TemplateNote]:
    """Render k and k+1 messages of a few conversations and say where the longer does not extend the shorter."""
    notes: list[TemplateNote] = []

    def render(*messages: Message, prompt: bool = False) -> str | None:
        try:
            return template.render(messages, add_generation_prompt=prompt, options=options)
        except HarnessError:
            return None

    def note(kind: str, detail: str) -> None:
        notes.append(TemplateNote(kind=kind, detail=detail))

    if not template.end_text:
        note("no_end_of_turn", "it writes no end-of-turn token after an answer, so a model can't learn when to stop")
    elif len(template.end_text) > len(template.end_text.lstrip()):
        note("no_end_of_turn", f"it writes {template.end_text!r} after an answer: text before the end-of-turn token")
    prompt, history = render(_USER, prompt=True), render(_USER, _ANSWER)
    if prompt is None or history is None:
        note("rewrites_history", "it refuses a plain exchange of user and assistant")
        return notes
    if not history.startswith(prompt):
        note("generation_prompt", "an earlier answer does not begin with the generation prompt: each turn is a branch")
    elif not history[len(prompt) :].startswith(_ANSWER.text):
        note("rewrites_answer", "an earlier answer is not rendered as it was sampled (trimmed or rewritten)")
    longer = render(_USER, _ANSWER, _NEXT)
    if longer is not None and not longer.startswith(history):
        note("rewrites_history", "a further message changes how earlier ones are rendered: each turn is a branch")
    thought, after = render(_USER, _THOUGHT), render(_USER, _THOUGHT, _NEXT)
    if after is not None and ("hm" not in after or (thought is not None and not after.startswith(thought))):
        note("strips_reasoning", "reasoning of earlier turns is dropped: a turn that reasons begins a branch")
    if render(_SYSTEM, _USER) is None:
        note("refuses_system", 'it has no place for a system message; use system_prompt = ""')
    if render(_USER, _ANSWER, _TOOL) is None:
        note("refuses_tool", 'it has no place for tool results; use actions = "text"')
    return notes


def checked_template(folder: Path) -> ChatTemplate:
    """Load a model folder's template, and log once what its lint says.

    Raises:
        ConfigError: see `load_template`.
    """
    template = load_template(folder)
    _warn_once(template, str(folder))
    return template


@lru_cache(maxsize=64)
def _warn_once(template: ChatTemplate, folder: str) -> None:
    for note in lint_template(template):
        if note.kind not in ("refuses_system", "refuses_tool"):
            logger.warning("chat template of %s: %s (%s)", folder, note.detail, note.kind)
