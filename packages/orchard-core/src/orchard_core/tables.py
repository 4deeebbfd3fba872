"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from orchard_core.run_dir import SUMMARY, RunDir

if TYPE_CHECKING:
    from rich.console import Console

    from orchard_api.hookspecs import DoctorCheck
    from orchard_api.registry import Registry


def print_summary(console: Console, path: Path) -> None:
    """A run's stages, failures and totals."""
    summary = RunDir.open(path).read_json(SUMMARY)
    table = Table("stage", "success", "95 % interval", "reward", "scored", "failed", box=None, pad_edge=False)
    for name, stage in summary.get("stages", {}).items():
        numbers = stage.get("evaluation") or stage.get("expert")
        if not numbers:
            continue
        low, high = numbers["success_interval"]
        failed = numbers["episodes"] - numbers["scored"]
        table.add_row(
            escape(name if "evaluation" in stage else f"{name} (expert)"),
            "-" if numbers["success"] is None else f"{numbers['success']:.3f}",
            f"{low:.3f} to {high:.3f}",
            "-" if numbers["reward_mean"] is None else f"{numbers['reward_mean']:.3f}",
            str(numbers["scored"]),
            f"[red]{failed}[/red]" if failed else "0",
        )
    console.print(table)
    failures, tokens = summary.get("failures", {}), summary.get("response_tokens", 0)
    console.print(
        "failures: "
        + "  ".join(f"{kind} {count}" for kind, count in failures.items())
        + f"  retries: {summary.get('retries', 0)}  episodes: {summary.get('episodes', 0)}"
        + (f"  sampled tokens: {tokens:,}" if tokens else "")
        + f"  seconds: {summary.get('wall_seconds', 0):.0f}",
        highlight=False,
    )
    for kind, count in summary.get("failure_kinds", {}).items():
        console.print(f"  {count} x {kind}", highlight=False, markup=False)
    if summary.get("incomplete"):
        console.print("[yellow]incomplete: some episodes could not be scored; success is over the scored ones[/yellow]")


def print_plugins(console: Console, registry: Registry) -> None:
    """What is registered, what failed, what is disabled."""
    table = Table("kind", "name", "package", "version", "state", box=None, pad_edge=False)
    for entry in registry:
        table.add_row(entry.kind, escape(entry.name), entry.distribution, entry.version, "[green]ok[/green]")
    for broken in registry.broken:
        cause = f"{type(broken.cause).__name__}: {broken.cause}"
        table.add_row(
            "?", escape(broken.name), broken.distribution, broken.version, f"[red]broken[/red] {escape(cause)}"
        )
    for name in registry.disabled:
        table.add_row("?", escape(name), "", "", "[yellow]disabled[/yellow]")
    console.print(table)


def print_doctor(console: Console, checks: Sequence[tuple[str, DoctorCheck]]) -> None:
    """One line per check, and beneath it what mends it."""
    width = max((len(check.name) for _, check in checks), default=0)
    for package in dict.fromkeys(package for package, _ in checks):
        console.print(f"[bold]{escape(package)}[/bold]")
        for owner, check in checks:
            if owner != package:
                continue
            mark = "[green]ok[/green]" if check.ok else "[red]no[/red]" if check.required else "[yellow]--[/yellow]"
            line = f"  {mark}  {escape(check.name):{width}}  {escape(check.detail)}"
            console.print(line, highlight=False, soft_wrap=True)
            if check.fix:
                console.print(f"      {'':{width}}  [bold]{escape(check.fix)}[/bold]", highlight=False, soft_wrap=True)
