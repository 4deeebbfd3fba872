"""A run's folder: resolved config, metrics, episodes, checkpoints, summary, report."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

from orchard_api.config import RunConfig
from orchard_api.errors import ConfigError

CONFIG, METRICS, SUMMARY, REPORT = "config.json", "metrics.jsonl", "summary.json", "report.html"
EPISODES, CHECKPOINTS = "episodes", "checkpoints"
FORMAT = "orchard-run-1"


class RunDir:
    """Writes what a run leaves behind. JSON files appear whole or not at all; metrics are appended line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: IO[str] | None = None

    @classmethod
    def create(cls, config: RunConfig, *, path: Path | None = None, overwrite: bool = False) -> RunDir:
        """Make a new run's folder; `output/NAME-TIME` unless a path is given.

        Raises:
            ConfigError: it exists and holds something, and `overwrite` is false or it isn't a run's folder.
        """
        if path is None:
            path = _claim(config.output / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if not overwrite:
                raise ConfigError(f"{path} exists already", hint="choose another --run-dir, or add --overwrite")
            if not _is_run(path):
                raise ConfigError(f"{path} is not a run's folder; it is not overwritten")
            shutil.rmtree(path)
        (path / EPISODES).mkdir(parents=True)
        run_dir = cls(path)
        run_dir.write_json(CONFIG, {"format": FORMAT, **config.to_dict()})
        return run_dir

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run's folder.

        Raises:
            ConfigError: it isn't one.
        """
        if not _is_run(path):
            raise ConfigError(
                f"{path} is not a run's folder: it has no {CONFIG} of a run", hint="give the folder that a run printed"
            )
        return cls(path)

    def discard_if_unused(self) -> None:
        """Remove the folder of a run that ended before it recorded anything."""
        self.close()
        if not any((self.path / name).exists() for name in (METRICS, SUMMARY)) and not any(
            (self.path / EPISODES).iterdir()
        ):
            shutil.rmtree(self.path, ignore_errors=True)

    def metrics(self, **values: Any) -> None:
        """Append one line to `metrics.jsonl`."""
        if self._metrics is None:
            self._metrics = (self.path / METRICS).open("a", encoding="utf-8")
        self._metrics.write(json.dumps({"time": round(time.time(), 3), **values}, default=float) + "\n")
        self._metrics.flush()

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines that are whole."""
        try:
            lines = (self.path / METRICS).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically."""
        self.write_text(name, json.dumps(value, indent=1, default=str) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        target = self.path / name
        partial = target.with_name(f".{name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object; empty where there is none yet."""
        try:
            value = json.loads((self.path / name).read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def close(self) -> None:
        """Close what is open."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _is_run(path: Path) -> bool:
    """Whether a folder holds a run: many things have a `config.json`, ours says what it is."""
    try:
        value = json.loads((path / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT


def _claim(path: Path) -> Path:
    """Make the folder, or the first of `PATH-2`, `PATH-3`, ... that nobody else has made."""
    for number in itertools.count(1):
        name = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        return name
    raise AssertionError
