"""What the user sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from orchard_api.episode import Episode
from orchard_api.training import UpdateReport
from orchard_core.statistics import Tally

LINE_EVERY_S = 5.0


class _State:
    """Numbers of the phase under way."""

    def __init__(self) -> None:
        self.stage = self.what = ""
        self.total: int | None = None
        self.done = 0
        self.tokens = 0
        self.begun = time.monotonic()
        self.tally = Tally()
        self.version = 0

    def begin(self, stage: str, what: str, total: int | None) -> None:
        self.stage, self.what, self.total, self.done, self.tokens = stage, what, total, 0, 0
        self.begun = time.monotonic()
        self.tally = Tally()

    def add(self, episode: Episode, tally: Tally) -> None:
        self.done += 1
        self.tokens += sum(len(turn.response_ids) for turn in episode.trajectory.turns)
        self.tally = tally
        self.version = max(self.version, episode.policy_version or 0)

    def text(self) -> str:
        """One line with all that is known."""
        parts = [f"{self.stage}: {self.what} {self.done}" + (f"/{self.total}" if self.total else "")]
        tally = self.tally
        if tally.success is not None:
            parts.append(f"success {tally.success:.3f}  reward {tally.reward_mean:.3f}")
        failures = {name: count for name, count in tally.failure_counts().items() if count}
        if failures:
            parts.append("failures " + " ".join(f"{name} {count}" for name, count in failures.items()))
        if self.tokens:
            parts.append(f"{self.tokens / max(time.monotonic() - self.begun, 1e-9):,.0f} tok/s")
        parts.append(f"version {self.version}")
        return "  ".join(parts)


class PlainProgress:
    """A line at the start and end of each phase, and every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = _State()
        self._printed = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.done:
            self._print()

    def phase(self, stage: str, what: str, *, total: int | None) -> None:
        """See `orchard_core.driver.Progress`."""
        before = self._state
        if before.done and (before.stage, before.what.split()[0]) != (stage, what.split()[0]):
            self._print()
        self._state.begin(stage, what, total)

    def episode(self, episode: Episode, tally: Tally) -> None:
        """See `orchard_core.driver.Progress`."""
        self._state.add(episode, tally)
        self._maybe()

    def update(self, step: int, report: UpdateReport) -> None:
        """See `orchard_core.driver.Progress`."""
        self._state.version = report.version
        if self._state.what == "fine-tuning":
            self._state.done = step
        self._maybe()

    def note(self, text: str) -> None:
        """See `orchard_core.driver.Progress`."""
        self._console.print(text, highlight=False, markup=False)

    def _maybe(self) -> None:
        if time.monotonic() - self._printed >= LINE_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        self._console.print(self._state.text(), highlight=False, markup=False, soft_wrap=True)


class LiveProgress:
    """A bar for the phase under way, the numbers beneath it, and the finished phases above."""

    def __init__(self, console: Console) -> None:
        self._state = _State()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task("starting", total=None)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._console = console

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def phase(self, stage: str, what: str, *, total: int | None) -> None:
        """See `orchard_core.driver.Progress`."""
        before = self._state
        if before.done and before.stage != stage:
            self._console.print(before.text(), highlight=False, markup=False)
        self._state.begin(stage, what, total)
        self._bar.reset(self._task, total=total, description=f"{stage}: {what}")

    def episode(self, episode: Episode, tally: Tally) -> None:
        """See `orchard_core.driver.Progress`."""
        self._state.add(episode, tally)
        self._bar.update(self._task, completed=self._state.done)

    def update(self, step: int, report: UpdateReport) -> None:
        """See `orchard_core.driver.Progress`."""
        self._state.version = report.version
        if self._state.what == "fine-tuning":
            self._state.done = step
            self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """See `orchard_core.driver.Progress`."""
        self._console.print(text, highlight=False, markup=False)

    def _render(self) -> RenderableType:
        tally = self._state.tally
        table = Table.grid(padding=(0, 2))
        rate = self._state.tokens / max(time.monotonic() - self._state.begun, 1e-9)
        failures = "  ".join(f"{name} {count}" for name, count in tally.failure_counts().items())
        table.add_row("success", "-" if tally.success is None else f"{tally.success:.3f}", "failures", failures)
        table.add_row("tokens/s", f"{rate:,.0f}", "policy version", str(self._state.version))
        return Group(self._bar, table)
