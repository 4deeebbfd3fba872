"""The conformance suite on the `local` environment."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.testing import BackendSuite


class TestLocal(BackendSuite):
    """Everything, without an override."""

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[LocalEnvironment]:
        above = Path(tempfile.mkdtemp(prefix="orchard-suite-"))
        above.chmod(0o755)
        try:
            environment = LocalEnvironment(LocalConfig(base=above / "base"))
            await environment.start()
            try:
                yield environment
            finally:
                await environment.aclose()
        finally:
            shutil.rmtree(above)
