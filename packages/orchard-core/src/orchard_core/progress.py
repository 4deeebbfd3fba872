"""What the user sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from orchard_api.episode import Episode
from orchard_api.training import UpdateReport
from orchard_core.statistics import Tally

LINE_EVERY_S = 5.0
_NUMBERS = ("loss", "grad_norm", "entropy")


class _State:
    """Numbers of the phase under way."""

    def __init__(self) -> None:
        self.stage = self.what = ""
        self.total: int | None = None
        self.done = self.tokens = 0
        self.begun = self.changed = time.monotonic()
        self.tally = Tally()
        self.version: int | None = None
        self.learnt: dict[str, float] = {}

    def begin(self, stage: str, what: str, total: int | None) -> None:
        if stage != self.stage or what == "evaluating":
            self.learnt = {}
        self.stage, self.what, self.total, self.done, self.tokens = stage, what, total, 0, 0
        self.begun = self.changed = time.monotonic()
        self.tally = Tally()

    def add(self, episode: Episode, tally: Tally) -> None:
        self.changed = time.monotonic()
        self.done += 1
        self.tokens += sum(len(turn.response_ids) for turn in episode.trajectory.turns)
        self.tally = tally
        version = episode.policy_version
        if version is not None:
            self.version = max(self.version or 0, version)

    def learn(self, step: int, report: UpdateReport) -> None:
        self.changed = time.monotonic()
        self.version = report.version
        self.learnt = {name: report.metrics[name] for name in _NUMBERS if name in report.metrics}
        if not self.tally.episodes:
            self.done = step

    @property
    def rate(self) -> float:
        """Response tokens per second of this phase, up to its newest event."""
        return self.tokens / max(self.changed - self.begun, 1e-3)

    def numbers(self) -> list[tuple[str, str]]:
        """Name and value of all that is known."""
        parts: list[tuple[str, str]] = []
        tally = self.tally
        if tally.success is not None:
            parts += [("success", f"{tally.success:.3f}"), ("reward", f"{tally.reward_mean:.3f}")]
        parts += [(name, f"{value:.3g}") for name, value in self.learnt.items()]
        failures = [f"{name} {count}" for name, count in tally.failure_counts().items() if count]
        if failures:
            parts.append(("failures", ", ".join(failures)))
        if self.tokens:
            parts.append(("tokens/s", f"{self.rate:,.0f}"))
        if self.version is not None:
            parts.append(("version", str(self.version)))
        return parts

    def text(self) -> str:
        """One line with all that is known."""
        head = f"{self.stage}: {self.what} {self.done}" + (f"/{self.total}" if self.total else "")
        return "  ".join([head, *(f"{name} {value}" for name, value in self.numbers())])


class PlainProgress:
    """A line at the end of each phase, and every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = _State()
        self._printed_at = time.monotonic()
        self._printed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.done:
            self._print()

    def phase(self, stage: str, what: str, *, total: int | None) -> None:
        """See `orchard_core.run.Progress`."""
        before = self._state
        if before.done and (before.stage, before.what.split()[0]) != (stage, what.split()[0]):
            self._print()
        self._state.begin(stage, what, total)

    def episode(self, episode: Episode, tally: Tally) -> None:
        """See `orchard_core.run.Progress`."""
        self._state.add(episode, tally)
        self._maybe()

    def update(self, step: int, report: UpdateReport) -> None:
        """See `orchard_core.run.Progress`."""
        self._state.learn(step, report)
        self._maybe()

    def note(self, text: str) -> None:
        """See `orchard_core.run.Progress`."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _maybe(self) -> None:
        if time.monotonic() - self._printed_at >= LINE_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._printed_at = time.monotonic()
        text = self._state.text()
        if text != self._printed:
            self._printed = text
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveProgress:
    """A bar for the phase under way, its numbers beneath, and the finished phases above."""

    def __init__(self, console: Console) -> None:
        self._state = _State()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[stage]}[/bold] {task.description}", markup=True),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task("starting", total=None, stage="")
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
        """See `orchard_core.run.Progress`."""
        before = self._state
        if before.done and (before.stage, before.what.split()[0]) != (stage, what.split()[0]):
            self._console.print(before.text(), highlight=False, markup=False, style="dim", soft_wrap=True)
        self._state.begin(stage, what, total)
        self._bar.reset(self._task, total=total, description=what, stage=stage)

    def episode(self, episode: Episode, tally: Tally) -> None:
        """See `orchard_core.run.Progress`."""
        self._state.add(episode, tally)
        self._bar.update(self._task, completed=self._state.done)

    def update(self, step: int, report: UpdateReport) -> None:
        """See `orchard_core.run.Progress`."""
        self._state.learn(step, report)
        self._bar.update(self._task, completed=self._state.done)

    def note(self, text: str) -> None:
        """See `orchard_core.run.Progress`."""
        self._console.print(text, highlight=False, markup=False)

    def _render(self) -> RenderableType:
        line = Text("  ")
        for name, value in self._state.numbers():
            line.append(f"{name}\u00a0", style="dim")
            line.append(f"{value.replace(' ', chr(0xA0))}   ")
        return Group(self._bar, line)
