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
    registrar.add(
        "reward",
        "unit_tests",
        "orchard_rewards.unit_tests:UnitTestsReward",
        config="orchard_rewards.unit_tests:UnitTestsConfig",
        summary="the tests that must pass did, by report and by exit code; test files are put back first",
    )
    registrar.add(
        "reward",
        "json_schema",
        "orchard_rewards.json_schema:JsonSchemaReward",
        config="orchard_rewards.json_schema:JsonSchemaConfig",
        summary="the answer, or a file, is JSON of the wanted form",
    )
    registrar.add(
        "reward",
        "judge",
        "orchard_rewards.judge:JudgeReward",
        config="orchard_rewards.judge:JudgeConfig",
        summary="a model scores the work by a rubric",
    )
    registrar.add(
        "reward",
        "weighted",
        "orchard_rewards.weighted:WeightedReward",
        config="orchard_rewards.weighted:WeightedConfig",
        summary="several rewards as one number, each a named component",
    )
