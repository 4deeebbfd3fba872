"""Chat templates of model folders: found in their files, run sandboxed with the helpers that model authors count on.

Both who builds prompts (harnesses) and who serves a model's chat API read templates here, so that they agree. Needs
jinja2 (extra `[template]`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchard_api.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class TemplateRefusalError(TemplateError):
    """A template called `raise_exception`."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote; here it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Render the body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFiles:
    """What a model folder says of its chat template.

    Attributes:
        source: the template, or None where the folder has none.
        tool_source: the one that replaces it where tools are offered, or None.
        tokens: named tokens that templates use (`bos_token`, `eos_token`, ...), as text.
    """

    source: str | None
    tool_source: str | None
    tokens: Mapping[str, str]


def read_template_files(folder: Path) -> TemplateFiles:
    """Read `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, and the named tokens.

    Raises:
        ConfigError: a file can't be read.
    """
    config = read_json(folder / "tokenizer_config.json")
    tokens = {name: text for name in NAMED_TOKENS if (text := token_text(config.get(name))) is not None}
    path = folder / "chat_template.jinja"
    value = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    sources = {"default": value} if isinstance(value, str) else {}
    if isinstance(value, list):
        sources = {str(entry["name"]): str(entry["template"]) for entry in value}
    return TemplateFiles(source=sources.get("default"), tool_source=sources.get("tool_use"), tokens=tokens)


def token_text(value: object) -> str | None:
    """A token as tokenizer configs give it: text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no file.

    Raises:
        ConfigError: it is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def chat_environment() -> ImmutableSandboxedEnvironment:
    """An environment with the block trimming, filters and globals of Hugging Face's chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    return environment


def compile_template(source: str) -> Callable[..., str]:
    """Compile a chat template.

    Raises:
        jinja2.TemplateSyntaxError: it doesn't parse.
    """
    return chat_environment().from_string(source).render


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON without HTML escaping: a model reads it, not a browser."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def refuse(message: str) -> None:
    """What a template calls when it can't render a conversation."""
    raise TemplateRefusalError(message)


def strftime_now(pattern: str) -> str:
    """The local time, for templates that put a date into the system prompt."""
    return datetime.now().strftime(pattern)
