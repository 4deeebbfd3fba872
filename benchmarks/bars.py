"""The bars of every benchmark, in one place: row id to (comparison, threshold, unit)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}

BARS: dict[str, tuple[str, float, str]] = {
    "exec-ratio": ("<=", 1.6, "ratio"),
    "exec-32": (">=", 0.7, "ratio"),
    "agent-start-ms": ("<=", 15, "ms"),
    "agent-rss-mb": ("<=", 10, "MB"),
    "local-create-ms": ("<=", 25, "ms"),
    "stdout-100mb-rss": ("<=", 32, "MB"),
    "pty-loss": (">=", 200, "complete of 200"),
    "process-reattach": (">=", 1, "exact"),
    "process-reattach-mb": ("<=", 48, "MB"),
    "forward-mb-s": (">=", 0.3, "ratio"),
    "reverse-mb-s": (">=", 0.3, "ratio"),
    "fork-ms": ("<=", 60, "ms"),
    "local-500": (">=", 1.0, "share"),
    "local-500-left": ("<=", 0, "sandboxes"),
    "file-mb-s": (">=", 300, "MB/s"),
    "help-ms": ("<=", 250, "ms"),
    "rollout-overhead-ms": ("<=", 5, "ms"),
    "quickstart": (">=", 0.9, "held-out success"),
    "quickstart-untrained": ("<=", 0.1, "held-out success"),
    "quickstart-sft-low": (">=", 0.2, "held-out success"),
    "quickstart-sft-high": ("<=", 0.7, "held-out success"),
    "quickstart-seconds": ("<=", 240, "s"),
    "quickstart-over-sft": (">=", 0.05, "held-out success"),
    "quickstart-shuffled": ("<=", 0.05, "held-out success"),
    "soak-solved": (">=", 1.0, "share"),
    "soak-memory-mb": ("<=", 8, "MiB growth"),
    "soak-files": ("<=", 10, "growth"),
    "soak-left": ("<=", 0, "sandboxes"),
}


def row(bar_id: str, value: float | Sequence[float], *, baseline: Any = None, **more: Any) -> dict[str, Any]:
    """A result row checked against its bar; of several values each must hold."""
    comparison, threshold, unit = BARS[bar_id]
    values = [value] if isinstance(value, (int, float)) else list(value)
    holds = COMPARISONS[comparison]
    return {
        "id": bar_id,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "bar": f"{comparison} {threshold:g}",
        "ok": bool(values) and all(holds(each, threshold) for each in values),
        **more,
    }
