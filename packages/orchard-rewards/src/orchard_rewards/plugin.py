"""What this package registers; importing it loads nothing heavy."""

from __future__ import annotations

from orchard_api.hookspecs import hookimpl
from orchard_api.registry import Registrar


@hookimpl
def orchard_register(registrar: Registrar) -> None:
    """Register the rewards."""
    registrar.add(
        "reward",
        "command",
        "orchard_rewards.command:CommandReward",
        config="orchard_rewards.command:CommandConfig",
        summary="runs the task's check where the agent could not have written",
    )
    registrar.add(
        "reward",
        "exact",
        "orchard_rewards.exact:ExactReward",
        config="orchard_rewards.exact:ExactConfig",
        summary="compares the answer, or a file, with the expected text",
    )
