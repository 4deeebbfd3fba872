"""Registration is cheap, and everything that is registered can be built."""

from __future__ import annotations

import subprocess
import sys

from orchard_api.plugins import PluginHost
from orchard_harnesses.react import ReactConfig


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, orchard_harnesses.plugin\n"
        "heavy = {'aiohttp', 'jinja2', 'tokenizers', 'torch', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_that_is_registered_can_be_built() -> None:
    registry = PluginHost().registry
    mine = [entry for entry in registry if entry.distribution == "orchard-harnesses"]
    assert [(entry.kind, entry.name) for entry in mine] == [
        ("harness", "noop"),
        ("harness", "react"),
        ("harness", "scripted"),
        ("policy_server", "openai"),
    ]
    for entry in mine:
        entry.build(entry.config_model()())


def test_a_harness_says_which_policies_it_calls() -> None:
    registry = PluginHost().registry
    needs = {name: registry.get("harness", name) for name in ("react", "scripted", "noop")}
    assert needs["react"].build(ReactConfig(policy="judge")).needs == ("judge",)
    assert [needs[name].build(needs[name].config_model()()).needs for name in ("scripted", "noop")] == [(), ()]
