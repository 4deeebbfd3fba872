"""Checks of the optional powers; a backend that does not declare one skips its checks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from orchard_api.errors import DeadlineError, SandboxCreateError, SandboxRequestError
from orchard_api.sandbox import AllowedProgram, Resources
from orchard_api.testing.backend import BackendChecks, Subject, alive, eventually
from orchard_api.testing.suite import needs
from orchard_api.transport import ByteStream

_WAIT_S = 20.0


async def read_all(stream: ByteStream) -> bytes:
    """A stream to its end."""
    parts = []
    while data := await asyncio.wait_for(stream.read(65536), _WAIT_S):
        parts.append(data)
    return b"".join(parts)


async def read_until(stream: ByteStream, text: bytes) -> bytes:
    """A stream up to a text in it."""
    seen = b""
    while text not in seen:
        data = await asyncio.wait_for(stream.read(65536), _WAIT_S)
        assert data, f"the stream ended after {seen[-200:]!r}"
        seen += data
    return seen


async def _ends(box: Any, marker: str) -> None:
    async def ended() -> bool:
        return not await alive(box, marker)

    await eventually(ended, within_s=6, what=f"the end of {marker}")


async def _starts(box: Any, marker: str) -> None:
    await eventually(lambda: alive(box, marker), within_s=10, what=f"the start of {marker}")


class StreamingExecSuite(BackendChecks):
    """Checks of `StreamingExec`."""

    @needs("StreamingExec")
    async def check_streamed_output_comes_as_it_is_written(self, box: Any) -> None:
        """Before the command ends."""
        stream = await box.stream_exec("echo early; while ! test -e go; do sleep 0.05; done; echo late >&2; exit 3")
        chunks = aiter(stream)
        first = await asyncio.wait_for(anext(chunks), _WAIT_S)
        assert (first.stream, first.data) == (1, b"early\n")
        await box.write_file("go", b"")
        rest = [(chunk.stream, chunk.data) async for chunk in stream]
        assert rest == [(2, b"late\n")]
        assert stream.result.exit_code == 3
        await stream.aclose()

    @needs("StreamingExec")
    async def check_streamed_output_is_whole(self, box: Any) -> None:
        """Megabytes of it, nothing dropped."""
        stream = await box.stream_exec("seq 1 300000")
        data = b"".join([chunk.data async for chunk in stream])
        assert data == b"".join(b"%d\n" % number for number in range(1, 300001))
        await stream.aclose()

    @needs("StreamingExec")
    async def check_a_stream_nobody_reads_is_held_up(self, box: Any) -> None:
        """Back-pressure reaches the command."""
        stream = await box.stream_exec("i=0; while :; do i=$((i+1)); echo $i > count; head -c 65536 /dev/zero; done")
        await asyncio.wait_for(anext(aiter(stream)), _WAIT_S)
        before = b""

        async def held() -> bool:
            nonlocal before
            await asyncio.sleep(0.5)
            now = await box.read_file("count")
            same, before = bool(now) and now == before, now
            return same

        await eventually(held, within_s=15, what="a command that waits for its reader")
        assert int(before) * 65536 < 64 << 20
        await stream.aclose()

    @needs("StreamingExec")
    async def check_closing_a_stream_kills_its_command(self, box: Any) -> None:
        """With all that it started."""
        stream = await box.stream_exec("setsid sleep 7721 & sleep 7721")
        await _starts(box, "7721")
        await stream.aclose()
        await _ends(box, "7721")

    @needs("StreamingExec")
    async def check_a_stream_times_out(self, box: Any) -> None:
        """With what was written, and without an exit code."""
        stream = await box.stream_exec("echo a; sleep 60", timeout_s=1)
        assert [chunk.data async for chunk in stream] == [b"a\n"]
        assert stream.result.timed_out
        assert stream.result.exit_code is None
        await stream.aclose()


class ProcessesSuite(BackendChecks):
    """Checks of `Processes`."""

    @needs("Processes")
    async def check_output_is_read_from_an_offset(self, box: Any) -> None:
        """As often as one likes."""
        process_id = await box.start_process("printf abcdef; printf ghi >&2")
        await box.wait_process(process_id, timeout_s=_WAIT_S)
        seen = b""
        while not (chunk := await box.read_output(process_id, offset=len(seen), wait_s=_WAIT_S)).ended:
            assert chunk.offset == len(seen)
            seen += chunk.data
        seen += chunk.data
        assert sorted(seen) == sorted(b"abcdefghi")
        again = await box.read_output(process_id, offset=4)
        assert (again.offset, again.data) == (4, seen[4:])
        with pytest.raises(SandboxRequestError):
            await box.read_output(process_id, offset=100)

    @needs("Processes")
    async def check_waiting_for_output_returns_when_it_comes(self, box: Any) -> None:
        """And returns nothing when none comes."""
        process_id = await box.start_process("while ! test -e go; do sleep 0.05; done; echo went; sleep 60")
        nothing = await box.read_output(process_id, offset=0, wait_s=0.3)
        assert (nothing.data, nothing.ended) == (b"", False)
        waiting = asyncio.ensure_future(box.read_output(process_id, offset=0, wait_s=_WAIT_S))
        await box.write_file("go", b"")
        assert (await waiting).data == b"went\n"

    @needs("Processes")
    async def check_only_the_last_output_is_kept(self, box: Any) -> None:
        """The oldest bytes go first, and offsets stay true."""
        process_id = await box.start_process("seq 1 20000", output_limit=1000)
        await box.wait_process(process_id, timeout_s=_WAIT_S)
        whole = b"".join(b"%d\n" % number for number in range(1, 20001))
        chunk = await box.read_output(process_id, offset=0, wait_s=_WAIT_S)
        while not chunk.ended:
            chunk = await box.read_output(process_id, offset=0, wait_s=_WAIT_S)
        assert (chunk.offset, chunk.data) == (len(whole) - 1000, whole[-1000:])

    @needs("Processes")
    async def check_a_process_is_found_by_another_client(self, subject: Subject) -> None:
        """It outlives the handle that started it."""
        box = await subject.create()
        process_id = await box.start_process("sleep 0.5; echo done; exit 4")
        await box.aclose()
        again: Any = await subject.environment.attach(box.sandbox_id)
        assert [info.process_id for info in await again.list_processes()] == [process_id]
        info = await again.wait_process(process_id, timeout_s=_WAIT_S)
        assert (info.running, info.exit_code) == (False, 4)
        assert (await again.read_output(process_id, offset=0, wait_s=_WAIT_S)).data == b"done\n"
        await again.aclose()

    @needs("Processes")
    async def check_stdin_is_fed(self, box: Any) -> None:
        """In pieces, and ended."""
        process_id = await box.start_process("sha256sum", stdin=True)
        data = os.urandom(500_000)
        await box.write_stdin(process_id, data[:10])
        await box.write_stdin(process_id, data[10:], eof=True)
        await box.wait_process(process_id, timeout_s=_WAIT_S)
        output = (await box.read_output(process_id, offset=0, wait_s=_WAIT_S)).data
        assert output.split()[0].decode() == hashlib.sha256(data).hexdigest()
        with pytest.raises(SandboxRequestError):
            await box.write_stdin(process_id, b"more")

    @needs("Processes")
    async def check_signals_reach_a_process(self, box: Any) -> None:
        """The one asked for."""
        process_id = await box.start_process("trap 'echo got; exit 9' USR1; echo up; while :; do sleep 0.05; done")
        await box.read_output(process_id, offset=0, wait_s=_WAIT_S)
        await box.signal_process(process_id, signal.SIGUSR1)
        assert (await box.wait_process(process_id, timeout_s=_WAIT_S)).exit_code == 9

    @needs("Processes")
    async def check_a_signal_to_the_tree_reaches_all(self, box: Any) -> None:
        """A child in a session of its own too."""
        process_id = await box.start_process("setsid sleep 7722 & sleep 7722")
        await _starts(box, "7722")
        await asyncio.sleep(0.3)
        await box.signal_process(process_id, signal.SIGKILL, tree=True)
        await _ends(box, "7722")

    @needs("Processes")
    async def check_forgetting_kills(self, box: Any) -> None:
        """And an unknown id is fine."""
        process_id = await box.start_process("setsid sleep 7723 & sleep 7723")
        await _starts(box, "7723")
        await box.forget_process(process_id)
        await _ends(box, "7723")
        assert list(await box.list_processes()) == []
        await box.forget_process(process_id)

    @needs("Processes")
    async def check_a_process_key_starts_once(self, box: Any) -> None:
        """A repeated request returns the first one's id."""
        first = await box.start_process("echo x >> count; sleep 60", key="once")
        assert await box.start_process("echo x >> count; sleep 60", key="once") == first
        await asyncio.sleep(0.5)
        assert await box.read_file("count") == b"x\n"


