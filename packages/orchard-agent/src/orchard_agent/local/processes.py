"""Processes of this machine, told apart by pid and start time, and waited for without a thread each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """A process for good: a pid is used again, a pid with its start time is not.

    Attributes:
        started: clock ticks since boot, from `/proc/PID/stat`.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now, or None."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        fields = text[text.rfind(")") + 2 :].split()
        if len(fields) < 20 or fields[0] in "ZX":
            return None
        return cls(pid=pid, started=int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return ProcessId.of(self.pid) == self

    def open(self) -> int | None:
        """A descriptor on it that no later process can take over, or None when it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if not self.alive:
            os.close(descriptor)
            return None
        return descriptor


async def wait_ended(descriptor: int, timeout_s: float) -> bool:
    """Wait until the process of a pidfd has ended; False when it still runs after `timeout_s`."""
    if has_ended(descriptor):
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    # A copy, because the loop knows one callback per descriptor.
    own = os.dup(descriptor)
    loop.add_reader(own, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(own)
        os.close(own)
    return True


def has_ended(descriptor: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


async def kill_and_wait(process: ProcessId, timeout_s: float, *, ask_s: float = 0.0) -> bool:
    """SIGKILL, then wait for the end; False when it outlives `timeout_s`.

    Args:
        ask_s: how long to wait after a SIGTERM first, for a process that has others to end.
    """
    descriptor = process.open()
    if descriptor is None:
        return True
    try:
        with contextlib.suppress(ProcessLookupError):
            if ask_s:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                if await wait_ended(descriptor, ask_s):
                    return True
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return await wait_ended(descriptor, timeout_s)
    finally:
        os.close(descriptor)


def descendants(pid: int) -> list[ProcessId]:
    """The processes below `pid` as they are now, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                text = (folder / "stat").read_text(errors="replace")
                children.setdefault(int(text[text.rfind(")") + 2 :].split()[1]), []).append(int(folder.name))
    found: list[ProcessId] = []
    below = list(children.get(pid, ()))
    while below:
        child = below.pop(0)
        below += children.get(child, ())
        process = ProcessId.of(child)
        if process is not None:
            found.append(process)
    return found


def kill_launching(pid: int) -> None:
    """Kill our child `pid`, which may be in the middle of setting up a namespace, and what it has started so far.

    Bubblewrap's inner process waits for its outer one before it arranges to die with it; killing the outer one alone in
    that moment leaves the inner one waiting for ever. So the outer one is held first, and the inner one goes first.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        _wait_held(pid)
        for process in reversed(descendants(pid)):
            descriptor = process.open()
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
        os.kill(pid, signal.SIGKILL)


def _wait_held(pid: int) -> None:
    """Wait, for 50 ms at most, until a process that was sent SIGSTOP has stopped and can't start others."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        if text[text.rfind(")") + 2 :][:1] in "TtZX":
            return
        time.sleep(0.0005)
