"""Find plugin packages through entry points, each guarded: one that fails never hides the others."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import pluggy

from orchard_api import hookspecs
from orchard_api.hookspecs import ENTRY_POINT_GROUP, DoctorCheck
from orchard_api.registry import BrokenPlugin, Registrar, Registry

DISABLE_VARIABLE = "ORCHARD_DISABLE_PLUGINS"
TRACE_VARIABLE = "ORCHARD_TRACE_PLUGINS"


class PluginHost:
    """Loads entry points one at a time and keeps what each registered or why it failed.

    Args:
        found: the entry points; by default those of the group `orchard`.
        disabled: entry point names to leave out.
    """

    def __init__(self, found: Iterable[EntryPoint] | None = None, *, disabled: Iterable[str] = ()) -> None:
        self.registry = Registry()
        self._hooks = pluggy.PluginManager("orchard")
        self._hooks.add_hookspecs(hookspecs)
        disabled = set(disabled)
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP) if found is None else found, key=lambda p: p.name):
            if point.name in disabled:
                self.registry.disabled.append(point.name)
                continue
            self._load(point)

    def _load(self, point: EntryPoint) -> None:
        distribution = point.dist.name if point.dist is not None else point.value
        version = point.dist.version if point.dist is not None else ""
        try:
            module = point.load()
            self._hooks.register(module, name=f"{distribution}:{point.name}")
            others = [other for other in self._hooks.get_plugins() if other is not module]
            register = self._hooks.subset_hook_caller("orchard_register", others)
            register(registrar=Registrar(self.registry, distribution=distribution, version=version))
        except (Exception, SystemExit) as error:
            broken = BrokenPlugin(name=point.name, distribution=distribution, version=version, cause=error)
            self.registry.broken.append(broken)
            _trace(f"{point.name} ({distribution} {version}) failed: {type(error).__name__}: {error}")
        else:
            _trace(f"{point.name} ({distribution} {version}) loaded")

    def doctor(self) -> list[tuple[str, DoctorCheck]]:
        """Run every package's `orchard_doctor`; one that fails is itself a failed check."""
        checks: list[tuple[str, DoctorCheck]] = []
        for name, module in sorted(self._hooks.list_name_plugin()):
            others = [other for other in self._hooks.get_plugins() if other is not module]
            package = name.partition(":")[0]
            try:
                results = self._hooks.subset_hook_caller("orchard_doctor", others)()
            except Exception as error:
                failed = DoctorCheck(name="doctor", ok=False, detail=f"its check failed: {error!r}")
                checks.append((package, failed))
            else:
                checks += [(package, check) for result in results for check in result]
        return checks


@cache
def plugin_host() -> PluginHost:
    """The process's plugins, loaded once."""
    disabled = [name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()]
    host = PluginHost(disabled=disabled)
    for broken in host.registry.broken:
        warnings.warn(
            f"plugin {broken.name!r} of {broken.distribution} failed to load: {broken.cause!r}",
            RuntimeWarning,
            stacklevel=2,
        )
    return host


def _trace(text: str) -> None:
    if os.environ.get(TRACE_VARIABLE):
        print(f"orchard plugins: {text}", file=sys.stderr)
