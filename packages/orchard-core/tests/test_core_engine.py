"""The engine: bounded by live sandboxes, retries infra alone, leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import pytest
from core_fakes import DictEnvironment, DictSandbox, Fixed, Play, engine_with, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_api.episode import HarnessResult
from orchard_api.errors import (
    CapabilityError,
    ContextOverflowError,
    Failure,
    FailureClass,
    GraderError,
    HarnessError,
    OverloadedError,
    SandboxCreateError,
    SandboxDeleteError,
    SandboxFileError,
    SandboxGone,
    TransportError,
)
from orchard_api.rollout import GroupRequest
from orchard_api.sandbox import SandboxSpec
from orchard_api.task import Check, Task
from orchard_api.trajectory import Trajectory
from orchard_core.engine import AsyncioRolloutEngine
from orchard_core.episode_run import classify


def requests(count: int, size: int = 1, **changes: object) -> list[GroupRequest]:
    return [
        GroupRequest(group_id=f"g{n}", task=Task(task_id=f"t{n}", instruction="do", **changes), size=size)  # type: ignore[arg-type]
        for n in range(count)
    ]


async def play(engine: AsyncioRolloutEngine, groups: list[GroupRequest]) -> list:
    return [group async for group in engine.run(groups)]


async def test_the_bound_is_on_live_sandboxes_with_slow_deletion() -> None:
    """Case 56."""
    environment = DictEnvironment()
    environment.delete_s = 0.01
    engine = await engine_with(environment, concurrency=4)
    groups = await play(engine, requests(10, size=4))
    assert environment.most == 4
    assert sum(len(group.episodes) for group in groups) == 40
    assert environment.alive == {}
    assert {group.group_id for group in groups} == {f"g{n}" for n in range(10)}


async def test_tasks_are_pulled_as_they_are_needed() -> None:
    pulled = 0

    def endless():
        nonlocal pulled
        while True:
            pulled += 1
            yield GroupRequest(group_id=f"g{pulled}", task=Task(task_id=f"t{pulled}", instruction="do"))

    engine = await engine_with(concurrency=2)
    async with contextlib.aclosing(engine.run(endless())) as groups:
        seen = 0
        async for _ in groups:
            seen += 1
            if seen == 5:
                break
    assert pulled <= 5 + 2 + 2 * 2


async def test_infra_failures_are_retried_in_a_fresh_sandbox_and_count_once() -> None:
    """Case 74: exactly one terminal attempt."""
    environment, harness = DictEnvironment(), Play()
    harness.errors["t0"] = [SandboxGone("evicted")]
    engine = await engine_with(environment, harness, infra_retries=2)
    (group,) = await play(engine, requests(1))
    (episode,) = group.episodes
    assert (episode.failure, episode.attempt, episode.reward) == (None, 1, 1.0)
    assert (environment.created, engine.retries) == (2, 1)
    assert environment.alive == {}


async def test_what_still_fails_is_an_infra_failure_without_reward() -> None:
    environment = DictEnvironment()
    environment.create_errors = [SandboxCreateError("no such image") for _ in range(3)]
    engine = await engine_with(environment, infra_retries=2, concurrency=1)
    groups = await play(engine, requests(2))
    failed = [e for group in groups for e in group.episodes if e.failure]
    assert len(failed) == 1
    assert failed[0].failure.failure_class is FailureClass.INFRA
    assert failed[0].failure.phase == "create"
    assert failed[0].reward is None
    assert environment.alive == {}


async def test_a_harness_bug_is_not_retried() -> None:
    environment, harness = DictEnvironment(), Play()
    harness.errors["t0"] = [ValueError("bug"), ValueError("bug")]
    engine = await engine_with(environment, harness)
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert episode.failure.failure_class is FailureClass.HARNESS
    assert environment.created == 1


@pytest.mark.parametrize("error", [GraderError("judge is down"), ValueError("bug in the reward")])
async def test_a_reward_that_raises_masks_the_episode(error: Exception) -> None:
    reward = Fixed()
    reward.error = error
    engine = await engine_with(reward=reward, infra_retries=0)
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert episode.failure.failure_class is FailureClass.INFRA
    assert episode.failure.phase == "reward"
    assert episode.reward is None
    assert len(episode.trajectory.turns) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_reward_that_is_no_number_masks_the_episode(value: float) -> None:
    engine = await engine_with(reward=Fixed(value=value), infra_retries=0)
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert episode.failure.kind == "GraderError"


async def test_processes_are_gone_before_the_reward_sees_the_sandbox() -> None:
    reward = Fixed()
    engine = await engine_with(reward=reward)
    await play(engine, requests(1))
    assert reward.seen[0].sandbox.killed == 1


async def test_making_the_sandbox_does_not_eat_the_checks_time() -> None:
    """Case 96."""
    environment, reward = DictEnvironment(), Fixed()
    environment.create_s, reward.seconds = 0.3, 0.1
    engine = await engine_with(environment, reward=reward, grace_s=0.05, infra_retries=0)
    spec = SandboxSpec(start_timeout_s=5.0)
    ((episode,),) = [
        g.episodes for g in await play(engine, requests(1, sandbox=spec, check=Check(command="x", timeout_s=0.2)))
    ]
    assert episode.failure is None
    reward.seconds = 0.5
    ((episode,),) = [
        g.episodes for g in await play(engine, requests(1, sandbox=spec, check=Check(command="x", timeout_s=0.2)))
    ]
    assert (episode.failure.kind, episode.failure.phase) == ("DeadlineError", "reward")


async def test_an_environment_that_never_answers_ends_at_the_start_timeout() -> None:
    """Cases 14 and 30: a typed error, no harness call, nothing alive."""
    environment, harness = DictEnvironment(), Play()
    environment.create_s = 60.0
    engine = await engine_with(environment, harness, grace_s=0.05, infra_retries=0)
    spec = SandboxSpec(start_timeout_s=0.1)
    ((episode,),) = [g.episodes for g in await play(engine, requests(1, sandbox=spec))]
    assert (episode.failure.kind, episode.failure.phase) == ("StartTimeoutError", "create")
    assert harness.timeouts == []
    assert environment.alive == {}


async def test_a_harness_that_ignores_its_timeout_is_cut() -> None:
    harness = Play()
    harness.seconds = 60.0
    engine = await engine_with(harness=harness, grace_s=0.1, infra_retries=0)
    ((episode,),) = [g.episodes for g in await play(engine, requests(1, agent_timeout_s=0.1))]
    assert (episode.failure.kind, episode.failure.phase) == ("HarnessError", "harness")


async def test_a_cap_bounds_every_tasks_own_timeout() -> None:
    harness = Play()
    engine = await engine_with(harness=harness, max_agent_s=5.0)
    await play(engine, requests(1, agent_timeout_s=1e9))
    assert harness.timeouts == [5.0]


async def test_cancelling_even_twice_leaves_nothing_also_with_a_create_in_flight() -> None:
    """Cases 3 and 4."""
    environment, harness = DictEnvironment(), Play()
    environment.create_s, harness.seconds, environment.delete_s = 0.05, 60.0, 0.02
    engine = await engine_with(environment, harness, concurrency=6)
    consumer = asyncio.create_task(play(engine, requests(20)))
    await asyncio.sleep(0.02)
    assert len(environment.alive) == 6
    consumer.cancel()
    await asyncio.sleep(0.01)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert environment.alive == {}


async def test_closing_the_engine_ends_what_runs() -> None:
    environment, harness = DictEnvironment(), Play()
    harness.seconds = 60.0
    engine = await engine_with(environment, harness, concurrency=3)
    consumer = asyncio.create_task(play(engine, requests(3)))
    await asyncio.sleep(0.05)
    await engine.aclose()
    await asyncio.wait_for(consumer, 5)
    assert environment.alive == {}


async def test_a_failed_removal_is_loud_and_listed() -> None:
    """Case 8."""
    environment = DictEnvironment()
    environment.undeletable = True
    engine = await engine_with(environment)
    await play(engine, requests(1))
    ((sandbox_id, reason),) = engine.undeleted.items()
    assert sandbox_id in environment.alive
    assert "the daemon answered 500" in reason


async def test_a_removal_that_fails_at_first_is_tried_again() -> None:
    environment = DictEnvironment()
    environment.delete_errors = [SandboxDeleteError("busy"), SandboxDeleteError("busy")]
    engine = await engine_with(environment)
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert episode.failure is None
    assert engine.undeleted == {}
    assert environment.alive == {}


async def test_a_removal_that_hangs_is_bounded_and_listed() -> None:
    """Case 29: the other episodes go on."""
    environment = DictEnvironment()
    environment.delete_s = 60.0
    engine = await engine_with(environment, delete_timeout_s=0.1, concurrency=2)
    async with asyncio.timeout(5):
        groups = await play(engine, requests(4))
    assert [group.episodes[0].reward for group in groups] == [1.0] * 4
    assert set(engine.undeleted) == set(environment.alive)
    assert all("not removed within 0.1 s" in reason for reason in engine.undeleted.values())


@pytest.mark.parametrize("error", [TransportError("broken pipe"), TimeoutError()])
async def test_a_handle_that_can_not_be_closed_does_not_keep_its_sandbox(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def aclose(self: DictSandbox) -> None:
        raise error

    monkeypatch.setattr(DictSandbox, "aclose", aclose)
    environment = DictEnvironment()
    engine = await engine_with(environment)
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert (episode.failure, episode.reward) == (None, 1.0)
    assert environment.alive == {}
    assert engine.undeleted == {}


async def test_a_bug_in_a_reward_is_not_played_again() -> None:
    environment, reward = DictEnvironment(), Fixed()
    reward.error = ZeroDivisionError("bug")
    engine = await engine_with(environment, reward=reward, infra_retries=2)
    await play(engine, requests(1))
    assert (environment.created, engine.retries) == (1, 0)


@pytest.mark.parametrize(
    "error",
    [
        SandboxFileError("disk full", reason="no_space", path="a"),
        ContextOverflowError(prompt_tokens=9, context_length=8),
        HarnessError("odd"),
        KeyError("x"),
    ],
)
def test_outside_the_harness_every_failure_is_infra_and_never_a_score(error: Exception) -> None:
    for phase in ("create", "setup", "reward"):
        assert classify(error, phase).failure_class is FailureClass.INFRA
    assert classify(error, "harness").failure_class is FailureClass.HARNESS
    assert classify(SandboxGone("evicted"), "harness").failure_class is FailureClass.INFRA


async def test_a_sandbox_gone_in_the_middle_keeps_what_was_played() -> None:
    """Case 45, the engine's half: the harness returned what it had."""
    harness = Play()
    failure = Failure.from_exception(SandboxGone("evicted"), phase="harness")
    harness.result = HarnessResult(trajectory=Trajectory(turns=(turn(),)), outcome="failed", failure=failure)
    engine = await engine_with(harness=harness, infra_retries=1)
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert (episode.outcome, episode.failure, episode.attempt) == ("failed", failure, 1)
    assert len(episode.trajectory.turns) == 1
    assert engine.retries == 1


