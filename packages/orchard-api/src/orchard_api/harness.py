"""The agent program around the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from orchard_api.episode import HarnessResult
from orchard_api.messages import Message
from orchard_api.policy import PolicyEndpoint
from orchard_api.sandbox import Sandbox
from orchard_api.task import Task


class Harness(Protocol):
    """Drives a policy at a task in a sandbox. Built from its config; one object serves all episodes at once.

    Attributes:
        needs: roles of the policies that it calls; others are not started for it.
    """

    needs: tuple[str, ...]

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        """Play one episode and return what was recorded, also when something broke.

        It keeps to `task.agent_timeout_s` itself (outcome `timeout`) and turns errors into
        `HarnessResult.failure`, so that the turns made so far are kept. An infra error ends the episode at
        once; its text is never shown to the model.
        """
        ...


@runtime_checkable
class Resumable(Protocol):
    """Optional power: go on from the middle of an episode, in a fork of its sandbox."""

    async def resume(
        self,
        messages: Sequence[Message],
        task: Task,
        sandbox: Sandbox,
        policies: Mapping[str, PolicyEndpoint],
    ) -> HarnessResult:
        """Continue from `messages`; what they record is not trained on again."""
        ...
