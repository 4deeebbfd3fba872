"""Remove a folder that a hostile program filled: links aren't followed, rights are taken back, depth costs nothing."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; one that isn't there is fine.

    Folders below the first level are moved up to it before they are emptied, so neither recursion nor open descriptors
    grow with the depth.

    Raises:
        OSError: something could not be removed.
    """
    try:
        _open_up(path.name, path.parent)
        top = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    try:
        moved = [0]
        queue = _empty(top, top, moved)
        while queue:
            name = queue.pop()
            here = os.open(name, _FOLDER, dir_fd=top)
            try:
                queue += _empty(here, top, moved)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    path.rmdir()


def _open_up(name: str, parent: Path) -> None:
    status = (parent / name).lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
        (parent / name).chmod(0o700)


def _empty(folder: int, top: int, moved: list[int]) -> list[str]:
    """Remove what `folder` holds; returns the folders that are not empty, now in `top`."""
    left: list[str] = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
            continue
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=folder)
            continue
        if os.lstat(name, dir_fd=folder).st_mode & 0o700 != 0o700:
            # No link can be here: it was a folder just now, and nobody else is left to change it.
            os.chmod(name, 0o700, dir_fd=folder)
        if folder == top:
            left.append(name)
            continue
        moved[0] += 1
        fresh = f".orchard-removed-{moved[0]}"
        os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=top)
        left.append(fresh)
    return left
