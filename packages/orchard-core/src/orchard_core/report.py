"""`report.html`: one self-contained page with the curves, the failures and a few whole episodes to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from orchard_api.episode import Episode
from orchard_core.charts import Series, bar_chart, line_chart
from orchard_core.recording import read_part, stage_folders
from orchard_core.run_dir import CONFIG, EPISODES, REPORT, SUMMARY, RunDir

PER_STAGE, SCANNED, SHOWN_CHARS = 4, 400, 20_000


def write_report(path: Path) -> Path:
    """Build a run's report anew from what is in its folder; returns the page's path.

    Raises:
        ConfigError: it is not a run's folder.
    """
    run_dir = RunDir.open(path)
    summary = run_dir.read_json(SUMMARY)
    config = run_dir.read_json(CONFIG)
    metrics = run_dir.read_metrics()
    stages: Mapping[str, Any] = summary.get("stages", {})
    solved_at = config.get("evaluation", {}).get("solved_at", 1.0)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined)
    template = environment.from_string(files("orchard_core").joinpath("report.html.j2").read_text("utf-8"))
    page = template.render(
        name=config.get("name", path.name),
        summary={"failures": {}, **summary},
        environment=config.get("environment", {}).get("backend", "?"),
        harness=config.get("harness", {}).get("name", "?"),
        undeleted=summary.get("undeleted_sandboxes") or {},
        failure_kinds=summary.get("failure_kinds") or {},
        bars=bar_chart("success on held-out tasks", _bars(stages)),
        charts=[chart for chart in _charts(metrics) if chart["svg"]],
        stages=[_stage_row(name, stage) for name, stage in stages.items()],
        episodes=[shown for folder in reversed(stage_folders(path)) for shown in _some(path, folder.name, solved_at)],
    )
    run_dir.write_text(REPORT, page)
    return path / REPORT


def _bars(stages: Mapping[str, Any]) -> list[tuple[str, float, tuple[float, float] | None]]:
    bars: list[tuple[str, float, tuple[float, float] | None]] = []
    for name, stage in stages.items():
        if stage.get("heldout_success") is not None:
            low, high = stage["evaluation"]["success_interval"]
            bars.append((name, stage["heldout_success"], (low, high)))
    return bars


def _charts(metrics: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    steps = [line for line in metrics if line.get("kind") == "step"]
    updates = [line for line in metrics if line.get("kind") == "update"]

    def series(lines: list[dict[str, Any]], key: str, name: str) -> Series:
        return Series(
            name=name, points=[(n + 1, line[key]) for n, line in enumerate(lines) if line.get(key) is not None]
        )

    rewards = [series(steps, "reward_mean", "mean reward"), series(steps, "success", "success")]
    if rewards[0].points == rewards[1].points:
        rewards.pop(0)
    yield {
        "title": "Reinforcement learning: reward of fresh episodes",
        "svg": line_chart("reward", rewards, x_label="step", low=0.0, high=1.0),
    }
    loss = [series(updates, "loss", "loss")]
    yield {"title": "Fine-tuning: loss", "svg": line_chart("fine-tuning loss", loss, x_label="update", low=0.0)}
    for key, title in (
        ("trainer/entropy", "Entropy of the policy"),
        ("trainer/grad_norm", "Gradient norm"),
        ("trainer/log_ratio_mean", "Engine and trainer: mean log ratio"),
    ):
        yield {"title": title, "svg": line_chart(title, [series(steps, key, key.rpartition("/")[2])], x_label="step")}
    speed = [series(steps, "tokens_per_second", "tokens/s")]
    yield {"title": "Sampling speed", "svg": line_chart("tokens per second", speed, x_label="step", low=0.0)}


def _stage_row(name: str, stage: Mapping[str, Any]) -> dict[str, str]:
    numbers = stage.get("evaluation") or stage.get("expert") or {}
    interval = numbers.get("success_interval")
    success = stage.get("heldout_success")
    return {
        "name": name,
        "success": "-" if success is None else f"{success:.3f}",
        "interval": f"{interval[0]:.3f} to {interval[1]:.3f}" if interval and success is not None else "-",
        "played": f"{numbers.get('scored', 0)} / {numbers.get('episodes', 0)}" if numbers else "-",
        "version": str(stage.get("policy_version", "-")),
        "seconds": f"{stage['seconds']:.1f}" if "seconds" in stage else "-",
    }


def _some(path: Path, stage: str, solved_at: float) -> Iterator[dict[str, Any]]:
    """A few of a stage's episodes: solved, unsolved and failed ones, from its first part and its last."""
    parts = sorted((path / EPISODES / stage).glob("*.parquet"))
    ends = list(dict.fromkeys([*parts[-1:], *parts[:1]]))
    for part in ends:
        each = PER_STAGE // (2 * len(ends))
        wanted = {"solved": each, "unsolved": each, "failed": 1}
        when = "" if len(ends) == 1 else "late" if part == parts[-1] else "early"
        for number, episode in enumerate(read_part(part)):
            if number >= SCANNED or not any(wanted.values()):
                break
            kind = "failed" if episode.failure else "solved" if (episode.reward or 0) >= solved_at else "unsolved"
            if wanted[kind]:
                wanted[kind] -= 1
                yield {**_shown(episode, stage, kind), "when": when}


def _shown(episode: Episode, stage: str, kind: str) -> dict[str, Any]:
    messages = []
    for turn in episode.trajectory.turns:
        branch = f"branch from turn {turn.parent}" if turn.parent not in (None, turn.index - 1) else ""
        messages += [{"role": m.role, "text": m.text[:SHOWN_CHARS], "note": branch} for m in turn.messages]
        version = f"version {turn.versions[-1]}" if turn.versions else "expert" if "expert" in turn.flags else ""
        calls = "".join(f"\n{call.name}({call.arguments})" for call in turn.response.tool_calls)
        note = ", ".join(
            part for part in (version, f"{len(turn.response_ids)} tokens" if turn.response_ids else "") if part
        )
        messages.append({"role": "assistant", "text": (turn.response.text + calls)[:SHOWN_CHARS], "note": note})
    if not messages:
        messages = [{"role": "user", "text": episode.task.instruction, "note": ""}]
    return {
        "stage": stage,
        "task": episode.task.task_id,
        "outcome": episode.outcome.replace("_", " "),
        "solved": kind == "solved",
        "verdict": "failed" if episode.reward is None else f"reward {episode.reward:g}",
        "messages": messages,
        "scores": [
            {
                "name": s.name,
                "value": f"{s.value:g}",
                "evidence": json.dumps(s.evidence, indent=1, ensure_ascii=False)[:SHOWN_CHARS],
            }
            for s in episode.scores
        ],
        "failure": _failure_text(episode),
    }


def _failure_text(episode: Episode) -> str:
    failure = episode.failure
    return "" if failure is None else f"{failure.failure_class.value} failure in {failure.phase}: {failure.message}"
