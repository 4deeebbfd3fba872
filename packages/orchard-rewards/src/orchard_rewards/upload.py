"""A check's files as part of a tar."""

from __future__ import annotations

from orchard_api.archive import TarWriter
from orchard_api.task import Check


def add_check(tar: TarWriter, check: Check) -> None:
    """Add the check's folder and files, `files` over `folder`.

    Raises:
        OSError: the folder can't be read.
        ValueError: a name in `files` is absolute or leads out of the folder.
    """
    if check.folder is not None:
        tar.tree(check.folder, without=check.files)
    for name, data in check.files.items():
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"check file {name!r} does not stay inside the check's folder")
        tar.file(name, data)
