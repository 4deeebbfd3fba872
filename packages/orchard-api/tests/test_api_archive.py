"""What `TarWriter` writes is what tarfile reads."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from orchard_api.archive import TarWriter


def read(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {info.name: info for info in archive.getmembers()}


def test_files_folders_and_long_names(tmp_path: Path) -> None:
    writer = TarWriter()
    long_name = "a/" + "x" * 300 + "/ü\n"
    writer.folder("d", mode=0o700)
    writer.file("run", b"#!/bin/sh\n")
    writer.file(long_name, b"z" * 1000)
    members = read(writer.getvalue())
    assert members["d"].isdir()
    assert members["d"].mode == 0o700
    assert members["run"].mode == 0o755
    assert members[long_name].size == 1000
    assert members[long_name].mode == 0o644


def test_a_tree_keeps_links_and_modes_and_leaves_sidecars_out(tmp_path: Path) -> None:
    """Case 97."""
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "sub" / "tool").write_bytes(b"\x00")
    (tmp_path / "sub" / "tool").chmod(0o755)
    (tmp_path / "._tool").write_bytes(b"mac")
    (tmp_path / ".DS_Store").write_bytes(b"mac")
    (tmp_path / "left").write_bytes(b"x")
    (tmp_path / "link").symlink_to("/etc")
    writer = TarWriter()
    writer.tree(tmp_path, "p/", without={"left"})
    members = read(writer.getvalue())
    assert sorted(members) == ["p/link", "p/sub", "p/sub/empty", "p/sub/tool"]
    assert members["p/link"].linkname == "/etc"
    assert members["p/sub/tool"].mode == 0o755
