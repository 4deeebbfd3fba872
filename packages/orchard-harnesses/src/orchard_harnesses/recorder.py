"""Records LLM calls as turns with exact ids: the next prompt grows out of the ids already held."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from orchard_api.errors import ContextOverflowError, HarnessError, PolicyServerError
from orchard_api.messages import Message, Tool
from orchard_api.policy import (
    ChatRequest,
    FinishReason,
    GenerateRequest,
    Generation,
    PolicyEndpoint,
    SamplingParams,
)
from orchard_api.trajectory import Trajectory, Turn
from orchard_harnesses.prefix_tree import Node, PrefixTree
from orchard_harnesses.template import ChatTemplate
from orchard_harnesses.tool_parsers import ToolParser

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a caller gets back for one call.

    Attributes:
        turn: index of the recorded turn.
        text: the response as it was sampled, without the end-of-turn token; empty for endpoints that speak messages.
        message: the response as a message; a malformed tool call stays text.
        problems: what was wrong with its tool calls.
    """

    turn: int
    text: str
    message: Message
    finish_reason: FinishReason
    problems: tuple[str, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    """A conversation that found its place: the turn it extends, what is new behind that, and all ids."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    parent: Node | None
    text: str = ""
    new_ids: tuple[int, ...] = ()
    all_ids: Sequence[int] = ()
    key: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What came back for a prompt, before it is a turn."""

    message: Message
    text: str = ""
    ids: tuple[int, ...] = ()
    generation: Generation | None = None
    finish_reason: FinishReason = "stop"
    problems: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    started: float = 0.0
    duration: float = 0.0
    tokens: tuple[int, int] = (0, 0)


class Recorder:
    """One episode's calls to one policy, as a tree of turns.

    Calls may run at the same time: each finds its place among the turns that are finished when it starts. A call
    that fails or is cancelled records nothing.

    Args:
        endpoint: where prompts go; None when only experts speak.
        template: the model's chat template; needed for exact endpoints and for expert ids.
        parser: reads tool calls out of sampled text.
        options: passed to the chat template.
        role: the policy's role in the run.
        turns: the list to record to; recorders of several policies of one episode share it.
    """

    def __init__(
        self,
        endpoint: PolicyEndpoint | None,
        *,
        template: ChatTemplate | None = None,
        parser: ToolParser | None = None,
        options: Mapping[str, Any] = _EMPTY,
        role: str = "main",
        turns: list[Turn] | None = None,
    ) -> None:
        if endpoint is not None and endpoint.info.exact and template is None:
            raise HarnessError(f"policy {role!r} is exact, but its chat template is not known (model_path is missing)")
        self._endpoint = endpoint
        self._template = template
        self._parser = parser
        self._options = options
        self._role = role
        self._turns: list[Turn] = [] if turns is None else turns
        self._tree = PrefixTree()

    @property
    def trajectory(self) -> Trajectory:
        """What has been recorded so far."""
        return Trajectory(turns=tuple(self._turns))

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        sampling: SamplingParams | None = None,
        deadline_s: float = 120.0,
    ) -> Reply:
        """Send a conversation to the policy and record the answer as a turn.

        Args:
            sampling: how to sample; the endpoint's own by default. It is not changed.

        Raises:
            ContextOverflowError: the prompt leaves no room in the context window.
            PolicyServerError: the endpoint failed, or an exact one left out ids or logprobs.
            OverloadedError, DeadlineError: see `PolicyEndpoint`.
            HarnessError: the chat template refuses the conversation.
        """
        endpoint = self._endpoint
        if endpoint is None:
            raise HarnessError("this recorder has no policy to ask")
        sampling = endpoint.info.sampling if sampling is None else sampling
        started, clock = time.time(), time.perf_counter()
        template = self._template
        if not endpoint.info.exact or template is None:
            prompt = self._place_messages(messages, tools)
            request = ChatRequest(
                messages=prompt.messages, sampling=sampling, tools=prompt.tools, deadline_s=deadline_s
            )
            reply = await endpoint.chat(request)
            return self._append(
                prompt,
                _Answer(
                    message=reply.message,
                    finish_reason=reply.finish_reason,
                    problems=_bad_arguments(reply.message),
                    flags=("truncated",) if reply.finish_reason == "length" else (),
                    started=started,
                    duration=time.perf_counter() - clock,
                    tokens=(reply.prompt_tokens, reply.completion_tokens),
                ),
            )
        prompt = self._place(template, messages, tools)
        sampling = _fit(template, sampling, len(prompt.all_ids), endpoint.info.context_length)
        generation = await endpoint.generate(
            GenerateRequest(prompt_ids=prompt.all_ids, sampling=sampling, deadline_s=deadline_s)
        )
        _check(generation)
        ids = tuple(generation.token_ids)
        text = template.decode(ids[:-1] if ids[-1] in template.end_ids else ids)
        message, problems = self._read(text, prompt.tools)
        return self._append(
            prompt,
            _Answer(
                message=message,
                text=text,
                ids=ids,
                generation=generation,
                finish_reason=generation.finish_reason,
                problems=problems,
                flags=("truncated",) if generation.finish_reason == "length" else (),
                started=started,
                duration=time.perf_counter() - clock,
                tokens=(len(prompt.all_ids), len(ids)),
            ),
        )

    def add_expert(self, messages: Sequence[Message], text: str, *, tools: Sequence[Tool] = ()) -> Reply:
        """Record an answer that no policy gave. With a template it is tokenised once, marked as not exact."""
        template, started = self._template, time.time()
        message, problems = self._read(text, tools)
        prompt = self._place_messages(messages, tools) if template is None else self._place(template, messages, tools)
        ids, flags = _expert_ids(template, text)
        answer = _Answer(
            message=message,
            text=text,
            ids=ids,
            problems=problems,
            flags=flags,
            started=started,
            tokens=(len(prompt.all_ids), len(ids)),
        )
        return self._append(prompt, answer)

    def _place(self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool]) -> _Prompt:
        """Find the turn whose ids this conversation extends, and tokenise only what is new behind it."""
        messages, tools = tuple(messages), tuple(tools)
        text = template.render(messages, tools=tools, add_generation_prompt=True, options=self._options)
        parent, at = self._tree.walk_text(text, template.end_text)
        if any(message.role == "assistant" for message in messages[parent.count if parent else 0 :]):
            candidate = self._tree.walk_messages(messages)
            if candidate is not None and (parent is None or candidate.count > parent.count):
                found = self._reconcile(template, candidate, messages, tools, text)
                parent, at = (parent, at) if found is None else (candidate, found)
        new = text[at:]
        held: list[int] = [] if parent is None else self._tree.held_ids(parent)
        new_ids = template.encode_after_end(new) if parent is not None and parent.ended else template.encode(new)
        return _Prompt(
            messages=messages,
            tools=tools,
            parent=parent,
            text=new,
            new_ids=tuple(new_ids),
            all_ids=held + new_ids,
            key=(len(text), hash(text)),
        )

    def _place_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Prompt:
        messages = tuple(messages)
        return _Prompt(messages=messages, tools=tuple(tools), parent=self._tree.walk_messages(messages))

    def _reconcile(
        self,
        template: ChatTemplate,
        node: Node,
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        text: str,
    ) -> int | None:
        """Whether a turn is extended though the template writes its answer in another form than was sampled.

        Accepted are other white space around the answer and tool calls written anew with the same meaning; the ids
        held stay as they are. Returns where the new text begins, or None.
        """
        try:
            asked = template.render(
                messages[: node.count - 1], tools=tools, add_generation_prompt=True, options=self._options
            )
            answered = template.render(messages[: node.count], tools=tools, options=self._options)
        except HarnessError:
            return None
        closing = template.end_text + template.after_end
        kept = (len(asked), hash(asked)) == node.prompt_key and answered.startswith(asked)
        if not (kept and template.end_text and answered.endswith(closing) and text.startswith(answered)):
            return None
        answer = answered[len(asked) : -len(closing)]
        if answer.strip() != node.text.strip() and not self._same_calls(answer, node.text):
            return None
        node.forms.append(answer + template.end_text)
        return len(asked) + len(answer) + (len(template.end_text) if node.ended else 0)

    def _same_calls(self, rendered: str, sampled: str) -> bool:
        if self._parser is None:
            return False
        one, other = self._parser.parse(rendered), self._parser.parse(sampled)
        if one.problems or other.problems or not one.calls or one.content != other.content:
            return False
        return [(call.name, call.parsed()) for call in one.calls] == [
            (call.name, call.parsed()) for call in other.calls
        ]

    def _read(self, text: str, tools: Sequence[Tool]) -> tuple[Message, tuple[str, ...]]:
        if not tools or self._parser is None:
            return Message(role="assistant", content=text), ()
        parsed = self._parser.parse(text)
        if parsed.problems or not parsed.calls:
            return Message(role="assistant", content=text), parsed.problems
        return Message(role="assistant", content=parsed.content, tool_calls=parsed.calls), ()

    def _append(self, prompt: _Prompt, answer: _Answer) -> Reply:
        parent, generation = prompt.parent, answer.generation
        flags = answer.flags
        if answer.problems:
            flags += ("malformed_tool_call",)
        if self._tree and (parent is None or parent.children):
            flags += ("branch",)
        turn = Turn(
            index=len(self._turns),
            parent=None if parent is None else parent.turn.index,
            messages=prompt.messages[0 if parent is None else parent.count :],
            response=answer.message,
            prompt_ids=prompt.new_ids,
            response_ids=answer.ids,
            logprobs=() if generation is None else tuple(generation.logprobs),
            versions=() if generation is None else tuple(generation.versions),
            exact=generation is not None,
            finish_reason=answer.finish_reason,
            tools=prompt.tools,
            started_at=answer.started,
            duration_s=answer.duration,
            flags=flags,
            policy=self._role,
        )
        end_text, end_ids = ("", ()) if self._template is None else (self._template.end_text, self._template.end_ids)
        plain = Message(role="assistant", content=answer.text or answer.message.text)
        node = Node(
            turn=turn,
            count=len(prompt.messages) + 1,
            prompt_text=prompt.text,
            text=answer.text,
            forms=[answer.text + end_text],
            ended=bool(answer.ids) and answer.ids[-1] in end_ids,
            answers=(answer.message, plain),
            prompt_key=prompt.key,
        )
        self._turns.append(turn)
        self._tree.add(node, parent)
        return Reply(
            turn=turn.index,
            text=answer.text,
            message=answer.message,
            finish_reason=answer.finish_reason,
            problems=answer.problems,
            prompt_tokens=answer.tokens[0],
            completion_tokens=answer.tokens[1],
        )


