"""An environment, harness and rewards that live in a dict: for what real ones can't be made to do on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from orchard_api.environment import Capabilities
from orchard_api.episode import Episode, HarnessResult, Score
from orchard_api.errors import SandboxDeleteError
from orchard_api.messages import Message
from orchard_api.policy import PolicyEndpoint
from orchard_api.registry import PluginConfig
from orchard_api.rollout import RolloutContext, WeightedReward
from orchard_api.sandbox import ExecResult, Sandbox, SandboxInfo, SandboxSpec, SandboxState
from orchard_api.task import Task
from orchard_api.trajectory import Trajectory, Turn
from orchard_core.engine import AsyncioRolloutEngine
from orchard_core.engine_config import AsyncioEngineConfig


class DictSandbox:
    """A sandbox whose files are a dict."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.files: dict[str, bytes] = {}
        self.killed = 0

    async def write_file(self, path: str, data: bytes, **_options: Any) -> int:
        self.files[path] = data
        return len(data)

    async def exec(self, command: str | Sequence[str], **_options: Any) -> ExecResult:
        return ExecResult(exit_code=1 if command == "false" else 0)

    async def kill_processes(self) -> int:
        self.killed += 1
        return 0

    async def aclose(self) -> None:
        pass


class DictEnvironment:
    """Counts what is alive; creation and deletion can be slow or fail."""

    Config = PluginConfig

    def __init__(self, config: PluginConfig | None = None) -> None:
        self.capabilities = Capabilities(networks=frozenset({"none", "full"}))
        self.alive: dict[str, SandboxSpec] = {}
        self.most = 0
        self.created = 0
        self.create_s = self.delete_s = 0.0
        self.create_errors: list[BaseException] = []
        self.undeletable = False

    async def start(self) -> None:
        pass

    async def create(self, spec: SandboxSpec, *, sandbox_id: str) -> Sandbox:
        self.created += 1
        self.alive[sandbox_id] = spec
        self.most = max(self.most, len(self.alive))
        await asyncio.sleep(self.create_s)
        if self.create_errors:
            del self.alive[sandbox_id]
            raise self.create_errors.pop(0)
        return DictSandbox(sandbox_id)  # type: ignore[return-value]

    async def list(self, labels: Mapping[str, str] = {}) -> Sequence[SandboxInfo]:
        return [
            SandboxInfo(sandbox_id=each, state=SandboxState.READY, labels=spec.labels)
            for each, spec in self.alive.items()
            if labels.items() <= dict(spec.labels).items()
        ]

    async def delete(self, sandbox_id: str) -> None:
        await asyncio.sleep(self.delete_s)
        if self.undeletable:
            raise SandboxDeleteError("the daemon answered 500")
        self.alive.pop(sandbox_id, None)

    async def aclose(self) -> None:
        pass


def turn(text: str = "done") -> Turn:
    """One sampled turn of two tokens."""
    return Turn(
        index=0,
        parent=None,
        messages=(Message(role="user", content="do"),),
        response=Message(role="assistant", content=text),
        prompt_ids=(1, 2),
        response_ids=(3, 4),
        logprobs=(-0.5, -0.25),
        versions=(7, 7),
        exact=True,
    )


class Play:
    """A harness that answers at once, or does what it is told to by task id."""

    Config = PluginConfig
    needs = ()

    def __init__(self, config: PluginConfig | None = None) -> None:
        self.errors: dict[str, list[BaseException]] = {}
        self.seconds = 0.0
        self.timeouts: list[float] = []

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        self.timeouts.append(task.agent_timeout_s)
        await asyncio.sleep(self.seconds)
        if self.errors.get(task.task_id):
            raise self.errors[task.task_id].pop(0)
        return HarnessResult(trajectory=Trajectory(turns=(turn(),)), outcome="submitted", answer="done")


class Fixed:
    """A reward that gives a number, or raises."""

    Config = PluginConfig

    def __init__(self, config: PluginConfig | None = None, *, value: float = 1.0) -> None:
        self.value = value
        self.error: BaseException | None = None
        self.lacks: list[str] = []
        self.seen: list[Episode] = []
        self.seconds = 0.0

    def missing(self, task: Task) -> list[str]:
        return self.lacks

    async def score(self, episode: Episode) -> Score:
        self.seen.append(episode)
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return Score(name="fixed", value=self.value)


async def engine_with(
    environment: DictEnvironment | None = None,
    harness: Play | None = None,
    reward: Fixed | None = None,
    **options: Any,
) -> AsyncioRolloutEngine:
    """A started engine over the fakes, without pauses between retries unless asked for."""
    engine = AsyncioRolloutEngine(AsyncioEngineConfig(**{"backoff_s": 0.0, **options}))
    await engine.start(
        RolloutContext(
            environment=environment or DictEnvironment(),  # type: ignore[arg-type]
            harness=harness or Play(),
            rewards=[WeightedReward(name="main", weight=1.0, reward=reward or Fixed())],
            policies={},
            owner="test",
        )
    )
    return engine
