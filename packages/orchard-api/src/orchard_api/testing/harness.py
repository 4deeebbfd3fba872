"""Checks of a `Harness`: what it returns, also when something breaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest

from orchard_api.environment import Environment
from orchard_api.episode import HarnessResult, Outcome
from orchard_api.errors import FailureClass, PolicyServerError, TransportError
from orchard_api.harness import Harness
from orchard_api.policy import ChatReply, ChatRequest, GenerateRequest, Generation, PolicyEndpoint, PolicyInfo
from orchard_api.sandbox import Sandbox
from orchard_api.task import Task
from orchard_api.testing.backend import Subject
from orchard_api.testing.suite import Check, Suite

_INFRA_TEXT = "the-wire-to-the-sandbox-is-cut"


class FailingPolicy:
    """An endpoint that is down."""

    def __init__(self, info: PolicyInfo) -> None:
        self._info = info

    @property
    def info(self) -> PolicyInfo:
        """See `PolicyEndpoint`."""
        return self._info

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `PolicyEndpoint`."""
        raise PolicyServerError("the endpoint is down")

    async def chat(self, request: ChatRequest) -> ChatReply:
        """See `PolicyEndpoint`."""
        raise PolicyServerError("the endpoint is down")


class HangingPolicy(FailingPolicy):
    """An endpoint that never answers."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `PolicyEndpoint`."""
        await asyncio.sleep(600)
        raise PolicyServerError("nobody waits that long")

    async def chat(self, request: ChatRequest) -> ChatReply:
        """See `PolicyEndpoint`."""
        await asyncio.sleep(600)
        raise PolicyServerError("nobody waits that long")


class CutOffSandbox:
    """A sandbox of which nothing is heard: every call is a `TransportError`."""

    def __init__(self, real: Sandbox) -> None:
        self.sandbox_id = real.sandbox_id

    def __getattr__(self, name: str) -> Any:
        async def call(*_args: Any, **_options: Any) -> Any:
            raise TransportError(_INFRA_TEXT)

        return call


class HarnessSuite(Suite):
    """What every harness owes the engine.

    Attributes:
        uses_sandbox: whether an episode of `task()` does anything in the sandbox.
    """

    uses_sandbox = True

    def harness(self) -> Harness:
        """The harness under test."""
        raise NotImplementedError("say how the harness is made: a method named `harness`")

    def environment(self) -> contextlib.AbstractAsyncContextManager[Environment]:
        """A started environment for its sandboxes."""
        raise NotImplementedError("say where its sandboxes come from: an @asynccontextmanager named `environment`")

    def policies(self) -> contextlib.AbstractAsyncContextManager[Mapping[str, PolicyEndpoint]]:
        """Endpoints by role, one at least for each that it needs; they play `task()` to its end."""
        raise NotImplementedError("say which policies it talks to: an @asynccontextmanager named `policies`")

    def task(self) -> Task:
        """A task that an episode of the harness with these policies ends in seconds."""
        raise NotImplementedError("give a task that the harness can play: a method named `task`")

    async def run(self, check: Check) -> None:
        """Make an environment and policies."""
        async with (
            self.environment() as environment,
            self.policies() as policies,
            contextlib.AsyncExitStack() as stack,
        ):
            await check(Subject(environment=environment, spec=self.task().sandbox, stack=stack), policies)

    async def check_an_episode_is_whole(self, subject: Subject, policies: Mapping[str, PolicyEndpoint]) -> None:
        """A known outcome, a failure only with `failed`, and a trajectory that can be flattened."""
        result = await self.harness().run(self.task(), await subject.create(), policies)
        assert result.outcome in get_args(Outcome)
        assert result.outcome != "failed", result.failure
        assert result.failure is None
        assert [turn.index for turn in result.trajectory.turns] == list(range(len(result.trajectory.turns)))
        for segment in result.trajectory.segments():
            assert len(segment.ids) == len(segment.mask) == len(segment.logprobs) == len(segment.versions)

    async def check_it_needs_what_it_is_given(self, subject: Subject, policies: Mapping[str, PolicyEndpoint]) -> None:
        """`needs` names roles; it plays with those alone."""
        harness = self.harness()
        assert isinstance(harness.needs, tuple)
        only = {role: policies[role] for role in harness.needs}
        assert (await harness.run(self.task(), await subject.create(), only)).outcome != "failed"

    async def check_episodes_run_side_by_side(self, subject: Subject, policies: Mapping[str, PolicyEndpoint]) -> None:
        """One object serves all; no episode sees another's turns."""
        harness = self.harness()
        alone = await harness.run(self.task(), await subject.create(), policies)
        boxes = [await subject.create() for _ in range(3)]
        results = await asyncio.gather(*(harness.run(self.task(), box, policies) for box in boxes))
        for result in results:
            assert result.outcome == alone.outcome
            assert len(result.trajectory.turns) == len(alone.trajectory.turns)

    async def check_a_policy_that_is_down_is_an_infra_failure(
        self, subject: Subject, policies: Mapping[str, PolicyEndpoint]
    ) -> None:
        """Returned, not raised; never an outcome that is scored."""
        harness = self.harness()
        down = {role: FailingPolicy(policy.info) for role, policy in policies.items()}
        result = await harness.run(self.task(), await subject.create(), down)
        if harness.needs:
            self._is_infra(result)

    async def check_a_sandbox_that_is_cut_off_is_an_infra_failure(
        self, subject: Subject, policies: Mapping[str, PolicyEndpoint]
    ) -> None:
        """Returned, not raised, and its text is never shown to the model."""
        sandbox = CutOffSandbox(await subject.create())
        result = await self.harness().run(self.task(), sandbox, policies)
        for turn in result.trajectory.turns:
            assert all(_INFRA_TEXT not in str(message) for message in turn.messages), "the model saw an infra error"
        if self.uses_sandbox:
            self._is_infra(result)

    def _is_infra(self, result: HarnessResult) -> None:
        assert result.outcome == "failed"
        assert result.failure is not None
        assert result.failure.failure_class is FailureClass.INFRA

    async def check_the_agents_time_is_kept(self, subject: Subject, policies: Mapping[str, PolicyEndpoint]) -> None:
        """Time is up: an outcome, at once, whatever the policy does."""
        harness = self.harness()
        hanging = {role: HangingPolicy(policy.info) for role, policy in policies.items()}
        box = await subject.create()
        begin = time.monotonic()
        result = await harness.run(replace(self.task(), agent_timeout_s=1.0), box, hanging)
        assert time.monotonic() - begin < 15
        if harness.needs:
            assert result.outcome == "timeout"
            assert result.failure is None

    async def check_a_cancelled_episode_ends_at_once(
        self, subject: Subject, policies: Mapping[str, PolicyEndpoint]
    ) -> None:
        """The engine cancels when a run stops."""
        harness = self.harness()
        if not harness.needs:
            pytest.skip("it talks to no policy that could hold it up")
        hanging = {role: HangingPolicy(policy.info) for role, policy in policies.items()}
        episode = asyncio.ensure_future(harness.run(self.task(), await subject.create(), hanging))
        await asyncio.sleep(0.5)
        assert not episode.done(), "the episode ended without its policy"
        episode.cancel()
        begin = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert time.monotonic() - begin < 10
