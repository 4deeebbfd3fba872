"""Runs a task's check where the agent could not have written; what the rewards that run one have in common."""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from orchard_api.archive import TarWriter
from orchard_api.episode import Episode
from orchard_api.errors import GraderError, InfraError, SandboxFileError, SandboxRequestError
from orchard_api.sandbox import ExecResult, Sandbox
from orchard_api.task import Check, Task
from orchard_rewards.isolation import check_script, clean_environment
from orchard_rewards.substitution import FilledEnv, fill
from orchard_rewards.upload import add_check

logger = logging.getLogger("orchard_rewards")
_OUTPUT_LIMIT = 64 << 10
_SHOWN = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckFolder:
    """A check in its place, ready to run.

    Attributes:
        root: a fresh folder that only the check knows of; files of the verdict may be written to it.
        folder: where the check's files are.
    """

    sandbox: Sandbox
    check: Check
    env: FilledEnv
    root: str
    folder: str

    async def run(self, variables: Mapping[str, str] | None = None) -> ExecResult:
        """Run the check's command there.

        Args:
            variables: further environment variables; the check's own come after them.
        """
        return await self.sandbox.exec(
            ["/bin/sh", "-c", check_script(self.check.command, root=self.root, folder=self.folder)],
            env={**clean_environment(self.root), **(variables or {}), **self.env.values},
            timeout_s=self.check.timeout_s,
            output_limit=_OUTPUT_LIMIT,
        )

    def evidence(self, result: ExecResult) -> dict[str, object]:
        """What the check did, bounded, without values of this machine."""
        return {
            "command": self.check.command,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "stdout": tail(self.env.scrub(result.stdout_text), _SHOWN),
            "stderr": tail(self.env.scrub(result.stderr_text), _SHOWN),
            "duration_s": round(result.duration_s, 4),
        }


def check_problems(task: Task) -> list[str]:
    """What a task lacks for its check to be run; values of variables are not shown."""
    check = task.check
    if check is None:
        return [f"task {task.task_id} has no check to run"]
    problems = [
        f"task {task.task_id}: check.env {reference} is not set on this machine"
        for reference in fill(check.env, os.environ).unset
    ]
    if check.folder is not None and not check.folder.is_dir():
        problems.append(f"task {task.task_id}: the check's folder {check.folder} does not exist")
    return problems


def live_sandbox(episode: Episode) -> Sandbox:
    """The episode's sandbox.

    Raises:
        GraderError: it has none any more.
    """
    if episode.sandbox is None:
        raise GraderError("the episode has no live sandbox to check")
    return episode.sandbox


@asynccontextmanager
async def check_folder(episode: Episode, *, base: str) -> AsyncIterator[CheckFolder]:
    """Put the task's check in place once the agent's processes are gone; nothing of it is left afterwards.

    Args:
        base: where inside the check's folder is made.

    Raises:
        GraderError: the check can't be put in place or run.
    """
    check, sandbox = episode.task.check, live_sandbox(episode)
    if check is None:
        raise GraderError(f"task {episode.task.task_id} has no check")
    env = fill(check.env, os.environ)
    if env.unset:
        raise GraderError(f"check.env is not filled: {', '.join(env.unset)}")
    root = f"{base}/orchard-{secrets.token_hex(16)}"
    try:
        folder = await _put_in_place(sandbox, check, root)
        yield CheckFolder(sandbox=sandbox, check=check, env=env, root=root, folder=folder)
    except (SandboxFileError, SandboxRequestError) as error:
        raise GraderError(f"the check could not be run: {env.scrub(error.message)}") from error
    finally:
        await asyncio.shield(_clean(sandbox, [root] if check.target is None else [root, check.target]))


async def _put_in_place(sandbox: Sandbox, check: Check, root: str) -> str:
    data = _tar(check) if check.folder is None else await asyncio.to_thread(_tar, check)
    folder = check.target or f"{root}/check"
    await sandbox.kill_processes()
    if check.target is not None:
        await fresh_folder(sandbox, check.target)
    await sandbox.make_dir(root if check.target else folder, mode=0o700)
    if data:
        await put_files(sandbox, folder, data)
    return folder


def _tar(check: Check) -> bytes:
    """The check's files, or nothing."""
    if check.folder is None and not check.files:
        return b""
    writer = TarWriter()
    try:
        add_check(writer, check)
    except (OSError, ValueError) as error:
        raise GraderError(f"the check's files can't be used: {error}") from error
    return writer.getvalue()


async def put_files(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Unpack files of ours into a folder; that some are refused is no fault of the agent's.

    Raises:
        GraderError: some were.
    """
    report = await sandbox.put_tar(path, data)
    if report.skipped:
        name, reason = report.skipped[0]
        raise GraderError(f"{len(report.skipped)} of the check's files were refused, the first {name!r}: {reason}")


async def fresh_folder(sandbox: Sandbox, path: str) -> None:
    """Make an empty folder whatever is at its path; symlinks on the way that somebody but root made are replaced."""
    at = ""
    for part in posixpath.dirname(path).strip("/").split("/"):
        at = f"{at}/{part}"
        if at == "/":
            continue
        try:
            info = await sandbox.stat(at, follow=False)
        except SandboxFileError as error:
            if error.reason != "not_found":
                raise
        else:
            if info.kind == "directory" or (info.kind == "symlink" and info.uid == 0):
                continue
            await sandbox.remove(at)
        await sandbox.make_dir(at)
    await remove_tree(sandbox, path)
    await sandbox.make_dir(path)


async def remove_tree(sandbox: Sandbox, path: str) -> None:
    """Remove all that is at a path; a mount point stays as an empty folder."""
    try:
        await sandbox.remove(path, recursive=True)
    except SandboxFileError as error:
        if error.reason != "not_found" and await sandbox.list_dir(path, limit=1):
            raise


async def _clean(sandbox: Sandbox, paths: list[str]) -> None:
    try:
        for path in paths:
            await remove_tree(sandbox, path)
    except (InfraError, SandboxRequestError) as error:
        logger.warning("the check's folder could not be removed: %s", error)


def tail(text: str, limit: int) -> str:
    """The end of a text, with how much was before it."""
    return text if len(text) <= limit else f"[{len(text) - limit} characters before] {text[-limit:]}"
