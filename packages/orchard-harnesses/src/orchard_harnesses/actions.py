"""What an agent of the built-in loop can do, and the text form of it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shell:
    """Run a shell line; `timeout_s` is what the model asked for, whatever it is."""

    command: str
    timeout_s: object = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Put `new` in the place of the one occurrence of `old`; without `old`, write the whole file."""

    path: str
    new: str
    old: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """The work is done."""

    answer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Malformed:
    """Something that was meant as an action and can't be run."""

    problem: str


Action = Shell | Edit | Submit | Malformed

_OPENING = re.compile(r'<shell>|<submit\s*/>|<submit>|<edit\s+path="([^"<>]*)"\s*>')
_OLD = ("<old>", "</old>")
_NEW = ("<new>", "</new>")


def parse_actions(text: str) -> list[Action]:
    """Find the actions in a reply, in order; linear in its length.

    Forms: `<shell>COMMAND</shell>`, `<edit path="P"><old>A</old><new>B</new></edit>`, the same without `<old>`,
    `<submit/>`, `<submit>ANSWER</submit>`. One line break right after an opening tag is not part of the content.
    An action that is opened and never closed is malformed and ends the reply.
    """
    found: list[Action] = []
    at = 0
    while (match := _OPENING.search(text, at)) is not None:
        opening = match.group()
        if opening.startswith("<submit") and opening.endswith("/>"):
            found.append(Submit())
            at = match.end()
            continue
        name = "edit" if match.group(1) is not None else opening[1:-1]
        close = text.find(f"</{name}>", match.end())
        if close < 0:
            found.append(Malformed(problem=f"<{name}> is not closed by </{name}>"))
            return found
        body = text[match.end() : close]
        at = close + len(name) + 3
        if name == "shell":
            found.append(Shell(command=_content(body)))
        elif name == "submit":
            found.append(Submit(answer=body.strip()))
        else:
            found.append(_edit(match.group(1), body))
    return found


def _edit(path: str, body: str) -> Action:
    new, old = _between(body, *_NEW), _between(body.partition(_NEW[0])[0], *_OLD)
    if new is None:
        return Malformed(problem=f"<edit> of {path} has no <new>…</new>")
    if not path:
        return Malformed(problem="<edit> has an empty path")
    return Edit(path=path, new=new, old=old)


def _between(text: str, opening: str, closing: str) -> str | None:
    start = text.find(opening)
    end = text.rfind(closing)
    return _content(text[start + len(opening) : end]) if 0 <= start < end else None


def _content(text: str) -> str:
    return text[1:] if text.startswith("\n") else text


def render_action(action: Action) -> str:
    """An action as a model writes it; `parse_actions` reads it back."""
    if isinstance(action, Shell):
        return f"<shell>{_padded(action.command)}</shell>"
    if isinstance(action, Edit):
        old = "" if action.old is None else f"<old>{_padded(action.old)}</old>"
        return f'<edit path="{action.path}">{old}<new>{_padded(action.new)}</new></edit>'
    if isinstance(action, Submit):
        return f"<submit>{action.answer}</submit>" if action.answer else "<submit/>"
    raise ValueError("a malformed action has no text of its own")


def _padded(text: str) -> str:
    return "\n" + text if text.startswith("\n") else text
