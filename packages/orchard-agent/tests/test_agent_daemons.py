from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from orchard_agent import AgentSandbox

Find = Callable[[AgentSandbox, str], Awaitable[list[str]]]


async def test_a_background_child_that_holds_the_pipe_neither_blocks_nor_dies(
    box: AgentSandbox, find_inside: Find
) -> None:
    """Case 39."""
    start = time.monotonic()
    result = await box.exec("sleep 300 & echo hi", timeout_s=20)
    assert time.monotonic() - start < 2
    assert (result.exit_code, result.stdout) == (0, b"hi\n")
    assert len(await find_inside(box, "sleep 300")) == 1


async def test_a_daemon_may_go_on_writing_to_the_pipe_that_nobody_keeps(box: AgentSandbox) -> None:
    """It gets no SIGPIPE, and never blocks on a full pipe: more than a pipe holds passes after the call's end."""
    script = "i=0; while [ $i -lt 40 ]; do head -c 10000 /dev/zero || exit; i=$((i+1)); done; echo $i > counted"
    result = await box.exec(f"echo begun; sh -c 'sleep 0.2; {script}' &", timeout_s=20)
    assert result.stdout == b"begun\n"
    for _ in range(200):
        if (await box.exec("cat counted 2>/dev/null")).stdout == b"40\n":
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the daemon did not finish its output")


async def test_a_server_started_in_one_call_answers_in_the_next(box: AgentSandbox) -> None:
    """Case 40: completion is the process's exit, not the end of the pipe."""
    start = time.monotonic()
    code = "import subprocess; subprocess.Popen(['python3', '-m', 'http.server', '8123', '--bind', '127.0.0.1'])"
    result = await box.exec(["python3", "-c", code], timeout_s=20)
    assert result.ok
    assert time.monotonic() - start < 2
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/').status)"
    for _ in range(100):
        if (await box.exec(["python3", "-c", fetch])).stdout == b"200\n":
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the server does not answer")


async def test_orphans_are_reaped(box: AgentSandbox) -> None:
    """Case 41: 500 commands, each leaving an orphan, and not one zombie."""
    for _ in range(20):
        await asyncio.gather(*(box.exec("(sleep 0.01 &) ; true") for _ in range(25)))
    await asyncio.sleep(0.1)
    states = (await box.exec(["ps", "-eo", "stat="])).stdout_text.split()
    assert not [state for state in states if state.startswith("Z")]
    assert (await box.exec("echo 501")).stdout == b"501\n"
