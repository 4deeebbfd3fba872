"""What this package registers; importing it loads nothing heavy."""

from __future__ import annotations

import os

from orchard_api.hookspecs import DoctorCheck, hookimpl
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


@hookimpl
def orchard_doctor() -> list[DoctorCheck]:
    """Say whether an API could be used without further settings; nothing is sent anywhere."""
    url, key = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")
    found = [name for name, value in (("$OPENAI_BASE_URL", url), ("$OPENAI_API_KEY", key)) if value]
    check = DoctorCheck(
        name="model API (policy server openai)",
        ok=bool(found),
        detail=f"{' and '.join(found)} set" if found else "neither $OPENAI_API_KEY nor $OPENAI_BASE_URL is set",
        fix="" if found else "export OPENAI_API_KEY=…, or OPENAI_BASE_URL=http://localhost:8000/v1 for your own server",
        required=False,
    )
    return [check]
