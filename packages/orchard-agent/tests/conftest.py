"""Real sandboxes for the tests of this package; what they leave is an error."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchard_agent import AgentSandbox, build_binaries
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import SandboxGone
from orchard_api.sandbox import SandboxSpec

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def agent_is_current() -> None:
    """The binary under test is the one of these sources."""
    if not build_binaries.is_current(ROOT):
        try:
            build_binaries.build(ROOT)
        except build_binaries.BuildError as error:
            pytest.exit(f"the agent's binaries are not those of its sources; run `make agent` ({error})", returncode=2)


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder of sandboxes that everybody may pass through, as /tmp is."""
    above = Path(tempfile.mkdtemp(prefix="orchard-test-"))
    above.chmod(0o755)
    yield above / "base"
    left = sorted((above / "base" / "boxes").glob("*")) if (above / "base" / "boxes").is_dir() else []
    shutil.rmtree(above)
    assert not left, f"left behind: {left}"


@pytest.fixture
async def environments(base: Path) -> AsyncIterator[Callable[..., Awaitable[LocalEnvironment]]]:
    """Makes started environments that share one base folder."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**options: Any) -> LocalEnvironment:
            environment = LocalEnvironment(LocalConfig(**{"base": base, **options}))
            await environment.start()
            stack.push_async_callback(environment.aclose)
            return environment

        yield make


@pytest.fixture
async def environment(environments: Callable[..., Awaitable[LocalEnvironment]]) -> LocalEnvironment:
    return await environments()


@pytest.fixture
async def box(environment: LocalEnvironment) -> AsyncIterator[AgentSandbox]:
    """One sandbox."""
    sandbox = await environment.create(SandboxSpec(), sandbox_id=f"box-{secrets.token_hex(4)}")
    yield sandbox
    await sandbox.aclose()


@pytest.fixture
def find_inside() -> Callable[[AgentSandbox, str], Awaitable[list[str]]]:
    """Command lines inside that contain a text, those of the search left out."""

    async def find(sandbox: AgentSandbox, text: str) -> list[str]:
        result = await sandbox.exec(["ps", "-eo", "pid=,stat=,args="])
        return [line for line in result.stdout_text.splitlines() if text in line]

    return find


def processes_with(text: str, file: str = "cmdline") -> list[int]:
    """Pids of this machine whose command line, or another of their files in /proc, contains a text."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / file).read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


@pytest.fixture
def host_processes() -> Callable[[str], list[int]]:
    return processes_with


@pytest.fixture
def enclosed_processes(base: Path) -> Callable[[], list[int]]:
    """Pids of this machine that run in a sandbox of the test's base folder: its folders are mounted there."""
    return lambda: processes_with(f"{base.parent.name}/base/boxes", "mountinfo")


@pytest.fixture
def is_gone() -> Callable[[AgentSandbox], Awaitable[bool]]:
    async def check(sandbox: AgentSandbox) -> bool:
        try:
            await sandbox.exec("true", timeout_s=5)
        except SandboxGone:
            return True
        return False

    return check
