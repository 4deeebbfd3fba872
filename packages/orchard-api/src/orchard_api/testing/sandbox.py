"""Checks of a `Sandbox`: commands and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest

from orchard_api.errors import SandboxRequestError
from orchard_api.sandbox import Sandbox
from orchard_api.testing.backend import BackendChecks, Subject, alive, eventually
from orchard_api.testing.suite import needs


class SandboxSuite(BackendChecks):
    """Commands: exactness, ends, bounds."""

    async def check_a_shell_line_runs(self, box: Sandbox) -> None:
        """A string is a line for `sh -c`."""
        result = await box.exec("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)

    async def check_an_argv_is_passed_exactly(self, box: Sandbox) -> None:
        """No shell has a hand in a sequence."""
        strange = ["a b", "", "$HOME", "'", "*", "line\nline", "ü", "-n"]
        result = await box.exec(["printf", "%s|", *strange])
        assert result.stdout.decode() == "".join(f"{one}|" for one in strange)

    async def check_output_is_bytes(self, box: Sandbox) -> None:
        """Bytes that are no text arrive as they are."""
        result = await box.exec(r"printf '\000\001\377\200'")
        assert result.stdout == b"\x00\x01\xff\x80"

    async def check_stdin_arrives(self, box: Sandbox) -> None:
        """Larger than any pipe, and ended."""
        data = os.urandom(300_000)
        result = await box.exec("wc -c", stdin=data)
        assert result.stdout.split() == [b"300000"]

    async def check_without_stdin_a_reader_sees_its_end(self, box: Sandbox) -> None:
        """A command that reads does not hang."""
        assert (await box.exec("cat", timeout_s=10)).exit_code == 0

    async def check_env_is_set(self, box: Sandbox) -> None:
        """For this command alone."""
        assert (await box.exec("echo $COLOUR", env={"COLOUR": "light green"})).stdout == b"light green\n"
        assert (await box.exec("echo $COLOUR")).stdout == b"\n"

    async def check_env_of_the_spec_is_set(self, subject: Subject) -> None:
        """For every command."""
        box = await subject.create(replace(subject.spec, env={"COLOUR": "blue"}))
        assert (await box.exec("echo $COLOUR")).stdout == b"blue\n"

    async def check_the_hosts_environment_is_not_seen(self, subject: Subject) -> None:
        """A variable of this process does not show inside."""
        os.environ["ORCHARD_SUITE_SECRET"] = "do-not-show"
        try:
            box = await subject.create()
            assert b"do-not-show" not in (await box.exec("env")).stdout
        finally:
            del os.environ["ORCHARD_SUITE_SECRET"]

    async def check_cwd_is_where_it_runs(self, box: Sandbox) -> None:
        """Absolute, or from the working directory."""
        await box.make_dir("sub")
        here = (await box.exec("pwd")).stdout_text.strip()
        assert (await box.exec("pwd", cwd="sub")).stdout_text.strip() == f"{here}/sub"
        assert (await box.exec("pwd", cwd="/")).stdout_text.strip() == "/"

    async def check_a_missing_cwd_is_a_request_error(self, box: Sandbox) -> None:
        """It is the caller's mistake, not the command's result."""
        with pytest.raises(SandboxRequestError):
            await box.exec("true", cwd="/does/not/exist")

    async def check_a_missing_program_is_127(self, box: Sandbox) -> None:
        """As a shell says it."""
        result = await box.exec(["no-such-program-here"])
        assert result.exit_code == 127
        assert result.stderr

    async def check_a_signal_is_told(self, box: Sandbox) -> None:
        """A process that a signal ended has no exit code."""
        result = await box.exec(["sh", "-c", "kill -TERM $$"])
        assert (result.signal, result.exit_code) == (15, None)

    async def check_a_timeout_returns_what_was_written(self, box: Sandbox) -> None:
        """In time, with the output so far."""
        begin = time.monotonic()
        result = await box.exec("echo so far; sleep 60", timeout_s=1)
        assert result.timed_out
        assert result.stdout == b"so far\n"
        assert result.exit_code is None
        assert time.monotonic() - begin < 15

    async def check_a_timeout_kills_all_that_it_started(self, box: Sandbox) -> None:
        """A session of its own does not save a child."""
        running = asyncio.ensure_future(box.exec("setsid sleep 7711 & sleep 7711", timeout_s=2))
        await eventually(lambda: alive(box, "7711"), within_s=10, what="the child")
        assert (await running).timed_out
        await eventually(lambda: _not(alive(box, "7711")), within_s=5, what="the child's end")

    async def check_a_cancelled_call_kills_all_that_it_started(self, box: Sandbox) -> None:
        """A caller that no longer waits no longer wants it."""
        running = asyncio.ensure_future(box.exec("setsid sleep 7712 & sleep 7712", timeout_s=60))
        await eventually(lambda: alive(box, "7712"), within_s=10, what="the child")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: _not(alive(box, "7712")), within_s=10, what="the child's end")

    async def check_a_background_child_holds_nobody_up(self, box: Sandbox) -> None:
        """The call ends with its process; the child lives on."""
        begin = time.monotonic()
        result = await box.exec("sleep 7713 & echo started", timeout_s=30)
        assert result.stdout == b"started\n"
        assert time.monotonic() - begin < 10
        assert await alive(box, "7713")

    async def check_output_is_bounded_and_keeps_both_ends(self, box: Sandbox) -> None:
        """Half head, half tail, and how much is missing."""
        result = await box.exec("seq 1 100000", output_limit=1000)
        whole = b"".join(b"%d\n" % number for number in range(1, 100001))
        assert result.stdout == whole[:500] + whole[-500:]
        assert result.stdout_dropped == len(whole) - 1000
        assert result.truncated

    async def check_a_key_runs_once(self, box: Sandbox) -> None:
        """A repeated request returns the first one's result."""
        first = await box.exec("echo x >> count; cat count", key="only-once")
        second = await box.exec("echo x >> count; cat count", key="only-once")
        assert first.stdout == second.stdout == b"x\n"

    async def check_commands_run_side_by_side(self, box: Sandbox) -> None:
        """One that waits for another's file."""
        waiting = box.exec("while ! test -e go; do sleep 0.05; done; echo went", timeout_s=20)
        result, _ = await asyncio.gather(waiting, box.exec("sleep 0.3; touch go"))
        assert result.stdout == b"went\n"

    async def check_the_time_is_measured(self, box: Sandbox) -> None:
        """`duration_s` is the command's own."""
        assert 0.4 <= (await box.exec("sleep 0.5")).duration_s < 5

    async def check_killing_processes_ends_daemons(self, box: Sandbox) -> None:
        """All of them; and the sandbox works on."""
        await box.exec("setsid sleep 7714 >/dev/null 2>&1 &")
        await eventually(lambda: alive(box, "7714"), within_s=10, what="the daemon")
        assert await box.kill_processes() >= 1
        assert not await alive(box, "7714")
        assert (await box.exec("echo on")).stdout == b"on\n"

    async def check_status_tells_of_it(self, box: Sandbox) -> None:
        """The same id, and ready."""
        info = await box.status()
        assert info.sandbox_id == box.sandbox_id
        assert info.state == "ready"

    async def check_closing_twice_is_fine(self, box: Sandbox) -> None:
        """`aclose` is idempotent."""
        await box.aclose()
        await box.aclose()

    @needs(networks=frozenset({"none"}))
    async def check_no_network_is_no_network(self, box: Sandbox) -> None:
        """No interface but the loopback is there, or none is up."""
        result = await box.exec("cat /proc/net/route; cat /proc/net/dev")
        devices = [line.split(":")[0].strip() for line in result.stdout_text.splitlines() if ":" in line]
        routes = [line for line in result.stdout_text.splitlines() if "\t00000000\t" in line]
        assert not routes, "there is a default route"
        assert "eth0" not in devices


async def _not(condition: object) -> bool:
    return not await condition  # type: ignore[misc]
