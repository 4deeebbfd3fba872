"""Good plugins in memory, for tests of the suites: each passes all checks of its suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from orchard_api.environment import Capabilities
from orchard_api.episode import Episode, HarnessResult, Outcome, Score
from orchard_api.errors import ConfigError, Failure, OrchardError
from orchard_api.messages import Message
from orchard_api.policy import ChatReply, ChatRequest, ModelSource, PolicyEndpoint, PolicyInfo, SamplingParams
from orchard_api.sandbox import ExecResult, Sandbox
from orchard_api.task import Check, Task
from orchard_api.testing import HarnessSuite, RewardSuite, Subject, TrainerSuite
from orchard_api.training import Batch, Columns, Forward, TrainerContext, UpdateReport
from orchard_api.trajectory import Trajectory, Turn


class MemorySandbox:
    """A file named by each command that was run."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.files: dict[str, bytes] = {}

    async def exec(self, command: str | Sequence[str], **_: Any) -> ExecResult:
        self.files[str(command)] = b""
        return ExecResult(exit_code=0, stdout=b"done\n")

    async def read_file(self, path: str, **_: Any) -> bytes:
        return self.files.get(path, b"")

    async def write_file(self, path: str, data: bytes, **_: Any) -> int:
        self.files[path] = data
        return len(data)

    async def aclose(self) -> None:
        pass


class MemoryEnvironment:
    """Makes them."""

    capabilities = Capabilities()

    async def create(self, spec: Any, *, sandbox_id: str) -> Any:
        return MemorySandbox(sandbox_id)

    async def delete(self, sandbox_id: str) -> None:
        pass


@asynccontextmanager
async def memory_environment() -> AsyncIterator[Any]:
    yield MemoryEnvironment()


class Replies:
    """An endpoint that always says the same."""

    info = PolicyInfo(name="main", model="fake", exact=False, sampling=SamplingParams(max_tokens=8))

    async def generate(self, request: Any) -> Any:
        raise AssertionError("it speaks messages")

    async def chat(self, request: ChatRequest) -> ChatReply:
        return ChatReply(message=Message(role="assistant", content="ls"), finish_reason="stop")


class GoodHarness:
    """Two turns: asks, runs what is said, shows what came out."""

    needs: tuple[str, ...] = ("main",)

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        turns: list[Turn] = []
        try:
            async with asyncio.timeout(task.agent_timeout_s):
                await self.play(task, sandbox, policies["main"], turns)
        except TimeoutError:
            return HarnessResult(trajectory=Trajectory(turns=tuple(turns)), outcome=self.on_timeout())
        except OrchardError as error:
            return self.on_error(error, turns)
        return HarnessResult(trajectory=Trajectory(turns=tuple(turns)), outcome="submitted")

    def on_timeout(self) -> Outcome:
        return "timeout"

    def on_error(self, error: OrchardError, turns: list[Turn]) -> HarnessResult:
        failure = Failure.from_exception(error, phase="harness")
        return HarnessResult(trajectory=Trajectory(turns=tuple(turns)), outcome="failed", failure=failure)

    async def play(self, task: Task, sandbox: Sandbox, policy: PolicyEndpoint, turns: list[Turn]) -> None:
        seen = Message(role="user", content=task.instruction)
        for index in range(2):
            reply = await policy.chat(ChatRequest(messages=(seen,), sampling=policy.info.sampling, deadline_s=60.0))
            turns.append(
                Turn(
                    index=index,
                    parent=index - 1 if index else None,
                    messages=(seen,),
                    response=reply.message,
                    exact=False,
                )
            )
            seen = Message(role="user", content=await self.act(sandbox, str(reply.message.content)))

    async def act(self, sandbox: Sandbox, command: str) -> str:
        return (await sandbox.exec(command, timeout_s=10)).stdout.decode()


class GoodHarnessSuite(HarnessSuite):
    """Not collected: its checks are run by name."""

    made: Any = GoodHarness

    def harness(self) -> Any:
        return self.made()

    def environment(self) -> Any:
        return memory_environment()

    @asynccontextmanager
    async def policies(self) -> AsyncIterator[Mapping[str, Any]]:
        yield {"main": Replies(), "judge": Replies()}

    def task(self) -> Task:
        return Task(task_id="t", instruction="list the files")


class GoodReward:
    """1 when `answer` is in the file that the check names."""

    def missing(self, task: Task) -> list[str]:
        return [] if task.check is not None else ["a check"]

    async def score(self, episode: Episode) -> Score:
        assert episode.sandbox is not None
        text = await episode.sandbox.read_file("answer.txt")
        return Score(name="fake", value=float(text == b"42"), evidence={"text": text.decode()})


class GoodRewardSuite(RewardSuite):
    """Not collected: its checks are run by name."""

    made: Any = GoodReward

    def reward(self) -> Any:
        return self.made()

    def environment(self) -> Any:
        return memory_environment()

    async def episode(self, subject: Subject, *, good: bool) -> Episode:
        box = await subject.create()
        await box.write_file("answer.txt", b"42" if good else b"41")
        task = Task(task_id="t", instruction="x", check=Check(command="true", timeout_s=5.0))
        return Episode(
            episode_id="e",
            group_id="g",
            task=task,
            trajectory=Trajectory(),
            outcome="submitted",
            sandbox=box,
        )


class Store:
    """Weights by version."""

    def __init__(self) -> None:
        self.kept: dict[int, Mapping[str, Any]] = {}

    async def put(self, version: int, weights: Mapping[str, Any]) -> None:
        self.kept[version] = dict(weights)

    async def get(self, version: int) -> Mapping[str, Any]:
        return self.kept[version]

    async def latest(self) -> int | None:
        return max(self.kept, default=None)

    async def release(self, version: int) -> None:
        pass


class GoodTrainer:
    """One number per weight: each update moves the logprob of every token towards 0, with momentum."""

    def __init__(self) -> None:
        self.logprob = -3.0
        self.momentum = 0.0
        self.version = 0
        self.closed = 0

    async def start(self, context: TrainerContext) -> None:
        self.store = context.store

    async def configure(self, options: Mapping[str, Any], *, updates: int) -> None:
        if options:
            raise ConfigError(f"unknown options: {', '.join(options)}")

    async def forward(self, batch: Batch, what: Forward) -> Columns:
        return {what: [[self.logprob] * len(row.ids) for row in batch.rows]}

    async def update(self, batch: Batch) -> UpdateReport:
        self.momentum = 0.5 * self.momentum - self.logprob
        self.logprob += 0.05 * self.momentum
        self.version += 1
        return UpdateReport(version=self.version)

    async def publish(self) -> int:
        await self.store.put(self.version, {"logprob": self.logprob})
        return self.version

    def state(self) -> dict[str, float]:
        return {"logprob": self.logprob, "momentum": self.momentum, "version": self.version}

    async def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps(self.state()))

    async def load(self, folder: Path) -> None:
        for name, value in json.loads((folder / "state.json").read_text()).items():
            setattr(self, name, value)

    async def aclose(self) -> None:
        self.closed += 1


class GoodTrainerSuite(TrainerSuite):
    """Not collected: its checks are run by name."""

    made: Any = GoodTrainer

    def trainer(self) -> Any:
        return self.made()

    def store(self) -> Any:
        return Store()

    def model(self, folder: Path) -> ModelSource:
        return ModelSource(path=folder)