async def test_a_server_that_says_when_to_come_back_is_waited_for() -> None:
    """Case 59."""
    environment = DictEnvironment()
    environment.create_errors = [OverloadedError("503", retry_after_s=0.3)]
    engine = await engine_with(environment)
    begun = time.monotonic()
    ((episode,),) = [group.episodes for group in await play(engine, requests(1))]
    assert time.monotonic() - begun >= 0.3
    assert (episode.failure, episode.attempt) == (None, 1)


@given(
    bad=st.lists(st.sampled_from(["fine", "create", "harness", "bug"]), min_size=1, max_size=24),
    concurrency=st.integers(1, 5),
    size=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_whatever_fails_each_episode_ends_once_and_nothing_is_left(bad: list[str], concurrency: int, size: int) -> None:
    async def run() -> None:
        environment, harness = DictEnvironment(), Play()
        environment.create_errors = [SandboxCreateError("no room") for kind in bad if kind == "create"]
        for number, kind in enumerate(bad):
            if kind in ("harness", "bug"):
                error = SandboxGone("evicted") if kind == "harness" else ValueError("bug")
                harness.errors[f"t{number}"] = [error]
        engine = await engine_with(environment, harness, concurrency=concurrency, infra_retries=1)
        groups = await play(engine, requests(len(bad), size=size))
        assert sorted(group.group_id for group in groups) == sorted(f"g{n}" for n in range(len(bad)))
        episodes = [episode for group in groups for episode in group.episodes]
        assert len({episode.episode_id for episode in episodes}) == len(bad) * size
        assert all((episode.reward is None) == (episode.failure is not None) for episode in episodes)
        assert environment.most <= concurrency
        assert environment.alive == {}
        assert environment.created == len(episodes) + engine.retries

    asyncio.run(run())


async def test_preflight_refuses_by_task_before_anything_starts() -> None:
    environment, reward = DictEnvironment(), Fixed()
    reward.lacks = ["no check"]
    engine = await engine_with(environment, reward=reward)
    with pytest.raises(CapabilityError, match=r"(?s)t0.*an image.*'main': no check"):
        await play(engine, requests(1, sandbox=SandboxSpec(image="debian")))
    assert environment.created == 0


async def test_a_setup_line_that_fails_is_infra() -> None:
    engine = await engine_with(infra_retries=0)
    ((episode,),) = [g.episodes for g in await play(engine, requests(1, setup="false", files={"a": b"x"}))]
    assert (episode.failure.failure_class, episode.failure.phase) == (FailureClass.INFRA, "setup")


async def test_too_few_file_descriptors_are_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 54."""
    import resource

    from orchard_api.errors import ConfigError

    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 1024))
    with pytest.raises(ConfigError, match=r"need about 4224 open files; the limit is 1024(?s:.)*ulimit -n 4224"):
        await engine_with(concurrency=512)
