"""What this package registers; importing it loads nothing heavy."""

from __future__ import annotations

from orchard_api.hookspecs import DoctorCheck, hookimpl
from orchard_api.registry import Registrar


@hookimpl
def orchard_register(registrar: Registrar) -> None:
    """Register the `local` environment."""
    registrar.add(
        "environment",
        "local",
        "orchard_agent.local.environment:LocalEnvironment",
        config="orchard_agent.local.config:LocalConfig",
        summary="sandboxes on this machine by bubblewrap or unshare, without a daemon",
    )


@hookimpl
def orchard_doctor() -> list[DoctorCheck]:
    """What of the `local` environment works on this machine."""
    from orchard_agent.local.doctor import checks

    return checks()
