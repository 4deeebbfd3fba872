"""The list of programs that may run: by path, by content, and what happens to the others."""

import asyncio
import hashlib
from pathlib import Path

from orchard_agent.local.environment import LocalEnvironment
from orchard_api.sandbox import AllowedProgram, SandboxSpec

SHELL = str(Path("/bin/sh").resolve())
SLEEP = str(Path("/bin/sleep").resolve())


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


async def test_what_is_not_on_the_list_does_not_start(environment: LocalEnvironment) -> None:
    spec = SandboxSpec(programs=(AllowedProgram(path=SHELL, sha256=digest(SHELL)),))
    box = await environment.create(spec, sandbox_id="listed")
    assert (await box.exec("echo yes")).stdout_text == "yes\n"
    refused = await box.exec(["sleep", "1"])
    assert refused.exit_code == 126
    assert "not among the programs" in refused.stderr_text
    await box.aclose()


async def test_what_a_listed_program_starts_is_killed(environment: LocalEnvironment) -> None:
    spec = SandboxSpec(programs=(AllowedProgram(path=SHELL),))
    box = await environment.create(spec, sandbox_id="watched")
    loop = asyncio.get_running_loop()
    begin = loop.time()
    result = await box.exec("sleep 30; echo $?", timeout_s=20)
    assert result.stdout_text == "137\n"
    assert loop.time() - begin < 10
    assert (await box.status()).details["killed_programs"] >= 1
    assert (await box.exec(["/bin/sh", "-c", "echo still"])).stdout_text == "still\n"
    await box.aclose()


async def test_another_content_at_a_listed_path_is_refused(environment: LocalEnvironment) -> None:
    own = "/workspace/tool"
    spec = SandboxSpec(
        programs=(
            AllowedProgram(path=SHELL),
            AllowedProgram(path=own, sha256=digest(SLEEP)),
        )
    )
    box = await environment.create(spec, sandbox_id="hashed")
    await box.write_file(own, Path(SLEEP).read_bytes(), mode=0o755)
    assert (await box.exec([own, "0"])).exit_code == 0
    await box.write_file(own, Path(SLEEP).read_bytes() + b"x", mode=0o755)
    assert (await box.exec([own, "0"])).exit_code == 126
    assert (await box.exec(f"{own} 30; echo $?", timeout_s=20)).stdout_text == "137\n"
    await box.aclose()


async def test_without_a_list_everything_runs(environment: LocalEnvironment) -> None:
    box = await environment.create(SandboxSpec(), sandbox_id="free")
    assert (await box.exec(["sleep", "0"])).exit_code == 0
    assert (await box.status()).details["killed_programs"] == 0
    await box.aclose()


async def test_a_program_that_hides_is_killed(environment: LocalEnvironment) -> None:
    python = str(Path("/usr/bin/python3").resolve())
    spec = SandboxSpec(programs=(AllowedProgram(path=SHELL), AllowedProgram(path=python)))
    box = await environment.create(spec, sandbox_id="hidden")
    hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0); time.sleep(20)"
    result = await box.exec(["/usr/bin/python3", "-c", hide], timeout_s=15)
    assert result.signal == 9
    assert not result.timed_out
    await box.aclose()
