"""Checks of a `Reward`: that it tells good from bad, and can't be made to say 0 by an outage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import replace

import pytest

from orchard_api.environment import Environment
from orchard_api.episode import Episode, Score
from orchard_api.errors import InfraError
from orchard_api.reward import Reward, deadline_s
from orchard_api.task import Task
from orchard_api.testing.backend import Subject
from orchard_api.testing.harness import CutOffSandbox
from orchard_api.testing.suite import Check, Suite

_EVIDENCE_BYTES = 256 << 10


class RewardSuite(Suite):
    """What every reward owes the engine.

    Attributes:
        uses_sandbox: whether it looks into the sandbox.
        needs_task: whether a task can lack something that it needs.
    """

    uses_sandbox = True
    needs_task = True

    def reward(self) -> Reward:
        """The reward under test."""
        raise NotImplementedError("say how the reward is made: a method named `reward`")

    def environment(self) -> contextlib.AbstractAsyncContextManager[Environment]:
        """A started environment for the episodes' sandboxes."""
        raise NotImplementedError("say where sandboxes come from: an @asynccontextmanager named `environment`")

    async def episode(self, subject: Subject, *, good: bool) -> Episode:
        """An episode that deserves the best score, or the worst, with its live sandbox (`subject.create()`)."""
        raise NotImplementedError("give a good and a bad episode: a coroutine named `episode`")

    async def run(self, check: Check) -> None:
        """Make an environment."""
        async with self.environment() as environment, contextlib.AsyncExitStack() as stack:
            example = Task(task_id="suite", instruction="")
            await check(Subject(environment=environment, spec=example.sandbox, stack=stack))

    async def check_good_is_better_than_bad(self, subject: Subject) -> None:
        """By its value."""
        reward = self.reward()
        good = await reward.score(await self.episode(subject, good=True))
        bad = await reward.score(await self.episode(subject, good=False))
        assert good.value > bad.value

    async def check_a_score_is_well_formed(self, subject: Subject) -> None:
        """Finite numbers, and evidence that fits into a record."""
        for good in (True, False):
            score = await self.reward().score(await self.episode(subject, good=good))
            assert isinstance(score, Score)
            assert math.isfinite(score.value)
            assert all(math.isfinite(value) for value in score.components.values())
            assert len(json.dumps(dict(score.evidence))) < _EVIDENCE_BYTES

    async def check_it_says_the_same_twice(self, subject: Subject) -> None:
        """Judging leaves no trace that changes the next judgement."""
        reward = self.reward()
        for good in (True, False):
            episode = await self.episode(subject, good=good)
            first = await reward.score(episode)
            assert (await reward.score(episode)).value == first.value

    async def check_it_judges_side_by_side(self, subject: Subject) -> None:
        """One object serves all episodes at once."""
        reward = self.reward()
        wanted = [True, False, True, False]
        episodes = [await self.episode(subject, good=good) for good in wanted]
        scores = await asyncio.gather(*(reward.score(episode) for episode in episodes))
        assert scores[0].value == scores[2].value > scores[1].value == scores[3].value

    async def check_what_a_task_lacks_is_said_before(self, subject: Subject) -> None:
        """`missing` is empty for a task that can be judged, and says what a bare one lacks."""
        reward = self.reward()
        assert list(reward.missing((await self.episode(subject, good=True)).task)) == []
        if self.needs_task:
            assert reward.missing(Task(task_id="bare", instruction="Do it."))

    async def check_an_outage_is_not_a_score(self, subject: Subject) -> None:
        """Nothing is heard of the sandbox: an infra error, for a good episode and for a bad one."""
        for good in (True, False):
            episode = await self.episode(subject, good=good)
            if episode.sandbox is None or not self.uses_sandbox:
                pytest.skip("it does not look into a sandbox")
            cut = replace(episode, sandbox=CutOffSandbox(episode.sandbox))
            with pytest.raises(InfraError):
                await self.reward().score(cut)

    async def check_its_time_is_bounded(self, subject: Subject) -> None:
        """The engine is told a number of seconds."""
        seconds = deadline_s(self.reward(), (await self.episode(subject, good=True)).task)
        assert 0 <= seconds < 24 * 3600
