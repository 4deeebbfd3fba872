"""The rollout engine on asyncio: many episodes at once, bounded by live sandboxes."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchard_api.episode import Episode
from orchard_api.rollout import Group, GroupRequest, RolloutContext
from orchard_core.engine_config import AsyncioEngineConfig
from orchard_core.episode_run import EpisodeRun
from orchard_core.limits import ensure_file_descriptors
from orchard_core.preflight import preflight
from orchard_core.settle import settle

logger = logging.getLogger("orchard_core")
_MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class _GroupState:
    request: GroupRequest
    missing: int
    episodes: dict[int, Episode] = field(default_factory=dict)


class AsyncioRolloutEngine:
    """Plays groups with at most `concurrency` sandboxes alive, deletion included; see `orchard_api.RolloutEngine`."""

    def __init__(self, config: AsyncioEngineConfig) -> None:
        self._config = config
        self._context: RolloutContext | None = None
        self._workers: set[asyncio.Task[None]] = set()
        self.undeleted: Mapping[str, str] = {}
        self.retries = 0

    async def start(self, context: RolloutContext) -> None:
        """See `orchard_api.RolloutEngine`; raises the soft limit on file descriptors where it must.

        Raises:
            ConfigError: the hard limit is too low for the concurrency.
        """
        ensure_file_descriptors(self._config.concurrency)
        self._context = context

    async def run(self, requests: Iterable[GroupRequest]) -> AsyncGenerator[Group, None]:
        """See `orchard_api.RolloutEngine`.

        Raises:
            CapabilityError: a task needs what the environment or a reward lacks; before its first sandbox.
        """
        context = self._context
        if context is None:
            raise RuntimeError("the engine was not started")
        results: asyncio.Queue[Group | BaseException] = asyncio.Queue(maxsize=2 * self._config.concurrency)
        episodes = self._episodes(context, requests)
        workers = [asyncio.create_task(self._work(context, episodes, results)) for _ in range(self._config.concurrency)]
        self._workers.update(workers)
        closer = asyncio.create_task(self._close_when_done(workers, results))
        try:
            while True:
                item = await results.get()
                if isinstance(item, _Done):
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            for worker in workers:
                worker.cancel()
            closer.cancel()
            await settle([*workers, closer])
            self._workers.difference_update(workers)

    async def aclose(self) -> None:
        """See `orchard_api.RolloutEngine`."""
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await settle(workers)

    def _episodes(self, context: RolloutContext, requests: Iterable[GroupRequest]) -> Iterator[tuple[_GroupState, int]]:
        for request in requests:
            preflight([request.task], context.environment, context.rewards)
            group = _GroupState(request=request, missing=request.size)
            for number in range(request.size):
                yield group, number

    async def _work(
        self,
        context: RolloutContext,
        episodes: Iterator[tuple[_GroupState, int]],
        results: asyncio.Queue[Group | BaseException],
    ) -> None:
        try:
            for group, number in episodes:
                episode = await self._episode(context, group.request)
                context.observe(episode)
                group.episodes[number] = episode
                group.missing -= 1
                if not group.missing:
                    ordered = tuple(group.episodes[n] for n in range(group.request.size))
                    await results.put(Group(group_id=group.request.group_id, episodes=ordered))
        except Exception as error:
            await results.put(error)

    async def _episode(self, context: RolloutContext, request: GroupRequest) -> Episode:
        episode_id = uuid.uuid4().hex
        for attempt in range(self._config.infra_retries + 1):
            run = EpisodeRun(
                context=context,
                config=self._config,
                request=request,
                episode_id=episode_id,
                attempt=attempt,
                undeleted=self._note_undeleted,
            )
            episode = await run.play()
            failure = episode.failure
            if failure is None or not run.retryable or attempt == self._config.infra_retries:
                break
            self.retries += 1
            logger.info("episode %s: %s in %s, trying again", episode_id, failure.kind, failure.phase)
            pause = self._config.backoff_s * 2**attempt * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(max(pause, run.retry_after_s), _MAX_BACKOFF_S))
        return episode

    @staticmethod
    async def _close_when_done(
        workers: list[asyncio.Task[None]], results: asyncio.Queue[Group | BaseException]
    ) -> None:
        await asyncio.gather(*workers, return_exceptions=True)
        await results.put(_Done())

    def _note_undeleted(self, sandbox_id: str, reason: str) -> None:
        self.undeleted = {**self.undeleted, sandbox_id: reason}
        logger.error("sandbox %s could not be removed: %s", sandbox_id, reason)


class _Done(BaseException):
    """All workers have ended."""
