from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator

import pytest

from orchard_agent import AgentSandbox
from orchard_api.errors import SandboxFileError


async def reason(call: object) -> str:
    with pytest.raises(SandboxFileError) as caught:
        await call  # type: ignore[misc]
    return caught.value.reason


async def test_all_byte_values_modes_and_odd_names_make_the_round_trip(box: AgentSandbox) -> None:
    """Case 103."""
    data = bytes(range(256)) * 3
    for name in ("plain", "with space", "new\nline", "ünï", "-leading", "\udcff\udcfe", "a" * 200, "?&=%23#+"):
        assert await box.write_file(f"d/{name}", data, mode=0o751) == len(data)
        assert await box.read_file(f"d/{name}") == data
        info = await box.stat(f"d/{name}")
        assert (info.name, info.kind, info.size, info.mode) == (name, "file", len(data), 0o751)
        await box.remove(f"d/{name}")
    assert await box.list_dir("d") == []


@pytest.mark.parametrize("size", [0, 1, 28 << 20])
async def test_any_size_both_ways(box: AgentSandbox, size: int) -> None:
    """Case 66, what of it can happen here."""
    data = os.urandom(size)
    await box.write_file("file", data)
    digest = (await box.exec("sha256sum file")).stdout_text.split()[0]
    assert digest == hashlib.sha256(data).hexdigest()
    assert await box.read_file("file") == data


async def test_ranges(box: AgentSandbox) -> None:
    await box.write_file("f", b"0123456789")
    assert await box.read_file("f", offset=3, length=4) == b"3456"
    assert await box.read_file("f", offset=8) == b"89"
    assert await box.read_file("f", offset=50) == b""
    assert await box.read_file("f", length=0) == b""
    assert await box.write_file("f", b"AB", offset=2) == 2
    assert await box.read_file("f") == b"01AB456789"
    await box.write_file("f", b"Z", offset=12)
    assert await box.read_file("f") == b"01AB456789\0\0Z"


async def test_streams(box: AgentSandbox) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for number in range(200):
            yield bytes([number]) * 50_000

    assert await box.write_file("big", chunks()) == 10_000_000
    digest = hashlib.sha256()
    async for chunk in box.stream_file("big"):
        digest.update(chunk)
    assert digest.hexdigest() == (await box.exec("sha256sum big")).stdout_text.split()[0]
    part = b"".join([chunk async for chunk in box.stream_file("big", offset=49_999, length=2)])
    assert part == b"\x00\x01"


async def test_a_stream_that_fails_leaves_the_old_file(box: AgentSandbox) -> None:
    await box.write_file("f", b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="the source broke"):
        await box.write_file("f", broken())
    assert await box.read_file("f") == b"old"
    for _ in range(100):
        if [info.name for info in await box.list_dir(".")] == ["f"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a temporary file is left")


async def test_a_full_disk_is_an_error_and_leaves_nothing_partial(box: AgentSandbox) -> None:
    """Case 67; /dev/shm is a file system of 64 MiB."""
    await box.write_file("/dev/shm/f", b"old")
    assert await reason(box.write_file("/dev/shm/f", b"x" * (70 << 20))) == "no_space"
    assert await box.read_file("/dev/shm/f") == b"old"
    assert [info.name for info in await box.list_dir("/dev/shm")] == ["f"]
    assert (await box.exec("echo fine")).ok


async def test_each_refusal_has_its_reason(box: AgentSandbox) -> None:
    await box.write_file("f", b"x")
    await box.make_dir("d/sub")
    assert await reason(box.read_file("missing")) == "not_found"
    assert await reason(box.read_file("d")) == "is_directory"
    assert await reason(box.write_file("d", b"")) == "is_directory"
    assert await reason(box.read_file("f/x")) == "not_directory"
    assert await reason(box.write_file("no/parent", b"", make_parents=False)) == "not_found"
    assert await reason(box.write_file("/usr/x", b"")) == "denied"
    assert await reason(box.make_dir("f", parents=False)) == "exists"
    assert await reason(box.make_dir("f")) == "not_directory"
    assert await reason(box.remove("d")) == "not_empty"
    assert await reason(box.remove("missing")) == "not_found"
    assert await reason(box.stat("missing")) == "not_found"
    assert await reason(box.list_dir("missing")) == "not_found"
    assert await reason(box.read_file("f", limit=0)) == "too_large"
    await box.make_dir("d/sub")
    await box.remove("d", recursive=True)
    assert [info.name for info in await box.list_dir(".")] == ["f"]


async def test_fifos_devices_and_sockets_neither_hang_nor_answer(box: AgentSandbox) -> None:
    await box.exec("mkfifo fifo; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"")
    assert await reason(box.read_file("fifo")) == "not_regular"
    assert await reason(box.write_file("fifo", b"x")) == "not_regular"
    assert await reason(box.write_file("fifo", b"x", offset=0)) == "not_regular"
    assert await reason(box.read_file("/dev/zero")) == "not_regular"
    assert await reason(box.read_file("sock")) == "not_regular"
    kinds = {info.name: info.kind for info in await box.list_dir(".")}
    assert kinds == {"fifo": "fifo", "sock": "socket"}


async def test_files_whose_size_is_not_known(box: AgentSandbox) -> None:
    assert b"orchard-agent" in await box.read_file("/proc/1/comm")
    assert await box.read_file("/proc/1/comm", length=3) == b"orc"


async def test_listing_survives_broken_links_and_any_name(box: AgentSandbox) -> None:
    await box.exec(
        ["python3", "-c", "import os; os.symlink('nowhere', 'broken'); open(b'\\xff\\n', 'w'); os.mkdir('z')"]
    )
    found = {info.name: (info.kind, info.target) for info in await box.list_dir(".")}
    assert found == {"broken": ("symlink", "nowhere"), "\udcff\n": ("file", None), "z": ("directory", None)}
    assert (await box.stat("broken", follow=False)).target == "nowhere"
    assert await reason(box.stat("broken")) == "not_found"
    assert await reason(box.list_dir(".", limit=2)) == "too_large"


async def test_a_write_goes_through_links_and_keeps_the_mode(box: AgentSandbox) -> None:
    await box.exec("mkdir real; echo a > real/f; chmod 640 real/f; ln -s real/f link; ln -s new dangling")
    await box.write_file("link", b"b")
    assert await box.read_file("real/f") == b"b"
    assert (await box.stat("link", follow=False)).kind == "symlink"
    assert (await box.stat("real/f")).mode == 0o640
    await box.write_file("dangling", b"c")
    assert await box.read_file("new") == b"c"
    await box.exec("ln -s loop loop")
    assert await reason(box.write_file("loop", b"")) == "other"


async def test_folders_made_to_resist_are_removed(box: AgentSandbox) -> None:
    script = (
        "import os\nos.makedirs('deep/a'); os.chdir('deep')\n"
        "for _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    )
    assert (await box.exec(["python3", "-c", script])).ok
    await box.exec("mkdir -p closed/in; touch closed/in/f; chmod 0 closed/in closed")
    await box.remove("deep", recursive=True)
    await box.remove("closed", recursive=True)
    assert await box.list_dir(".") == []


async def test_a_handle_closed_refuses(box: AgentSandbox) -> None:
    from orchard_api.errors import TransportError

    await box.aclose()
    with pytest.raises(TransportError, match="closed"):
        await box.exec("true")