class PtySuite(BackendChecks):
    """Checks of `Pty`."""

    @needs("Pty")
    async def check_a_terminal_is_a_terminal(self, box: Any) -> None:
        """With the size asked for."""
        session = await box.open_pty(["sh", "-c", "test -t 0 && test -t 1 && stty size; exit 7"], rows=30, cols=100)
        assert await read_all(session) == b"30 100\r\n"
        assert (await session.wait(timeout_s=_WAIT_S)).exit_code == 7
        await session.aclose()

    @needs("Pty")
    async def check_nothing_is_lost_at_a_terminals_end(self, box: Any) -> None:
        """A command that ends right after much output."""
        for _ in range(5):
            session = await box.open_pty(["seq", "1", "3000"])
            assert await read_all(session) == b"".join(b"%d\r\n" % number for number in range(1, 3001))
            await session.aclose()

    @needs("Pty")
    async def check_what_is_typed_arrives(self, box: Any) -> None:
        """And the terminal echoes it."""
        session = await box.open_pty(["sh", "-c", "read line; echo got-$line"])
        await session.write(b"hello\n")
        assert b"got-hello" in await read_until(session, b"got-hello")
        await session.aclose()

    @needs("Pty")
    async def check_a_terminal_is_resized(self, box: Any) -> None:
        """The program sees the new size."""
        session = await box.open_pty(["sh", "-c", "echo up; read go; stty size"])
        await read_until(session, b"up")
        await session.resize(rows=50, cols=132)
        await session.write(b"\n")
        await read_until(session, b"50 132")
        await session.aclose()

    @needs("Pty")
    async def check_a_terminals_foreground_gets_signals(self, box: Any) -> None:
        """As Ctrl-C would."""
        session = await box.open_pty(
            ["sh", "-c", "trap 'echo caught; exit 5' INT; echo up; while :; do sleep 0.1; done"]
        )
        await read_until(session, b"up")
        await session.signal(signal.SIGINT)
        await read_until(session, b"caught")
        assert (await session.wait(timeout_s=_WAIT_S)).exit_code == 5
        await session.aclose()

    @needs("Pty")
    async def check_closing_a_terminal_kills(self, box: Any) -> None:
        """Those who ignore the hangup too."""
        session = await box.open_pty(["sh", "-c", "trap '' HUP; setsid sleep 7724 & sleep 7724"])
        await _starts(box, "7724")
        await session.aclose()
        await _ends(box, "7724")

    @needs("Pty")
    async def check_waiting_for_a_terminal_has_a_deadline(self, box: Any) -> None:
        """A program that goes on is not waited for for ever."""
        session = await box.open_pty(["sleep", "60"])
        with pytest.raises(DeadlineError):
            await session.wait(timeout_s=0.3)
        await session.aclose()