def _expert_ids(template: ChatTemplate | None, text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids of an expert's text with what ends a turn, and the turn's flags."""
    if template is None:
        return (), ("expert",)
    before_end = template.end_text[: len(template.end_text) - len(template.end_text.lstrip())]
    ids = template.encode_after_end(text + before_end)
    lossy = template.decode(ids) != text + before_end
    if template.end_id is not None:
        ids.append(template.end_id)
    return tuple(ids), ("expert", "lossy_tokenization") if lossy else ("expert",)


def _fit(template: ChatTemplate, sampling: SamplingParams, prompt: int, context: int | None) -> SamplingParams:
    """A copy of `sampling` that fits into the context window and ends at the template's end-of-turn token."""
    room = sampling.max_tokens
    if context is not None:
        if prompt >= context:
            raise ContextOverflowError(prompt_tokens=prompt, context_length=context)
        room = min(room, context - prompt)
    stops = dict.fromkeys((*sampling.stop_token_ids, *sorted(template.end_ids)))
    return replace(sampling, max_tokens=room, stop_token_ids=tuple(stops))


def _bad_arguments(message: Message) -> tuple[str, ...]:
    return tuple(
        f"the arguments of {call.name} are not a JSON object" for call in message.tool_calls if call.parsed() is None
    )


def _check(generation: Generation) -> None:
    count = len(generation.token_ids)
    if not count:
        raise PolicyServerError(
            "the policy server returned no token ids",
            hint="an exact endpoint returns ids and logprobs; text is never tokenised in their place",
        )
    if not count == len(generation.logprobs) == len(generation.versions):
        raise PolicyServerError(
            f"the policy server returned {count} ids, {len(generation.logprobs)} logprobs and "
            f"{len(generation.versions)} versions"
        )
    if not all(map(math.isfinite, generation.logprobs)):
        raise PolicyServerError("the policy server returned a logprob that is not finite")
    if generation.finish_reason == "abort":
        raise PolicyServerError("the policy server aborted the response")
