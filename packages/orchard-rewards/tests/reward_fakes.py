"""A stand-in for a sandbox: plain folders and processes of this machine. Nothing is isolated."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchard_api.episode import Episode
from orchard_api.errors import SandboxFileError
from orchard_api.messages import Message
from orchard_api.sandbox import ExecResult, FileInfo, TarReport
from orchard_api.task import Check, Task
from orchard_api.trajectory import Trajectory, Turn

PATH = "/usr/local/bin:/usr/bin:/bin"


class FolderSandbox:
    """Absolute paths below `top` are used as they are; `/logs/...` and `/tests` are mapped below `top`."""

    sandbox_id = "folder"

    def __init__(self, top: Path) -> None:
        self.top = top
        self.work = top / "work"
        self.home = top / "home"
        self.tmp = top / "tmp"
        for folder in (self.work, self.home, self.tmp):
            folder.mkdir()
        self.kills = 0
        self.execs: list[dict[str, Any]] = []
        self.removed: list[str] = []
        self.skipped: tuple[tuple[str, str], ...] = ()

    def path(self, path: str) -> Path:
        if path.startswith(str(self.top)):
            return Path(path)
        return self.top / path.lstrip("/") if path.startswith("/") else self.work / path

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        output_limit: int = 1 << 20,
    ) -> ExecResult:
        self.execs.append({"command": command, "env": dict(env or {}), "timeout_s": timeout_s})
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {"PATH": PATH, "HOME": str(self.home), "FROM_SPEC": "1", **(env or {})}
        start = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.work,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        output = asyncio.ensure_future(process.communicate())
        ended: object = None
        try:
            ended, _ = await asyncio.wait({output}, timeout=timeout_s)
        finally:
            if not ended:
                os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait({output})
        out, err = await output
        if not ended:
            return ExecResult(exit_code=None, signal=9, timed_out=True, stdout=out, stderr=err)
        code = process.returncode
        assert code is not None
        return ExecResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=out[-output_limit:],
            stderr=err[-output_limit:],
            duration_s=time.monotonic() - start,
        )

    async def kill_processes(self) -> int:
        self.kills += 1
        return 0

    async def make_dir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        try:
            self.path(path).mkdir(mode=mode, parents=parents, exist_ok=parents)
        except FileExistsError as error:
            raise SandboxFileError(f"{path} exists", reason="exists", path=path) from error

    async def put_tar(self, path: str, data: bytes) -> TarReport:
        target = self.path(path)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(target, filter="data")
            return TarReport(delivered=len(archive.getnames()), skipped=self.skipped)

    async def read_file(self, path: str, *, limit: int = 1 << 26) -> bytes:
        file = self.path(path)
        if not file.exists():
            raise SandboxFileError(f"{path} does not exist", reason="not_found", path=path)
        if not file.is_file():
            raise SandboxFileError(f"{path} is not a regular file", reason="not_regular", path=path)
        if file.stat().st_size > limit:
            raise SandboxFileError(f"{path} is too large", reason="too_large", path=path)
        return file.read_bytes()

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        file = self.path(path)
        if not file.exists() and not file.is_symlink():
            raise SandboxFileError(f"{path} does not exist", reason="not_found", path=path)
        kind = "symlink" if file.is_symlink() and not follow else "directory" if file.is_dir() else "file"
        return FileInfo(name=file.name, kind=kind, size=0, mode=0, modified=0.0, uid=1000)

    async def list_dir(self, path: str, *, limit: int = 100_000) -> list[str]:
        return sorted(file.name for file in self.path(path).iterdir())

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        file = self.path(path)
        self.removed.append(path)
        if file.is_symlink() or file.is_file():
            file.unlink()
        elif file.is_dir():
            shutil.rmtree(file)
        else:
            raise SandboxFileError(f"{path} does not exist", reason="not_found", path=path)


def episode(sandbox: Any, check: Check | None = None, *, answer: str = "", expected: str | None = None) -> Episode:
    """An episode that has just been played by version 4 of a policy."""
    turn = Turn(
        index=0,
        parent=None,
        messages=(),
        response=Message(role="assistant"),
        response_ids=(1,),
        logprobs=(-1.0,),
        versions=(4,),
        exact=True,
    )
    return Episode(
        episode_id="e",
        group_id="g",
        task=Task(task_id="t", instruction="x", check=check, expected=expected),
        trajectory=Trajectory(turns=(turn,)),
        outcome="submitted",
        answer=answer,
        sandbox=sandbox,
    )