_BOMB = """
import os, time
n = 0
try:
    while n < 400:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        n += 1
except OSError:
    pass
print(n)
"""
_SPIN = """
import time
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
print(time.process_time())
"""
_SERVER = """
import hashlib, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
open("listening", "w").close()
while True:
    connection, _ = listener.accept()
    hash = hashlib.sha256()
    while data := connection.recv(65536):
        hash.update(data)
    connection.sendall(hash.hexdigest().encode())
    connection.close()
"""
_ASK = """
import json, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[2]}]}).encode()
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", body)
print(json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"])
"""


async def _listen(box: Any, port: int) -> None:
    await box.write_file("server.py", _SERVER.encode())
    await box.exec(f"python3 server.py {port} >/dev/null 2>&1 &")

    async def listening() -> bool:
        return bool((await box.exec("test -e listening")).ok)

    await eventually(listening, within_s=_WAIT_S, what="a server inside")


async def _model(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A model's endpoint: answers a chat completion with its last message in capitals."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split()[0])
    request = json.loads(await reader.readexactly(length))
    content = request["messages"][-1]["content"].upper()
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def _with_model(use: Callable[[int], Awaitable[None]]) -> None:
    server = await asyncio.start_server(_model, "127.0.0.1", 0)
    try:
        await use(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await server.wait_closed()


class PortsSuite(BackendChecks):
    """Checks of `Ports` and `ReversePorts`; they need `python3` inside."""

    @needs("Ports")
    async def check_a_port_inside_is_reached(self, box: Any) -> None:
        """On the inside loopback, half-closes included."""
        await _listen(box, 8701)
        data = os.urandom(1_000_000)
        stream = await box.connect_port(8701)
        await stream.write(data)
        await stream.write_eof()
        assert (await read_all(stream)).decode() == hashlib.sha256(data).hexdigest()
        await stream.aclose()

    @needs("Ports")
    async def check_a_port_nobody_listens_on_is_refused(self, box: Any) -> None:
        """By an error that says so, at once."""
        with pytest.raises(SandboxRequestError):
            await box.connect_port(8702)

    @needs("ReversePorts", networks=frozenset({"none"}))
    async def check_a_sandbox_without_network_reaches_its_model(self, box: Any) -> None:
        """Through a port that leads to the one target, and only through it."""
        await box.write_file("ask.py", _ASK.encode())

        async def use(target: int) -> None:
            direct = await box.exec(["python3", "ask.py", str(target), "hi"], timeout_s=40)
            assert direct.exit_code != 0, "the target is reached without the port"
            port = await box.serve_port(0, host="127.0.0.1", target_port=target)
            asked = await asyncio.gather(
                *(box.exec(["python3", "ask.py", str(port.port), f"word{n}"], timeout_s=40) for n in range(4))
            )
            assert [result.stdout_text for result in asked] == [f"WORD{n}\n" for n in range(4)]
            await port.aclose()

        await _with_model(use)

    @needs("ReversePorts")
    async def check_a_closed_reverse_port_leads_nowhere(self, box: Any) -> None:
        """And its number is free again."""
        await box.write_file("ask.py", _ASK.encode())

        async def use(target: int) -> None:
            port = await box.serve_port(0, host="127.0.0.1", target_port=target)
            await port.aclose()
            assert (await box.exec(["python3", "ask.py", str(port.port), "hi"], timeout_s=40)).exit_code != 0
            again = await box.serve_port(port.port, host="127.0.0.1", target_port=target)
            assert again.port == port.port
            await again.aclose()

        await _with_model(use)

    @needs("ReversePorts")
    async def check_a_taken_port_is_refused(self, box: Any) -> None:
        """Where something inside listens already."""
        await _listen(box, 8703)
        with pytest.raises(SandboxRequestError):
            await box.serve_port(8703, host="127.0.0.1", target_port=9)


class ForkSuite(BackendChecks):
    """Checks of `Fork`."""

    @needs("Fork")
    async def check_forks_have_the_files(self, subject: Subject) -> None:
        """As they were, and then apart."""
        box = await subject.create()
        await box.exec("mkdir d; echo one > d/f; ln -s d/f link; chmod 700 d")
        names = [subject.fresh_id(), subject.fresh_id()]
        forks = await box.fork(names)
        try:
            assert [fork.sandbox_id for fork in forks] == names
            for fork in forks:
                assert (await fork.exec("cat link; stat -c %a d")).stdout == b"one\n700\n"
            await forks[0].write_file("d/f", b"changed\n")
            assert await box.read_file("d/f") == b"one\n"
            assert await forks[1].read_file("d/f") == b"one\n"
        finally:
            for fork in forks:
                await fork.aclose()
                await subject.environment.delete(fork.sandbox_id)

    @needs("Fork")
    async def check_forks_are_of_the_same_spec(self, subject: Subject) -> None:
        """Environment variables and labels."""
        owner = subject.fresh_id()
        box = await subject.create(replace(subject.spec, env={"COLOUR": "red"}, labels={"orchard.owner": owner}))
        (fork,) = await box.fork([subject.fresh_id()])
        try:
            assert (await fork.exec("echo $COLOUR")).stdout == b"red\n"
            assert len(await subject.environment.list({"orchard.owner": owner})) == 2
        finally:
            await fork.aclose()
            await subject.environment.delete(fork.sandbox_id)

    @needs("Fork")
    async def check_forks_are_all_or_none(self, subject: Subject) -> None:
        """One id that is taken, and nothing is made."""
        owner = subject.fresh_id()
        box = await subject.create(replace(subject.spec, labels={"orchard.owner": owner}))
        with pytest.raises(SandboxCreateError):
            await box.fork([subject.fresh_id(), box.sandbox_id])
        assert [info.sandbox_id for info in await subject.environment.list({"orchard.owner": owner})] == [
            box.sandbox_id
        ]


class RestraintsSuite(BackendChecks):
    """Checks of lists of programs and of limits; those of memory and processes need `python3` inside."""

    @needs(programs=True)
    async def check_only_listed_programs_run(self, subject: Subject) -> None:
        """Others are refused, or killed where a listed one starts them."""
        shell = (await (await subject.create()).exec("readlink -f /bin/sh")).stdout_text.strip()
        box = await subject.create(replace(subject.spec, programs=(AllowedProgram(path=shell),)))
        assert (await box.exec("echo yes")).stdout == b"yes\n"
        assert not (await box.exec(["sleep", "0"])).ok
        result = await box.exec("sleep 30; echo $?", timeout_s=20)
        assert result.stdout == b"137\n"

    @needs(programs=True)
    async def check_another_content_does_not_run(self, subject: Subject) -> None:
        """A listed path with another hash."""
        shell = (await (await subject.create()).exec("readlink -f /bin/sh")).stdout_text.strip()
        box = await subject.create(replace(subject.spec, programs=(AllowedProgram(path=shell, sha256="0" * 64),)))
        result = await box.exec("sleep 30; echo ran", timeout_s=20)
        assert not result.ok
        assert b"ran" not in result.stdout

    @needs(limits=frozenset({"memory_mb"}))
    async def check_memory_is_limited(self, subject: Subject) -> None:
        """A program within it runs, one beyond it does not."""
        box = await subject.create(replace(subject.spec, resources=Resources(memory_mb=200)))
        hog = "x = bytearray({} << 20); print('got it')"
        assert (await box.exec(["python3", "-c", hog.format(40)])).stdout == b"got it\n"
        assert not (await box.exec(["python3", "-c", hog.format(600)])).ok

    @needs(limits=frozenset({"pids"}))
    async def check_processes_are_limited(self, subject: Subject) -> None:
        """A program that forks on and on is stopped."""
        box = await subject.create(replace(subject.spec, resources=Resources(pids=40)))
        made = int((await box.exec(["python3", "-c", _BOMB])).stdout)
        assert made < 200
        await box.kill_processes()

    @needs(limits=frozenset({"cpus"}))
    async def check_cpus_are_limited(self, subject: Subject) -> None:
        """A program that spins gets its share and no more."""
        box = await subject.create(replace(subject.spec, resources=Resources(cpus=0.2)))
        assert float((await box.exec(["python3", "-c", _SPIN])).stdout) < 1.2
