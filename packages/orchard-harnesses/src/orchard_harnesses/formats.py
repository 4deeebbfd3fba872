"""How actions are written: as text with tags, or as tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from orchard_api.messages import Message, Tool, ToolCall
from orchard_harnesses.actions import Action, Edit, Malformed, Shell, Submit, parse_actions, render_action
from orchard_harnesses.recorder import Reply
from orchard_harnesses.tool_parsers import ToolParser, render_hermes, visible_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One action of a reply, with the id of the tool call that asked for it."""

    action: Action
    call_id: str | None = None


class ActionFormat(Protocol):
    """Reads actions out of replies, writes them as an expert would, and puts observations into messages."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What is offered to the model besides text."""
        ...

    @property
    def system_prompt(self) -> str:
        """What a general model needs to be told."""
        ...

    def read(self, reply: Reply) -> list[Step]:
        """The actions of a reply, in order."""
        ...

    def history(self, reply: Reply) -> Message:
        """The reply as an earlier message of the next prompt: exactly as sampled where ids are held."""
        ...

    def observe(self, observations: Sequence[tuple[Step, str]]) -> list[Message]:
        """The messages that tell the model what its actions gave."""
        ...

    def write(self, thought: str, actions: Sequence[Action]) -> str:
        """An expert's reply as text."""
        ...


TEXT_PROMPT = """\
You work in a Linux sandbox, in the current directory. Solve the task by acting; each reply may hold your reasoning and
one or more actions, which are run in order. You are then shown what they printed.

Run a shell command:
<shell>ls -la</shell>

Replace text in a file; the old text must occur exactly once:
<edit path="notes.txt"><old>first</old><new>second</new></edit>

Write a whole file:
<edit path="hello.py"><new>
print("hello")
</new></edit>

When the task is done, and only then, say so; an answer goes between the tags if the task asks for one:
<submit></submit>

Each command runs in a fresh shell, so `cd` and variables don't last. Commands can't be interactive."""

CALL_PROMPT = """\
You work in a Linux sandbox, in the current directory. Solve the task with the tools. Each shell command runs in a fresh
shell, so `cd` and variables don't last; commands can't be interactive. When the task is done, and only then, call
submit, with the answer if the task asks for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """`<shell>…</shell>` and its like in the reply's text; observations come back as one message."""

    role: Literal["user", "tool"] = "user"
    tools: tuple[Tool, ...] = ()
    system_prompt: str = TEXT_PROMPT

    def read(self, reply: Reply) -> list[Step]:
        """See `ActionFormat`."""
        return [Step(action=action) for action in parse_actions(visible_text(reply.text or reply.message.text))]

    def history(self, reply: Reply) -> Message:
        """See `ActionFormat`."""
        return Message(role="assistant", content=reply.text or reply.message.text)

    def observe(self, observations: Sequence[tuple[Step, str]]) -> list[Message]:
        """See `ActionFormat`."""
        return [Message(role=self.role, content="\n".join(text for _, text in observations))]

    def write(self, thought: str, actions: Sequence[Action]) -> str:
        """See `ActionFormat`."""
        return "\n".join([*([thought] if thought else []), *map(render_action, actions)])


def _tool(name: str, description: str, required: Sequence[str], **properties: tuple[str, str]) -> Tool:
    schema = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(required)}
    return Tool(name=name, description=description, parameters=parameters)


TOOLS = (
    _tool(
        "shell",
        "Run a shell command and see what it prints.",
        ["command"],
        command=("string", "The command line."),
        timeout_s=("number", "Seconds it may take."),
    ),
    _tool(
        "edit",
        "Replace text in a file, or write a whole file when `old` is left out.",
        ["path", "new"],
        path=("string", "The file."),
        old=("string", "The text to replace; it must occur exactly once."),
        new=("string", "The text to put there."),
    ),
    _tool(
        "submit",
        "Say that the task is done.",
        [],
        answer=("string", "The answer, if the task asks for one."),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Tool calls: the endpoint's own, or read out of sampled text by the model family's parser."""

    parser: ToolParser | None = None
    tools: tuple[Tool, ...] = TOOLS
    system_prompt: str = CALL_PROMPT

    def read(self, reply: Reply) -> list[Step]:
        """See `ActionFormat`."""
        if reply.problems and not reply.message.tool_calls:
            return [Step(action=Malformed(problem=f"malformed tool call: {problem}")) for problem in reply.problems]
        return [Step(action=_action(call), call_id=call.id) for call in reply.message.tool_calls]

    def history(self, reply: Reply) -> Message:
        """See `ActionFormat`."""
        return Message(role="assistant", content=reply.text) if reply.text else reply.message

    def observe(self, observations: Sequence[tuple[Step, str]]) -> list[Message]:
        """See `ActionFormat`."""
        messages: list[Message] = []
        for step, text in observations:
            role: Literal["user", "tool"] = "user" if step.call_id is None else "tool"
            messages.append(Message(role=role, content=text, tool_call_id=step.call_id))
        return messages

    def write(self, thought: str, actions: Sequence[Action]) -> str:
        """See `ActionFormat`."""
        calls = [_call(action, number) for number, action in enumerate(actions)]
        render = render_hermes if self.parser is None else self.parser.render
        return "\n".join([*([thought] if thought else []), *([render(calls)] if calls else [])])


def _action(call: ToolCall) -> Action:
    arguments = call.parsed()
    if arguments is None:
        return Malformed(problem=f"malformed tool call: the arguments of {call.name} are not a JSON object")
    texts = {"shell": ("command",), "edit": ("path", "new"), "submit": ()}.get(call.name)
    if texts is None:
        return Malformed(problem=f"there is no tool {call.name!r}; there are shell, edit and submit")
    for name in texts:
        if not isinstance(arguments.get(name), str):
            return Malformed(problem=f"malformed tool call: {call.name} needs {name!r} as a string")
    if call.name == "shell":
        return Shell(command=arguments["command"], timeout_s=arguments.get("timeout_s", arguments.get("timeout")))
    if call.name == "submit":
        answer = arguments.get("answer")
        return Submit(answer="" if answer is None else str(answer))
    old = arguments.get("old")
    if old is not None and not isinstance(old, str):
        return Malformed(problem="malformed tool call: edit needs 'old' as a string")
    return Edit(path=arguments["path"], new=arguments["new"], old=old)


def _call(action: Action, number: int) -> ToolCall:
    if isinstance(action, Shell):
        name, arguments = "shell", {"command": action.command}
    elif isinstance(action, Edit):
        name, arguments = "edit", {"path": action.path, "new": action.new}
        if action.old is not None:
            arguments["old"] = action.old
    elif isinstance(action, Submit):
        name, arguments = "submit", {"answer": action.answer} if action.answer else {}
    else:
        raise ValueError("a malformed action can't be written")
    return ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))
