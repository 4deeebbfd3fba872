"""Everything a run works with, brought up from its config and closed in the right order."""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from orchard_api.config import PluginChoice, RunConfig
from orchard_api.environment import Environment
from orchard_api.episode import Episode
from orchard_api.harness import Harness
from orchard_api.policy import (
    ChatReply,
    ChatRequest,
    GenerateRequest,
    Generation,
    ModelSource,
    PolicyEndpoint,
    PolicyInfo,
    PolicyServer,
    PolicyServerContext,
    SamplingParams,
    WeightStore,
)
from orchard_api.registry import Registry
from orchard_api.rollout import RolloutContext, RolloutEngine, WeightedReward
from orchard_api.task import Taskset


@dataclass(frozen=True, slots=True)
class SampledEndpoint:
    """A policy's endpoint with the run's sampling parameters; what harnesses are handed."""

    endpoint: PolicyEndpoint
    sampling: SamplingParams

    @property
    def info(self) -> PolicyInfo:
        """See `PolicyEndpoint`."""
        return replace(self.endpoint.info, sampling=self.sampling)

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `PolicyEndpoint`."""
        return await self.endpoint.generate(request)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """See `PolicyEndpoint`."""
        return await self.endpoint.chat(request)


@dataclass(slots=True)
class Workshop:
    """A run's live objects.

    Attributes:
        observers: called with each episode as it ends.
    """

    config: RunConfig
    registry: Registry
    owner: str
    stack: AsyncExitStack
    taskset: Taskset
    environment: Environment
    rewards: list[WeightedReward]
    servers: dict[str, PolicyServer]
    store: WeightStore | None
    model: ModelSource | None
    observers: list[Callable[[Episode], None]]

    def build(self, choice: PluginChoice) -> Any:
        """Make the object of a plugin that the run file selects."""
        return choice.build(self.registry, base=self.config.base)

    def policies(self, *, temperature: float | None = None) -> Mapping[str, PolicyEndpoint]:
        """The endpoints that a harness is given, sampling as the run says."""
        section = self.config.sampling
        sampling = SamplingParams(
            max_tokens=section.max_tokens,
            temperature=section.temperature if temperature is None else temperature,
            top_p=section.top_p,
        )
        return {name: SampledEndpoint(server.endpoint(), sampling) for name, server in self.servers.items()}

    @asynccontextmanager
    async def engine(self, harness: Harness, *, temperature: float | None = None) -> AsyncIterator[RolloutEngine]:
        """A rollout engine for one phase."""
        engine: RolloutEngine = self.build(self.config.rollout)
        context = RolloutContext(
            environment=self.environment,
            harness=harness,
            rewards=self.rewards,
            policies=self.policies(temperature=temperature),
            owner=self.owner,
            observe=self._observe,
        )
        await engine.start(context)
        try:
            yield engine
        finally:
            await engine.aclose()

    def _observe(self, episode: Episode) -> None:
        for observer in self.observers:
            observer(episode)


@asynccontextmanager
async def open_workshop(config: RunConfig, registry: Registry) -> AsyncIterator[Workshop]:
    """Bring up environment, policy servers and the rest; close them in reverse order, also on errors."""
    async with AsyncExitStack() as stack:
        base = config.base
        environment: Environment = config.environment.build(registry, base=base)
        stack.push_async_callback(environment.aclose)
        await environment.start()
        store: WeightStore | None = None
        if config.weight_store is not None:
            store = config.weight_store.build(registry, base=base)
        model = None
        if config.model is not None:
            model = ModelSource(path=config.model.path, init=config.model.init, seed=config.seed)
        servers: dict[str, PolicyServer] = {}
        for name, choice in config.policies.items():
            server: PolicyServer = choice.build(registry, base=base)
            stack.push_async_callback(server.aclose)
            await server.start(PolicyServerContext(name=name, model=model, store=store))
            servers[name] = server
        yield Workshop(
            config=config,
            registry=registry,
            owner=owner_label(config.name),
            stack=stack,
            taskset=config.tasks.build(registry, base=base),
            environment=environment,
            rewards=[
                WeightedReward(name=r.label, weight=r.weight, reward=r.plugin.build(registry, base=base))
                for r in config.rewards
            ],
            servers=servers,
            store=store,
            model=model,
            observers=[],
        )


def owner_label(name: str) -> str:
    """A label unique to this run: its name, host, process and a random part."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:20]
    return (
        f"{name[:24].lower().replace('_', '-').replace('.', '-')}-{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}".lower()
    )
