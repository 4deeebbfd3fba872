"""Small tars for `Sandbox.put_tar`: what a task, a check or a solution puts into a sandbox."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

_BLOCK = 512


class TarWriter:
    """Builds a tar in memory; for small files a fraction of the cost of `tarfile.open`. All is owned by nobody."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()

    def folder(self, name: str, *, mode: int = 0o755) -> None:
        """Add a folder."""
        info = tarfile.TarInfo(name)
        info.type = tarfile.DIRTYPE
        info.mode = mode
        self._buffer.write(info.tobuf(tarfile.PAX_FORMAT))

    def file(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """Add a file; scripts (`#!`, `*.sh`) are executable."""
        info = tarfile.TarInfo(name)
        info.size = len(data)
        info.mode = 0o755 if executable or data.startswith(b"#!") or name.endswith(".sh") else 0o644
        self._buffer.write(info.tobuf(tarfile.PAX_FORMAT))
        self._buffer.write(data)
        self._buffer.write(bytes(-len(data) % _BLOCK))

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        info = tarfile.TarInfo(name)
        info.type = tarfile.SYMTYPE
        info.linkname = target
        self._buffer.write(info.tobuf(tarfile.PAX_FORMAT))

    def tree(self, folder: Path, prefix: str = "", *, without: Collection[str] = ()) -> None:
        """Add all of a local folder, links as links; what macOS leaves behind (`._*`, `.DS_Store`) is left out.

        Args:
            without: paths relative to `folder` that are left out as well.

        Raises:
            OSError: it can't be read.
        """
        for path, name in _walk(folder, ""):
            if name in without:
                continue
            if path.is_symlink():
                self.link(prefix + name, str(path.readlink()))
            elif path.is_dir():
                self.folder(prefix + name)
            elif path.is_file():
                self.file(prefix + name, path.read_bytes(), executable=bool(path.stat().st_mode & 0o100))

    def getvalue(self) -> bytes:
        """The whole tar."""
        return self._buffer.getvalue() + bytes(2 * _BLOCK)


def _walk(folder: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("._") or path.name == ".DS_Store":
            continue
        yield path, prefix + path.name
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path, f"{prefix}{path.name}/")
