"""The report shows what happened and trusts nothing of it."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_fakes import turn
from hypothesis import given
from hypothesis import strategies as st
from test_core_batching import episode

from orchard_api.errors import ConfigError
from orchard_core.charts import HEIGHT, MOST_POINTS, WIDTH, Series, bar_chart, line_chart
from orchard_core.recording import EpisodeLog
from orchard_core.report import write_report
from orchard_core.run_dir import RunDir

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path)
    run.write_json("config.json", {"format": "orchard-run-1", "name": "demo"})
    yield run
    run.close()


def test_hostile_text_of_a_model_is_escaped(run_dir: RunDir) -> None:
    log = EpisodeLog(run_dir, "rl")
    log.append(episode(0, "g", 1.0, (turn(HOSTILE),)))
    log.append(episode(1, "g", None))
    log.close()
    page = write_report(run_dir.path).read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "infra failure in harness: gone" in page


def test_curves_bars_and_stages_are_drawn_from_the_files(run_dir: RunDir) -> None:
    for step in range(3):
        run_dir.metrics(kind="step", stage="rl", step=step + 1, reward_mean=step / 2, success=step / 4)
    with (run_dir.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "cut sho')
    numbers = {"success_interval": [0.4, 0.6], "scored": 9, "episodes": 10, "success": 0.5}
    stages = {"rl": {"heldout_success": 0.5, "evaluation": numbers, "seconds": 3.0, "policy_version": 3}}
    run_dir.write_json("summary.json", {"stages": stages, "failures": {"infra": 1}, "incomplete": True, "episodes": 10})
    page = write_report(run_dir.path).read_text()
    assert page.count("<polyline") == 2
    assert "0.400 to 0.600" in page
    assert "9 / 10" in page
    assert "Incomplete" in page


def test_a_run_cut_short_before_anything_was_written_still_has_a_page(run_dir: RunDir) -> None:
    assert "No episodes were recorded" in write_report(run_dir.path).read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run's folder"):
        write_report(tmp_path)


def test_a_run_that_failed_or_was_interrupted_says_so(run_dir: RunDir) -> None:
    run_dir.write_json("summary.json", {"status": "failed", "error": "InfraError: <gone>"})
    assert "This run failed: InfraError: &lt;gone&gt;" in write_report(run_dir.path).read_text()
    run_dir.write_json("summary.json", {"status": "interrupted"})
    assert "This run was interrupted" in write_report(run_dir.path).read_text()


def test_episodes_of_the_first_and_the_last_part_are_shown(run_dir: RunDir) -> None:
    for part in range(3):
        log = EpisodeLog(run_dir, "rl")
        for number in range(4):
            log.append(episode(10 * part + number, f"g{part}", float(number % 2), (turn(f"said {part}-{number}"),)))
        log.close()
    page = write_report(run_dir.path).read_text()
    assert [text for text in ("said 0-0", "said 0-1", "said 2-0", "said 2-1") if text not in page] == []
    assert "said 1-" not in page
    assert "(early)" in page
    assert "(late)" in page


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=50),
    st.sampled_from([None, 0.0]),
)
def test_any_numbers_make_a_chart_whose_points_lie_inside(values: list[float], low: float | None) -> None:
    points = [(n, value) for n, value in enumerate(values)]
    svg = line_chart("t", [Series(name="a", points=points)], x_label="x", low=low, high=None if low is None else 1.0)
    if not any(math.isfinite(value) for value in values):
        assert svg == ""
        return
    for circle in ET.fromstring(svg).iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= WIDTH
        assert 0 <= float(circle.attrib["cy"]) <= HEIGHT


def test_a_long_curve_is_thinned_out_and_keeps_its_end() -> None:
    svg = line_chart("t", [Series(name="a", points=[(n, n) for n in range(100_001)])], x_label="x")
    assert svg.count("<circle") <= MOST_POINTS
    assert "100,000 at 100,000" in svg


def test_charts_are_wellformed_also_at_the_edges() -> None:
    for svg in (
        line_chart("<t>", [Series(name="a & b", points=[(1, 0.5)])], x_label="<x>"),
        line_chart("t", [Series(name="a", points=[(1, 2), (2, 2)])], x_label="x"),
        bar_chart("t", [("<s>", 0.0, (0.0, 0.1)), ("b", 1.0, None)]),
    ):
        ET.fromstring(svg)
    assert line_chart("t", [], x_label="x") == ""
    assert line_chart("t", [Series(name="a", points=[(1, math.nan)])], x_label="x") == ""
    assert bar_chart("t", []) == ""
