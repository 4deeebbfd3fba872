"""Background processes: output by offset, stdin, signals, and finding them again."""

import asyncio
import hashlib
import signal

import pytest

from orchard_agent import AgentSandbox
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import OverloadedError, SandboxRequestError
from orchard_api.powers import Processes


async def read_to_end(box: AgentSandbox, process_id: str, offset: int = 0) -> bytes:
    parts = []
    while True:
        chunk = await box.read_output(process_id, offset=offset, wait_s=20)
        assert chunk.offset == offset
        parts.append(chunk.data)
        offset = chunk.next_offset
        if chunk.ended:
            return b"".join(parts)
        assert chunk.data


async def test_output_from_an_offset(box: AgentSandbox) -> None:
    assert isinstance(box, Processes)
    process_id = await box.start_process("printf abcdef; sleep 0.4; printf ghi >&2; exit 4")
    await box.read_output(process_id, offset=0, wait_s=10)
    first = await box.read_output(process_id, offset=2, wait_s=10)
    assert (first.offset, first.data, first.ended) == (2, b"cdef", False)
    assert await read_to_end(box, process_id, 6) == b"ghi"
    assert await read_to_end(box, process_id) == b"abcdefghi"
    info = await box.wait_process(process_id, timeout_s=5)
    assert (info.running, info.exit_code, info.signal, info.output_end) == (False, 4, None, 9)
    with pytest.raises(SandboxRequestError, match="after the end"):
        await box.read_output(process_id, offset=10)
    assert [one.process_id for one in await box.list_processes()] == [process_id]


async def test_a_wait_that_brings_nothing(box: AgentSandbox) -> None:
    process_id = await box.start_process("sleep 100")
    chunk = await box.read_output(process_id, offset=0, wait_s=0.3)
    assert (chunk.data, chunk.ended) == (b"", False)
    assert (await box.wait_process(process_id, timeout_s=0.2)).running


async def test_only_the_last_bytes_are_kept(box: AgentSandbox) -> None:
    process_id = await box.start_process("seq 1 100000", output_limit=1000)
    await box.wait_process(process_id, timeout_s=20)
    chunk = await box.read_output(process_id, offset=0, wait_s=10)
    whole = b"".join(b"%d\n" % i for i in range(1, 100001))
    while not chunk.ended:
        chunk = await box.read_output(process_id, offset=0, wait_s=10)
    assert chunk.data == whole[-1000:]
    assert chunk.offset == len(whole) - 1000


async def test_another_client_finds_it_again(environment: LocalEnvironment, box: AgentSandbox) -> None:
    process_id = await box.start_process("for i in 1 2 3 4 5; do echo $i; sleep 0.1; done")
    assert (await box.read_output(process_id, offset=0, wait_s=10)).data.startswith(b"1\n")
    await box.aclose()
    again = await environment.attach(box.sandbox_id)
    assert await read_to_end(again, process_id, 2) == b"2\n3\n4\n5\n"
    await again.aclose()


async def test_stdin_in_pieces(box: AgentSandbox) -> None:
    data = bytes(range(256)) * 8192
    process_id = await box.start_process("sleep 0.3; sha256sum", stdin=True)
    await box.write_stdin(process_id, data[:5])
    await box.write_stdin(process_id, data[5:], eof=True)
    assert (await read_to_end(box, process_id)).split()[0].decode() == hashlib.sha256(data).hexdigest()
    with pytest.raises(SandboxRequestError, match="stdin"):
        await box.write_stdin(process_id, b"more")


async def test_stdin_of_those_that_have_none(box: AgentSandbox) -> None:
    without = await box.start_process("cat; sleep 100")
    with pytest.raises(SandboxRequestError, match="stdin"):
        await box.write_stdin(without, b"x")
    closed = await box.start_process("exec 0<&-; echo closed; sleep 100", stdin=True)
    await box.read_output(closed, offset=0, wait_s=10)
    with pytest.raises(SandboxRequestError, match="closed"):
        await box.write_stdin(closed, b"x")


async def test_signals(box: AgentSandbox, find_inside) -> None:
    process_id = await box.start_process("trap 'echo got; exit 9' USR1; echo up; while :; do sleep 0.05; done")
    await box.read_output(process_id, offset=0, wait_s=10)
    await box.signal_process(process_id, signal.SIGUSR1)
    assert (await box.wait_process(process_id, timeout_s=10)).exit_code == 9
    await box.signal_process(process_id, signal.SIGTERM)

    tree = await box.start_process("setsid sleep 4247 & echo up; sleep 4247")
    await box.read_output(tree, offset=0, wait_s=10)
    for _ in range(100):
        if len(await find_inside(box, "sleep 4247")) >= 3:
            break
        await asyncio.sleep(0.05)
    await box.signal_process(tree, signal.SIGKILL, tree=True)
    assert (await box.wait_process(tree, timeout_s=10)).signal == 9
    assert await find_inside(box, "sleep 4247") == []
    with pytest.raises(SandboxRequestError):
        await box.signal_process(tree, 65)


async def test_forgetting_kills_even_after_the_exit(box: AgentSandbox, find_inside) -> None:
    process_id = await box.start_process("setsid sleep 4248 & echo up")
    await box.wait_process(process_id, timeout_s=10)
    assert len(await find_inside(box, "sleep 4248")) >= 1
    chunk = await box.read_output(process_id, offset=3, wait_s=0.2)
    assert not chunk.ended, "a child still holds the output"
    await box.forget_process(process_id)
    assert await find_inside(box, "sleep 4248") == []
    with pytest.raises(SandboxRequestError, match="no background process"):
        await box.read_output(process_id, offset=0)
    await box.forget_process(process_id)


async def test_keys_start_nothing_twice(box: AgentSandbox) -> None:
    first = await box.start_process("echo x >> count; sleep 100", key="one")
    assert await box.start_process("echo x >> count; sleep 100", key="one") == first
    with pytest.raises(SandboxRequestError, match="another command"):
        await box.start_process("true", key="one")
    await asyncio.sleep(0.2)
    assert await box.read_file("count") == b"x\n"


async def test_bounds(box: AgentSandbox) -> None:
    started = [await box.start_process("sleep 100") for _ in range(64)]
    with pytest.raises(OverloadedError):
        await box.start_process("sleep 100")
    await box.forget_process(started[0])
    await box.start_process("sleep 100")


async def test_commands_that_cannot_start(box: AgentSandbox) -> None:
    process_id = await box.start_process(["/nowhere"], stdin=True)
    assert (await box.wait_process(process_id, timeout_s=5)).exit_code == 127
    assert b"/nowhere" in await read_to_end(box, process_id)
    with pytest.raises(SandboxRequestError, match="working directory"):
        await box.start_process("true", cwd="/nowhere")
    with pytest.raises(SandboxRequestError):
        await box.start_process("true", user="nobody-here")


async def test_killing_everything_ends_them(box: AgentSandbox) -> None:
    process_id = await box.start_process("sleep 100")
    assert await box.kill_processes() >= 1
    assert (await box.wait_process(process_id, timeout_s=5)).signal == 9
