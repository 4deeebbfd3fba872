"""Forks of local sandboxes: what is copied, what is not, and what a hostile workdir can do."""

import asyncio
import os
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox
from orchard_agent.local.copying import MAX_DEPTH, copy_tree
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import SandboxCreateError, SandboxGone
from orchard_api.powers import Fork
from orchard_api.sandbox import SandboxSpec


async def test_files_are_copied_and_then_apart(environment: LocalEnvironment, find_inside) -> None:
    spec = SandboxSpec(env={"COLOUR": "green"}, labels={"kind": "forked"}, workdir="/workspace/deep/er")
    box = await environment.create(spec, sandbox_id="first")
    assert isinstance(box, Fork)
    script = "echo one > a; mkdir -p d/e; echo two > d/e/b; ln -s a link; ln a hard; chmod 751 d; echo x > /tmp/t"
    assert (await box.exec(f"{script}; echo h > ~/home; mkfifo pipe; truncate -s 1G hole")).ok
    await box.start_process("sleep 4250")
    left, right = await box.fork(["left", "right"])
    for fork in (left, right):
        seen = await fork.exec("pwd; cat a d/e/b /tmp/t ~/home; readlink link; stat -c '%a %h %U' d a; echo $COLOUR")
        assert seen.stdout_text.splitlines() == [
            *("/workspace/deep/er", "one", "two", "x", "h", "a"),
            *("751 3 agent", "644 2 agent", "green"),
        ]
        assert (await fork.exec("stat -c '%s %b' hole")).stdout_text == "1073741824 0\n"
        assert not (await fork.exec("test -e pipe")).ok
        assert await find_inside(fork, "sleep 4250") == []
    await left.write_file("a", b"changed\n")
    assert await box.read_file("a") == b"one\n"
    assert await right.read_file("a") == b"one\n"
    assert {info.sandbox_id for info in await environment.list({"kind": "forked"})} == {"first", "left", "right"}
    for sandbox in (box, left, right):
        await sandbox.aclose()


async def test_all_or_none(environment: LocalEnvironment) -> None:
    box = await environment.create(SandboxSpec(), sandbox_id="first")
    other = await environment.create(SandboxSpec(), sandbox_id="taken")
    with pytest.raises(SandboxCreateError):
        await box.fork(["new", "taken"])
    with pytest.raises(SandboxCreateError):
        await box.fork(["same", "same"])
    assert {info.sandbox_id for info in await environment.list()} == {"first", "taken"}
    assert (await other.exec("echo well")).stdout_text == "well\n"
    await environment.delete("first")
    with pytest.raises(SandboxGone):
        await box.fork(["late"])
    for sandbox in (box, other):
        await sandbox.aclose()


async def test_a_cancelled_fork_leaves_nothing(environment: LocalEnvironment) -> None:
    box = await environment.create(SandboxSpec(), sandbox_id="first")
    assert (await box.exec("head -c 100000000 /dev/zero > big", timeout_s=60)).ok
    for wait_s in (0.0, 0.02, 0.05):
        task = asyncio.ensure_future(box.fork(["one", "two"]))
        await asyncio.sleep(wait_s)
        task.cancel()
        try:
            made = await task
        except asyncio.CancelledError:
            made = []
        assert made == []
        assert [info.sandbox_id for info in await environment.list()] == ["first"]
    await box.aclose()


async def test_a_workdir_that_changes_while_it_is_copied_leads_nowhere(
    environment: LocalEnvironment, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "f").write_text("secret")
    box: AgentSandbox = await environment.create(SandboxSpec(), sandbox_id="first")
    swap = f"while :; do mkdir -p d; echo own > d/f; rm -rf d; ln -sfn {secret} d; rm -f d; done"
    await box.start_process(swap)
    for turn in range(5):
        (fork,) = await box.fork([f"fork{turn}"])
        found = await fork.exec("find . -type f -exec cat {} +; find . -type l")
        assert "secret\n" not in found.stdout_text.replace("own\n", "")
        await fork.aclose()
        await environment.delete(f"fork{turn}")
    await box.aclose()


def test_depth_and_links(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "dangling").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    copy_tree(source, target)
    assert (target / "dangling").is_symlink()
    assert sorted(path.name for path in target.iterdir()) == ["dangling"]
    deep = source
    for _ in range(MAX_DEPTH + 2):
        deep /= "d"
    deep.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="nested deeper"):
        copy_tree(source, tmp_path / "other")
