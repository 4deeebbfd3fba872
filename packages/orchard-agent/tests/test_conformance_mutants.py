"""Each check of the backend suites catches a backend with one fault: real sandboxes, wrong in one way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_agent.local.sandbox import LocalSandbox
from orchard_agent.ports import AgentReversePort, PortStream
from orchard_agent.terminal import AgentPty
from orchard_api.errors import InfraError, OverloadedError, SandboxFileError, SandboxGone, SandboxRequestError
from orchard_api.sandbox import ExecResult, NetworkRule, Resources, SandboxInfo, SandboxSpec, SandboxState
from orchard_api.testing import BackendSuite, checks_of

pytestmark = pytest.mark.slow


class Environment(LocalEnvironment):
    """A good backend, whose handles are of `box`."""

    box: type[LocalSandbox] = LocalSandbox

    def _handle(self, *args: Any) -> LocalSandbox:
        sandbox = super()._handle(*args)
        sandbox.__class__ = self.box
        sandbox.backend = self  # type: ignore[attr-defined]
        return sandbox


MUTANTS: dict[str, type[Environment]] = {}


def of_environment(check: str):
    """Register a class of overrides for an environment as the mutant of a check."""

    def register(overrides: type) -> type:
        assert check not in MUTANTS
        MUTANTS[check] = type(overrides.__name__, (overrides, Environment), {})
        return overrides

    return register


def of_box(check: str):
    """The same for a sandbox's handle."""

    def register(overrides: type) -> type:
        assert check not in MUTANTS
        box = type(overrides.__name__, (overrides, LocalSandbox), {"backend": None})
        MUTANTS[check] = type(overrides.__name__, (Environment,), {"box": box})
        return overrides

    return register


def spec_changed(check: str, **changes: Any) -> None:
    """A backend that forgets a part of what it is asked for."""

    class Forgetful:
        async def create(self, spec: SandboxSpec, *, sandbox_id: str) -> Any:
            return await super().create(replace(spec, **changes), sandbox_id=sandbox_id)  # type: ignore[misc]

    of_environment(check)(Forgetful)


def result_changed(check: str, change: Any) -> None:
    """A sandbox that tells something else of its commands."""

    class Liar:
        async def exec(self, *args: Any, **options: Any) -> ExecResult:
            return change(await super().exec(*args, **options))  # type: ignore[misc]

    of_box(check)(Liar)


def argument_changed(check: str, method: str, **changes: Any) -> None:
    """A sandbox that ignores an argument."""

    async def call(self: Any, *args: Any, **options: Any) -> Any:
        return await getattr(LocalSandbox, method)(self, *args, **{**options, **changes})

    of_box(check)(type("Deaf", (), {method: call}))


def class_changed(check: str, opener: str, base: type, **methods: Any) -> None:
    """A sandbox whose streams of a kind are wrong."""
    wrong = type("Wrong", (base,), methods)

    async def call(self: Any, *args: Any, **options: Any) -> Any:
        opened = await getattr(LocalSandbox, opener)(self, *args, **options)
        opened.__class__ = wrong
        return opened

    of_box(check)(type("Opener", (), {opener: call}))


async def nothing(*_args: Any, **_options: Any) -> None:
    """What a forgotten implementation does."""


# Environment


@of_box("a_sandbox_has_the_id_it_was_given")
class OwnId:
    sandbox_id = "an-id-of-its-own"


@of_environment("creating_twice_adopts_the_first")
class Replaces:
    async def create(self, spec, *, sandbox_id):
        await self.delete(sandbox_id)
        return await super().create(spec, sandbox_id=sandbox_id)


@of_environment("sandboxes_are_apart")
class One:
    async def create(self, spec, *, sandbox_id):
        return await super().create(spec, sandbox_id="the-one")


@of_environment("many_start_at_once")
class OneAtATime:
    busy = False

    async def create(self, spec, *, sandbox_id):
        if self.busy:
            raise OverloadedError("another sandbox is being made")
        self.busy = True
        try:
            return await super().create(spec, sandbox_id=sandbox_id)
        finally:
            self.busy = False


@of_environment("the_listing_shows_state_and_labels")
class NoLabels:
    async def list(self, labels=None):
        return [replace(info, labels={}) for info in await super().list(labels or {})]


