"""One sandbox's folder on the host: made in one go, and removed with its control groups, whoever removes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from orchard_agent.local.control_groups import remove_group
from orchard_agent.local.records import read_text
from orchard_agent.local.removal import remove_tree
from orchard_agent.local.root_folder import WRITABLE

OWNER = "owner"
"""Its first line is the tag of the client that made it; the others are the sandbox's control groups."""


FRESH = ".new-"
"""Prefix of a folder that is being made; the client's tag follows, so that it has an owner before it has a file."""


def make_box_folder(folder: Path, *, owner: str, groups: Sequence[Path], uid: int | None) -> None:
    """Make the folder and the writable ones in it; it appears complete, and nothing is left when that fails.

    The groups' names are in it before they are made: whoever removes the folder knows of it.

    Args:
        uid: host uid and gid of the sandbox when it isn't the client's own; it may pass through, nobody else.

    Raises:
        FileExistsError: there is one of that name.
        OSError: it can't be made.
    """
    fresh = folder.with_name(f"{FRESH}{owner}-{folder.name}")
    fresh.mkdir(mode=0o700)
    try:
        (fresh / OWNER).write_text("\n".join([owner, *map(str, groups)]))
        for name in WRITABLE.values():
            (fresh / name).mkdir()
            if uid is not None:
                os.chown(fresh / name, uid, uid)
        (fresh / "tmp").chmod(0o1777)
        if uid is not None:
            os.chown(fresh, -1, uid)
            fresh.chmod(0o710)
        fresh.rename(folder)
    except BaseException as error:
        remove_tree(fresh)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(error.errno, "it exists", str(folder)) from error
        raise


def owner_of(folder: Path) -> str:
    """The tag of the client that made it, or empty."""
    return read_text(folder / OWNER).partition("\n")[0]


def groups_of(folder: Path) -> list[Path]:
    """The control groups that are, or will be, a sandbox's."""
    return [Path(line) for line in read_text(folder / OWNER).splitlines()[1:] if line]


def remove_box(folder: Path) -> None:
    """Remove a sandbox's control groups and its folder; what isn't there is fine.

    Raises:
        OSError: something could not be removed.
    """
    for group in groups_of(folder):
        remove_group(group)
    remove_tree(folder)
