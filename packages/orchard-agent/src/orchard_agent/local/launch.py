"""Start one enclosed agent: the listening socket and the settings are handed down as descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard_agent.local.isolation import PATH
from orchard_agent.local.processes import ProcessId, kill_and_wait, kill_launching, wait_ended
from orchard_agent.local.records import LOG, SOCKET, read_text
from orchard_agent.streams import bind_unix
from orchard_api.errors import SandboxCreateError, StartTimeoutError

_BACKLOG = 256
_CREDENTIALS = struct.Struct("3i")
TTL_EXIT = 75
"""The agent's exit code when its TTL ran out."""


@dataclass(eq=False, kw_only=True, slots=True)
class LaunchedAgent:
    """A running agent and what holds it.

    Attributes:
        process: the agent itself, PID 1 of its namespace where it has one.
        launcher: our child, which ends with the agent and is reaped here.
        lifeline: our end of the settings stream; the agent ends when it closes.
    """

    process: ProcessId
    launcher: subprocess.Popen[bytes]
    lifeline: socket.socket

    def death(self) -> str | None:
        """Why it has ended, or None while it runs."""
        code = self.launcher.poll()
        if code is None and self.process.alive:
            return None
        if code == TTL_EXIT:
            return "its time to live ran out without a sign of life from a client"
        return "its agent has ended" if code is None else f"its agent has ended (exit code {code})"

    async def kill(self, timeout_s: float, *, ask_s: float = 0.0) -> bool:
        """End it and everything in it; False when something outlives `timeout_s`.

        The agent goes first: its end is that of its whole namespace, and its launcher then ends by itself.

        Args:
            ask_s: without a namespace, how long the agent may take to end its processes.
        """
        self.lifeline.close()
        return await kill_and_wait(self.process, timeout_s, ask_s=ask_s) and await _reap(self.launcher, timeout_s)


async def _reap(launcher: subprocess.Popen[bytes], timeout_s: float) -> bool:
    if launcher.poll() is not None:
        return True
    try:
        outer = os.pidfd_open(launcher.pid)
    except ProcessLookupError:
        return launcher.poll() is not None
    try:
        if not await wait_ended(outer, min(timeout_s, 1.0)):
            launcher.kill()
            await wait_ended(outer, timeout_s)
    finally:
        os.close(outer)
    return launcher.poll() is not None


async def launch(
    folder: Path,
    argv_of: Sequence[str],
    settings: Mapping[str, Any],
    *,
    timeout_s: float,
    group: Path | None = None,
) -> LaunchedAgent:
    """Start the agent and wait until it serves.

    Args:
        folder: the sandbox's folder on the host, for its socket and its log.
        group: a cgroup to hand down, which the agent is moved into afterwards.
        argv_of: the command line, with `{listen}` and `{settings}` where descriptor numbers go.
        settings: the agent's settings, its token among them; they pass through a descriptor, never an argv.

    Raises:
        StartTimeoutError: it did not answer in `timeout_s`.
        SandboxCreateError: it ended instead, with what it said.
    """
    ours, theirs = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    launcher: subprocess.Popen[bytes] | None = None
    try:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        launcher, handed = _spawn(folder, argv_of, listener, theirs, group)
        settings = {**settings, **handed}
        # Only the agent may hold it: a connection must be refused once the agent is gone.
        listener.close()
        theirs.close()
        async with asyncio.timeout(timeout_s):
            process = await _ready(ours, settings)
        if process is None:
            raise SandboxCreateError(f"the sandbox's agent did not start: {_log(folder) or 'it said nothing'}")
        return LaunchedAgent(process=process, launcher=launcher, lifeline=ours)
    except BaseException as error:
        ours.close()
        if launcher is not None:
            await _end_shielded(launcher)
        if isinstance(error, TimeoutError):
            raise StartTimeoutError(
                f"the sandbox's agent did not answer within {timeout_s:g} s: {_log(folder) or 'it said nothing'}"
            ) from None
        if isinstance(error, OSError):
            raise SandboxCreateError(f"the sandbox's agent could not be started: {error}") from error
        raise
    finally:
        listener.close()
        theirs.close()


def _spawn(
    folder: Path, argv_of: Sequence[str], listener: socket.socket, settings: socket.socket, group: Path | None
) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    bind_unix(listener, folder / SOCKET)
    listener.listen(_BACKLOG)
    numbers = {"fd:{listen}": f"fd:{listener.fileno()}", "{settings}": str(settings.fileno())}
    handed = {"listener": listener.fileno(), "settings": settings.fileno()}
    opened = None if group is None else os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if opened is not None:
            handed["group_fd"] = opened
        with open(folder / LOG, "wb") as log:
            launcher = subprocess.Popen(
                [numbers.get(part, part) for part in argv_of],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={"PATH": PATH},
                cwd="/",
                pass_fds=tuple(handed.values()),
                start_new_session=True,
            )
    finally:
        if opened is not None:
            os.close(opened)
    return launcher, {"group_fd": opened} if opened is not None else {}


async def _end_shielded(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is None:
        kill_launching(launcher.pid)
    task = asyncio.ensure_future(_reap(launcher, 5.0))
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


def _log(folder: Path) -> str:
    return read_text(folder / LOG).strip()[-1000:]


async def _ready(stream: socket.socket, settings: Mapping[str, Any]) -> ProcessId | None:
    """Send the settings and wait for the agent's word; the kernel says with it which process spoke."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(stream, json.dumps(settings).encode() + b"\n")
    except OSError:
        return None
    readable = asyncio.Event()
    loop.add_reader(stream, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(stream)
    try:
        data, ancillary, _, _ = stream.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
    except OSError:
        return None
    if not data:
        return None
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, _, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
            return ProcessId.of(pid)
    return None