@of_environment("the_listing_takes_all_labels_into_account")
class AnyLabel:
    async def list(self, labels=None):
        found = await super().list()
        return [info for info in found if not labels or set(info.labels.items()) & set(labels.items())]


@of_environment("attach_opens_the_same_machine")
class FreshAttach:
    async def attach(self, sandbox_id):
        await self.delete(sandbox_id)
        return await self.create(SandboxSpec(), sandbox_id=sandbox_id)


@of_box("closing_a_handle_leaves_the_machine")
class ClosesAll:
    async def aclose(self):
        await super().aclose()
        with contextlib.suppress(InfraError):
            await self.backend.delete(self.sandbox_id)


@of_environment("attaching_to_none_is_gone")
class VagueAttach:
    async def attach(self, sandbox_id):
        try:
            return await super().attach(sandbox_id)
        except SandboxGone:
            raise InfraError("something went wrong") from None


@of_environment("deleting_takes_it_off_the_listing")
class KeepsAll:
    delete = nothing


@of_environment("deleting_none_is_fine")
class StrictDelete:
    async def delete(self, sandbox_id):
        await self.attach(sandbox_id)
        await super().delete(sandbox_id)


@of_box("calls_on_a_deleted_sandbox_say_that_it_is_gone")
class VagueCalls:
    async def exec(self, *args, **options):
        try:
            return await super().exec(*args, **options)
        except SandboxGone:
            raise InfraError("something went wrong") from None


@of_box("a_running_command_ends_with_its_sandbox")
class GoneIsAnExit:
    async def exec(self, *args, **options):
        try:
            return await super().exec(*args, **options)
        except SandboxGone:
            return ExecResult(exit_code=137)


spec_changed("what_it_cannot_give_is_refused", network=NetworkRule())


@of_environment("a_cancelled_creation_leaves_nothing")
class Uncancellable:
    async def create(self, spec, *, sandbox_id):
        task = asyncio.ensure_future(super().create(spec, sandbox_id=sandbox_id))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise


spec_changed("a_sandbox_nobody_uses_ends_by_itself", ttl_s=3600.0)


@of_box("signs_of_life_keep_it")
class MakesUpStatus:
    async def status(self):
        return SandboxInfo(sandbox_id=self.sandbox_id, state=SandboxState.READY)


@of_environment("renewing_keeps_it")
class NeverRenews:
    renew = nothing


@of_environment("closing_the_environment_ends_what_it_made")
class LazyClose:
    closed = False

    async def aclose(self):
        if not self.closed:
            self.closed = True
            return
        await super().aclose()


@of_environment("the_powers_are_as_declared")
class Modest:
    async def start(self):
        await super().start()
        self.capabilities = replace(self.capabilities, powers=self.capabilities.powers - {"Pty"})


# Sandbox

result_changed("a_shell_line_runs", lambda r: replace(r, stdout=r.stdout + r.stderr, stderr=b""))


@of_box("an_argv_is_passed_exactly")
class JoinsArgv:
    async def exec(self, command, **options):
        return await super().exec(command if isinstance(command, str) else " ".join(command), **options)


result_changed("output_is_bytes", lambda r: replace(r, stdout=r.stdout.decode(errors="replace").encode()))


@of_box("stdin_arrives")
class CutsStdin:
    async def exec(self, command, *, stdin=None, **options):
        return await super().exec(command, stdin=stdin and stdin[:65536], **options)


@of_box("without_stdin_a_reader_sees_its_end")
class HoldsStdin:
    async def exec(self, command, **options):
        if command == "cat":
            return await super().exec("sleep 9 | cat", timeout_s=0.3)
        return await super().exec(command, **options)


@of_box("env_is_set")
class KeepsEnv:
    kept = None

    async def exec(self, command, *, env=None, **options):
        self.kept = {**(self.kept or {}), **(env or {})}
        return await super().exec(command, env=self.kept, **options)


spec_changed("env_of_the_spec_is_set", env={})


@of_environment("the_hosts_environment_is_not_seen")
class LeaksEnv:
    async def create(self, spec, *, sandbox_id):
        host = {name: value for name, value in os.environ.items() if name.startswith("ORCHARD_")}
        return await super().create(replace(spec, env=host), sandbox_id=sandbox_id)


argument_changed("cwd_is_where_it_runs", "exec", cwd=None)


