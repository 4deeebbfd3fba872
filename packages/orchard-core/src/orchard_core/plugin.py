"""Registers what orchard-core ships."""

from __future__ import annotations

from orchard_api.hookspecs import hookimpl
from orchard_api.registry import Registrar


@hookimpl
def orchard_register(registrar: Registrar) -> None:
    """See `orchard_api.hookspecs`."""
    registrar.add(
        "rollout",
        "asyncio",
        "orchard_core.engine:AsyncioRolloutEngine",
        config="orchard_core.engine_config:AsyncioEngineConfig",
        summary="many episodes at once in one process",
    )
    registrar.add(
        "taskset",
        "directory",
        "orchard_core.directory_taskset:DirectoryTaskset",
        config="orchard_core.directory_taskset:DirectoryConfig",
        summary="task folders in the Harbor format",
    )
