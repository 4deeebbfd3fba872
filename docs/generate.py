"""Writes `docs/reference/`: the command line's help, and the run file from the models that check it.

`python docs/generate.py` writes; with `--check` it only says whether what is there is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from orchard_api.config import (
    DEFAULTS,
    DistilStage,
    EvalStage,
    EvaluationSection,
    ModelSection,
    RlStage,
    SamplingSection,
    SftStage,
    selector,
)
from orchard_api.plugins import plugin_host
from orchard_core.cli import app

REFERENCE = Path(__file__).resolve().parent / "reference"
SECTIONS = {"model": ModelSection, "sampling": SamplingSection, "evaluation": EvaluationSection}
STAGES = (DistilStage, SftStage, RlStage, EvalStage)
PLUGIN_SECTIONS = {
    "environment": "[environment]",
    "harness": "[harness] and [expert]",
    "reward": "[[rewards]]",
    "trainer": "[trainer]",
    "taskset": "[tasks]",
    "rollout": "[rollout]",
    "policy_server": "[policies.NAME]",
    "weight_store": "[weight_store]",
    "advantage": "[advantage]",
}


def command_line() -> str:
    """Help of every command."""
    parts = ["# The command line", "", "Generated from `orchard --help`.", ""]
    for name in ("", *(command.name or command.callback.__name__ for command in app.registered_commands)):
        arguments = [name, "--help"] if name else ["--help"]
        help_text = CliRunner(env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}).invoke(
            app, arguments, prog_name="orchard"
        )
        assert help_text.exit_code == 0, help_text.output
        lines = [line.rstrip() for line in help_text.output.strip().splitlines()]
        parts += [f"## orchard {name}".rstrip(), "", "```text", *lines, "```", ""]
    return "\n".join(parts)


def run_file() -> str:
    """Every section of a run file."""
    parts = [
        "# The run file",
        "",
        "Generated from the models that check it. Any value can be changed by `--set key.path=value`; the value is",
        "TOML. A section that selects a plugin names it by the key given; all other keys are that plugin's options.",
        "A plugin may also be named as `module:Class` or `file.py:Class`, the path as seen from the run file.",
        "",
        "Top level: `name` (the file's name by default), `seed` (0), `output` (`runs`).",
        "",
    ]
    for name, model in SECTIONS.items():
        parts += [f"## [{name}]", "", _summary(model), "", *_fields(model), ""]
    for stage in STAGES:
        kind = stage.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]
        parts += [f'## [[stages]] of kind "{kind}"', "", _summary(stage), "", *_fields(stage, without=("kind",)), ""]
    for kind, section in PLUGIN_SECTIONS.items():
        default = DEFAULTS.get(kind)
        key = f"The key is `{selector(kind)}`" + (f"; `{default}` by default." if default else ".")
        parts += [f"## {section}", "", key, ""]
        if kind == "reward":
            parts += ["Each entry may also say `as` (its name in the run) and `weight` (1).", ""]
        for entry in plugin_host().registry:
            if entry.kind == kind:
                parts += [f"### {entry.name}", "", f"From {entry.distribution}: {entry.summary or kind}.", ""]
                parts += [*_fields(entry.config_model()), ""]
    return "\n".join(parts)


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _fields(model: type[BaseModel], *, without: tuple[str, ...] = ()) -> list[str]:
    rows = ["| key | type | default | what |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name not in without:
            rows.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {field.description or ''} |")
    return rows if len(rows) > 2 else ["No options."]


def _type(annotation: Any) -> str:
    return f"`{_type_text(annotation)}`".replace("|", "\\|")


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return " | ".join(repr(each) for each in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type_text(each) for each in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_text(each) for each in arguments)}]"
    if annotation is type(None):
        return "None"
    return "..." if annotation is Ellipsis else getattr(annotation, "__name__", str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else f"`{value!r}`".replace("|", "\\|")


def main() -> int:
    """Write or check."""
    stale = []
    for name, text in {"cli.md": command_line(), "run-file.md": run_file()}.items():
        path = REFERENCE / name
        text = text.rstrip() + "\n"
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    if stale and "--check" in sys.argv:
        print(f"docs/reference is out of date ({', '.join(stale)}); run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
