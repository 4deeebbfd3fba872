"""What is asked of an agent, with its sandbox, its check and, where there is one, its solution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from orchard_api.sandbox import SandboxSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """How an episode's result is verified, by a command inside the sandbox when the agent is gone.

    Attributes:
        command: shell line, run in `files`' folder, which is made after the agent's processes are gone; the
            sandbox's working directory is in `$WORKDIR`.
        files: what that folder holds, by relative path.
        folder: a local folder whose files it holds besides; `._*` and `.DS_Store` are ignored.
        target: absolute path inside to make the folder at; None for a fresh random one.
        timeout_s: limit of the whole check, sandbox creation not included.
        env: environment; `${NAME}` and `${NAME:-default}` are filled from the host before anything starts.
        verdict: `exit_code`: 0 scores 1, anything else 0. `reward_file`: as Harbor does, from
            `/logs/verifier/reward.json`, else `reward.txt`.
        tests: what the `unit_tests` reward must see passed: pytest node ids, or `classname::name` of a junit report.
    """

    command: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    folder: Path | None = None
    target: str | None = None
    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    verdict: Literal["exit_code", "reward_file"] = "exit_code"
    tests: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SolutionStep:
    """One turn of an expert: what it says, and the shell lines that it runs."""

    commands: tuple[str, ...]
    thought: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A way to solve the task, played by the `scripted` harness; the last step also submits.

    Attributes:
        steps: the turns.
        folder: a local folder that is put at `/solution` before the first step, or None.
        env: environment variables for it.
    """

    steps: tuple[SolutionStep, ...]
    folder: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is asked.

    Attributes:
        task_id: unique within its taskset; made of letters, digits, `.`, `_`, `-` and `/`.
        instruction: the prompt.
        sandbox: what its sandbox must be.
        files: put into the sandbox before the agent starts; path (relative to the workdir) to bytes.
        folder: a local folder put into the workdir likewise, or None.
        setup: a shell line run after that, or None; its failure is infra.
        check: how the `command` reward verifies it, or None.
        expected: the answer that the `exact` reward compares with, or None.
        solution: how an expert solves it, or None.
        agent_timeout_s: seconds that the agent may take; reaching it is an outcome, and grading still happens.
        metadata: JSON values for reports and rewards of your own.
    """

    task_id: str
    instruction: str
    sandbox: SandboxSpec = SandboxSpec()
    files: Mapping[str, bytes] = field(default_factory=dict)
    folder: Path | None = None
    setup: str | None = None
    check: Check | None = None
    expected: str | None = None
    solution: Solution | None = None
    agent_timeout_s: float = 600.0
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Taskset(Protocol):
    """Yields tasks by split. Built from its config."""

    def tasks(self, split: str, *, seed: int) -> Iterator[Task]:
        """Yield the tasks of `train`, `heldout` or another split, in an order that depends on `seed` alone.

        A generated split may be endless; users take what they need.

        Raises:
            TaskError: the split is unknown or a task can't be read; names file and field.
        """
        ...