@of_box("a_missing_cwd_is_a_request_error")
class CwdIsAnExit:
    async def exec(self, *args, **options):
        try:
            return await super().exec(*args, **options)
        except SandboxRequestError:
            return ExecResult(exit_code=1)


result_changed("a_missing_program_is_127", lambda r: replace(r, exit_code=1) if r.exit_code == 127 else r)
result_changed("a_signal_is_told", lambda r: replace(r, exit_code=128 + r.signal, signal=None) if r.signal else r)
result_changed("a_timeout_returns_what_was_written", lambda r: replace(r, stdout=b"") if r.timed_out else r)


@of_box("a_timeout_kills_all_that_it_started")
class LeavesChildren:
    async def exec(self, command, **options):
        result = await super().exec(command, **options)
        if result.timed_out:
            await super().exec("setsid sleep 7711 >/dev/null 2>&1 &")
        return result


@of_box("a_cancelled_call_kills_all_that_it_started")
class RunsOn:
    async def exec(self, *args, **options):
        task = asyncio.ensure_future(super().exec(*args, **options))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise


@of_box("a_background_child_holds_nobody_up")
class KillsChildren:
    async def exec(self, *args, **options):
        result = await super().exec(*args, **options)
        await self.kill_processes()
        return result


result_changed("output_is_bounded_and_keeps_both_ends", lambda r: replace(r, stdout=r.stdout[:500]))
argument_changed("a_key_runs_once", "exec", key=None)


@of_box("commands_run_side_by_side")
class OneCommand:
    busy = False

    async def exec(self, *args, **options):
        if self.busy:
            raise OverloadedError("another command runs")
        self.busy = True
        try:
            return await super().exec(*args, **options)
        finally:
            self.busy = False


result_changed("the_time_is_measured", lambda r: replace(r, duration_s=0.0))


@of_box("killing_processes_ends_daemons")
class KillsNobody:
    async def kill_processes(self):
        return 1


@of_box("status_tells_of_it")
class StatusOfAnother:
    async def status(self):
        return replace(await super().status(), sandbox_id="another")


@of_box("closing_twice_is_fine")
class ClosesOnce:
    closed = False

    async def aclose(self):
        if self.closed:
            raise InfraError("it is closed already")
        self.closed = True
        await super().aclose()


spec_changed("no_network_is_no_network", network=NetworkRule(mode="full"))


# Files


def read_changed(check: str, change: Any) -> None:
    """A sandbox that reads something else."""

    class Reader:
        async def read_file(self, *args: Any, **options: Any) -> bytes:
            return change(await super().read_file(*args, **options))  # type: ignore[misc]

    of_box(check)(Reader)


def refuse_empty(data: bytes) -> bytes:
    if not data:
        raise SandboxFileError("nothing there", reason="not_found", path="")
    return data


read_changed("bytes_come_back", lambda data: data.replace(b"\x00", b""))
read_changed("an_empty_file_comes_back", refuse_empty)


@of_box("a_command_sees_what_was_written")
class WritesElsewhere:
    async def write_file(self, path, data, **options):
        return await super().write_file(f"/tmp/{path}", data, **options)


argument_changed("a_part_is_read", "read_file", offset=0)
argument_changed("a_part_is_written", "write_file", offset=None)
argument_changed("a_shorter_file_replaces_a_longer_one", "write_file", offset=0)
argument_changed("parents_are_made_unless_not_wanted", "write_file", make_parents=True)
argument_changed("mode_is_set", "write_file", mode=None)


@of_box("a_limit_refuses_rather_than_cuts")
class Cuts:
    async def read_file(self, path, *, limit=64 << 20, **options):
        return (await super().read_file(path, **options))[:limit]


@of_box("what_is_not_there_is_not_found")
class NothingIsEmpty:
    async def read_file(self, path, **options):
        try:
            return await super().read_file(path, **options)
        except SandboxFileError:
            return b""


class Vague:
    async def read_file(self, path, **options):
        try:
            return await super().read_file(path, **options)
        except SandboxFileError as error:
            raise SandboxFileError("can't", reason="other", path=path) from error


of_box("a_fifo_holds_nobody_up")(Vague)
of_box("a_folder_is_no_file")(type("VagueToo", (Vague,), {}))


