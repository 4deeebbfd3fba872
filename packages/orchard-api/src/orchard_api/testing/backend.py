"""How suites of backends come to an environment and a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from orchard_api.environment import Environment
from orchard_api.sandbox import Sandbox, SandboxSpec
from orchard_api.testing.suite import Check, Suite, needs_of


@dataclass(kw_only=True, slots=True)
class Subject:
    """What a check of a backend works with.

    Attributes:
        closed: the check has closed the environment itself.
    """

    environment: Environment
    spec: SandboxSpec
    stack: contextlib.AsyncExitStack
    closed: bool = False

    def fresh_id(self) -> str:
        """An id that nobody has."""
        return f"suite-{secrets.token_hex(6)}"

    async def create(self, spec: SandboxSpec | None = None, *, sandbox_id: str | None = None) -> Any:
        """A sandbox that is deleted after the check."""
        name = sandbox_id or self.fresh_id()
        self.stack.push_async_callback(self._delete, name)
        sandbox = await self.environment.create(spec or self.spec, sandbox_id=name)
        self.stack.push_async_callback(sandbox.aclose)
        return sandbox

    async def _delete(self, sandbox_id: str) -> None:
        if not self.closed:
            await self.environment.delete(sandbox_id)


class BackendChecks(Suite):
    """Base of the suites of a backend; a check takes a `Subject`, or a `Sandbox` where its parameter is named `box`."""

    spec: SandboxSpec = SandboxSpec()
    """What sandboxes of the checks are made from: an image with a shell, where the backend needs to be told."""

    def environment(self) -> contextlib.AbstractAsyncContextManager[Environment]:
        """A started environment, closed in the end. Each check has one of its own."""
        raise NotImplementedError("say how the environment is made: an @asynccontextmanager named `environment`")

    async def run(self, check: Check) -> None:
        """Make an environment, and a sandbox where the check wants one."""
        async with self.environment() as environment, contextlib.AsyncExitStack() as stack:
            if missing := needs_of(check).missing(environment.capabilities):
                pytest.skip(f"this backend does not have: {missing}")
            subject = Subject(environment=environment, spec=self.spec, stack=stack)
            if "box" in inspect.signature(check).parameters:
                await check(await subject.create())
            else:
                await check(subject)


async def eventually(condition: Callable[[], Awaitable[bool]], *, within_s: float, what: str) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it does not within the time.
    """
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.05)


async def alive(box: Sandbox, marker: str) -> bool:
    """Whether a process inside has a text among its arguments."""
    # The bracket keeps the search from finding itself.
    pattern = f"[{marker[0]}]{marker[1:]}"
    script = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -q -- '{pattern}'"
    return (await box.exec(script, timeout_s=20)).exit_code == 0


async def lines(stream: AsyncIterator[bytes]) -> bytes:
    """All of a stream."""
    return b"".join([chunk async for chunk in stream])
