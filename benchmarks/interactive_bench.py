"""Terminals, background processes and forwards of a local sandbox that has no network."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from bars import row

from orchard_agent.client import AgentSandbox
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.sandbox import SandboxSpec

TERMINALS = 200
LINES = 3000
OUTPUT_MB = 500
STREAM_MB = 512
ROUNDS = 5

# The far ends of the forwards; the same program is the baseline's far end, outside.
SOURCE = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
block = bytes(1 << 20)
while True:
    connection, _ = listener.accept()
    for _ in range(int(sys.argv[2])):
        connection.sendall(block)
    connection.close()
"""
SINK = """
import socket, sys, time
buffer = bytearray(1 << 20)
for _ in range(int(sys.argv[2])):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    begin = time.perf_counter()
    size = 0
    while n := connection.recv_into(buffer):
        size += n
    print(size / (time.perf_counter() - begin) / 1e6, flush=True)
    connection.close()
"""


@contextlib.asynccontextmanager
async def sandbox() -> AsyncIterator[tuple[LocalEnvironment, AgentSandbox]]:
    """One sandbox and its environment."""
    environment = LocalEnvironment(LocalConfig())
    await environment.start()
    try:
        box = await environment.create(SandboxSpec(), sandbox_id=f"bench-{secrets.token_hex(6)}")
        yield environment, box
        await box.aclose()
    finally:
        await environment.aclose()


async def terminals() -> list[dict[str, Any]]:
    """Complete outputs of short-lived commands on a terminal."""
    wanted = b"".join(b"%d\r\n" % i for i in range(1, LINES + 1))
    complete = 0
    async with sandbox() as (_, box):
        for _ in range(TERMINALS):
            session = await box.open_pty(["seq", "1", str(LINES)])
            shown = bytearray()
            while data := await session.read(65536):
                shown += data
            complete += shown == wanted and (await session.wait(timeout_s=10)).exit_code == 0
            await session.aclose()
    return [row("pty-loss", complete, baseline=TERMINALS)]


def agent_peak_mb(box: AgentSandbox) -> float:
    """Peak memory of the agent of a sandbox, in MB."""
    needle = f"boxes/{box.sandbox_id}".encode()
    peaks = [0.0]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"serve" in (entry / "cmdline").read_bytes() and needle in (entry / "mountinfo").read_bytes():
                text = (entry / "status").read_text()
                peaks.append(int(text.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6)
    return max(peaks)


async def reattach() -> list[dict[str, Any]]:
    """A background process's output, read from offsets by a client that came back."""
    size = OUTPUT_MB * 1_000_000
    async with sandbox() as (environment, box):
        await box.write_file("make.py", MAKE.encode())
        process_id = await box.start_process(["python3", "make.py", str(size)], output_limit=size)
        ours = hashlib.sha256()
        offset = since = 0
        client = box
        exact = True
        while True:
            # Another client every 50 MB: each goes on where the one before stopped.
            if offset - since >= 50_000_000:
                if client is not box:
                    await client.aclose()
                client, since = await environment.attach(box.sandbox_id), offset
            chunk = await client.read_output(process_id, offset=offset, wait_s=30)
            exact = exact and chunk.offset == offset
            ours.update(chunk.data)
            offset = chunk.next_offset
            if chunk.ended or not chunk.data:
                break
        if client is not box:
            await client.aclose()
        theirs = (await box.exec("cat digest")).stdout_text
        peak = agent_peak_mb(box)
        assert peak > 1, "the agent was not found"
    equal = exact and offset == size and ours.hexdigest() == theirs
    return [row("process-reattach", int(equal), baseline=None), row("process-reattach-mb", peak)]


MAKE = """
import hashlib, random, sys
left = int(sys.argv[1])
hash = hashlib.sha256()
block = random.Random(0).randbytes(1 << 20)
turn = 0
while left:
    turn += 1
    data = (turn.to_bytes(8, "big") + block[8:])[:left]
    hash.update(data)
    sys.stdout.buffer.write(data)
    left -= len(data)
open("digest", "w").write(hash.hexdigest())
"""


def pull(port: int) -> float:
    """MB/s from a TCP port, read as fast as it comes."""
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        begin = time.perf_counter()
        size = 0
        while n := connection.recv_into(buffer):
            size += n
        return size / (time.perf_counter() - begin) / 1e6


def outside_source() -> tuple[int, Callable[[], None]]:
    """A port on this machine that sends STREAM_MB to each who connects, from a thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        block = bytes(1 << 20)
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                for _ in range(STREAM_MB):
                    connection.sendall(block)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], lambda: listener.shutdown(socket.SHUT_RDWR)


async def forwards() -> list[dict[str, Any]]:
    """Both forwards, against a loopback connection between two processes of this machine."""
    plain: list[float] = []
    inward: list[float] = []
    async with sandbox() as (_, box):
        await box.write_file("source.py", SOURCE.encode())
        await box.write_file("sink.py", SINK.encode())
        process_id = await box.start_process(["python3", "source.py", "9000", str(STREAM_MB)])
        assert (await box.read_output(process_id, offset=0, wait_s=20)).data == b"up\n"
        source = await asyncio.create_subprocess_exec(
            "python3", "-c", SOURCE, "19000", str(STREAM_MB), stdout=asyncio.subprocess.PIPE
        )
        assert source.stdout is not None
        await source.stdout.readline()
        try:
            for _ in range(ROUNDS):
                plain.append(await asyncio.to_thread(pull, 19000))
                stream = await box.connect_port(9000)
                begin = time.perf_counter()
                size = 0
                while data := await stream.read(1 << 20):
                    size += len(data)
                inward.append(size / (time.perf_counter() - begin) / 1e6)
                assert size == STREAM_MB << 20
                await stream.aclose()
        finally:
            source.terminate()
            await source.wait()
        port, stop = outside_source()
        served = await box.serve_port(0, host="127.0.0.1", target_port=port)
        result = await box.exec(["python3", "sink.py", str(served.port), str(ROUNDS)], timeout_s=120)
        outward = [float(line) for line in result.stdout_text.split()]
        assert len(outward) == ROUNDS, result.stderr_text
        await served.aclose()
        stop()
    base = statistics.median(plain)
    return [
        row("forward-mb-s", statistics.median(inward) / base, baseline=base, mb_s=statistics.median(inward)),
        row("reverse-mb-s", statistics.median(outward) / base, baseline=base, mb_s=statistics.median(outward)),
    ]


async def rows() -> list[dict[str, Any]]:
    """All rows."""
    return [*await terminals(), *await reattach(), *await forwards()]
