"""Registration: cheap to import, everything resolves, run files are checked without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchard_api.registry import Registrar, Registry
from orchard_trainer_deepspeed import plugin

EXPECTED = {
    ("trainer", "torch"),
    ("policy_server", "in_process"),
    ("weight_store", "memory"),
    ("weight_store", "folder"),
    *(("advantage", name) for name in ("grpo", "dr_grpo", "rloo")),
    *(("loss", name) for name in ("ppo_clip", "policy_gradient", "cispo")),
}


@pytest.fixture
def registry():
    made = Registry()
    plugin.orchard_register(Registrar(made, distribution="orchard-trainer-deepspeed", version="0"))
    return made


@pytest.mark.parametrize("module", ["plugin", "config", "advantages"])
def test_importing_is_cheap(module):
    code = (
        f"import sys, orchard_trainer_deepspeed.{module}\n"
        "heavy = {'torch', 'safetensors', 'tokenizers', 'aiohttp', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_everything_registered_can_be_built(registry, tmp_path):
    assert {(entry.kind, entry.name) for entry in registry} == EXPECTED
    for entry in registry:
        options = {"path": tmp_path} if entry.name == "folder" else {}
        assert entry.build(entry.config_model().model_validate(options)) is not None


def test_the_doctor_finds_torch():
    (check,) = plugin.orchard_doctor()
    assert check.ok
    assert "cores" in check.detail
