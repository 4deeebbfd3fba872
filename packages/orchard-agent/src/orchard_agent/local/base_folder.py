"""The private folder in which sandboxes of this machine's user live, found again by every process of that user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from orchard_api.errors import InfraError

ROOTS = "roots"
BOXES = "boxes"
_LOCK = ".lock"


def default_base() -> Path:
    """Where sandboxes are unless the config says otherwise: one folder per user, so that `attach` and `gc` find it."""
    return Path(tempfile.gettempdir()) / f"orchard-local-{os.geteuid()}"


class BaseFolder:
    """The folder, held by a shared lock while an environment uses it.

    Args:
        group: gid that sandboxes run as when the client is root: it may pass through the folder, others may not.

    Raises:
        InfraError: it can't be made, or it belongs to somebody else.
    """

    def __init__(self, path: Path, *, group: int | None) -> None:
        self.path = path
        self.roots = path / ROOTS
        self.boxes = path / BOXES
        self._mode = 0o710 if group is not None else 0o700
        self._group = group
        try:
            self._lock = self._open()
        except OSError as error:
            raise InfraError(
                f"the folder of local sandboxes can't be used: {error}",
                hint='set base = "/some/private/folder" under [environment], or mend its rights',
            ) from error
        if group is not None:
            self._check_passage()

    def _open(self) -> int:
        while True:
            for folder in (self.path, self.roots, self.boxes):
                self._make(folder)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            # Another process may have removed the folder between the two.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == (self.path / _LOCK).stat().st_ino and self.boxes.is_dir():
                    return lock
            os.close(lock)

    def _make(self, folder: Path) -> None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=folder == self.path)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{folder} is not a folder of our own")
        if self._group is not None and status.st_gid != self._group:
            os.chown(folder, -1, self._group)
        if stat.S_IMODE(status.st_mode) != self._mode:
            folder.chmod(self._mode)

    def _check_passage(self) -> None:
        for above in self.path.parents:
            if not above.stat().st_mode & 0o001:
                raise InfraError(
                    f"sandboxes run as uid {self._group} and can't pass through {above} to their folder",
                    hint='set base = "/some/folder" under [environment], below folders that everybody may enter',
                )

    def close(self) -> None:
        """Give it up; the last one to leave an empty folder removes it."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not any(self.boxes.iterdir()):
                shutil.rmtree(self.path)
        os.close(self._lock)
        self._lock = -1
