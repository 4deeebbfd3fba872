"""Plugins that are chosen inside another plugin's options, such as the parts of a composed reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema

from orchard_api.config import PluginChoice, choose_plugin
from orchard_api.errors import PluginError
from orchard_api.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedPlugin:
    """A plugin with its validated options, found when the run file was checked."""

    choice: PluginChoice
    registry: Registry

    def build(self) -> Any:
        """Import and make the object."""
        return self.choice.build(self.registry)


def nested(kind: str, section: Mapping[str, Any], info: ValidationInfo) -> NestedPlugin:
    """Check a table that names a plugin of `kind`; for validators of plugin configs.

    Raises:
        ValueError: it can't be used, or there is no registry to look in.
    """
    context = info.context or {}
    registry = context.get("registry")
    if not isinstance(registry, Registry):
        raise ValueError("plugins can only be chosen by name in a run file")
    problems: list[str] = []
    try:
        choice = choose_plugin(kind, section, registry, base=context.get("base"), path="", problems=problems)
    except PluginError as error:
        raise ValueError(str(error)) from None
    if choice is None or problems:
        raise ValueError("; ".join(problem.lstrip(".") for problem in problems))
    return NestedPlugin(choice=choice, registry=registry)


def _reward(value: Any, info: ValidationInfo) -> Any:
    return nested("reward", value, info) if isinstance(value, Mapping) else value


def _checked(value: Any) -> NestedPlugin:
    if not isinstance(value, NestedPlugin):
        raise ValueError("expected a table that names a plugin")
    return value


NestedReward = Annotated[
    NestedPlugin,
    PlainValidator(_checked),
    BeforeValidator(_reward),
    PlainSerializer(lambda plugin: plugin.choice.to_dict()),
    WithJsonSchema({"type": "object", "required": ["name"]}),
]
"""A field of a plugin's config that holds a reward: `{name = "exact", casefold = true}`."""
