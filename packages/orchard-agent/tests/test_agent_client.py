"""The client against agents that lie, stall, break off, restart, or are another's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox, ClientLimits, UnixTransport, wire
from orchard_agent.streams import SocketStream
from orchard_api.errors import DeadlineError, OrchardError, OverloadedError, SandboxGone, TransportError
from orchard_api.sandbox import SandboxInfo, SandboxState

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
INFO = SandboxInfo(sandbox_id="fake", state=SandboxState.READY)
LIMITS = ClientLimits(idle_s=0.3, call_s=0.5, exec_slack_s=0.3, revive_s=0.3, heartbeat_s=0.2, connections=3)


def http(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def health(instance: str = "one") -> bytes:
    return http(json.dumps({"version": "1.0", "instance": instance}).encode())


async def request_of(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
    return head.split(" ")[1], await reader.readexactly(length)


def exec_answer(**fields: object) -> bytes:
    head = {"exit_code": 0, "duration_s": 0.1, "stdout": 0, "stderr": 0, **fields}
    text = json.dumps(head).encode()
    return struct.pack(">I", len(text)) + text


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[AgentSandbox]]]:
    """Makes a handle on an agent that is the given function, one call per connection."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(handler: Handler, limits: ClientLimits = LIMITS) -> AgentSandbox:
            async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                    await handler(reader, writer)
                writer.close()

            path = tmp_path / secrets.token_hex(4)
            server = await asyncio.start_unix_server(guarded, path)
            stack.callback(server.close)
            sandbox = AgentSandbox(UnixTransport(path), token="t" * 32, info=INFO, limits=limits)
            stack.push_async_callback(sandbox.aclose)
            return sandbox

        yield make


Make = Callable[..., Awaitable[AgentSandbox]]


@pytest.mark.parametrize(
    "answer",
    [
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
        http(b"\xff\xff\xff\xff{}"),
        http(struct.pack(">I", 2) + b"{}"),
        http(exec_answer(stdout=10**9)),
        http(exec_answer(stdout=-1)),
        http(exec_answer(exit_code="zero")),
        http(exec_answer(exit_code=10**6)),
        http(b"\0" * (8 << 20)),
        http(exec_answer())[:-3],
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    ],
    ids=[
        "junk",
        "endless-head",
        "huge-head",
        "empty",
        "long",
        "negative",
        "type",
        "code",
        "bomb",
        "cut",
        "length",
        "chunk",
    ],
)
async def test_a_lying_agent_is_an_infra_error_and_costs_no_memory(fake: Make, answer: bytes) -> None:
    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            target, _ = await request_of(reader)
            writer.write(health() if "health" in target else answer)
            await writer.drain()
            if "health" not in target:
                return

    sandbox = await fake(agent)
    with pytest.raises(TransportError):
        await sandbox.exec("true", timeout_s=1, output_limit=1000)


async def test_an_agent_that_accepts_and_never_answers(fake: Make) -> None:
    """Case 29: each call ends at its own limit."""

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    calls: list[Callable[[AgentSandbox], Awaitable[object]]] = [
        lambda sandbox: sandbox.exec("true", timeout_s=0.2),
        lambda sandbox: sandbox.write_file("f", b"x" * 1_000_000),
        lambda sandbox: sandbox.read_file("f"),
        lambda sandbox: sandbox.list_dir("/"),
        lambda sandbox: sandbox.status(),
    ]
    for call in calls:
        sandbox = await fake(agent)
        start = time.monotonic()
        with pytest.raises((SandboxGone, DeadlineError)):
            await asyncio.wait_for(call(sandbox), 40)
        assert time.monotonic() - start < 3


async def test_a_transfer_that_stands_still_ends(fake: Make) -> None:
    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target, _ = await request_of(reader)
        if "health" in target:
            writer.write(health())
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nsome")
        await writer.drain()
        await asyncio.sleep(30)

    sandbox = await fake(agent)
    start = time.monotonic()
    with pytest.raises(TransportError, match="stood still"):
        await sandbox.read_file("f")
    with pytest.raises(TransportError, match="stood still"):
        async for _ in sandbox.stream_file("f"):
            pass
    assert time.monotonic() - start < 3


