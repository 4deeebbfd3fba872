"""What a task needs and this run can't give is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchard_api.environment import Environment
from orchard_api.errors import CapabilityError
from orchard_api.rollout import WeightedReward
from orchard_api.task import Task

_SHOWN_TASKS = 10


def missing(task: Task, environment: Environment, rewards: Sequence[WeightedReward]) -> list[str]:
    """All that keeps a task from being played here; empty when nothing does."""
    problems = list(environment.capabilities.missing(task.sandbox))
    for weighted in rewards:
        problems += [f"reward {weighted.name!r}: {problem}" for problem in weighted.reward.missing(task)]
    return problems


def preflight(tasks: Iterable[Task], environment: Environment, rewards: Sequence[WeightedReward]) -> None:
    """Refuse tasks that can't be played here.

    Raises:
        CapabilityError: names each such task and all that it lacks.
    """
    refused = [(task.task_id, problems) for task in tasks if (problems := missing(task, environment, rewards))]
    if not refused:
        return
    parts = [
        f"task {task_id} can't be played here; it needs:\n  " + "\n  ".join(problems)
        for task_id, problems in refused[:_SHOWN_TASKS]
    ]
    if len(refused) > _SHOWN_TASKS:
        parts.append(f"and {len(refused) - _SHOWN_TASKS} more tasks")
    raise CapabilityError("\n".join(parts))
