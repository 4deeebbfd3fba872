"""A small process beside the client: when the client dies by SIGKILL too, the folders of its sandboxes are removed."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path


class Janitor:
    """Waits for the end of this process, or for `aclose`, holding nothing but a pipe.

    Args:
        agent: the agent's binary, whose `janitor` command it runs.
        boxes: folder of the sandboxes' folders.
        owner: tag in the file `owner` of those that are ours.
    """

    def __init__(self, *, agent: Path, boxes: Path, owner: str) -> None:
        self._process = subprocess.Popen(
            [str(agent), "janitor", "-base", str(boxes), "-owner", owner],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )

    async def aclose(self) -> None:
        """Let it look once more, and wait for its end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.to_thread(self._process.wait)
