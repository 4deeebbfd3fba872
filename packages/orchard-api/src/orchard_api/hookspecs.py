"""The whole contract between Orchard and a plugin package.

A package declares one entry point in the group `orchard`, whose value is a module with these hooks::

    [project.entry-points.orchard]
    docker = "orchard_env_docker.plugin"

That module must be cheap to import: it registers strings, and the heavy import happens when a run selects them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from orchard_api.registry import Registrar

ENTRY_POINT_GROUP = "orchard"
hookspec = pluggy.HookspecMarker("orchard")
hookimpl = pluggy.HookimplMarker("orchard")


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorCheck:
    """One line of `orchard doctor`.

    Attributes:
        name: what was looked at.
        ok: whether it works on this machine.
        detail: what was found.
        fix: the command or change that makes it work; empty when ok.
        required: whether a run with this plugin can't start without it.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    required: bool = True


@hookspec
def orchard_register(registrar: Registrar) -> None:
    """Register what the package provides: `registrar.add(kind, name, "module:Class", config="module:Model")`."""


@hookspec
def orchard_doctor() -> list[DoctorCheck]:  # type: ignore[empty-body]
    """Look at this machine, in at most a few seconds, and say what works and how to mend what doesn't."""
