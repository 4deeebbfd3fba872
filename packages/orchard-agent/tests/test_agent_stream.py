"""Streamed commands: order, back-pressure, ends."""

import asyncio

import pytest

from orchard_agent import AgentSandbox
from orchard_api.errors import SandboxRequestError, TransportError
from orchard_api.powers import ExecChunk, StreamingExec


async def collect(stream) -> tuple[bytes, bytes]:
    parts: list[ExecChunk] = [chunk async for chunk in stream]
    return tuple(b"".join(part.data for part in parts if part.stream == kind) for kind in (1, 2))


async def test_output_comes_while_the_command_runs(box: AgentSandbox) -> None:
    assert isinstance(box, StreamingExec)
    stream = await box.stream_exec("echo first; sleep 0.5; echo second >&2; exit 3")
    seen = aiter(stream)
    loop = asyncio.get_running_loop()
    first = await anext(seen)
    arrived = loop.time()
    assert first == ExecChunk(stream=1, data=b"first\n")
    with pytest.raises(SandboxRequestError, match="not been read to its end"):
        _ = stream.result
    assert await anext(seen) == ExecChunk(stream=2, data=b"second\n")
    assert loop.time() - arrived > 0.3
    assert await collect(stream) == (b"", b"")
    assert stream.result.exit_code == 3
    await stream.aclose()


async def test_nothing_is_dropped(box: AgentSandbox) -> None:
    stream = await box.stream_exec("seq 1 2000000")
    out, err = await collect(stream)
    assert out == b"".join(b"%d\n" % i for i in range(1, 2000001))
    assert err == b""
    assert stream.result.exit_code == 0


async def test_a_reader_that_stops_holds_the_command_up(box: AgentSandbox) -> None:
    stream = await box.stream_exec("i=0; while :; do i=$((i+1)); echo $i > count; head -c 65536 /dev/zero; done")
    await anext(aiter(stream))

    async def settled() -> bytes:
        # It writes ahead until the pipes and sockets on the way are full.
        before = b""
        for _ in range(50):
            await asyncio.sleep(0.3)
            now = await box.read_file("count")
            if now == before:
                return now
            before = now
        raise AssertionError("the command was never held up")

    stopped_at = int(await settled())
    assert stopped_at * 65536 < 32 << 20
    await stream.aclose()


async def test_closing_kills_all_that_it_started(box: AgentSandbox, find_inside) -> None:
    stream = await box.stream_exec("setsid sleep 4242 & echo up; sleep 4242")
    await anext(aiter(stream))
    assert len(await find_inside(box, "sleep 4242")) >= 2
    await stream.aclose()
    for _ in range(100):
        if not await find_inside(box, "sleep 4242"):
            break
        await asyncio.sleep(0.05)
    assert await find_inside(box, "sleep 4242") == []


async def test_a_timeout_kills(box: AgentSandbox) -> None:
    stream = await box.stream_exec("echo a; sleep 4243", timeout_s=0.5)
    assert await collect(stream) == (b"a\n", b"")
    assert stream.result.timed_out
    assert stream.result.exit_code is None


async def test_commands_that_cannot_start(box: AgentSandbox) -> None:
    stream = await box.stream_exec(["/nowhere"])
    out, err = await collect(stream)
    assert (out, stream.result.exit_code) == (b"", 127)
    assert b"/nowhere" in err
    stream = await box.stream_exec("true", cwd="/nowhere")
    with pytest.raises(SandboxRequestError, match="working directory"):
        await collect(stream)
    await stream.aclose()
    with pytest.raises(SandboxRequestError):
        await box.stream_exec("true", user="nobody-here")


async def test_closing_the_handle_ends_a_reader(box: AgentSandbox) -> None:
    stream = await box.stream_exec("sleep 100")
    reader = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0.1)
    await box.aclose()
    with pytest.raises(TransportError):
        await asyncio.wait_for(reader, 5)
