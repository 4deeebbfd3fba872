"""Each distribution builds, and installs, imports and registers alone in a clean environment."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
NEED_EXTRAS = {"orchard_api.schema", "orchard_api.chat_template", "orchard_api.openai_http"}

pytestmark = [pytest.mark.wheels, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheelhouse")
    for package in PACKAGES:
        _run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT / "packages" / package)]
        )
    return folder


def _run(argv: list[str], **options: object) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return str(done.stdout)


def _module(package: str) -> str:
    return package.replace("-", "_")


@pytest.mark.parametrize("package", PACKAGES)
def test_it_has_what_a_package_needs(package: str) -> None:
    folder = ROOT / "packages" / package
    meta = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert meta["name"] == package
    assert meta["license"] == "MIT"
    assert (folder / "README.md").stat().st_size > 500
    assert (folder / "CHANGELOG.md").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    assert (folder / "src" / _module(package) / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_alone_installs_and_imports(package: str, wheelhouse: Path, tmp_path: Path) -> None:
    (wheel,) = wheelhouse.glob(f"{_module(package)}-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints]
    _run([*install, "--find-links", str(wheelhouse), str(wheel)])
    code = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({_module(package)!r})\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    if not module.name.endswith(('__main__', '.build', '.testing')) and not (module.name in EXTRA):\n"
        "        importlib.import_module(module.name)\n"
        "from orchard_api.plugins import plugin_host\n"
        "host = plugin_host()\n"
        "assert not host.registry.broken, host.registry.broken\n"
        "for entry in host.registry:\n"
        "    entry.config_model()\n"
        "print(sorted(f'{entry.kind}:{entry.name}' for entry in host.registry))\n"
    ).replace("EXTRA", f"{NEED_EXTRAS}" if package == "orchard-api" else "()")
    _run([python, "-W", "error", "-c", code], cwd=tmp_path)


def test_the_source_distribution_of_the_agent_has_its_go_sources(wheelhouse: Path) -> None:
    import tarfile

    (sdist,) = wheelhouse.glob("orchard_agent-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith(".go") for name in names)
    assert not any("_bin/orchard-agent" in name for name in names)


def test_the_agents_wheel_holds_both_architectures_and_runs_anywhere(wheelhouse: Path) -> None:
    (wheel,) = wheelhouse.glob("orchard_agent-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"amd64", "arm64"} <= {name.rpartition("-")[2] for name in names if "_bin/orchard-agent" in name}
