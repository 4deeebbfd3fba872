"""Tasks that are folders in the Harbor format."""

from __future__ import annotations

import os
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from orchard_api.config import RunPath, describe
from orchard_api.errors import TaskError
from orchard_api.registry import PluginConfig
from orchard_api.sandbox import NetworkRule, Resources, SandboxSpec
from orchard_api.task import Check, Solution, SolutionStep, Task
from orchard_core.task_toml import UNSUPPORTED, TaskToml

NETWORKS = {"public": "full", "no-network": "none", "allowlist": "allowlist"}
UNSUPPORTED_FILES = {
    "environment/docker-compose.yaml": "tasks of several containers",
    "environment/docker-compose.yml": "tasks of several containers",
    "environment/singularity-compose.yaml": "tasks of several containers",
    "trajectory.json": "tasks that begin with a conversation",
}
CHECK = (
    'cd "$WORKDIR" && chmod +x /tests/test.sh && /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1; '
    "cat /logs/verifier/test-stdout.txt"
)
"""As Harbor runs a task's tests: from the working directory, output kept, exit code ignored."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
DEFAULT_AGENT_TIMEOUT_S = 3600.0


class DirectoryConfig(PluginConfig):
    """`[tasks]` with `name = "directory"`."""

    path: RunPath = Field(description="a task's folder, or a folder of such")
    heldout_share: float = Field(default=0.0, ge=0, lt=1, description="share of the tasks that `train` leaves out")
    network: str | None = Field(
        default=None, pattern="^(none|full)$", description="instead of what the tasks say of the network"
    )


class DirectoryTaskset:
    """Reads tasks from disk. Splits: `all`, and with `heldout_share` also `train` and `heldout`.

    Without a `heldout_share`, `train` and `heldout` are both all tasks.
    """

    Config = DirectoryConfig

    def __init__(self, config: DirectoryConfig) -> None:
        self._config = config

    def tasks(self, split: str, *, seed: int) -> Iterator[Task]:
        """See `orchard_api.Taskset`."""
        folders = self._folders()
        share = self._config.heldout_share
        held = {folder for folder in folders if share and random.Random(folder.name).random() < share}
        if split == "train":
            folders = [folder for folder in folders if folder not in held]
        elif split == "heldout":
            folders = [folder for folder in folders if folder in held or not share]
        elif split != "all":
            raise TaskError(f"unknown split {split!r}; a directory has: all, train, heldout")
        random.Random(seed).shuffle(folders)
        for folder in folders:
            yield read_task(folder, network=self._config.network)

    def _folders(self) -> list[Path]:
        path = self._config.path
        if (path / "task.toml").is_file():
            return [path]
        found = sorted(file.parent for file in path.glob("*/task.toml") if not file.parent.name.startswith("."))
        if not found:
            raise TaskError(
                f"no tasks in {path}: it has neither a task.toml nor folders with one", hint="orchard init makes one"
            )
        return found


def read_task(folder: Path, *, network: str | None = None) -> Task:
    """Read one task folder.

    Raises:
        TaskError: a file is missing or a field can't be used; names both.
    """
    table = _read_toml(folder / "task.toml")
    instruction = folder / "instruction.md"
    script = folder / "tests" / "test.sh"
    for needed in (instruction, script):
        if not needed.is_file():
            raise TaskError(f"{folder}: there is no {needed.relative_to(folder)}")
    for name, what in UNSUPPORTED_FILES.items():
        if (folder / name).exists():
            raise TaskError(f"{folder / name}: {what} are not supported yet")
    environment = table.environment
    image = environment.docker_image
    if image is None and (folder / "environment" / "Dockerfile").is_file():
        image = f"build:{folder / 'environment' / 'Dockerfile'}"
    solve = folder / "solution" / "solve.sh"
    solution = None
    if solve.is_file():
        step = SolutionStep(commands=("chmod +x /solution/solve.sh; /solution/solve.sh",))
        solution = Solution(
            steps=(step,), folder=solve.parent, env=_fill(table.solution.env, f"{folder}/task.toml: solution.env")
        )
    return Task(
        task_id=table.task.name or folder.name,
        instruction=instruction.read_text("utf-8").strip(),
        sandbox=SandboxSpec(
            image=image,
            workdir=environment.workdir,
            user=table.agent.user,
            env=_fill(environment.env, f"{folder}/task.toml: environment.env"),
            network=NetworkRule(
                mode=network or NETWORKS[environment.network_mode],  # type: ignore[arg-type]
                allow=tuple(environment.allowed_hosts),
            ),
            resources=Resources(
                cpus=environment.cpus,
                memory_mb=environment.memory_mb,
                disk_mb=environment.storage_mb,
                gpus=environment.gpus,
                gpu_types=tuple(environment.gpu_types),
            ),
        ),
        check=Check(
            command=CHECK,
            folder=script.parent,
            target="/tests",
            timeout_s=table.verifier.timeout_sec,
            env=table.verifier.env,
            verdict="reward_file",
        ),
        solution=solution,
        agent_timeout_s=table.agent.timeout_sec or DEFAULT_AGENT_TIMEOUT_S,
        metadata={"source": table.source, **table.metadata},
    )


def _read_toml(path: Path) -> TaskToml:
    try:
        return TaskToml.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        lines = [_unsupported(line) for line in describe(error)]
        raise TaskError(f"{path} can't be used:\n" + "\n".join(f"  {line}" for line in lines)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TaskError(f"{path} can't be read: {error}") from None


def _unsupported(line: str) -> str:
    key = line.removesuffix(": unknown key")
    return f"{key}: part of the Harbor format, but not supported yet" if key in UNSUPPORTED else line


def _fill(env: Mapping[str, str], where: str) -> dict[str, str]:
    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise TaskError(f"{where}: ${{{match[1]}}} is not set on this machine")
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}
