"""The local environment: from `create` to the end of the first exec."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from typing import Any

from bars import row

from orchard_agent.local.config import LocalConfig
from orchard_agent.local.environment import LocalEnvironment
from orchard_api.sandbox import SandboxSpec

TIMES = 60


async def rows() -> list[dict[str, Any]]:
    """One row; the baseline is a bare process of the same machine, in the same run."""
    environment = LocalEnvironment(LocalConfig())
    await environment.start()
    own: list[float] = []
    plain: list[float] = []
    try:
        for _ in range(TIMES):
            sandbox_id = f"bench-{secrets.token_hex(6)}"
            start = time.perf_counter()
            sandbox = await environment.create(SandboxSpec(), sandbox_id=sandbox_id)
            result = await sandbox.exec(["/bin/true"])
            own.append(time.perf_counter() - start)
            assert result.ok
            await sandbox.aclose()
            await environment.delete(sandbox_id)
            start = time.perf_counter()
            process = await asyncio.create_subprocess_exec("/bin/true")
            await process.wait()
            plain.append(time.perf_counter() - start)
    finally:
        await environment.aclose()
    value = statistics.median(own) * 1e3
    return [
        row(
            "local-create-ms",
            value,
            baseline=statistics.median(plain) * 1e3,
            isolation=environment.capabilities.isolation,
        )
    ]
