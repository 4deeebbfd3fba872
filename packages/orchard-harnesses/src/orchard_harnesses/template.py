"""A model's chat template and tokenizer: conversations to text, text to ids, and where a turn ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from tokenizers import Tokenizer

from orchard_api.chat_template import compile_template, read_json, read_template_files
from orchard_api.errors import ConfigError, HarnessError
from orchard_api.messages import Message, Tool

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_PROBE = "orchardprobe"


class ChatTemplate:
    """Renders conversations for one model and turns text into its ids.

    Args:
        tokenizer: the model's tokenizer.
        source: the Jinja source of its chat template; `tool_source` replaces it where tools are offered.
        tokens: named tokens that templates use (`bos_token`, `eos_token`, ...), as text.
        stop_ids: ids at which the model's engine ends a response.

    Attributes:
        end_text: what the template writes after an assistant's text, up to and including the end-of-turn token;
            empty when it writes none.
        end_id: the id of that token, else the first stop id, else None.
        end_ids: all ids that end a response.
        after_end: what the template writes after the end-of-turn token, before anything that follows.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        source: str,
        tool_source: str | None = None,
        tokens: Mapping[str, str] = _EMPTY,
        stop_ids: Sequence[int] = (),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.source = source
        try:
            self._render = compile_template(source)
            self._render_with_tools = self._render if tool_source is None else compile_template(tool_source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
        self._tokens = dict(tokens)
        special = {str(token.content): number for number, token in added_tokens(tokenizer).items() if token.special}
        self._special = _pattern(special)
        ends = dict(special)
        for number in stop_ids:
            text = tokenizer.decode([number], skip_special_tokens=False)
            if text and tokenizer.encode(text, add_special_tokens=False).ids == [number]:
                ends[text] = number
        self.end_text, self.end_id, self.after_end = self._find_end(ends, stop_ids)
        self.end_ids = frozenset(stop_ids) | ({self.end_id} if self.end_id is not None else frozenset())
        anchor = next((text for text, number in ends.items() if number == self.end_id and text in self.end_text), None)
        self._anchor = anchor if anchor is not None and self.encode(anchor) == [self.end_id] else None

    def _find_end(self, ends: Mapping[str, int], stop_ids: Sequence[int]) -> tuple[str, int | None, str]:
        fallback = stop_ids[0] if stop_ids else None
        talk = (Message(role="user", content="a"), Message(role="assistant", content=_PROBE))
        try:
            tail = self.render(talk).rpartition(_PROBE)[2]
        except HarnessError:
            return "", fallback, ""
        pattern = _pattern(ends)
        found = list(pattern.finditer(tail)) if pattern is not None else []
        if not found:
            return "", fallback, ""
        match = next((item for item in found if ends[item.group()] in stop_ids), found[0])
        return tail[: match.end()], ends[match.group()], tail[match.end() :]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = False,
        options: Mapping[str, Any] = _EMPTY,
    ) -> str:
        """The conversation as text; `options` are passed to the template (`enable_thinking`, for instance).

        Raises:
            HarnessError: the template refuses this conversation.
        """
        render = self._render_with_tools if tools else self._render
        try:
            return render(
                messages=[_template_message(message) for message in messages],
                tools=[tool.to_openai() for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise HarnessError(f"the chat template refuses this conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; special tokens in it become their ids, and none is added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_after_end(self, text: str) -> list[int]:
        """Ids of text that follows an end-of-turn token: what it gets there, not at the start of a text."""
        if self._anchor is None:
            return self.encode(text)
        return self.encode(self._anchor + text)[1:]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def neutralise(self, text: str) -> str:
        """Break up special tokens in text from a sandbox, so that it can't end a turn or begin another."""
        if self._special is None:
            return text
        return self._special.sub(lambda match: f"{match.group()[0]}\u200b{match.group()[1:]}", text)


def added_tokens(tokenizer: Tokenizer) -> Mapping[int, Any]:
    """The tokenizer's added tokens by id."""
    found: Mapping[int, Any] = tokenizer.get_added_tokens_decoder()
    return found


def _pattern(texts: Mapping[str, int]) -> re.Pattern[str] | None:
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _template_message(message: Message) -> dict[str, Any]:
    value = message.to_openai()
    for call, sent in zip(message.tool_calls, value.get("tool_calls", ()), strict=True):
        arguments = call.parsed()
        if arguments is not None:
            sent["function"]["arguments"] = arguments
    return value


def load_template(folder: Path) -> ChatTemplate:
    """The template of a model folder; read once per state of its files.

    Raises:
        ConfigError: `tokenizer.json` or the chat template is missing or can't be read.
    """
    folder = folder.resolve()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
    state = tuple(_state(folder / name) for name in names)
    cached = _LOADED.get(folder)
    if cached is None or cached[0] != state:
        cached = _LOADED[folder] = (state, _load(folder))
    return cached[1]


_LOADED: dict[Path, tuple[tuple[Any, ...], ChatTemplate]] = {}


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _load(folder: Path) -> ChatTemplate:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"the model folder {folder} has no tokenizer.json",
            hint="save it with a fast tokenizer: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} can't be read: {error}") from error
    files = read_template_files(folder)
    if files.source is None:
        raise ConfigError(
            f"the model folder {folder} has no chat template",
            hint="add chat_template.jinja, or `chat_template` to tokenizer_config.json",
        )
    return ChatTemplate(
        tokenizer=tokenizer,
        source=files.source,
        tool_source=files.tool_source,
        tokens=files.tokens,
        stop_ids=_stop_ids(folder, files.tokens.get("eos_token"), tokenizer),
    )


def _stop_ids(folder: Path, eos: str | None, tokenizer: Tokenizer) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        found += [value] if isinstance(value, int) else value if isinstance(value, list) else []
    number = tokenizer.token_to_id(eos) if eos is not None else None
    return list(dict.fromkeys([*found, *([number] if number is not None else [])]))
