"""Everything a run works with, brought up from its config and closed in the right order."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from orchard_api.config import PluginChoice, RunConfig
from orchard_api.environment import Environment
from orchard_api.episode import Episode
from orchard_api.errors import ConfigError
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
from orchard_api.training import Advantage

logger = logging.getLogger("orchard_core")
SWEEP_S, CLOSE_S = 10.0, 60.0


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
    """A run's live objects. Policy servers come up with `serve`, when it is known that there is something to play."""

    config: RunConfig
    registry: Registry
    owner: str
    stack: AsyncExitStack
    taskset: Taskset
    environment: Environment
    rewards: Sequence[WeightedReward]
    harness: Harness
    expert: Harness | None
    advantage: Advantage | None
    store: WeightStore | None
    model: ModelSource | None
    servers: dict[str, PolicyServer] = field(default_factory=dict)

    def build(self, choice: PluginChoice) -> Any:
        """Make the object of a plugin that the run file selects."""
        return choice.build(self.registry, base=self.config.base)

    async def serve(self) -> None:
        """Bring up the policy servers that the run needs; they close with the workshop.

        Raises:
            ConfigError: the harness calls a policy that the run file does not have.
        """
        for name, choice in needed_policies(self.config, self.harness).items():
            server: PolicyServer = self.build(choice)
            self.stack.push_async_callback(server.aclose)
            await server.start(PolicyServerContext(name=name, model=self.model, store=self.store))
            self.servers[name] = server

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
    async def engine(
        self, harness: Harness, *, observe: Callable[[Episode], None], temperature: float | None = None
    ) -> AsyncIterator[RolloutEngine]:
        """A rollout engine for one phase."""
        engine: RolloutEngine = self.build(self.config.rollout)
        await engine.start(
            RolloutContext(
                environment=self.environment,
                harness=harness,
                rewards=self.rewards,
                policies=self.policies(temperature=temperature),
                owner=self.owner,
                observe=observe,
            )
        )
        try:
            yield engine
        finally:
            await engine.aclose()

    async def sweep(self, undeleted: Mapping[str, str]) -> dict[str, str]:
        """Remove what the backend still lists as this run's; returns what is left, id to reason."""
        try:
            async with asyncio.timeout(SWEEP_S):
                listed = await self.environment.list({"orchard.owner": self.owner})
        except Exception as error:
            logger.warning("the environment can't say whether sandboxes are left: %s", error)
            return dict(undeleted)
        left: dict[str, str] = {}

        async def remove(sandbox_id: str) -> None:
            try:
                async with asyncio.timeout(SWEEP_S):
                    await self.environment.delete(sandbox_id)
            except Exception as error:
                left[sandbox_id] = undeleted.get(sandbox_id, f"{type(error).__name__}: {error}")

        await asyncio.gather(*(remove(info.sandbox_id) for info in listed))
        return left


@asynccontextmanager
async def open_workshop(config: RunConfig, registry: Registry) -> AsyncIterator[Workshop]:
    """Build everything but the policy servers and the trainer; close all of it in reverse order, also on errors."""
    base = config.base

    def build(choice: PluginChoice | None) -> Any:
        return None if choice is None else choice.build(registry, base=base)

    async with AsyncExitStack() as stack:
        model = config.model
        workshop = Workshop(
            config=config,
            registry=registry,
            owner=owner_label(config.name),
            stack=stack,
            taskset=build(config.tasks),
            environment=build(config.environment),
            rewards=[WeightedReward(name=r.label, weight=r.weight, reward=build(r.plugin)) for r in config.rewards],
            harness=build(config.harness),
            expert=build(config.expert),
            advantage=build(config.advantage),
            store=build(config.weight_store),
            model=None if model is None else ModelSource(path=model.path, init=model.init, seed=config.seed),
        )
        stack.push_async_callback(_close, workshop.environment)
        await workshop.environment.start()
        yield workshop


async def _close(environment: Environment) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await environment.aclose()
    except Exception as error:
        logger.error("the environment could not be closed: %s: %s", type(error).__name__, error)


def needed_policies(config: RunConfig, harness: Harness) -> Mapping[str, PluginChoice]:
    """The policies that this run must serve: those that its harness calls, and `main` where it is trained.

    Raises:
        ConfigError: the harness calls one that the run file does not have.
    """
    roles = [*harness.needs, *(["main"] if config.trainer is not None else [])]
    missing = [role for role in roles if role not in config.policies]
    if missing:
        raise ConfigError(
            f"harness {config.harness.name!r} calls the policy {missing[0]!r}, which the run file does not have",
            hint=f'add [policies.{missing[0]}], for instance with server = "openai" and a model',
        )
    return {role: config.policies[role] for role in dict.fromkeys(roles)}


def owner_label(name: str) -> str:
    """A label unique to this run: its name, host, process and a random part."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:20]
    return (
        f"{name[:24].lower().replace('_', '-').replace('.', '-')}-{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}".lower()
    )
