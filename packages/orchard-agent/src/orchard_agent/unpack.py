"""Unpack on this machine a tar that comes out of a sandbox: hostile, so nothing lands or points outside the folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterable, Iterator
from pathlib import Path
from typing import IO, Protocol, cast

from orchard_agent.client import TarStream
from orchard_api.errors import InfraError
from orchard_api.sandbox import TarReport

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 1 << 20
_MAX_DEPTH = 100
_MAX_READ = 4 << 20


class _HasTar(Protocol):
    def get_tar(self, path: str) -> TarStream: ...


async def download_folder(
    sandbox: _HasTar, path: str, destination: Path, *, max_bytes: int = 4 << 30, max_members: int = 200_000
) -> TarReport:
    """Copy folder `path` of a sandbox into `destination`; what was left out, on either side, is listed.

    Raises:
        SandboxFileError: the folder can't be packed.
        InfraError: it has more than `max_bytes` or `max_members`, or the tar is broken.
    """
    stream = sandbox.get_tar(path)
    report = await unpack_tar(stream, destination, source=path, max_bytes=max_bytes, max_members=max_members)
    return TarReport(delivered=report.delivered, skipped=(*stream.report.skipped, *report.skipped))


async def unpack_tar(
    data: AsyncIterable[bytes],
    destination: Path,
    *,
    source: str | None = None,
    max_bytes: int = 4 << 30,
    max_members: int = 200_000,
) -> TarReport:
    """Unpack a tar; the bytes wait on disk, not in memory.

    Files get no set-user-ID bits and our own user; devices and FIFOs are skipped; a link is kept when it stays inside.

    Args:
        source: the absolute folder inside the sandbox that was packed: absolute links into it become relative ones.

    Raises:
        InfraError: more than `max_bytes` or `max_members`, or the tar is broken.
    """
    with tempfile.TemporaryFile() as spool:
        size = 0
        async for chunk in data:
            size += len(chunk)
            if size > max_bytes:
                raise InfraError(f"the tar is larger than {max_bytes} bytes")
            spool.write(chunk)
        spool.seek(0)
        unpacker = _Unpacker(destination, source=source, max_bytes=max_bytes, max_members=max_members)
        return await asyncio.to_thread(unpacker.run, spool)


class _BoundedReads:
    """A file whose single reads are small: `tarfile` reads an extended header whole, however long it says it is."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


class _SkippedError(Exception):
    """This member is left out, for the reason in the text."""


class _Unpacker:
    def __init__(self, destination: Path, *, source: str | None, max_bytes: int, max_members: int) -> None:
        self._destination = destination
        self._source = None if source is None else posixpath.normpath(source)
        self._bytes_left = max_bytes
        self._members_left = max_members
        self._delivered = 0
        self._skipped: list[tuple[str, str]] = []

    def run(self, spool: IO[bytes]) -> TarReport:
        self._destination.mkdir(parents=True, exist_ok=True)
        root = os.open(self._destination, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with tarfile.open(
                fileobj=cast(IO[bytes], _BoundedReads(spool)), mode="r:", errors="surrogateescape"
            ) as archive:
                while (member := archive.next()) is not None:
                    self._take(archive, member, root)
                    # tarfile keeps every header that it has read.
                    archive.members = []  # type: ignore[attr-defined]
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise InfraError(f"the tar from the sandbox is broken: {error}") from error
        finally:
            os.close(root)
        return TarReport(delivered=self._delivered, skipped=tuple(self._skipped))

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo, root: int) -> None:
        self._members_left -= 1
        if self._members_left < 0:
            raise InfraError("the tar from the sandbox has too many members")
        try:
            self._extract(archive, member, root)
        except _SkippedError as error:
            self._skipped.append((member.name, str(error)))
        except OSError as error:
            if error.errno == 28:
                raise InfraError(f"no space left to unpack into {self._destination}") from error
            self._skipped.append((member.name, error.strerror or str(error)))
        else:
            self._delivered += 1

    def _extract(self, archive: tarfile.TarFile, member: tarfile.TarInfo, root: int) -> None:
        parts = _inside(member.name)
        if not parts:
            return
        if member.isdir():
            with _folder(root, parts):
                return
        with _folder(root, parts[:-1]) as folder:
            name = parts[-1]
            if member.isreg():
                self._file(archive, member, folder, name)
            elif member.issym():
                self._link(member, folder, parts)
            elif member.islnk():
                self._hard_link(member, root, folder, name)
            else:
                raise _SkippedError("not a file, folder or link")

    def _file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        self._bytes_left -= member.size
        if self._bytes_left < 0:
            raise InfraError("the tar from the sandbox unpacks to too many bytes")
        content = archive.extractfile(member)
        if content is None:
            raise _SkippedError("it has no content")
        _make_way(folder, name)
        mode = 0o755 if member.mode & 0o100 else 0o644
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        with open(handle, "wb") as file:
            while chunk := content.read(_COPY_BYTES):
                file.write(chunk)

    def _link(self, member: tarfile.TarInfo, folder: int, parts: list[str]) -> None:
        text = member.linkname
        if text.startswith("/"):
            text = self._relative(text, parts)
        steps = [step for step in text.split("/") if step not in ("", ".")]
        ups = next((at for at, step in enumerate(steps) if step != ".."), len(steps))
        if ups > len(parts) - 1 or ".." in steps[ups:]:
            raise _SkippedError(f"a link out of the folder, to {member.linkname}")
        _make_way(folder, parts[-1])
        os.symlink("/".join(steps) or ".", parts[-1], dir_fd=folder)

    def _relative(self, text: str, parts: list[str]) -> str:
        place = posixpath.normpath(text)
        if self._source is None or not (place == self._source or place.startswith(self._source.rstrip("/") + "/")):
            raise _SkippedError(f"a link out of the folder, to {text}")
        return posixpath.relpath(place, posixpath.join(self._source, *parts[:-1]))

    def _hard_link(self, member: tarfile.TarInfo, root: int, folder: int, name: str) -> None:
        old = _inside(member.linkname)
        if not old:
            raise _SkippedError("a hard link to the folder itself")
        with _folder(root, old[:-1], make=False) as source:
            if not stat.S_ISREG(os.stat(old[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise _SkippedError("a hard link to what is not a file")
            _make_way(folder, name)
            os.link(old[-1], name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)


def _inside(name: str) -> list[str]:
    """A member's path below the destination.

    Raises:
        _SkippedError: it has none.
    """
    if name.startswith("/"):
        raise _SkippedError("its path is absolute")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _SkippedError("its path leads out of the folder")
    if len(parts) > _MAX_DEPTH:
        raise _SkippedError(f"it lies deeper than {_MAX_DEPTH} folders")
    return parts


@contextlib.contextmanager
def _folder(root: int, parts: list[str], *, make: bool = True) -> Iterator[int]:
    """Walk down from an open folder without following any link; missing folders are made."""
    here = os.dup(root)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
            try:
                below = os.open(part, _FOLDER, dir_fd=here)
            except OSError as error:
                raise _SkippedError("its path goes through a link or a file") from error
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def _make_way(folder: int, name: str) -> None:
    """Remove a file or link of that name; a folder stays, and its name can't be taken."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _SkippedError("a folder of that name is there")
        os.unlink(name, dir_fd=folder)
