"""The Jinja environment in which chat templates run: sandboxed, with the helpers that model authors count on."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
