"""Run benchmarks, print the table, and write `benchmarks/results/NAME.json`; exits 1 where a bar is missed.

Each `benchmarks/NAME_bench.py` has `rows()`, plain or async, that measures a peer or a limit in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "gpu": None,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def measure(name: str) -> list[dict[str, Any]]:
    """Run one benchmark file."""
    rows = importlib.import_module(f"{name}_bench").rows()
    return asyncio.run(rows) if inspect.iscoroutine(rows) else rows


def show(value: Any) -> str:
    """A number or a list of numbers for people."""
    if isinstance(value, (list, tuple)):
        return ", ".join(show(each) for each in value)
    return f"{value:.3g}" if isinstance(value, float) else str("" if value is None else value)


def main() -> int:
    """Parse arguments and run."""
    names = sorted(path.name.removesuffix("_bench.py") for path in HERE.glob("*_bench.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of: {', '.join(names)}; all by default")
    chosen = parser.parse_args().names or names
    unknown = set(chosen) - set(names)
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    missed = False
    for name in chosen:
        console.print(f"measuring {name} ...")
        rows = measure(name)
        table = Table("id", "value", "unit", "baseline", "bar", "ok", title=name)
        for row in rows:
            verdict = "[green]yes" if row["ok"] else "[red]MISSED"
            table.add_row(row["id"], show(row["value"]), row["unit"], show(row["baseline"]), row["bar"], verdict)
            missed |= not row["ok"]
        console.print(table)
        results = HERE / "results" / f"{name}.json"
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