@of_box("streams_carry_large_files")
class FirstChunk:
    async def stream_file(self, *args, **options):
        async for chunk in super().stream_file(*args, **options):
            yield chunk
            return


def listing_changed(check: str, change: Any) -> None:
    """A sandbox that lists something else."""

    class Lister:
        async def list_dir(self, *args: Any, **options: Any) -> Any:
            return change(await super().list_dir(*args, **options))  # type: ignore[misc]

    of_box(check)(Lister)


listing_changed("a_listing_shows_everything", lambda found: [one for one in found if one.name[0] != "."])
listing_changed(
    "names_of_any_bytes_go_both_ways",
    lambda found: [replace(one, name=os.fsencode(one.name).decode(errors="replace")) for one in found],
)
argument_changed("stat_follows_unless_told", "stat", follow=True)
argument_changed("folders_are_made", "make_dir", parents=True)
argument_changed("removing_takes_what_it_is_told", "remove", recursive=True)


@of_box("removing_a_link_leaves_its_target")
class FollowsLinks:
    async def remove(self, path, *, recursive=False):
        await self.exec(f"rm -rf {path}/* {path}")


@of_box("a_tar_comes_back")
class DropsLinks:
    async def put_tar(self, path, data):
        report = await super().put_tar(path, data)
        await self.exec(f"find {path} -type l -delete")
        return report


@of_box("a_tar_lands_nowhere_else")
class FollowsTar:
    async def put_tar(self, path, data):
        report = await super().put_tar(path, data)
        await self.write_file("escaped", b"x")
        return report


# Powers


