from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from orchard_agent import AgentSandbox
from orchard_api.errors import SandboxRequestError

Find = Callable[[AgentSandbox, str], Awaitable[list[str]]]


async def test_an_argv_is_exact_and_a_line_goes_through_the_shell(box: AgentSandbox) -> None:
    odd = ["a b", "", "$HOME", "'\"", "new\nline", "\udcff", "--", "ü"]
    result = await box.exec(["printf", "%s|", *odd])
    assert result.stdout == b"a b||$HOME|'\"|new\nline|\xff|--|\xc3\xbc|"
    assert (await box.exec("echo $((1+2)) | tr 3 4")).stdout == b"4\n"


async def test_exit_codes_and_signals_are_told_apart_from_timeouts(box: AgentSandbox) -> None:
    """Case 25: a command that itself exits 124, 137 or 143, or that is killed, did not time out."""
    for code in (0, 1, 124, 137, 143, 255):
        result = await box.exec(f"exit {code}")
        assert (result.exit_code, result.signal, result.timed_out) == (code, None, False)
    result = await box.exec("kill -9 $$")
    assert (result.exit_code, result.signal, result.timed_out) == (None, 9, False)
    result = await box.exec("sleep 30", timeout_s=0.2)
    assert (result.exit_code, result.signal, result.timed_out) == (None, 9, True)


async def test_what_cannot_be_run_reads_as_a_shell_would_say_it(box: AgentSandbox) -> None:
    """Case 46: a non-executable script is an ordinary 126, a missing program 127; neither is a dead sandbox."""
    await box.write_file("script", b"#!/bin/sh\necho hi\n", mode=0o644)
    assert (await box.exec("./script")).exit_code == 126
    assert (await box.exec(["./script"])).exit_code == 126
    assert (await box.exec(["no-such-program"])).exit_code == 127
    result = await box.exec(["/no/such/program"])
    assert result.exit_code == 127
    assert b"no such file" in result.stderr
    await box.write_file("noformat", b"\x00\x01\x02", mode=0o755)
    assert (await box.exec(["./noformat"])).exit_code == 126


async def test_stdin_cwd_and_env(box: AgentSandbox) -> None:
    assert (await box.exec(["cat"], stdin=bytes(range(256)))).stdout == bytes(range(256))
    assert (await box.exec(["cat"])).stdout == b""
    await box.make_dir("deep/er")
    assert (await box.exec("pwd", cwd="deep/er")).stdout == b"/workspace/deep/er\n"
    assert (await box.exec("pwd", cwd="/usr")).stdout == b"/usr\n"
    with pytest.raises(SandboxRequestError, match="working directory"):
        await box.exec("pwd", cwd="/not/there")


async def test_a_variable_keeps_its_exact_value(box: AgentSandbox) -> None:
    """Case 101."""
    value = "x y\"$z\n\t='`\\"
    result = await box.exec(["sh", "-c", 'printf %s "$A"'], env={"A": value})
    assert result.stdout_text == value
    assert (await box.exec('printf %s "${A-unset}"')).stdout == b"unset"
    with pytest.raises(SandboxRequestError, match="environment"):
        await box.exec("true", env={"A=B": "x"})


async def test_large_stdin_and_a_command_that_does_not_read_it(box: AgentSandbox) -> None:
    data = b"0123456789" * 1_000_000
    assert (await box.exec("wc -c", stdin=data)).stdout.strip() == b"10000000"
    assert (await box.exec("exec true", stdin=data)).ok
    assert (await box.exec("head -c 3", stdin=data)).stdout == b"012"


async def test_a_command_line_of_more_than_ten_megabytes(box: AgentSandbox) -> None:
    """Longer than any single argument may be: it reaches the shell as a file."""
    line = "X=" + "a" * 11_000_000 + "\necho ${#X}; cat"
    result = await box.exec(line, stdin=b"in", timeout_s=30)
    assert (result.exit_code, result.stdout) == (0, b"11000000\nin")
    with pytest.raises(SandboxRequestError, match="longer than"):
        await box.exec(["echo", "a" * 3_000_000])
    assert (await box.exec("echo still here")).ok


@pytest.mark.parametrize(
    "command",
    [
        "while :; do :; done # {mark}",
        "sh -c 'while :; do sleep 0.1; done # {mark}' & sh -c 'while :; do sleep 0.1; done # {mark}' & wait",
        "setsid sh -c 'while :; do sleep 0.1; done # {mark}' & sleep 60",
        "nohup sh -c 'while :; do sleep 0.1; done # {mark}' >/dev/null 2>&1 & sleep 60",
        "trap '' TERM INT HUP; sh -c \"trap '' TERM INT HUP; while :; do sleep 0.1; done # {mark}\"",
        "(setsid sh -c 'setsid sh -c \"while :; do sleep 0.1; done # {mark}\" & ' &) ; sleep 60",
        "setsid env -i /bin/sh -c 'while :; do /bin/sleep 0.1; done # {mark}' & sleep 60",
    ],
    ids=["loop", "children", "setsid", "nohup", "traps", "daemon", "clean-environment"],
)
async def test_a_timeout_kills_all_that_the_command_started(box: AgentSandbox, find_inside: Find, command: str) -> None:
    """Cases 16, 17 and 20; the processes are first seen alive."""
    mark = "marked-for-death"
    start = time.monotonic()
    call = asyncio.create_task(box.exec(command.format(mark=mark), timeout_s=0.6))
    seen: list[str] = []
    while time.monotonic() - start < 0.55 and not seen:
        seen = await find_inside(box, mark)
    assert seen, "nothing was running that could be killed"
    result = await call
    assert result.timed_out
    assert time.monotonic() - start < 4
    assert await find_inside(box, mark) == []


