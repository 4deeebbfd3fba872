"""Turns by what they were rendered to, so that a new prompt finds the turn that it extends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchard_api.messages import Message
from orchard_api.trajectory import Turn


@dataclass(slots=True, eq=False)
class Node:
    """A turn's place in the tree of texts.

    Attributes:
        count: messages of its conversation, its response included.
        prompt_text: what was rendered for it behind its parent's text.
        text: its response as sampled, without the end-of-turn token.
        forms: how its response may stand in a later render, each up to and including the end of the turn.
        ended: whether the ids held include the end-of-turn token.
        answers: the messages that a caller may send back for its response.
        prompt_key: length and hash of its whole prompt's text.
    """

    turn: Turn
    count: int
    prompt_text: str = ""
    text: str = ""
    forms: list[str] = field(default_factory=list)
    ended: bool = True
    answers: tuple[Message, ...] = ()
    prompt_key: tuple[int, int] = (0, 0)
    children: list[Node] = field(default_factory=list)

    def match(self, text: str, at: int, end_text: str) -> int | None:
        """Where the text goes on behind the ids held, or None when it isn't an extension of this turn."""
        if not text.startswith(self.prompt_text, at):
            return None
        at += len(self.prompt_text)
        for form in self.forms:
            if text.startswith(form, at):
                return at + len(form) - (0 if self.ended else len(end_text))
        return None


class PrefixTree:
    """The turns of one episode under one policy."""

    def __init__(self) -> None:
        self._roots: list[Node] = []
        self._turns: dict[int, Turn] = {}

    def __bool__(self) -> bool:
        return bool(self._roots)

    def add(self, node: Node, parent: Node | None) -> None:
        """Put a finished turn behind `parent`."""
        self._turns[node.turn.index] = node.turn
        (self._roots if parent is None else parent.children).append(node)

    def walk_text(self, text: str, end_text: str) -> tuple[Node | None, int]:
        """The deepest turn whose whole text begins `text`, the latest of equals, and where the new text begins."""
        best: Node | None = None
        best_at = 0
        open_nodes = [(node, 0) for node in self._roots]
        while open_nodes:
            node, at = open_nodes.pop()
            end = node.match(text, at, end_text)
            if end is None:
                continue
            if end > best_at:
                best, best_at = node, end
            open_nodes += [(child, end) for child in node.children]
        return best, best_at

    def walk_messages(self, messages: Sequence[Message]) -> Node | None:
        """The deepest turn whose conversation, answer included, begins `messages`."""
        best: Node | None = None
        open_nodes = [(node, 0) for node in self._roots]
        while open_nodes:
            node, at = open_nodes.pop()
            last = node.count - 1
            if last >= len(messages) or messages[last] not in node.answers:
                continue
            if tuple(messages[at:last]) != node.turn.messages:
                continue
            if best is None or node.count > best.count:
                best = node
            open_nodes += [(child, node.count) for child in node.children]
        return best

    def held_ids(self, node: Node) -> list[int]:
        """All ids up to and including the response of a turn."""
        path: list[Turn] = []
        at: int | None = node.turn.index
        while at is not None:
            turn = self._turns[at]
            path.append(turn)
            at = turn.parent
        ids: list[int] = []
        for turn in reversed(path):
            ids += turn.prompt_ids
            ids += turn.response_ids
        return ids