class Stream:
    """A wrapper of an exec's stream, to be wrong in one way."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __aiter__(self) -> Any:
        return self.real.__aiter__()

    @property
    def result(self) -> ExecResult:
        return self.real.result

    async def aclose(self) -> None:
        await self.real.aclose()


def stream_changed(check: str, wrapper: type[Stream]) -> None:
    async def stream_exec(self: Any, *args: Any, **options: Any) -> Stream:
        return wrapper(await LocalSandbox.stream_exec(self, *args, **options))

    of_box(check)(type("Streamer", (), {"stream_exec": stream_exec}))


class AllStdout(Stream):
    async def __aiter__(self):
        async for chunk in self.real:
            yield replace(chunk, stream=1)


class DropsSecond(Stream):
    async def __aiter__(self):
        number = 0
        async for chunk in self.real:
            number += 1
            if number != 2:
                yield chunk


class ReadsAhead(Stream):
    task = None

    async def __aiter__(self):
        chunks = aiter(self.real)
        first = await anext(chunks)

        async def drain():
            async for _ in chunks:
                pass

        self.task = asyncio.ensure_future(drain())
        yield first


class StaysOpen(Stream):
    aclose = nothing


class NeverTimedOut(Stream):
    @property
    def result(self):
        return replace(self.real.result, timed_out=False, exit_code=0)


stream_changed("streamed_output_comes_as_it_is_written", AllStdout)
stream_changed("streamed_output_is_whole", DropsSecond)
stream_changed("a_stream_nobody_reads_is_held_up", ReadsAhead)
stream_changed("closing_a_stream_kills_its_command", StaysOpen)
stream_changed("a_stream_times_out", NeverTimedOut)

argument_changed("output_is_read_from_an_offset", "read_output", offset=0)
argument_changed("waiting_for_output_returns_when_it_comes", "read_output", wait_s=0.0)
argument_changed("only_the_last_output_is_kept", "start_process", output_limit=1 << 30)


@of_box("a_process_is_found_by_another_client")
class ListsNone:
    async def list_processes(self):
        return []


@of_box("stdin_is_fed")
class DropsAByte:
    async def write_stdin(self, process_id, data, *, eof=False):
        await super().write_stdin(process_id, data[1:], eof=eof)


@of_box("signals_reach_a_process")
class AlwaysTerm:
    async def signal_process(self, process_id, signal, *, tree=False):
        await super().signal_process(process_id, 15, tree=tree)


argument_changed("a_signal_to_the_tree_reaches_all", "signal_process", tree=False)


@of_box("forgetting_kills")
class ForgetsOnly:
    forget_process = nothing


argument_changed("a_process_key_starts_once", "start_process", key=None)

argument_changed("a_terminal_is_a_terminal", "open_pty", rows=24, cols=80)


async def read_less(self: Any, limit: int) -> bytes:
    return (await AgentPty.read(self, limit))[:-1]


async def type_less(self: Any, data: bytes) -> None:
    await AgentPty.write(self, data.replace(b"l", b""))


async def only_term(self: Any, signal: int) -> None:
    await AgentPty.signal(self, 15)


async def at_once(self: Any, *, timeout_s: float) -> ExecResult:
    return ExecResult(exit_code=0)


class_changed("nothing_is_lost_at_a_terminals_end", "open_pty", AgentPty, read=read_less)
class_changed("what_is_typed_arrives", "open_pty", AgentPty, write=type_less)
class_changed("a_terminal_is_resized", "open_pty", AgentPty, resize=nothing)
class_changed("a_terminals_foreground_gets_signals", "open_pty", AgentPty, signal=only_term)
class_changed("closing_a_terminal_kills", "open_pty", AgentPty, aclose=nothing)
class_changed("waiting_for_a_terminal_has_a_deadline", "open_pty", AgentPty, wait=at_once)


async def write_less(self: Any, data: bytes) -> None:
    await PortStream.write(self, data[1:])


class_changed("a_port_inside_is_reached", "connect_port", PortStream, write=write_less)


@of_box("a_port_nobody_listens_on_is_refused")
class VaguePorts:
    async def connect_port(self, port):
        try:
            return await super().connect_port(port)
        except SandboxRequestError:
            raise InfraError("something went wrong") from None


argument_changed("a_sandbox_without_network_reaches_its_model", "serve_port", target_port=1)
class_changed("a_closed_reverse_port_leads_nowhere", "serve_port", AgentReversePort, aclose=nothing)


@of_box("a_taken_port_is_refused")
class AnotherPort:
    async def serve_port(self, port, **options):
        try:
            return await super().serve_port(port, **options)
        except SandboxRequestError:
            return await super().serve_port(0, **options)


@of_box("forks_have_the_files")
class ForgetsLinks:
    async def fork(self, sandbox_ids):
        forks = await super().fork(sandbox_ids)
        for fork in forks:
            await fork.exec("rm link")
        return forks


@of_box("forks_are_of_the_same_spec")
class ForksPlain:
    async def fork(self, sandbox_ids):
        return [await self.backend.create(SandboxSpec(), sandbox_id=name) for name in sandbox_ids]


@of_box("forks_are_all_or_none")
class ForksSome:
    async def fork(self, sandbox_ids):
        forks = []
        try:
            for name in sandbox_ids:
                forks += await super().fork([name])
        except BaseException:
            for fork in forks:
                await fork.aclose()
            raise
        return forks


spec_changed("only_listed_programs_run", programs=None)


@of_environment("another_content_does_not_run")
class PathsOnly:
    async def create(self, spec, *, sandbox_id):
        programs = spec.programs and tuple(replace(one, sha256=None) for one in spec.programs)
        return await super().create(replace(spec, programs=programs), sandbox_id=sandbox_id)


spec_changed("memory_is_limited", resources=Resources())
spec_changed("processes_are_limited", resources=Resources())
spec_changed("cpus_are_limited", resources=Resources())


def suite_of(environment_class: type[Environment]) -> BackendSuite:
    class Subject(BackendSuite):
        @contextlib.asynccontextmanager
        async def environment(self) -> AsyncIterator[LocalEnvironment]:
            above = Path(tempfile.mkdtemp(prefix="orchard-mutant-"))
            above.chmod(0o755)
            environment = environment_class(LocalConfig(base=above / "base"))
            await environment.start()
            try:
                yield environment
            finally:
                for box in list(environment._mine):
                    await LocalEnvironment.delete(environment, box)
                await LocalEnvironment.aclose(environment)
                shutil.rmtree(above)

    return Subject()


def test_there_is_a_mutant_for_each_check() -> None:
    assert set(MUTANTS) == set(checks_of(BackendSuite))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", sorted(MUTANTS))
def test_the_mutant_is_caught(check: str) -> None:
    with pytest.raises(BaseException) as caught:
        asyncio.run(suite_of(MUTANTS[check]).run_check(check))
    assert isinstance(caught.value, (AssertionError, pytest.fail.Exception, InfraError, SandboxRequestError)), caught
