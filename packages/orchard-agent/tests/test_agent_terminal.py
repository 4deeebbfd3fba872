"""Terminals: nothing lost at the end, sizes, signals, and nothing left behind."""

import asyncio

import pytest

from orchard_agent import AgentSandbox
from orchard_api.errors import DeadlineError, SandboxRequestError
from orchard_api.powers import Pty, PtySession


async def read_all(session: PtySession) -> bytes:
    parts = []
    while data := await asyncio.wait_for(session.read(65536), 20):
        parts.append(data)
    return b"".join(parts)


async def read_until(session: PtySession, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        data = await asyncio.wait_for(session.read(65536), 20)
        assert data, f"the terminal ended after {seen!r}"
        seen += data
    return seen


async def test_what_a_terminal_is(box: AgentSandbox) -> None:
    assert isinstance(box, Pty)
    session = await box.open_pty(["sh", "-c", "tty; stty size; echo $TERM; exit 7"], rows=30, cols=100)
    assert isinstance(session, PtySession)
    shown = await read_all(session)
    lines = shown.decode().splitlines()
    assert lines[1:] == ["30 100", "xterm-256color"]
    result = await session.wait(timeout_s=5)
    assert result.exit_code == 7
    assert await session.read(10) == b""
    await session.aclose()


async def test_nothing_is_lost_at_the_end(box: AgentSandbox) -> None:
    for _ in range(20):
        session = await box.open_pty(["seq", "1", "3000"])
        shown = await read_all(session)
        assert shown == b"".join(b"%d\r\n" % i for i in range(1, 3001))
        assert (await session.wait(timeout_s=5)).exit_code == 0
        await session.aclose()


async def test_typing_resizing_and_signals(box: AgentSandbox) -> None:
    session = await box.open_pty(["bash", "--norc", "-i"], env={"PS1": "> "})
    await read_until(session, b"> ")
    await session.resize(rows=50, cols=132)
    await session.write(b"stty size; sleep 4244\n")
    await read_until(session, b"50 132")
    await asyncio.sleep(0.2)
    await session.signal(2)
    await session.write(b"echo after-$?\n")
    await read_until(session, b"after-130")
    await session.write(b"echo up-''to-here; cat >/dev/null\n")
    await read_until(session, b"up-to-here")
    await asyncio.sleep(0.3)
    await session.write_eof()
    await session.write(b"exit 5\n")
    await read_all(session)
    assert (await session.wait(timeout_s=5)).exit_code == 5
    await session.aclose()


async def test_more_is_typed_than_anybody_reads(box: AgentSandbox) -> None:
    """A program that does not read holds its typist up, and nobody else."""
    session = await box.open_pty(["sh", "-c", "stty raw -echo; echo ready; sleep 1; head -c 300000 | wc -c"])
    await read_until(session, b"ready")
    await asyncio.wait_for(session.write(b"x" * 300000), 30)
    assert b"300000" in await read_all(session)
    await session.aclose()


async def test_output_that_nobody_reads_holds_only_itself_up(box: AgentSandbox) -> None:
    session = await box.open_pty(["sh", "-c", "yes"])
    await asyncio.sleep(0.5)
    with pytest.raises(DeadlineError):
        await session.wait(timeout_s=0.2)
    assert (await box.exec("echo alive")).stdout_text == "alive\n"
    await asyncio.wait_for(session.aclose(), 5)


@pytest.mark.parametrize("escape", ["", "setsid "])
async def test_closing_leaves_no_child(box: AgentSandbox, find_inside, escape: str) -> None:
    session = await box.open_pty(["sh", "-c", f"trap '' HUP; {escape}sleep 4245 & echo up; sleep 4245"])
    await read_until(session, b"up")
    assert len(await find_inside(box, "sleep 4245")) >= 2
    await session.aclose()
    for _ in range(100):
        if not await find_inside(box, "sleep 4245"):
            break
        await asyncio.sleep(0.05)
    assert await find_inside(box, "sleep 4245") == []


async def test_a_session_leader_that_exits_takes_its_children_along(box: AgentSandbox, find_inside) -> None:
    session = await box.open_pty(["sh", "-c", "trap '' HUP; sleep 4246 & echo left; exit 0"])
    assert await read_all(session) == b"left\r\n"
    assert (await session.wait(timeout_s=5)).exit_code == 0
    assert await find_inside(box, "sleep 4246") == []
    await session.aclose()


async def test_bad_requests(box: AgentSandbox) -> None:
    with pytest.raises(SandboxRequestError):
        await box.open_pty(["sh"], rows=0)
    session = await box.open_pty(["/nowhere"])
    assert b"/nowhere" in await read_all(session)
    assert (await session.wait(timeout_s=5)).exit_code == 127
    with pytest.raises(SandboxRequestError):
        await session.signal(0)
    await session.aclose()
    session = await box.open_pty(["sh"], cwd="/nowhere")
    with pytest.raises(SandboxRequestError, match="working directory"):
        await read_all(session)
    await session.aclose()