async def test_a_broken_connection_asks_again_by_the_same_key(fake: Make) -> None:
    """Cases 50 and 51: the command's result is awaited, the command is not another one."""
    keys: list[str] = []

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            target, body = await request_of(reader)
            if "health" in target:
                writer.write(health())
                continue
            (size,) = struct.unpack_from(">I", body)
            keys.append(json.loads(body[4 : 4 + size])["key"])
            if len(keys) < 3:
                return
            writer.write(http(exec_answer(exit_code=7)))

    sandbox = await fake(agent)
    assert (await sandbox.exec("true")).exit_code == 7
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_a_restarted_agent_is_not_taken_for_the_same(fake: Make) -> None:
    """Case 49: never a fresh empty box in the place of the one that was lost."""
    instances = iter(["one", "two", "two", "two"])

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target, _ = await request_of(reader)
        if "health" in target:
            writer.write(health(next(instances)))
            await writer.drain()

    sandbox = await fake(agent)
    await sandbox.status()
    with pytest.raises(SandboxGone, match="restarted"):
        await sandbox.exec("true")


async def test_an_agent_of_another_protocol_or_another_token(fake: Make) -> None:
    async def other_version(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(http(b'{"version": "2.0", "instance": "x"}'))
        await writer.drain()

    async def other_token(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(http(b'{"error": "unauthorized", "message": "no"}', "401 Unauthorized"))
        await writer.drain()

    with pytest.raises(SandboxGone, match="speaks protocol"):
        await (await fake(other_version)).wait_ready()
    with pytest.raises(SandboxGone, match="token"):
        await (await fake(other_token)).exec("true")


async def test_overload_is_an_error_of_its_own(fake: Make) -> None:
    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(http(b'{"error": "too_many_execs", "message": "limit is 1"}', "429 Too Many Requests"))
        await writer.drain()

    with pytest.raises(OverloadedError, match="limit is 1"):
        await (await fake(agent)).exec("true")


async def test_no_agent_at_all_is_gone_within_two_seconds(tmp_path: Path) -> None:
    sandbox = AgentSandbox(UnixTransport(tmp_path / "none"), token="t" * 32, info=INFO)
    start = time.monotonic()
    with pytest.raises(SandboxGone):
        await sandbox.exec("true")
    assert time.monotonic() - start < 2
    await sandbox.aclose()


async def test_the_pool_is_bounded_and_reused(fake: Make) -> None:
    """Case 55: calls one after the other use one connection; many at once never more than the bound."""
    opened = 0
    open_now: set[object] = set()
    most = 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, most
        opened += 1
        open_now.add(writer)
        most = max(most, len(open_now))
        try:
            while True:
                await request_of(reader)
                await asyncio.sleep(0.001)
                writer.write(health())
        finally:
            open_now.discard(writer)

    sandbox = await fake(agent)
    for _ in range(300):
        await sandbox.status()
    assert opened == 1
    await asyncio.gather(*(sandbox.status() for _ in range(60)))
    assert most <= 3


async def test_an_idle_connection_that_was_closed_is_not_used(fake: Make) -> None:
    """Case 51."""

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(health())
        await writer.drain()

    sandbox = await fake(agent)
    for _ in range(5):
        await sandbox.status()
        await asyncio.sleep(0.02)


async def test_a_stream_of_any_kind_carries_it(box: AgentSandbox) -> None:
    """A transport that gives single bytes at a time, to show that nothing depends on the stream's pieces."""

    class Dribble(SocketStream):
        async def read(self, limit: int) -> bytes:
            return await super().read(7)

        stale = False

    class Transport:
        async def connect(self) -> SocketStream:
            stream = await box._pool._transport.connect()
            return Dribble(stream._socket)  # type: ignore[attr-defined]

        async def aclose(self) -> None:
            pass

    token = box._pool._headers[1][1].split()[1].decode()
    handle = AgentSandbox(Transport(), token=token, info=INFO)
    assert (await handle.exec("echo hi; seq 500")).stdout.startswith(b"hi\n1\n2\n")
    await handle.write_file("f", b"x" * 10_000)
    assert await handle.read_file("f") == b"x" * 10_000
    await handle.aclose()


def test_messages_are_bounded() -> None:
    for status in (400, 404, 500, 507):
        error = wire.refusal(status, b'{"error": "x", "message": "' + b"y" * 50_000 + b'"}', path="p")
        assert isinstance(error, OrchardError)
        assert len(error.message) < 3000
    assert "answered 500" in wire.refusal(500, b"[" * 100_000).message
