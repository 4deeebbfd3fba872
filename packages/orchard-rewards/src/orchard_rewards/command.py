"""The `command` reward: a check of the task's author, run where the agent could not have written."""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import secrets
from collections.abc import Mapping

from pydantic import Field

from orchard_api.archive import TarWriter
from orchard_api.episode import Episode, Score
from orchard_api.errors import GraderError, InfraError, SandboxFileError, SandboxRequestError
from orchard_api.registry import PluginConfig
from orchard_api.sandbox import ExecResult, Sandbox
from orchard_api.task import Check, Task
from orchard_rewards.isolation import check_script, clean_environment
from orchard_rewards.substitution import FilledEnv, fill
from orchard_rewards.upload import add_check
from orchard_rewards.verdict import VERIFIER_FOLDER, read_reward

logger = logging.getLogger("orchard_rewards")
_OUTPUT_LIMIT = 64 << 10
_SHOWN = 4000


class CommandConfig(PluginConfig):
    """Options of `command`."""

    key: str = Field(default="reward", description="which number of a reward.json object is the score")
    base: str = Field(default="/tmp", pattern=r"^(/[^/\n]+)+$", description="where inside the check's folder is made")


class CommandReward:
    """Runs `task.check` and takes its verdict.

    A check that reaches its timeout, or writes no verdict where it must write one, has said nothing about the agent:
    that is a `GraderError`, not a score of 0.
    """

    Config = CommandConfig

    def __init__(self, config: CommandConfig) -> None:
        self._config = config

    def missing(self, task: Task) -> list[str]:
        """See `orchard_api.Reward`; values of variables are not shown."""
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

    async def score(self, episode: Episode) -> Score:
        """See `orchard_api.Reward`."""
        check, sandbox = episode.task.check, episode.sandbox
        if check is None:
            raise GraderError(f"task {episode.task.task_id} has no check")
        if sandbox is None:
            raise GraderError("the episode has no live sandbox to check")
        env = fill(check.env, os.environ)
        if env.unset:
            raise GraderError(f"check.env is not filled: {', '.join(env.unset)}")
        root = f"{self._config.base}/orchard-{secrets.token_hex(16)}"
        try:
            result = await self._run(sandbox, check, env, root)
            values = await self._values(sandbox, check, result)
        except (SandboxFileError, SandboxRequestError) as error:
            raise GraderError(f"the check could not be run: {env.scrub(error.message)}") from error
        finally:
            await asyncio.shield(_clean(sandbox, [root] if check.target is None else [root, check.target]))
        return Score(
            name="command",
            value=self._pick(values),
            components=values if len(values) > 1 else {},
            evidence=_evidence(check, result, env),
            policy_version=episode.policy_version,
        )

    async def _run(self, sandbox: Sandbox, check: Check, env: FilledEnv, root: str) -> ExecResult:
        data = _tar(check) if check.folder is None else await asyncio.to_thread(_tar, check)
        folder = check.target or f"{root}/check"
        await sandbox.kill_processes()
        if check.target is not None:
            await _fresh(sandbox, check.target)
        await sandbox.make_dir(root if check.target else folder, mode=0o700)
        if data:
            await _put(sandbox, folder, data)
        if check.verdict == "reward_file":
            await _fresh(sandbox, VERIFIER_FOLDER)
        script = check_script(check.command, root=root, folder=folder)
        result = await sandbox.exec(
            ["/bin/sh", "-c", script],
            env={**clean_environment(root), **env.values},
            timeout_s=check.timeout_s,
            output_limit=_OUTPUT_LIMIT,
        )
        if result.timed_out:
            raise GraderError(
                f"the check reached its timeout of {check.timeout_s:g} s: {_tail(env.scrub(result.stdout_text), 500)}",
                hint="a check should bound the program under test itself, so that a slow one scores 0",
            )
        return result

    async def _values(self, sandbox: Sandbox, check: Check, result: ExecResult) -> Mapping[str, float]:
        if check.verdict == "exit_code":
            return {self._config.key: 1.0 if result.ok else 0.0}
        await sandbox.kill_processes()
        return await read_reward(sandbox)

    def _pick(self, values: Mapping[str, float]) -> float:
        if self._config.key in values:
            return values[self._config.key]
        if len(values) == 1:
            return next(iter(values.values()))
        raise GraderError(
            f"reward.json has no {self._config.key!r}; it has {', '.join(values)}",
            hint='say which one is the score: key = "..." in the reward\'s section',
        )


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


async def _put(sandbox: Sandbox, path: str, data: bytes) -> None:
    report = await sandbox.put_tar(path, data)
    if report.skipped:
        name, reason = report.skipped[0]
        raise GraderError(f"{len(report.skipped)} of the check's files were refused, the first {name!r}: {reason}")


async def _fresh(sandbox: Sandbox, path: str) -> None:
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
    await _remove(sandbox, path)
    await sandbox.make_dir(path)


async def _remove(sandbox: Sandbox, path: str) -> None:
    """Remove all that is at a path; a mount point stays as an empty folder."""
    try:
        await sandbox.remove(path, recursive=True)
    except SandboxFileError as error:
        if error.reason != "not_found" and await sandbox.list_dir(path, limit=1):
            raise


async def _clean(sandbox: Sandbox, paths: list[str]) -> None:
    try:
        for path in paths:
            await _remove(sandbox, path)
    except (InfraError, SandboxRequestError) as error:
        logger.warning("the check's folder could not be removed: %s", error)


def _evidence(check: Check, result: ExecResult, env: FilledEnv) -> dict[str, object]:
    return {
        "command": check.command,
        "verdict": check.verdict,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": _tail(env.scrub(result.stdout_text), _SHOWN),
        "stderr": _tail(env.scrub(result.stderr_text), _SHOWN),
        "duration_s": round(result.duration_s, 4),
    }


def _tail(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"[{len(text) - limit} characters before] {text[-limit:]}"
