"""Chat messages and tools, in the shape of OpenAI's Chat Completions, typed and immutable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePart:
    """An image by reference: a URL, or `sha256:…` of a file in the run directory's `images/`."""

    reference: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """A piece of text in a message of several parts."""

    text: str


Part = TextPart | ImagePart


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of a tool; `arguments` is the model's own JSON text, valid or not."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any] | None:
        """The arguments as a JSON object, or None when they aren't one."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool that a model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """The `tools` entry of a Chat Completions request."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        content: text, or parts where images are among it.
        reasoning: the model's thinking where the dialect keeps it apart, else None.
        tool_calls: calls that an assistant message makes.
        tool_call_id: for role `tool`, the call that it answers.
    """

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """All text of the message."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def to_openai(self) -> dict[str, Any]:
        """The message as a Chat Completions request carries it, also what chat templates are given."""
        out: dict[str, Any] = {"role": self.role}
        if isinstance(self.content, str):
            out["content"] = self.content
        else:
            out["content"] = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image_url", "image_url": {"url": part.reference}}
                for part in self.content
            ]
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out

    @classmethod
    def from_openai(cls, value: Mapping[str, Any]) -> Message:
        """Read a message of the wire; unknown fields and part types are left out.

        Raises:
            ValueError: the role is unknown or a field has the wrong type.
        """
        role = value.get("role")
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"unknown role {role!r}")
        calls = []
        for call in value.get("tool_calls") or ():
            function = call["function"]
            calls.append(ToolCall(id=str(call.get("id", "")), name=function["name"], arguments=function["arguments"]))
        reasoning = value.get("reasoning_content", value.get("reasoning"))
        return cls(
            role=role,
            content=_content(value.get("content")),
            reasoning=reasoning if isinstance(reasoning, str) else None,
            tool_calls=tuple(calls),
            tool_call_id=value.get("tool_call_id"),
        )


def _content(value: object) -> str | tuple[Part, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise ValueError(f"content is a {type(value).__name__}; expected text or a list of parts")
    parts: list[Part] = []
    for part in value:
        if part.get("type") in ("text", "input_text", "output_text"):
            parts.append(TextPart(text=str(part["text"])))
        elif part.get("type") == "image_url":
            parts.append(ImagePart(reference=str(part["image_url"]["url"])))
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return tuple(parts)
