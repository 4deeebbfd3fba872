"""Checks of a `Sandbox`'s files."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator

import pytest

from orchard_api.errors import SandboxFileError
from orchard_api.sandbox import Sandbox
from orchard_api.testing.backend import BackendChecks, lines


def _tar(*members: tuple[str, bytes, str]) -> bytes:
    """A tar of (name, content or link target, type)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data, kind in members:
            member = tarfile.TarInfo(name)
            if kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, data.decode()
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


async def _reason(call: object) -> str:
    with pytest.raises(SandboxFileError) as caught:
        await call  # type: ignore[misc]
    return caught.value.reason


class FilesSuite(BackendChecks):
    """Files: exact bytes, bounds, refusals with reasons."""

    async def check_bytes_come_back(self, box: Sandbox) -> None:
        """A few megabytes of everything."""
        data = os.urandom(3 << 20)
        assert await box.write_file("data", data) == len(data)
        assert await box.read_file("data") == data

    async def check_an_empty_file_comes_back(self, box: Sandbox) -> None:
        """Nothing is something."""
        assert await box.write_file("empty", b"") == 0
        assert await box.read_file("empty") == b""

    async def check_a_command_sees_what_was_written(self, box: Sandbox) -> None:
        """Relative paths start at the working directory, for both."""
        await box.write_file("note", b"hello\n")
        assert (await box.exec("cat note")).stdout == b"hello\n"
        await box.exec("echo back > answer")
        assert await box.read_file("answer") == b"back\n"

    async def check_a_part_is_read(self, box: Sandbox) -> None:
        """From an offset, so many bytes."""
        await box.write_file("digits", b"0123456789")
        assert await box.read_file("digits", offset=3, length=4) == b"3456"
        assert await box.read_file("digits", offset=8) == b"89"
        assert await box.read_file("digits", offset=20) == b""

    async def check_a_part_is_written(self, box: Sandbox) -> None:
        """In place, the rest stays."""
        await box.write_file("digits", b"0123456789")
        await box.write_file("digits", b"xx", offset=4)
        assert await box.read_file("digits") == b"0123xx6789"

    async def check_a_shorter_file_replaces_a_longer_one(self, box: Sandbox) -> None:
        """Nothing of the old one is left."""
        await box.write_file("f", b"long content")
        await box.write_file("f", b"short")
        assert await box.read_file("f") == b"short"

    async def check_parents_are_made_unless_not_wanted(self, box: Sandbox) -> None:
        """And a missing one is `not_found` then."""
        await box.write_file("a/b/c", b"x")
        assert await box.read_file("a/b/c") == b"x"
        assert await _reason(box.write_file("no/such", b"x", make_parents=False)) == "not_found"

    async def check_mode_is_set(self, box: Sandbox) -> None:
        """Permission bits of a written file."""
        await box.write_file("script", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await box.exec(["./script"])).stdout == b"ran\n"
        assert (await box.stat("script")).mode == 0o755

    async def check_a_limit_refuses_rather_than_cuts(self, box: Sandbox) -> None:
        """A cut file would look whole."""
        await box.write_file("big", b"x" * 2000)
        assert await _reason(box.read_file("big", limit=1999)) == "too_large"
        assert len(await box.read_file("big", limit=2000)) == 2000

    async def check_what_is_not_there_is_not_found(self, box: Sandbox) -> None:
        """By reading and by asking."""
        assert await _reason(box.read_file("nothing")) == "not_found"
        assert await _reason(box.stat("nothing")) == "not_found"

    async def check_a_fifo_holds_nobody_up(self, box: Sandbox) -> None:
        """Only regular files are read."""
        await box.exec("mkfifo pipe")
        assert await _reason(box.read_file("pipe")) == "not_regular"

    async def check_a_folder_is_no_file(self, box: Sandbox) -> None:
        """Neither to read nor to write."""
        await box.make_dir("folder")
        assert await _reason(box.read_file("folder")) in ("is_directory", "not_regular")

    async def check_streams_carry_large_files(self, box: Sandbox) -> None:
        """In several chunks both ways."""
        data = os.urandom(5 << 20)

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 1 << 18):
                yield data[start : start + (1 << 18)]

        assert await box.write_file("big", chunks()) == len(data)
        assert await lines(box.stream_file("big")) == data
        assert await lines(box.stream_file("big", offset=5, length=10)) == data[5:15]

    async def check_a_listing_shows_everything(self, box: Sandbox) -> None:
        """Sorted; hidden files, broken links and strange names too."""
        await box.exec("touch .hidden b; mkdir a; ln -s nowhere c; touch 'd e'; printf x > f")
        found = await box.list_dir(".")
        assert [(one.name, one.kind) for one in found] == [
            (".hidden", "file"),
            ("a", "directory"),
            ("b", "file"),
            ("c", "symlink"),
            ("d e", "file"),
            ("f", "file"),
        ]
        assert found[3].target == "nowhere"
        assert found[5].size == 1

    async def check_names_of_any_bytes_go_both_ways(self, box: Sandbox) -> None:
        """A name that is no UTF-8 is listed as surrogate escapes, and read by them."""
        await box.exec(r"printf x > \"$(printf 'odd-\377')\"".replace('\\"', '"'))
        (found,) = await box.list_dir(".")
        assert os.fsencode(found.name) == b"odd-\xff"
        assert await box.read_file(found.name) == b"x"

    async def check_stat_follows_unless_told(self, box: Sandbox) -> None:
        """A link is its target, or itself."""
        await box.exec("printf 12345 > f; ln -s f link")
        assert (await box.stat("link")).size == 5
        assert (await box.stat("link", follow=False)).kind == "symlink"

    async def check_folders_are_made(self, box: Sandbox) -> None:
        """With parents, and an existing one is fine; without, it is not."""
        await box.make_dir("a/b/c")
        await box.make_dir("a/b/c")
        assert (await box.stat("a/b/c")).kind == "directory"
        assert await _reason(box.make_dir("a", parents=False)) == "exists"

    async def check_removing_takes_what_it_is_told(self, box: Sandbox) -> None:
        """A folder with something in it only when asked for."""
        await box.write_file("d/f", b"x")
        assert await _reason(box.remove("d")) == "not_empty"
        await box.remove("d", recursive=True)
        assert await _reason(box.stat("d")) == "not_found"

    async def check_removing_a_link_leaves_its_target(self, box: Sandbox) -> None:
        """Also when recursive."""
        await box.exec("mkdir d; touch d/f; ln -s d link")
        await box.remove("link", recursive=True)
        assert (await box.stat("d/f")).kind == "file"

    async def check_a_tar_comes_back(self, box: Sandbox) -> None:
        """Folders, modes and links through a tar in and a tar out."""
        await box.put_tar("in", _tar(("a/b", b"content", "file"), ("link", b"a/b", "link")))
        assert await box.read_file("in/link") == b"content"
        data = await lines(box.get_tar("in"))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            names = {member.name.removeprefix("./") for member in tar.getmembers()}
            assert {"a/b", "link"} <= names
            member = next(one for one in tar.getmembers() if one.name.removeprefix("./") == "a/b")
            file = tar.extractfile(member)
            assert file is not None
            assert file.read() == b"content"

    async def check_a_tar_lands_nowhere_else(self, box: Sandbox) -> None:
        """Members that would leave the folder are skipped and named."""
        report = await box.put_tar(
            "in",
            _tar(
                ("../escaped", b"x", "file"),
                ("out", b"..", "link"),
                ("out/escaped", b"x", "file"),
                ("fine", b"x", "file"),
            ),
        )
        assert not (await box.exec("test -e escaped")).ok
        assert await box.read_file("in/fine") == b"x"
        assert report.skipped