async def test_a_timeout_kills_nothing_else(box: AgentSandbox, find_inside: Find) -> None:
    await box.exec("setsid sleep 1234 >/dev/null 2>&1 &")
    other = asyncio.create_task(box.exec("sleep 1.2; echo done"))
    assert (await box.exec("sleep 60", timeout_s=0.5)).timed_out
    assert (await other).stdout == b"done\n"
    assert len(await find_inside(box, "sleep 1234")) == 1


async def test_output_before_the_timeout_is_returned(box: AgentSandbox) -> None:
    """Case 24."""
    result = await box.exec("echo part; echo problem >&2; sleep 60", timeout_s=0.5)
    assert (result.timed_out, result.stdout, result.stderr) == (True, b"part\n", b"problem\n")


async def test_only_its_own_timeout_ends_a_command(base: object, box: AgentSandbox) -> None:
    """Case 18: no default of the client below cuts a longer command; here all of those are shorter than it."""
    from dataclasses import replace

    box._limits = replace(box._limits, call_s=0.7, idle_s=0.7, heartbeat_s=0.3)
    result = await box.exec("sleep 2; echo ok", timeout_s=20)
    assert (result.exit_code, result.stdout) == (0, b"ok\n")


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), float("inf")])
async def test_a_timeout_that_is_none_is_refused(box: AgentSandbox, timeout_s: float) -> None:
    """Case 22."""
    with pytest.raises(SandboxRequestError, match="timeout_s"):
        await box.exec("yes", timeout_s=timeout_s)


async def test_cancelling_a_call_kills_its_processes(box: AgentSandbox, find_inside: Find) -> None:
    call = asyncio.create_task(box.exec("setsid sleep 4321 & sleep 4321"))
    while len(await find_inside(box, "sleep 4321")) < 2:
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not [line for line in await find_inside(box, "sleep 4321") if " Z" not in line]


async def test_a_repeated_key_returns_the_first_result(box: AgentSandbox) -> None:
    first = await box.exec("echo $$ | tee -a runs", key="once")
    again = await box.exec("echo $$ | tee -a runs", key="once")
    assert first == again
    assert (await box.read_file("runs")) == first.stdout
    with pytest.raises(SandboxRequestError, match="another command"):
        await box.exec("echo other", key="once")


async def test_a_key_attaches_to_a_command_that_still_runs(box: AgentSandbox) -> None:
    calls = [asyncio.create_task(box.exec("echo x >> count; sleep 0.5; cat count", key="both")) for _ in range(3)]
    results = await asyncio.gather(*calls)
    assert {result.stdout for result in results} == {b"x\n"}


async def test_a_forgotten_result_is_not_run_again(box: AgentSandbox) -> None:
    """The memory of kept results is bounded; beyond it a key is refused, never run twice."""
    await box.exec("echo x >> ran; head -c 1000000 /dev/zero", key="old")
    for number in range(8):
        await box.exec("head -c 1000000 /dev/zero", key=f"new-{number}")
    with pytest.raises(SandboxRequestError, match="no longer kept"):
        await box.exec("echo x >> ran; head -c 1000000 /dev/zero", key="old")
    assert await box.read_file("ran") == b"x\n"


async def test_two_hundred_at_once(box: AgentSandbox) -> None:
    results = await asyncio.gather(*(box.exec(f"echo {number}") for number in range(200)))
    assert [int(result.stdout) for result in results] == list(range(200))


async def test_another_user_needs_a_privileged_agent(box: AgentSandbox) -> None:
    assert (await box.exec("id -un", user="agent")).stdout == b"agent\n"
    assert (await box.exec("id -u", user=1000)).stdout == b"1000\n"
    with pytest.raises(SandboxRequestError, match="only an agent that is root can switch users"):
        await box.exec("id", user="root")
    with pytest.raises(SandboxRequestError, match='no user "stranger"'):
        await box.exec("id", user="stranger")


async def test_kill_processes_ends_all_but_the_agent(box: AgentSandbox, find_inside: Find) -> None:
    for _ in range(5):
        await box.exec("setsid env -i /bin/sleep 7777 >/dev/null 2>&1 & sleep 7777 >/dev/null 2>&1 &")
    assert len(await find_inside(box, "sleep 7777")) == 10
    assert await box.kill_processes() == 10
    assert await find_inside(box, "7777") == []
    assert await box.kill_processes() == 0
    assert (await box.exec("echo alive")).stdout == b"alive\n"


async def test_kill_processes_outruns_one_that_forks_all_the_time(box: AgentSandbox, find_inside: Find) -> None:
    await box.exec("cat > hydra <<'E'\n(sleep 0.02; exec setsid sh hydra) &\n(sleep 0.02) &\nE\nsetsid sh hydra &")
    await asyncio.sleep(0.3)
    assert await find_inside(box, "hydra"), "it does not run"
    assert await box.kill_processes() > 0
    await asyncio.sleep(0.2)
    assert await find_inside(box, "hydra") == []
