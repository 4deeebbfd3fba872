"""Local folders as tars for a sandbox."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def is_sidecar(name: str) -> bool:
    """Whether a file is one that macOS leaves behind."""
    return name.startswith("._") or name == ".DS_Store"


def tar_folder(folder: Path) -> bytes:
    """A folder's content as a tar, owned by nobody in particular, without macOS sidecar files."""

    def keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if is_sidecar(info.name.rpartition("/")[2]):
            return None
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name, filter=keep)
    return buffer.getvalue()
