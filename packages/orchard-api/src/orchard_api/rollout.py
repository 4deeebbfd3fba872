"""Making episodes: many at once, in groups, bounded by live sandboxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchard_api.environment import Environment
from orchard_api.episode import Episode
from orchard_api.harness import Harness
from orchard_api.policy import PolicyEndpoint
from orchard_api.reward import Reward
from orchard_api.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedReward:
    """A reward under its name in the run, with its share."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """What a rollout engine works with; the caller owns and closes all of it.

    Attributes:
        owner: label put on every sandbox (`orchard.owner`), unique to the run.
        observe: called with each episode as it ends; must not block.
    """

    environment: Environment
    harness: Harness
    rewards: Sequence[WeightedReward]
    policies: Mapping[str, PolicyEndpoint]
    owner: str
    observe: Callable[[Episode], None] = lambda _episode: None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """Ask for `size` episodes of one task, compared with each other."""

    group_id: str
    task: Task
    size: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The episodes of one group; failed ones are among them."""

    group_id: str
    episodes: tuple[Episode, ...]


class RolloutEngine(Protocol):
    """Makes episodes. Built from its config.

    Attributes:
        undeleted: sandboxes that could not be removed, id to reason; the backend still lists them.
        retries: attempts that followed an infra failure.
    """

    undeleted: Mapping[str, str]
    retries: int

    async def start(self, context: RolloutContext) -> None:
        """Take what it works with."""
        ...

    def run(self, requests: Iterable[GroupRequest]) -> AsyncGenerator[Group, None]:
        """Play the groups and yield each as it completes, in no fixed order.

        At most the configured number of sandboxes is alive at any time, deletion included. Infra failures are
        retried with a fresh sandbox; what still fails is yielded as a failed episode. Closing the iterator or
        cancelling its consumer ends all episodes under way and leaves no sandbox.
        """
        ...

    async def aclose(self) -> None:
        """End what is under way; idempotent."""
        ...
