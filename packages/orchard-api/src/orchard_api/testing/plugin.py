"""Checks of a package's plugins: that they load, build, and say what they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, distribution

from pydantic import BaseModel, ValidationError

from orchard_api.hookspecs import ENTRY_POINT_GROUP
from orchard_api.plugins import PluginHost
from orchard_api.registry import Registration
from orchard_api.testing.suite import Check, Suite

HEAVY = ("torch", "vllm", "deepspeed", "ray", "transformers", "docker", "kubernetes", "modal", "aiohttp", "pyarrow")
"""What no entry point may import: every command of `orchard` loads all of them."""


class PluginSuite(Suite):
    """What every plugin package owes its users.

    Attributes:
        distribution: name of the installed package.
    """

    distribution = ""

    def points(self) -> Sequence[EntryPoint]:
        """The package's entry points."""
        return [point for point in distribution(self.distribution).entry_points if point.group == ENTRY_POINT_GROUP]

    def host(self) -> PluginHost:
        """Its plugins alone, loaded."""
        return PluginHost(self.points())

    def entries(self) -> list[Registration]:
        """What it registers."""
        return list(self.host().registry)

    async def run(self, check: Check) -> None:
        """There is nothing to make."""
        await check()

    async def check_it_registers_something(self) -> None:
        """By an entry point of the group `orchard` that loads."""
        host = self.host()
        assert [f"{broken.name}: {broken.cause}" for broken in host.registry.broken] == []
        assert list(host.registry)

    async def check_targets_can_be_imported(self) -> None:
        """Classes and config models, by the names that were registered."""
        for entry in self.entries():
            assert issubclass(entry.config_model(), BaseModel)
            assert callable(entry._resolve(entry.target)), entry.target

    async def check_unknown_options_are_refused(self) -> None:
        """A typing error in a run file is an error, not a default."""
        for entry in self.entries():
            types = self._refused(entry.config_model(), {"no_such_option_at_all": 1})
            assert "extra_forbidden" in types, f"{entry.kind} {entry.name!r} takes any option: use PluginConfig"

    @staticmethod
    def _refused(model: type[BaseModel], options: dict[str, object]) -> list[str]:
        try:
            model.model_validate(options)
        except ValidationError as error:
            return [one["type"] for one in error.errors()]
        return []

    async def check_each_says_what_it_is(self) -> None:
        """A line for `orchard plugins`."""
        for entry in self.entries():
            assert 10 <= len(entry.summary) <= 120, f"{entry.kind} {entry.name!r}: {entry.summary!r}"

    async def check_loading_is_light(self) -> None:
        """Entry points import no heavy package."""
        for point in self.points():
            line = f"import {point.module}, sys; print(*(n for n in {HEAVY!r} if n in sys.modules))"
            done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=60)  # noqa: ASYNC221
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == [], f"{point.module} imports {done.stdout.strip()}"

    async def check_the_doctor_answers(self) -> None:
        """Its checks say what is wrong rather than fail."""
        for name, check in self.host().doctor():
            assert check.name != "doctor" or check.ok, f"{name}: {check.detail}"
            assert check.detail
            assert check.ok or check.fix, f"{check.name} says what is wrong and not what to do"
