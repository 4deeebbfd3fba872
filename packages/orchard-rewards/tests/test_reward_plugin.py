"""Registration is cheap, and everything that is registered can be built."""

from __future__ import annotations

import subprocess
import sys

from orchard_api.plugins import PluginHost


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    code = "import sys, orchard_rewards.plugin; assert not {'asyncio', 'tarfile', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_that_is_registered_can_be_built() -> None:
    registry = PluginHost().registry
    mine = [entry for entry in registry if entry.distribution == "orchard-rewards"]
    needed = {"judge": {"model": "m"}, "weighted": {"parts": [{"name": "exact"}]}}
    names = ["command", "exact", "json_schema", "judge", "unit_tests", "weighted"]
    assert [(entry.kind, entry.name) for entry in mine] == [("reward", name) for name in names]
    for entry in mine:
        options = needed.get(entry.name, {})
        config = entry.config_model().model_validate(options, context={"registry": registry, "base": None})
        assert entry.build(config).missing
