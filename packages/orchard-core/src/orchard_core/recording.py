"""Episodes of a run on disk: a folder per stage, in parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchard_api.episode import Episode
from orchard_core.run_dir import EPISODES, RunDir

if TYPE_CHECKING:
    from orchard_api.schema import EpisodeWriter


WRITE_EVERY_S = 60.0


class EpisodeLog:
    """Writes a stage's episodes to `episodes/STAGE/part-*.parquet`, at least once a minute while they end."""

    def __init__(self, run_dir: RunDir, stage: str) -> None:
        self._folder = run_dir.path / EPISODES / stage
        self._writer: EpisodeWriter | None = None
        self._written = time.monotonic()

    def append(self, episode: Episode) -> None:
        """Add one episode.

        Raises:
            OSError: a part could not be written (disk full).
        """
        if self._writer is None:
            from orchard_api.schema import EpisodeWriter

            self._writer = EpisodeWriter(self._folder)
        self._writer.append(episode)
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.close()

    def close(self) -> None:
        """Write what is pending."""
        self._written = time.monotonic()
        if self._writer is not None:
            self._writer.flush()


def stage_folders(path: Path) -> list[Path]:
    """The stages that have episodes, in the order in which they began."""
    folders = (
        [folder for folder in (path / EPISODES).iterdir() if folder.is_dir()] if (path / EPISODES).is_dir() else []
    )
    return sorted(folders, key=lambda folder: min((f.stat().st_mtime for f in folder.iterdir()), default=0.0))


def read_part(file: Path) -> Iterator[Episode]:
    """Stream the episodes of one part."""
    from orchard_api.schema import read_episodes

    yield from read_episodes(file)
