from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from orchard_agent import AgentSandbox, plugin
from orchard_agent.local import binary, doctor, selection
from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.errors import InfraError
from orchard_api.plugins import PluginHost
from orchard_api.sandbox import Sandbox


def test_it_registers_and_its_module_is_cheap() -> None:
    entry = PluginHost().registry.get("environment", "local")
    assert entry.config_model() is LocalConfig
    assert isinstance(entry.build(LocalConfig()), LocalEnvironment)
    code = (
        "import sys, orchard_agent.plugin\n"
        "print([name for name in ('torch', 'pyarrow', 'aiohttp', 'asyncio', 'h11') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_handle_is_a_sandbox(box: AgentSandbox) -> None:
    assert isinstance(box, Sandbox)


def test_doctor_tries_and_says_how_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(check.ok for check in plugin.orchard_doctor() if check.required)
    monkeypatch.setattr(selection, "probe", lambda *_: "Operation not permitted")
    broken = [check for check in doctor.checks() if not check.ok]
    assert {check.name for check in broken} == {"local: bubblewrap", "local: unshare"}
    assert all(check.required and "apt-get install bubblewrap" in check.fix for check in broken)
    monkeypatch.setattr(binary.sys, "platform", "darwin")
    (check,) = doctor.checks()
    assert "needs Linux" in check.detail
    assert "docker" in check.fix


async def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary.sys, "platform", "darwin")
    with pytest.raises(InfraError, match="needs Linux; this is darwin"):
        await LocalEnvironment(LocalConfig()).start()


async def test_it_must_be_started() -> None:
    with pytest.raises(InfraError, match="not started"):
        await LocalEnvironment(LocalConfig()).list()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"isolation": "jail"}, "bubblewrap"),
        ({"read_only": ["relative"]}, "absolute"),
        ({"read_only": ["/a/../etc"]}, "absolute"),
        ({"uid": 0}, "greater than or equal to 1"),
        ({"unknown": 1}, "not permitted"),
    ],
)
def test_options_are_checked(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        LocalConfig.model_validate(options)


async def test_a_base_that_is_not_ours_or_cannot_be_passed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InfraError, match="base ="):
        await LocalEnvironment(LocalConfig(base=tmp_path / "file")).start()
    (tmp_path / "closed").mkdir(mode=0o700)
    if os.geteuid() == 0:
        with pytest.raises(InfraError, match="can't pass through"):
            await LocalEnvironment(LocalConfig(base=tmp_path / "closed" / "base")).start()
