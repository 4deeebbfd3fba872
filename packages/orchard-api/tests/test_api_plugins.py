"""Plugins load one at a time; each kind of trouble has an error of its own that says what to do."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from orchard_api.errors import BrokenPluginError, DuplicatePluginError, UnknownPluginError
from orchard_api.plugins import PluginHost
from orchard_api.registry import PluginConfig, Registrar, Registry

GOOD = """
from orchard_api.hookspecs import DoctorCheck, hookimpl

@hookimpl
def orchard_register(registrar):
    registrar.add("environment", "{name}", "{module}:Thing", config="{module}:Config", summary="a thing")

@hookimpl
def orchard_doctor():
    return [DoctorCheck(name="{name}", ok=True, detail="fine")]

from orchard_api.registry import PluginConfig

class Config(PluginConfig):
    size: int = 1

class Thing:
    def __init__(self, config):
        self.config = config
"""


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(module: str, body: str, name: str | None = None) -> EntryPoint:
        (tmp_path / f"{module}.py").write_text(body)
        made.append(module)
        return EntryPoint(name=name or module, value=module, group="orchard")

    yield make
    for module in made:
        sys.modules.pop(module, None)


def test_one_that_fails_at_import_does_not_hide_the_others_and_names_itself(entry) -> None:
    host = PluginHost(
        [
            entry("aaa_broken", "import no_such_module_at_all"),
            entry("bbb_good", GOOD.format(name="good", module="bbb_good")),
            entry("ccc_exits", "raise SystemExit(3)"),
        ]
    )
    assert [registration.name for registration in host.registry] == ["good"]
    assert [(broken.name, type(broken.cause)) for broken in host.registry.broken] == [
        ("aaa_broken", ModuleNotFoundError),
        ("ccc_exits", SystemExit),
    ]
    with pytest.raises(BrokenPluginError, match=r"installed but failed to load.*no_such_module_at_all"):
        host.registry.get("environment", "aaa_broken")


def test_a_plugin_whose_class_fails_at_import_is_broken_not_unknown(entry) -> None:
    body = GOOD.format(name="good", module="no_such_inner")
    host = PluginHost([entry("ddd_lazy", body)])
    with pytest.raises(BrokenPluginError, match="its import failed: ModuleNotFoundError"):
        host.registry.get("environment", "good").build(PluginConfig())


def test_a_duplicate_names_both_packages_and_only_breaks_its_own_name(entry) -> None:
    host = PluginHost(
        [
            entry("eee_one", GOOD.format(name="same", module="eee_one")),
            entry("fff_two", GOOD.format(name="same", module="fff_two")),
            entry("ggg_other", GOOD.format(name="other", module="ggg_other")),
        ]
    )
    with pytest.raises(DuplicatePluginError, match=r"eee_one.*fff_two"):
        host.registry.get("environment", "same")
    assert host.registry.get("environment", "other").name == "other"


def test_an_unknown_name_gets_the_nearest_match_what_is_installed_and_the_package(entry) -> None:
    host = PluginHost([entry("hhh_good", GOOD.format(name="local", module="hhh_good"))])
    with pytest.raises(UnknownPluginError) as caught:
        host.registry.get("environment", "dcoker")
    text = str(caught.value)
    assert "unknown environment 'dcoker'" in text
    assert "did you mean 'docker'?" in text
    assert "Installed: local." in text
    assert "pip install orchard-env-docker" in text


def test_building_gives_the_config_and_disabled_ones_stay_out(entry) -> None:
    points = [entry("iii_good", GOOD.format(name="good", module="iii_good"))]
    registration = PluginHost(points).registry.get("environment", "good")
    config = registration.config_model().model_validate({"size": 3})
    assert registration.build(config).config.size == 3
    host = PluginHost(points, disabled=["iii_good"])
    assert list(host.registry) == []
    assert host.registry.disabled == ["iii_good"]


def test_doctor_runs_each_packages_checks_and_a_failing_one_is_a_failed_check(entry) -> None:
    failing = GOOD.format(name="bad", module="jjj_bad").replace(
        "return [DoctorCheck", "raise OSError('boom'); [DoctorCheck"
    )
    host = PluginHost([entry("jjj_bad", failing), entry("kkk_good", GOOD.format(name="good", module="kkk_good"))])
    assert [(package, check.ok) for package, check in host.doctor()] == [("jjj_bad", False), ("kkk_good", True)]


def test_a_wrong_kind_or_target_is_refused_at_registration() -> None:
    registrar = Registrar(Registry(), distribution="d", version="1")
    with pytest.raises(Exception, match="unknown plugin kind 'enviroment'"):
        registrar.add("enviroment", "x", "m:C")
    with pytest.raises(Exception, match="not of the form"):
        registrar.add("environment", "x", "m.C")


def test_a_class_in_a_file_can_be_named_directly(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from orchard_api.registry import PluginConfig\n"
        "class Tasks:\n"
        "    class Config(PluginConfig):\n"
        "        size: int = 2\n"
        "    def __init__(self, config): self.config = config\n"
    )
    registration = Registry().get("taskset", "mine.py:Tasks", base=tmp_path)
    built = registration.build(registration.config_model().model_validate({"size": 5}))
    assert built.config.size == 5
    with pytest.raises(UnknownPluginError, match="no attribute 'Nope'"):
        Registry().get("taskset", "mine.py:Nope", base=tmp_path)
    with pytest.raises(UnknownPluginError, match="no Python file"):
        Registry().get("taskset", "other.py:Tasks", base=tmp_path)


def test_ours_register_cheaply() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from orchard_api.plugins import plugin_host\n"
        "list(plugin_host().registry)\n"
        "bad = {'torch', 'pyarrow', 'docker', 'kubernetes', 'ray', 'transformers', 'aiohttp', 'jinja2', 'tokenizers'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
