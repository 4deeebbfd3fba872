"""Copy a folder that hostile programs may be changing meanwhile: links are never followed, holes stay holes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SOURCE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TARGET = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CLONE = 0x40049409
"""ioctl FICLONE: share the blocks, where the file system can."""
_CHUNK = 64 << 20
MAX_DEPTH = 200
_SHARED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def copy_tree(source: Path, target: Path) -> None:
    """Copy what `source` holds into the empty `target`: files, folders, links; modes, owners, times, hard links.

    Fifos and sockets are left out: nobody is at their other end. What vanishes meanwhile is left out too.

    Raises:
        OSError: something could not be copied, or folders are nested deeper than `MAX_DEPTH`.
    """
    here = os.open(source, _FOLDER)
    try:
        there = os.open(target, _FOLDER)
        try:
            _Copy(there).folder(here, there, "", 0)
        finally:
            os.close(there)
    finally:
        os.close(here)


class _Copy:
    def __init__(self, top: int) -> None:
        self._top = top
        self._links: dict[tuple[int, int], str] = {}
        self._clones = True

    def folder(self, here: int, there: int, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise OSError(errno.ELOOP, f"folders are nested deeper than {MAX_DEPTH}")
        with os.scandir(here) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._entry(here, there, name, f"{path}{name}", depth)

    def _entry(self, here: int, there: int, name: str, path: str, depth: int) -> None:
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
            _own(name, there, status)
        elif stat.S_ISDIR(status.st_mode):
            self._subfolder(here, there, name, path, depth)
        elif stat.S_ISREG(status.st_mode):
            self._file(here, there, name, path)

    def _subfolder(self, here: int, there: int, name: str, path: str, depth: int) -> None:
        source = os.open(name, _FOLDER, dir_fd=here)
        try:
            os.mkdir(name, 0o700, dir_fd=there)
            target = os.open(name, _FOLDER, dir_fd=there)
            try:
                self.folder(source, target, f"{path}/", depth + 1)
                _finish(target, os.fstat(source))
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _file(self, here: int, there: int, name: str, path: str) -> None:
        try:
            source = os.open(name, _SOURCE, dir_fd=here)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                # It became a link or a fifo since.
                return
            raise
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode):
                return
            key = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and key in self._links:
                os.link(self._links[key], name, src_dir_fd=self._top, dst_dir_fd=there, follow_symlinks=False)
                return
            target = os.open(name, _TARGET, 0o600, dir_fd=there)
            try:
                if not self._clone(source, target):
                    _copy_data(source, target, status.st_size)
                _finish(target, status)
            finally:
                os.close(target)
            if status.st_nlink > 1:
                self._links[key] = path
        finally:
            os.close(source)

    def _clone(self, source: int, target: int) -> bool:
        if not self._clones:
            return False
        try:
            fcntl.ioctl(target, _CLONE, source)
        except OSError as error:
            if error.errno not in _SHARED:
                raise
            self._clones = False
            return False
        return True


def _copy_data(source: int, target: int, size: int) -> None:
    """The bytes that are there; a file that shrinks meanwhile ends early, one that grows is cut at `size`."""
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        os.lseek(target, start, os.SEEK_SET)
        at = start
        while at < end:
            count = os.sendfile(target, source, at, min(end - at, _CHUNK))
            if count == 0:
                break
            at += count
        if at < end:
            break
    os.ftruncate(target, size)


def _own(name: str, folder: int, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(name, status.st_uid, status.st_gid, dir_fd=folder, follow_symlinks=False)
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False)


def _finish(target: int, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        # Before the mode: a change of owner takes set-id bits away.
        os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
