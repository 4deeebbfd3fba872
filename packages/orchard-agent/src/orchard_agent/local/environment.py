"""`LocalEnvironment`: sandboxes as processes of this machine, each in namespaces of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from orchard_agent.local import records
from orchard_agent.local.base_folder import BaseFolder, default_base
from orchard_agent.local.binary import agent_binary, architecture
from orchard_agent.local.box_folder import FRESH, groups_of, make_box_folder, owner_of, remove_box
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.control_groups import enter_group, make_group, own_group
from orchard_agent.local.copying import copy_tree
from orchard_agent.local.isolation import Enclosure, Isolation
from orchard_agent.local.janitor import Janitor
from orchard_agent.local.launch import LaunchedAgent, launch
from orchard_agent.local.limits import Limits, find_limits, make_groups
from orchard_agent.local.processes import ProcessId, kill_and_wait
from orchard_agent.local.records import Record, checked_id
from orchard_agent.local.root_folder import (
    AGENT_PATH,
    HOME,
    INSIDE_USER,
    WORKSPACE,
    WRITABLE,
    Bind,
    RootFolder,
    make_root_folder,
)
from orchard_agent.local.sandbox import LocalSandbox
from orchard_agent.local.selection import choose_isolation
from orchard_agent.local.transport import LocalTransport
from orchard_api.environment import Capabilities
from orchard_api.errors import (
    CapabilityError,
    InfraError,
    SandboxCreateError,
    SandboxDeleteError,
    SandboxGone,
    StartTimeoutError,
    TransportError,
)
from orchard_api.sandbox import SandboxInfo, SandboxSpec

T = TypeVar("T")
logger = logging.getLogger("orchard_agent.local")
_KILL_S = 10.0
_ASK_S = 5.0


class LocalEnvironment:
    """See `orchard_api.Environment`. Its sandboxes end with this process, whichever way it ends."""

    Config = LocalConfig

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._base: BaseFolder | None = None
        self._isolation: Isolation | None = None
        self._roots: dict[bool, RootFolder] = {}
        self._mine: dict[str, LaunchedAgent] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._janitor: Janitor | None = None
        self._groups: Path | None = None
        self._limits = Limits(version=0)
        self._owner = ""
        self.capabilities = Capabilities(
            networks=frozenset({"none", "full"}),
            powers=frozenset({"StreamingExec", "Processes", "Pty", "Ports", "ReversePorts", "Fork"}),
            programs=True,
            isolation="bubblewrap or unshare; see `orchard doctor`",
        )

    async def start(self) -> None:
        """See `Environment`. Chooses the isolation by trying it, and removes what dead clients left."""
        if self._base is not None:
            return
        agent = agent_binary()
        uid = self._config.uid if os.geteuid() == 0 else None
        self._base = BaseFolder(self._config.base or default_base(), group=uid)
        try:
            limits = await asyncio.to_thread(find_limits, self._config.limits)
            if limits is None:
                raise InfraError(
                    'limits = "cgroups" was chosen, and no control group can be made here',
                    hint='set limits = "auto" under [environment], or run as root with a writable /sys/fs/cgroup',
                )
            self._limits = limits
            root = await self._root(network=False)
            self._isolation = await asyncio.to_thread(choose_isolation, self._config, uid=uid, root=root)
        except BaseException:
            self._base.close()
            self._base = None
            raise
        self.capabilities = replace(
            self.capabilities,
            architectures=frozenset({architecture()}),
            limits=self._limits.enforced,
            isolation=self._isolation.text,
        )
        if self._isolation.mode == "none":
            logger.warning("local sandboxes are NOT isolated (allow_unisolated): %s", self._isolation.text)
        self._groups = own_group()
        me = ProcessId.of(os.getpid())
        self._owner = f"{os.getpid()}.{me.started if me else 0}.{secrets.token_hex(4)}"
        await asyncio.to_thread(self._sweep)
        self._janitor = Janitor(agent=agent, boxes=self._base.boxes, owner=self._owner)

    async def _root(self, *, network: bool) -> RootFolder:
        if network not in self._roots:
            assert self._base is not None
            self._roots[network] = await asyncio.to_thread(
                make_root_folder,
                self._base.roots,
                agent=agent_binary(),
                network=network,
                read_only=self._config.read_only,
            )
        return self._roots[network]

    def _sweep(self) -> None:
        """Remove folders of sandboxes whose client and whose processes are both gone."""
        for folder in [*self._folders(), *self._ready()[0].boxes.glob(f"{FRESH}*")]:
            owner = owner_of(folder) or folder.name.removeprefix(FRESH)
            pid, _, rest = owner.partition(".")
            started = rest.partition(".")[0]
            if not (pid.isdigit() and started.isdigit()) or ProcessId(pid=int(pid), started=int(started)).alive:
                continue
            record = Record.read(folder)
            if record is None or not record.process.alive:
                try:
                    remove_box(folder)
                except OSError as error:
                    logger.warning("the folder of dead sandbox %s can't be removed: %s", folder.name, error)

    def _folders(self) -> list[Path]:
        base = self._ready()[0]
        with contextlib.suppress(FileNotFoundError):
            return sorted(path for path in base.boxes.iterdir() if path.is_dir() and not path.name.startswith("."))
        return []

    def _ready(self) -> tuple[BaseFolder, Isolation]:
        if self._base is None or self._isolation is None:
            raise InfraError("the local environment is not started", hint="await environment.start() first")
        return self._base, self._isolation

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._locks.setdefault(sandbox_id, asyncio.Lock())

    async def create(self, spec: SandboxSpec, *, sandbox_id: str) -> LocalSandbox:
        """See `Environment`."""
        base, isolation = self._ready()
        self._check(spec, isolation)
        folder = base.boxes / checked_id(sandbox_id)
        async with self._lock(sandbox_id):
            existing = Record.read(folder)
            if existing is not None and existing.process.alive:
                return await self.attach(sandbox_id)
            if existing is not None:
                await self._remove(sandbox_id, folder)
            return await self._start(spec, sandbox_id, folder, isolation, source=None)

    async def _start(
        self, spec: SandboxSpec, sandbox_id: str, folder: Path, isolation: Isolation, *, source: Path | None
    ) -> LocalSandbox:
        """Make a sandbox, with the files of another one's folder where one is given; nothing is left on failure."""
        name = f"orchard-{secrets.token_hex(8)}"
        limits = self._limits.groups(spec.resources, name)
        group = self._groups / name if self._groups is not None and isolation.uid is not None else None
        if group in limits:
            # A group of version 2 with limits is the one of its commands' leaves as well.
            group = None
        self._make_folder(sandbox_id, folder, isolation.uid, [*([group] if group else []), *limits])
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                if source is not None:
                    await _to_the_end(lambda: asyncio.to_thread(_copy_files, source, folder))
                return await self._make(spec, sandbox_id, folder, isolation, group, limits)
        except BaseException as error:
            await self._undo(sandbox_id, folder)
            if isinstance(error, TimeoutError):
                raise StartTimeoutError(f"sandbox {sandbox_id} was not ready in {spec.start_timeout_s:g} s") from None
            if isinstance(error, OSError):
                raise SandboxCreateError(f"sandbox {sandbox_id} could not be made: {error}") from error
            if isinstance(error, (TransportError, SandboxGone)):
                raise SandboxCreateError(f"the agent of sandbox {sandbox_id} does not answer: {error}") from error
            raise

    async def _fork(self, source_id: str, sandbox_ids: Sequence[str]) -> Sequence[LocalSandbox]:
        base, isolation = self._ready()
        source = base.boxes / checked_id(source_id)
        record = Record.read(source)
        if record is None or not record.process.alive:
            raise SandboxGone(f"sandbox {source_id} is gone: there is nothing to fork")
        if len(set(sandbox_ids)) != len(sandbox_ids):
            raise SandboxCreateError("the ids of forks must differ from each other")
        spec = record.sandbox_spec()
        self._check(spec, isolation)

        async def one(sandbox_id: str) -> LocalSandbox:
            async with self._lock(sandbox_id):
                return await self._start(spec, sandbox_id, base.boxes / sandbox_id, isolation, source=source)

        tasks = [asyncio.ensure_future(one(checked_id(sandbox_id))) for sandbox_id in sandbox_ids]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            made = await _to_the_end(lambda: asyncio.gather(*tasks, return_exceptions=True))
            for sandbox in made:
                if isinstance(sandbox, LocalSandbox):
                    await sandbox.aclose()
                    await self._undo(sandbox.sandbox_id, base.boxes / sandbox.sandbox_id)
            raise

    def _check(self, spec: SandboxSpec, isolation: Isolation) -> None:
        problems = self.capabilities.missing(spec)
        if spec.extra:
            problems.append(f"extra options {', '.join(sorted(spec.extra))}, which the local backend does not know")
        if isolation.mode == "none" and spec.workdir is not None:
            problems.append(f"working directory {spec.workdir}; unisolated sandboxes only have their default")
        if problems:
            raise CapabilityError("the local backend can't give " + "; nor ".join(problems))

    async def _make(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        folder: Path,
        isolation: Isolation,
        group: Path | None,
        limits: Mapping[Path, Mapping[str, str]],
    ) -> LocalSandbox:
        root = await self._root(network=spec.network.mode == "full")
        workdir, enclosure = self._enclosure(spec, folder, isolation, root)
        token = secrets.token_urlsafe(32)
        argv = isolation.argv(enclosure, [AGENT_PATH, "serve", "-listen", "fd:{listen}", "-settings-fd", "{settings}"])
        settings = self._settings(spec, workdir, token, isolation)
        if group is not None and isolation.uid is not None:
            make_group(group, uid=isolation.uid)
        make_groups(limits)
        agent = await launch(folder, argv, settings, timeout_s=spec.start_timeout_s, group=group)
        self._mine[sandbox_id] = agent
        record = Record(
            sandbox_id=sandbox_id,
            token=token,
            process=agent.process,
            owner=self._owner,
            created_at=time.time(),
            ttl_s=spec.ttl_s,
            workdir=workdir,
            isolation=isolation.mode,
            labels=dict(spec.labels),
            spec=asdict(spec),
        )
        sandbox = self._handle(record, folder)
        try:
            if group is None and not limits:
                await sandbox.wait_ready()
            else:
                # The kernel takes milliseconds of waiting to move a process.
                await asyncio.gather(
                    _to_the_end(lambda: asyncio.to_thread(_enter, group, limits, agent.process.pid)),
                    sandbox.wait_ready(),
                )
            record.write(folder)
        except BaseException:
            await sandbox.aclose()
            raise
        return sandbox

    def _make_folder(self, sandbox_id: str, folder: Path, uid: int | None, groups: Sequence[Path]) -> None:
        try:
            make_box_folder(folder, owner=self._owner, groups=groups, uid=uid)
        except FileExistsError:
            raise SandboxCreateError(
                f"sandbox {sandbox_id} is being made by another process, or its creation never ended",
                hint="delete it, or use another id",
            ) from None
        except OSError as error:
            raise SandboxCreateError(f"sandbox {sandbox_id} could not be made: {error}") from error

    def _enclosure(
        self, spec: SandboxSpec, folder: Path, isolation: Isolation, root: RootFolder
    ) -> tuple[str, Enclosure]:
        network = spec.network.mode == "full"
        if isolation.mode == "none":
            return str(folder / "workspace"), Enclosure(root=str(root.path), binds=(), network=True, workdir="/")
        binds = [*root.binds]
        binds += [Bind(source=str(folder / name), target=inside, writable=True) for inside, name in WRITABLE.items()]
        workdir = posixpath.normpath(spec.workdir or WORKSPACE)
        if not workdir.startswith("/") or workdir == "/":
            raise CapabilityError(f"working directory {spec.workdir!r}: an absolute path below / is needed")
        above = next((inside for inside in WRITABLE if workdir == inside or workdir.startswith(inside + "/")), None)
        if above is None:
            root.add_mount_point(workdir)
            binds.append(Bind(source=str(folder / "workspace"), target=workdir, writable=True))
        elif workdir != above:
            here = folder / WRITABLE[above]
            for part in Path(workdir).relative_to(above).parts:
                here /= part
                if here.is_dir():
                    # A fork has it already.
                    continue
                here.mkdir()
                if isolation.uid is not None:
                    os.chown(here, isolation.uid, isolation.uid)
        return workdir, Enclosure(
            root=str(root.path), binds=tuple(binds), network=network, workdir=workdir, shm_mb=self._config.shm_mb
        )

    def _settings(self, spec: SandboxSpec, workdir: str, token: str, isolation: Isolation) -> dict[str, Any]:
        home = str(Path(workdir).parent / "home") if isolation.mode == "none" else HOME
        own = {"HOME": home, "USER": INSIDE_USER, "LOGNAME": INSIDE_USER, "LANG": "C.UTF-8"}
        if isolation.mode == "none":
            own["TMPDIR"] = str(Path(workdir).parent / "tmp")
        return {
            "token": token,
            "workdir": workdir,
            "env": {**own, **self._config.env, **spec.env},
            "ttl_s": spec.ttl_s,
            "ignore_term": isolation.mode != "none",
            "file_size_bytes": (self._config.file_size_mb or 0) << 20,
            "open_files": self._config.open_files or 0,
            **self._limits.rlimits(spec.resources),
            "programs": None if spec.programs is None else [asdict(program) for program in spec.programs],
        }

    def _handle(self, record: Record, folder: Path) -> LocalSandbox:
        agent = self._mine.get(record.sandbox_id)
        transport = LocalTransport(folder / records.SOCKET, record=record, agent=agent)
        return LocalSandbox(
            transport,
            token=record.token,
            info=record.info(folder),
            fork=self._fork,
            memory_group=_memory_group(record, folder),
        )

    async def _undo(self, sandbox_id: str, folder: Path) -> None:
        """Leave nothing of a creation that failed or was cancelled, however often it is cancelled meanwhile."""
        task = asyncio.ensure_future(self._remove(sandbox_id, folder))
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.wait([task]))
        if (error := task.exception()) is not None:
            logger.warning("what is left of sandbox %s can't be removed: %s", sandbox_id, error)

    async def attach(self, sandbox_id: str) -> LocalSandbox:
        """See `Environment`."""
        base, _ = self._ready()
        folder = base.boxes / checked_id(sandbox_id)
        record = Record.read(folder)
        if record is None:
            raise SandboxGone(f"there is no local sandbox {sandbox_id}")
        if not record.process.alive:
            raise SandboxGone(f"sandbox {sandbox_id} is gone: its processes have ended")
        return self._handle(record, folder)

    async def list(self, labels: Mapping[str, str] = MappingProxyType({})) -> Sequence[SandboxInfo]:
        """See `Environment`."""
        found: list[SandboxInfo] = []
        for folder in self._folders():
            record = Record.read(folder)
            info = record.info(folder) if record is not None else records.info_without_record(folder)
            if info is not None and labels.items() <= info.labels.items():
                found.append(info)
        return found

    async def renew(self, sandbox_id: str, ttl_s: float) -> None:
        """See `Environment`."""
        sandbox = await self.attach(sandbox_id)
        try:
            await sandbox.renew(ttl_s)
        finally:
            await sandbox.aclose()

    async def delete(self, sandbox_id: str) -> None:
        """See `Environment`."""
        base, _ = self._ready()
        folder = base.boxes / checked_id(sandbox_id)
        async with self._lock(sandbox_id):
            await self._remove(sandbox_id, folder)
        self._locks.pop(sandbox_id, None)

    async def _remove(self, sandbox_id: str, folder: Path) -> None:
        agent = self._mine.get(sandbox_id)
        record = Record.read(folder)
        ask_s = _ASK_S if self._ready()[1].mode == "none" else 0.0
        if agent is not None:
            ended = await agent.kill(_KILL_S, ask_s=ask_s)
        else:
            ended = record is None or await kill_and_wait(record.process, _KILL_S, ask_s=ask_s)
        if not ended:
            raise self._not_deleted(sandbox_id, folder, f"its processes outlived SIGKILL by {_KILL_S:.0f} s")
        self._mine.pop(sandbox_id, None)
        try:
            await asyncio.to_thread(remove_box, folder)
        except OSError as error:
            raise self._not_deleted(sandbox_id, folder, f"its folder can't be removed: {error}") from error

    def _not_deleted(self, sandbox_id: str, folder: Path, reason: str) -> SandboxDeleteError:
        with contextlib.suppress(OSError):
            (folder / records.FAILURE).write_text(reason)
        return SandboxDeleteError(f"sandbox {sandbox_id} could not be deleted: {reason}", hint=f"look at {folder}")

    async def aclose(self) -> None:
        """See `Environment`."""
        if self._base is None:
            return
        results = await asyncio.gather(*(self.delete(name) for name in list(self._mine)), return_exceptions=True)
        if self._janitor is not None:
            await self._janitor.aclose()
            self._janitor = None
        self._base.close()
        self._base = None
        self._roots.clear()
        if failures := [str(result) for result in results if isinstance(result, BaseException)]:
            raise SandboxDeleteError("; ".join(failures))


async def _to_the_end(step: Callable[[], Awaitable[T]]) -> T:
    """Wait for something that can't be stopped half-way, then be cancelled."""
    task = asyncio.ensure_future(step())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.wait([task]))
        raise


def _copy_files(source: Path, target: Path) -> None:
    for name in WRITABLE.values():
        copy_tree(source / name, target / name)


def _memory_group(record: Record, folder: Path) -> Path | None:
    """The control group that says whether memory ran out; None without a limit on it."""
    if record.sandbox_spec().resources.memory_mb is None:
        return None
    files = ("memory.oom_control", "memory.events")
    return next((group for group in groups_of(folder) if any((group / name).is_file() for name in files)), None)


def _enter(group: Path | None, limits: Mapping[Path, Mapping[str, str]], pid: int) -> None:
    for limiting in limits:
        enter_group(limiting, pid)
    if group is None:
        return
    try:
        enter_group(group, pid)
    except OSError as error:
        logger.warning("no control group for a sandbox; commands are killed by their marks instead: %s", error)
