"""Hatch's build hook: compiles the agent before a wheel, plain or editable, is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AgentBuildHook(BuildHookInterface[Any]):
    """Writes both architectures' binaries into the package, so that one wheel serves every machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatch before the files are gathered."""
        source = str(Path(self.root) / "src" / "orchard_agent")
        sys.path.insert(0, source)
        try:
            import build_binaries
        finally:
            sys.path.remove(source)
        build_binaries.build(Path(self.root))
