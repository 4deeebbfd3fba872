from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox, download_folder, unpack_tar
from orchard_api.errors import InfraError, SandboxFileError


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def file(name: str, data: bytes = b"x", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.mode = mode
    return member, data


def special(name: str, kind: bytes, target: str = "", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, target, mode
    return member, b""


ATTACKS = tar_of(
    file("good-first"),
    file("../../escaped"),
    file("/tmp/absolute"),
    file("a/../../escaped"),
    special("link", tarfile.SYMTYPE, "/tmp"),
    file("link/through"),
    special("up", tarfile.SYMTYPE, "../.."),
    file("up/through"),
    special("hard", tarfile.LNKTYPE, "../outside"),
    special("hard-link", tarfile.LNKTYPE, "/etc/passwd"),
    special("hard-through", tarfile.LNKTYPE, "link/x"),
    special("device", tarfile.CHRTYPE),
    special("block", tarfile.BLKTYPE),
    special("fifo", tarfile.FIFOTYPE),
    special("dir", tarfile.DIRTYPE, mode=0o755),
    file("dir/good-last", mode=0o4755),
)


async def stream(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


async def test_extraction_inside_stays_in_its_folder(box: AgentSandbox) -> None:
    """Case 104, into the sandbox: benign members arrive, the others are listed."""
    await box.exec("mkdir /tmp/dest; touch /tmp/outside")
    report = await box.put_tar("/tmp/dest", ATTACKS)
    found = (await box.exec("find /tmp /workspace ! -type d | sort")).stdout_text.split()
    inside = [f"/tmp/dest/{name}" for name in ("dir/good-last", "good-first", "link", "up")]
    assert found == [*inside, "/tmp/outside"]
    skipped = {name for name, _ in report.skipped}
    expected = {"../../escaped", "/tmp/absolute", "a/../../escaped", "link/through", "up/through", "hard", "hard-link"}
    assert skipped == expected | {"hard-through", "device", "block", "fifo"}
    assert report.delivered == 5
    assert (await box.stat("/tmp/dest/dir/good-last")).mode == 0o755


async def test_extraction_inside_keeps_what_is_legitimate(box: AgentSandbox) -> None:
    """A link with an absolute target is a legitimate member; read-only folders are filled; files are replaced."""
    await box.exec("mkdir dest; echo old > dest/file; ln -s /tmp/elsewhere dest/was-link")
    data = tar_of(
        special("python", tarfile.SYMTYPE, "/usr/bin/python3"),
        special("closed", tarfile.DIRTYPE, mode=0o555),
        file("closed/in", b"in"),
        file("file", b"new"),
        file("was-link", b"file now"),
        special("same", tarfile.LNKTYPE, "file"),
        file("\udcff\n odd", b"odd"),
        special("empty", tarfile.DIRTYPE, mode=0o700),
    )
    report = await box.put_tar("dest", data)
    assert (report.delivered, report.skipped) == (8, ())
    assert (await box.exec(["dest/python", "-c", "print(open('dest/same').read())"])).stdout == b"new\n"
    assert (await box.stat("dest/closed")).mode == 0o555
    assert (await box.stat("dest/was-link", follow=False)).kind == "file"
    assert await box.read_file("dest/\udcff\n odd") == b"odd"
    assert (await box.stat("/tmp")).kind == "directory"


async def test_a_cut_or_broken_tar_is_an_error(box: AgentSandbox) -> None:
    data = tar_of(file("a", b"a" * 5000), file("b", b"b" * 5000))
    for broken in (data[:3000], b"this is no tar" * 100):
        with pytest.raises(SandboxFileError, match="broken or cut"):
            await box.put_tar("dest", broken)
    assert (await box.put_tar("dest", data)).delivered == 2


async def test_no_space_ends_an_extraction(box: AgentSandbox) -> None:
    with pytest.raises(SandboxFileError) as caught:
        await box.put_tar("/dev/shm/dest", tar_of(file("small"), file("big", b"x" * (70 << 20))))
    assert caught.value.reason == "no_space"
    assert "big" not in [info.name for info in await box.list_dir("/dev/shm/dest")]


async def test_ten_thousand_small_files_make_the_round_trip(box: AgentSandbox, tmp_path: Path) -> None:
    """Case 103."""
    data = tar_of(*(file(f"{n % 100}/{n}", b"%d" % n) for n in range(10_000)))
    assert (await box.put_tar("many", data)).delivered == 10_000
    report = await download_folder(box, "/workspace/many", tmp_path / "out")
    assert report.skipped == ()
    assert sum(1 for path in (tmp_path / "out").rglob("*") if path.is_file()) == 10_000
    assert (tmp_path / "out" / "42" / "4242").read_bytes() == b"4242"


async def test_a_folder_with_a_fifo_and_a_large_file_comes_out(box: AgentSandbox, tmp_path: Path) -> None:
    """Cases 103 and 106."""
    await box.exec(
        "mkdir -p art/empty; cd art; mkfifo pipe; truncate -s 200M large; echo end >> large; ln -s large soft;"
        "ln large hard; ln -s /workspace/art/large inner; ln -s /etc/passwd outer; printf x > -x; chmod +x ./-x;"
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"; touch \"$(printf 'new\\nline')\""
    )
    report = await download_folder(box, "/workspace/art", tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "large").stat().st_size == (200 << 20) + 4
    assert {name for name, _ in report.skipped} == {"pipe", "sock", "outer"}
    assert (out / "soft").resolve() == out / "large" == (out / "inner").resolve()
    assert (out / "hard").stat().st_ino == (out / "large").stat().st_ino
    assert os.access(out / "-x", os.X_OK)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["-x", "empty", "hard", "inner", "large", "new\nline", "soft"]
    )


async def test_unpacking_here_stays_in_its_folder(tmp_path: Path) -> None:
    """Case 104, out of a sandbox: neither written nor pointed outside."""
    (tmp_path / "outside").write_text("secret")
    report = await unpack_tar(stream(ATTACKS), tmp_path / "a" / "dest")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    # The links were not made, so what was to go through them lies in plain folders of those names.
    inside = ["dir/good-last", "good-first", "link/through", "up/through"]
    assert found == [*(f"a/dest/{name}" for name in inside), "outside"]
    skipped = {name for name, _ in report.skipped}
    dots = {"../../escaped", "/tmp/absolute", "a/../../escaped"}
    assert skipped == dots | {"link", "up", "hard", "hard-link", "hard-through", "device", "block", "fifo"}
    assert (tmp_path / "a/dest/dir/good-last").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    "members",
    [
        [
            special("a/b/c", tarfile.DIRTYPE),
            special("a/b/c/s", tarfile.SYMTYPE, "../../.."),
            special("t", tarfile.SYMTYPE, "a/b/c/s/../out"),
            file("t", b"pwned"),
        ],
        [special("d", tarfile.SYMTYPE, "."), file("d/../../out", b"pwned")],
        [special("d", tarfile.SYMTYPE, "e"), special("e", tarfile.DIRTYPE), file("d/f", b"pwned")],
        [special("d", tarfile.DIRTYPE), special("d", tarfile.SYMTYPE, ".."), file("d/out", b"pwned")],
        [special("h", tarfile.SYMTYPE, "../out"), special("k", tarfile.LNKTYPE, "h"), file("k", b"pwned")],
    ],
    ids=["climb-through-a-link", "dots", "link-to-inside", "folder-replaced", "hard-link-to-link"],
)
async def test_combinations_of_links_do_not_escape(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    (tmp_path / "out").write_text("untouched")
    await unpack_tar(stream(tar_of(*members)), tmp_path / "dest")
    assert (tmp_path / "out").read_text() == "untouched"
    for path in (tmp_path / "dest").rglob("*"):
        assert path.resolve().is_relative_to(tmp_path / "dest")


async def test_limits_of_unpacking(tmp_path: Path) -> None:
    many = tar_of(*(file(str(n)) for n in range(50)))
    with pytest.raises(InfraError, match="too many members"):
        await unpack_tar(stream(many), tmp_path / "a", max_members=10)
    with pytest.raises(InfraError, match="larger than"):
        await unpack_tar(stream(many), tmp_path / "b", max_bytes=1000)
    with pytest.raises(InfraError, match="broken"):
        await unpack_tar(stream(b"junk" * 1000), tmp_path / "c")
    header, _ = special("x", tarfile.XHDTYPE)
    header.size = 1 << 33
    with pytest.raises(InfraError, match="broken"):
        await unpack_tar(stream(header.tobuf() + bytes(4096)), tmp_path / "d")


async def test_a_folder_that_is_not_there_cannot_be_packed(box: AgentSandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxFileError) as caught:
        await download_folder(box, "/workspace/none", tmp_path)
    assert caught.value.reason == "not_found"
