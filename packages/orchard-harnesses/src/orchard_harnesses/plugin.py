"""What this package registers; importing it loads nothing heavy."""

from __future__ import annotations

from orchard_api.hookspecs import hookimpl
from orchard_api.registry import Registrar


@hookimpl
def orchard_register(registrar: Registrar) -> None:
    """Register the harnesses and the `openai` policy server."""
    registrar.add(
        "harness",
        "react",
        "orchard_harnesses.react:ReactHarness",
        config="orchard_harnesses.react:ReactConfig",
        summary="a loop of replies and actions (shell, edit, submit) around any policy",
    )
    registrar.add(
        "harness",
        "scripted",
        "orchard_harnesses.scripted:ScriptedHarness",
        config="orchard_harnesses.scripted:ScriptedConfig",
        summary="plays the task's own solution in react's format",
    )
    registrar.add(
        "harness",
        "noop",
        "orchard_harnesses.scripted:NoopHarness",
        summary="submits at once",
    )
    registrar.add(
        "policy_server",
        "openai",
        "orchard_harnesses.openai_server:OpenAIServer",
        config="orchard_harnesses.openai_config:OpenAIConfig",
        summary="any OpenAI-compatible API over HTTP",
    )
