"""What an agent did, as turns in a tree, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchard_api.messages import Message, Tool
from orchard_api.policy import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One LLM call.

    The ids that the model saw are the parent's full ids followed by `prompt_ids`; `response_ids` follow them. A
    turn whose prompt does not extend an earlier turn's ids has parent None, or the turn that it does extend:
    that makes a branch.

    Attributes:
        index: place in `Trajectory.turns`.
        parent: index of the turn whose full ids this prompt extends, or None for a new root.
        messages: the messages that are new in this prompt since the parent.
        response: the model's answer as a message; a malformed tool call stays text.
        prompt_ids: ids new in this prompt since the parent's full ids. Empty when `exact` and `tokenized` are False.
        response_ids: the response's ids.
        logprobs: one per response id, as the engine gave them; empty where there are none.
        versions: one policy version per response id; empty where there is none.
        exact: the ids are those that the engine sampled, so the `rl` stream may train on them. Ids of text that was
            tokenised here (experts) are not exact and feed `ce` only.
        finish_reason: why the response ended.
        tools: the tools offered.
        started_at: seconds since the epoch.
        duration_s: seconds the call took.
        flags: what was odd: `malformed_tool_call`, `truncated`, ...
        policy: the role of the policy that answered.
    """

    index: int
    parent: int | None
    messages: tuple[Message, ...]
    response: Message
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    exact: bool = False
    finish_reason: FinishReason = "stop"
    tools: tuple[Tool, ...] = ()
    started_at: float = 0.0
    duration_s: float = 0.0
    flags: tuple[str, ...] = ()
    policy: str = "main"

    def __post_init__(self) -> None:
        count = len(self.response_ids)
        if self.exact and not (count == len(self.logprobs) == len(self.versions)):
            raise ValueError(
                f"turn {self.index}: {count} response ids, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions; an exact turn has as many of each"
            )
        if self.parent is not None and not 0 <= self.parent < self.index:
            raise ValueError(f"turn {self.index}: parent {self.parent} is not an earlier turn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One branch of a trajectory as a flat row of T tokens.

    Attributes:
        ids: T token ids, prompt and responses.
        mask: T flags; True where the token is a response to train on. Each turn is True in exactly one branch.
        exact: T flags; True where a response token came from the engine with its logprob.
        logprobs: T floats; 0 where there is none.
        versions: T policy versions; -1 where there is none.
        turns: the turns on this branch, root first.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    exact: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The turns of one episode; a tree through `Turn.parent`."""

    turns: tuple[Turn, ...] = field(default=())

    def path(self, index: int) -> list[Turn]:
        """The turns from the root to `index`."""
        path: list[Turn] = []
        at: int | None = index
        while at is not None:
            path.append(self.turns[at])
            at = self.turns[at].parent
        return path[::-1]

    def full_ids(self, index: int) -> tuple[int, ...]:
        """All ids up to and including the response of turn `index`."""
        ids: list[int] = []
        for turn in self.path(index):
            ids += turn.prompt_ids
            ids += turn.response_ids
        return tuple(ids)

    def segments(self) -> list[Segment]:
        """Flatten to one row per leaf; a response on several branches is trained on in the first alone."""
        parents = {turn.parent for turn in self.turns}
        leaves = [turn.index for turn in self.turns if turn.index not in parents]
        done: set[int] = set()
        return [self._segment(self.path(leaf), done) for leaf in leaves]

    @staticmethod
    def _segment(path: Sequence[Turn], done: set[int]) -> Segment:
        ids: list[int] = []
        mask: list[bool] = []
        exact: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for turn in path:
            prompt, count = len(turn.prompt_ids), len(turn.response_ids)
            ids += turn.prompt_ids
            ids += turn.response_ids
            mask += [False] * prompt + [turn.index not in done] * count
            exact += [False] * prompt + [turn.exact] * count
            logprobs += [0.0] * prompt
            logprobs += turn.logprobs if turn.exact else [0.0] * count
            versions += [-1] * prompt
            versions += turn.versions if turn.exact else [-1] * count
            done.add(turn.index)
        return Segment(
            ids=tuple(ids),
            mask=tuple(mask),
            exact=tuple(exact),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            turns=tuple(turn.index for turn in path),
        )
