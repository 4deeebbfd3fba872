"""Puts back the task's own test files before grading, and removes those that the agent added."""

from __future__ import annotations

import asyncio
import fnmatch
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchard_api.archive import TarWriter
from orchard_api.errors import GraderError, SandboxFileError
from orchard_api.sandbox import Sandbox
from orchard_api.task import Task
from orchard_rewards.check_run import put_files, remove_tree
from orchard_rewards.isolation import clean_environment

MOST_ADDED = 1000
_LISTING = 4 << 20
_FIND_S = 60.0


class TooManyFilesError(Exception):
    """The agent left more files under protected names than anybody would."""


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path relative to the working directory is protected.

    A pattern without `/` is for the last part of a path, one with it for the whole path; `*` crosses folders.
    """
    name = posixpath.basename(path)
    return any(fnmatch.fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)


async def restore(sandbox: Sandbox, task: Task, patterns: Sequence[str]) -> dict[str, int]:
    """Make the protected files as the task has them; returns how many were put back, and how many removed.

    Raises:
        TooManyFilesError: more were added than can be looked at.
        GraderError: they can't be listed or put back.
    """
    if not patterns:
        return {"restored": 0, "removed": 0}
    originals = await asyncio.to_thread(_originals, task, patterns)
    added = [path for path in await _present(sandbox, patterns) if path not in originals]
    for path in added:
        await remove_tree(sandbox, path)
    if originals:
        await _clear_the_way(sandbox, originals)
        writer = TarWriter()
        for path, (data, executable) in originals.items():
            writer.file(path, data, executable=executable)
        await put_files(sandbox, ".", writer.getvalue())
    return {"restored": len(originals), "removed": len(added)}


def _originals(task: Task, patterns: Sequence[str]) -> Mapping[str, tuple[bytes, bool]]:
    """The task's own protected files: content, and whether it is executable, by path."""
    found: dict[str, tuple[bytes, bool]] = {}
    try:
        for file in [] if task.folder is None else sorted(task.folder.rglob("*")):
            path = file.relative_to(task.folder or Path()).as_posix()
            if matches(path, patterns) and file.is_file():
                found[path] = (file.read_bytes(), bool(file.stat().st_mode & 0o111))
    except OSError as error:
        raise GraderError(f"task {task.task_id}: its files can't be read: {error}") from error
    for path, data in task.files.items():
        path = posixpath.normpath(path)
        if matches(path, patterns):
            found[path] = (data, False)
    return found


async def _present(sandbox: Sandbox, patterns: Sequence[str]) -> list[str]:
    """The protected paths that are there now: files, links and whatever else, but no folders."""
    tests: list[str] = []
    for pattern in patterns:
        tests += ["-o", "-path", f"./{pattern}"] if "/" in pattern else ["-o", "-name", pattern]
    listed = await sandbox.exec(
        ["find", ".", "(", *tests[1:], ")", "!", "-type", "d", "-print0"],
        env=clean_environment("/"),
        timeout_s=_FIND_S,
        output_limit=_LISTING,
    )
    paths = [data.decode("utf-8", "surrogateescape") for data in listed.stdout.split(b"\0") if data]
    if listed.truncated or listed.timed_out or len(paths) > MOST_ADDED:
        raise TooManyFilesError
    # What can't be entered can't be imported either: an exit code of 1 is no error here.
    if listed.exit_code not in (0, 1):
        raise GraderError(f"the working directory can't be listed: find exited {listed.exit_code}")
    return [posixpath.normpath(path) for path in paths]


async def _clear_the_way(sandbox: Sandbox, paths: Mapping[str, object]) -> None:
    """Remove what the agent put where a folder of an original, or the original itself, belongs."""
    looked_at: set[str] = set()
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above not in looked_at:
                looked_at.add(above)
                await _remove_unless(sandbox, above, "directory")
        await _remove_unless(sandbox, path, "file")


async def _remove_unless(sandbox: Sandbox, path: str, kind: str) -> None:
    try:
        info = await sandbox.stat(path, follow=False)
    except SandboxFileError as error:
        if error.reason == "not_found":
            return
        raise
    if info.kind != kind:
        await remove_tree(sandbox, path)
