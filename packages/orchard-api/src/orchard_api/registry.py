"""What plugins are known: kinds, names, and how a name becomes an object."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from orchard_api.errors import BrokenPluginError, DuplicatePluginError, PluginError, UnknownPluginError

KINDS = (
    "environment",
    "harness",
    "reward",
    "trainer",
    "taskset",
    "rollout",
    "policy_server",
    "weight_store",
    "advantage",
    "loss",
)
KNOWN_PACKAGES = {
    ("environment", "local"): "orchard-agent",
    ("environment", "docker"): "orchard-env-docker",
    ("environment", "k8s"): "orchard-env-k8s",
    ("environment", "modal"): "orchard-env-modal",
    ("environment", "remote"): "orchard-service",
    ("harness", "react"): "orchard-harnesses",
    ("harness", "scripted"): "orchard-harnesses",
    ("harness", "noop"): "orchard-harnesses",
    ("reward", "command"): "orchard-rewards",
    ("reward", "exact"): "orchard-rewards",
    ("reward", "json_schema"): "orchard-rewards",
    ("reward", "judge"): "orchard-rewards",
    ("reward", "unit_tests"): "orchard-rewards",
    ("reward", "weighted"): "orchard-rewards",
    ("policy_server", "openai"): "orchard-harnesses",
    ("policy_server", "in_process"): "orchard-trainer-deepspeed",
    ("trainer", "torch"): "orchard-trainer-deepspeed",
    ("weight_store", "memory"): "orchard-trainer-deepspeed",
    ("weight_store", "folder"): "orchard-trainer-deepspeed",
    ("loss", "ppo_clip"): "orchard-trainer-deepspeed",
    ("advantage", "grpo"): "orchard-trainer-deepspeed",
    ("advantage", "dr_grpo"): "orchard-trainer-deepspeed",
    ("advantage", "rloo"): "orchard-trainer-deepspeed",
    ("rollout", "asyncio"): "orchard-core",
    ("taskset", "directory"): "orchard-core",
    ("rollout", "ray"): "orchard-rollout-ray",
}


class PluginConfig(BaseModel):
    """Base of every plugin's own config model: unknown keys are errors, values don't change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """One registered plugin.

    Attributes:
        target: `module:Class`; built as `Class(config)`.
        config: `module:Model` of a `PluginConfig`, or None when it takes no options.
        distribution: the package that registered it.
        version: that package's version.
    """

    kind: str
    name: str
    target: str
    config: str | None
    summary: str
    distribution: str
    version: str

    def config_model(self) -> type[BaseModel]:
        """Import the config model."""
        if self.config is None:
            return PluginConfig
        model = self._resolve(self.config)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise BrokenPluginError(f"{self.config} of {self.kind} {self.name!r} is not a pydantic model")
        return model

    def build(self, config: BaseModel) -> Any:
        """Import the plugin's class and make the object."""
        return self._resolve(self.target)(config)

    def _resolve(self, reference: str) -> Any:
        try:
            return resolve(reference)
        except Exception as error:
            raise BrokenPluginError(
                f"{self.kind} {self.name!r} is installed ({self.distribution} {self.version}) but its import failed: "
                f"{type(error).__name__}: {error}",
                hint=f"try: python -c 'import {reference.partition(':')[0]}'",
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenPlugin:
    """An entry point whose module could not be loaded or whose registration failed."""

    name: str
    distribution: str
    version: str
    cause: BaseException


class Registrar:
    """What a plugin's `orchard_register` is given: adds registrations in the name of its package."""

    def __init__(self, registry: Registry, *, distribution: str, version: str) -> None:
        self._registry = registry
        self._distribution = distribution
        self._version = version

    def add(self, kind: str, name: str, target: str, *, config: str | None = None, summary: str = "") -> None:
        """Register `module:Class` under a kind and name.

        Raises:
            PluginError: the kind is unknown or the target is not `module:Class`.
            DuplicatePluginError: another package has that kind and name.
        """
        self._registry.add(
            Registration(
                kind=kind,
                name=name,
                target=target,
                config=config,
                summary=summary,
                distribution=self._distribution,
                version=self._version,
            )
        )


class Registry:
    """All registrations of a process."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Registration] = {}
        self._duplicates: dict[tuple[str, str], DuplicatePluginError] = {}
        self.broken: list[BrokenPlugin] = []
        self.disabled: list[str] = []

    def __iter__(self) -> Iterator[Registration]:
        return iter(sorted(self._entries.values(), key=lambda entry: (KINDS.index(entry.kind), entry.name)))

    def add(self, entry: Registration) -> None:
        """Add one registration; see `Registrar.add`."""
        if entry.kind not in KINDS:
            raise PluginError(f"unknown plugin kind {entry.kind!r}; kinds are {', '.join(KINDS)}")
        for reference in (entry.target, entry.config or "module:Model"):
            module, separator, name = reference.partition(":")
            if not (module and separator and name):
                raise PluginError(f"{entry.kind} {entry.name!r}: {reference!r} is not of the form 'module:Class'")
        key = (entry.kind, entry.name)
        other = self._entries.get(key)
        if other is not None:
            error = DuplicatePluginError(
                f"{entry.kind} {entry.name!r} is registered by both {other.distribution} and {entry.distribution}",
                hint=f"uninstall one, or set ORCHARD_DISABLE_PLUGINS to the entry point of {entry.distribution}",
            )
            self._duplicates[key] = error
            raise error
        self._entries[key] = entry

    def get(self, kind: str, name: str, *, base: Path | None = None) -> Registration:
        """Find a plugin by name, or by a direct reference: `module:Class` or `path/to/file.py:Class`.

        A class named directly says its config model in a class attribute `Config`, or takes no options.

        Raises:
            UnknownPluginError: nothing of that name; says what is installed and what to install.
            DuplicatePluginError: two packages claim it.
            BrokenPluginError: its package is installed, but failed to load.
        """
        if ":" in name:
            return self._direct(kind, name, base)
        if (kind, name) in self._duplicates:
            raise self._duplicates[kind, name]
        entry = self._entries.get((kind, name))
        if entry is not None:
            return entry
        package = KNOWN_PACKAGES.get((kind, name))
        for broken in self.broken:
            if broken.distribution == package or broken.name == name:
                raise BrokenPluginError(
                    f"{kind} {name!r} comes with {broken.distribution}, which is installed but failed to load: "
                    f"{type(broken.cause).__name__}: {broken.cause}",
                    hint=f"mend or reinstall it: pip install --force-reinstall {broken.distribution}",
                ) from broken.cause
        raise self._unknown(kind, name, package)

    def _unknown(self, kind: str, name: str, package: str | None) -> UnknownPluginError:
        installed = [entry.name for entry in self if entry.kind == kind]
        known = [other for other_kind, other in KNOWN_PACKAGES if other_kind == kind]
        near = difflib.get_close_matches(name, {*installed, *known}, n=1)
        text = f"unknown {kind} {name!r}"
        if near and near[0] != name:
            text += f"; did you mean {near[0]!r}?"
        text += f" Installed: {', '.join(installed) or 'none'}."
        wanted = package or (KNOWN_PACKAGES.get((kind, near[0])) if near and near[0] not in installed else None)
        return UnknownPluginError(text, hint=f"pip install {wanted}" if wanted else "orchard plugins lists all")

    def _direct(self, kind: str, name: str, base: Path | None) -> Registration:
        path, _, attribute = name.rpartition(":")
        module = _load_file(Path(path) if base is None else base / path) if path.endswith(".py") else path
        try:
            target = resolve(f"{module}:{attribute}")
        except (ImportError, AttributeError) as error:
            raise UnknownPluginError(
                f"{kind} {name!r} can't be loaded: {error}",
                hint="write 'module:Class', or 'file.py:Class' with the path as seen from the run file",
            ) from error
        config = f"{module}:{attribute}.Config" if hasattr(target, "Config") else None
        return Registration(
            kind=kind,
            name=name,
            target=f"{module}:{attribute}",
            config=config,
            summary="",
            distribution="(run file)",
            version="",
        )


def resolve(reference: str) -> Any:
    """Import `module:Name.Inner` and return the object.

    Raises:
        ImportError, AttributeError: as Python says.
    """
    module, _, path = reference.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _load_file(path: Path) -> str:
    """Import a Python file under a name of its own and return that name."""
    path = path.resolve()
    name = f"orchard_file_{sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnknownPluginError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BrokenPluginError(f"{path} failed at import: {type(error).__name__}: {error}") from error
    return name
