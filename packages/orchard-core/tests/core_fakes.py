"""An environment, harness and rewards that live in a dict: for what real ones can't be made to do on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from orchard_api.environment import Capabilities
from orchard_api.episode import Episode, HarnessResult, Score
from orchard_api.errors import ConfigError, SandboxDeleteError, SandboxGone, TaskError
from orchard_api.messages import Message
from orchard_api.policy import GenerateRequest, Generation, PolicyEndpoint, PolicyInfo, PolicyServerContext
from orchard_api.registry import PluginConfig
from orchard_api.rollout import RolloutContext, WeightedReward
from orchard_api.sandbox import ExecResult, Sandbox, SandboxInfo, SandboxSpec, SandboxState
from orchard_api.task import Task
from orchard_api.training import Batch, TrainerContext, UpdateReport
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
    made: ClassVar[list[DictEnvironment]] = []

    def __init__(self, config: PluginConfig | None = None) -> None:
        self.capabilities = Capabilities(networks=frozenset({"none", "full"}))
        self.alive: dict[str, SandboxSpec] = {}
        self.most = 0
        self.created = 0
        self.create_s = self.delete_s = 0.0
        self.create_errors: list[BaseException] = []
        self.undeletable = False
        self.delete_errors: list[BaseException] = []
        self.made.append(self)

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
        if self.delete_errors:
            raise self.delete_errors.pop(0)
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
        self.result: HarnessResult | None = None

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        self.timeouts.append(task.agent_timeout_s)
        await asyncio.sleep(self.seconds)
        if self.errors.get(task.task_id):
            raise self.errors[task.task_id].pop(0)
        if self.result is not None:
            return self.result
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


class MemoryStore:
    """Keeps what a trainer publishes."""

    Config = PluginConfig

    def __init__(self, config: PluginConfig | None = None) -> None:
        self.versions: dict[int, Mapping[str, Any]] = {}
        self.released: list[int] = []

    async def put(self, version: int, weights: Mapping[str, Any]) -> None:
        self.versions[version] = weights

    async def get(self, version: int) -> Mapping[str, Any]:
        return self.versions[version]

    async def latest(self) -> int | None:
        return max(self.versions, default=None)

    async def release(self, version: int) -> None:
        self.released.append(version)


class CountingTrainer:
    """Counts updates and keeps the batches; its weights are the version."""

    class Config(PluginConfig):
        """Options."""

        rate: float = 1.0

    made: ClassVar[list[CountingTrainer]] = []

    def __init__(self, config: Config) -> None:
        self.config = config
        self.version = 0
        self.batches: list[Batch] = []
        self.configured: list[tuple[Mapping[str, Any], int]] = []
        self.saved: list[str] = []
        self.update_s = 0.0
        self.closed = False
        self.made.append(self)

    async def start(self, context: TrainerContext) -> None:
        self.context = context

    async def configure(self, options: Mapping[str, Any], *, updates: int) -> None:
        if unknown := set(options) - {"rate", "update_s"}:
            raise ConfigError(f"trainer.{unknown.pop()}: unknown key")
        self.update_s = options.get("update_s", 0.0)
        self.configured.append((options, updates))

    async def update(self, batch: Batch) -> UpdateReport:
        await asyncio.sleep(self.update_s)
        self.batches.append(batch)
        self.version += 1
        return UpdateReport(version=self.version, metrics={"loss": 1.0 / self.version})

    async def publish(self) -> int:
        await self.context.store.put(self.version, {"v": self.version})
        return self.version

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.saved.append(folder.name)

    async def aclose(self) -> None:
        self.closed = True


class VersionServer:
    """Answers with the tokens 3 and 4, stamped with the loaded version."""

    class Config(PluginConfig):
        """Options."""

        exact: bool = True
        stuck: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.version = 0
        self.info = PolicyInfo(name="main", model="fake", exact=config.exact)

    async def start(self, context: PolicyServerContext) -> None:
        self.store = context.store

    def endpoint(self) -> VersionServer:
        return self

    async def generate(self, request: GenerateRequest) -> Generation:
        return Generation(
            token_ids=(3, 4), logprobs=(-0.5, -0.5), versions=(self.version, self.version), finish_reason="stop"
        )

    async def load(self, version: int) -> None:
        assert self.store is not None
        weights = await self.store.get(version)
        self.version = 0 if self.config.stuck else weights["v"]

    async def aclose(self) -> None:
        pass


class Ask(Play):
    """Asks the policy once per episode; breaks as `Play` does."""

    needs = ("main",)

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        if task.metadata.get("breaks"):
            raise SandboxGone("evicted")
        endpoint = policies["main"]
        answer = await endpoint.generate(GenerateRequest(prompt_ids=[1, 2], sampling=endpoint.info.sampling))
        await asyncio.sleep(task.metadata.get("seconds", 0))
        exact = endpoint.info.exact
        made = replace(
            turn(),
            response_ids=answer.token_ids if exact else (),
            logprobs=answer.logprobs if exact else (),
            versions=answer.versions if exact else (),
            exact=exact,
        )
        return HarnessResult(trajectory=Trajectory(turns=(made,)), outcome="submitted")


class Expert(Play):
    """Plays one turn that no engine sampled."""

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        made = replace(turn(), logprobs=(), versions=(), exact=False)
        return HarnessResult(trajectory=Trajectory(turns=(made,)), outcome="submitted")


class Alternate:
    """Scores 1 and 0 in turn, per group; what a task's metadata says comes first."""

    Config = PluginConfig

    def __init__(self, config: PluginConfig | None = None) -> None:
        self.seen: dict[str, int] = {}

    def missing(self, task: Task) -> list[str]:
        return list(task.metadata.get("lacks", ()))

    async def score(self, episode: Episode) -> Score:
        count = self.seen[episode.group_id] = self.seen.get(episode.group_id, 0) + 1
        return Score(name="alternate", value=episode.task.metadata.get("value", float(count % 2)))


class MeanBaseline:
    """Reward minus the group's mean over its scored episodes."""

    Config = PluginConfig

    def __init__(self, config: PluginConfig | None = None) -> None:
        pass

    def __call__(self, rewards: Sequence[float | None], groups: Sequence[str]) -> list[float]:
        result = []
        for reward, group in zip(rewards, groups, strict=True):
            peers = [r for r, g in zip(rewards, groups, strict=True) if g == group and r is not None]
            result.append(0.0 if reward is None or len(peers) < 2 else reward - sum(peers) / len(peers))
        return result


class Numbered:
    """`train` without end, a finite `heldout`; other splits by name, as a test sets them."""

    Config = PluginConfig
    splits: ClassVar[dict[str, Callable[[int], Iterator[Task]]]] = {}

    def __init__(self, config: PluginConfig | None = None) -> None:
        pass

    def tasks(self, split: str, *, seed: int) -> Iterator[Task]:
        if split in self.splits:
            return self.splits[split](seed)
        if split == "train":
            return (Task(task_id=f"train-{seed}-{n}", instruction="do") for n in itertools.count())
        if split == "heldout":
            return iter([Task(task_id=f"heldout-{n}", instruction="do") for n in range(5)])
        raise TaskError(f"unknown split {split!r}")
