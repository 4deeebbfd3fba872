"""The engine's own thread, and the way between it and the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import torch

from orchard_api.errors import OverloadedError, PolicyServerError
from orchard_api.policy import Generation
from orchard_trainer_deepspeed.engine import ActiveRequest, Engine


class _Ticket:
    """Who waits for a request: a future for the end, and a queue where tokens are followed one by one."""

    __slots__ = ("future", "request", "tokens")

    def __init__(self, request: ActiveRequest, future: asyncio.Future[Generation], *, follow: bool) -> None:
        self.request = request
        self.future = future
        self.tokens: asyncio.Queue[int | None] | None = asyncio.Queue() if follow else None


class EngineThread:
    """Steps the engine while there is work, and sleeps otherwise.

    Args:
        engine: used by this thread alone from now on.
        capacity: requests that may be under way or waiting; more are refused.
        threads: CPU threads of its computations.
        loop: the event loop whose coroutines call it.
    """

    def __init__(self, engine: Engine, *, capacity: int, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._capacity = capacity
        self._threads = threads
        self._loop = loop
        self._wake = threading.Condition()
        self._arrived: list[_Ticket] = []
        self._commands: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._tickets: dict[int, _Ticket] = {}
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="orchard-engine", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Requests under way or waiting."""
        return len(self._tickets)

    async def generate(self, request: ActiveRequest) -> Generation:
        """Wait for a request's end; cancelling frees its slot before the next step.

        Raises:
            OverloadedError: the queue is full.
            PolicyServerError: the engine failed or was closed.
        """
        ticket = self._submit(request, follow=False)
        try:
            return await ticket.future
        finally:
            self._forget(ticket)

    async def follow(self, request: ActiveRequest) -> AsyncGenerator[int, None]:
        """Yield the number of tokens sampled so far, each time there are more; `request` holds them."""
        ticket = self._submit(request, follow=True)
        assert ticket.tokens is not None
        try:
            while (count := await ticket.tokens.get()) is not None:
                yield count
            await ticket.future
        finally:
            self._forget(ticket)

    async def call(self, work: Callable[[], Any]) -> Any:
        """Run something between two steps, in the engine's thread."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._wake:
            self._check()
            self._commands.append((work, future))
            self._wake.notify()
        return await future

    async def aclose(self) -> None:
        """Stop after the step under way; what waits fails. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, request: ActiveRequest, *, follow: bool) -> _Ticket:
        with self._wake:
            self._check()
            if len(self._tickets) >= self._capacity:
                raise OverloadedError(
                    f"the policy server has {self._capacity} requests under way and takes no more",
                    retry_after_s=1.0,
                    hint="raise policies.<name>.max_waiting, or lower the run's concurrency",
                )
            ticket = _Ticket(request, self._loop.create_future(), follow=follow)
            self._tickets[id(request)] = ticket
            self._arrived.append(ticket)
            self._wake.notify()
        return ticket

    def _forget(self, ticket: _Ticket) -> None:
        if not ticket.future.done() or ticket.future.cancelled():
            ticket.request.cancelled = True
            ticket.future.cancel()
        elif not ticket.future.cancelled():
            ticket.future.exception()
        with self._wake:
            self._tickets.pop(id(ticket.request), None)
            self._wake.notify()

    def _check(self) -> None:
        if self._failure is not None:
            raise PolicyServerError(f"the engine failed: {self._failure!r}") from self._failure
        if self._closing:
            raise PolicyServerError("the policy server is closed")

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        engine = self._engine
        failure: BaseException | None = None
        try:
            while True:
                with self._wake:
                    while not (self._closing or self._arrived or self._commands or not engine.idle()):
                        self._wake.wait()
                    if self._closing:
                        break
                    arrived, self._arrived = self._arrived, []
                    commands, self._commands = self._commands, []
                for work, future in commands:
                    self._command(work, future)
                for ticket in arrived:
                    engine.add(ticket.request)
                if not engine.idle():
                    self._deliver(engine.step())
        except BaseException as error:
            failure = error
        with self._wake:
            self._failure = failure
            self._closing = True
            left = list(self._tickets.values())
            futures: list[asyncio.Future[Any]] = [future for _, future in self._commands]
        self._post(self._end, left, futures, failure)

    def _command(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = work()
        except Exception as error:
            self._post(_settle, future, None, error)
        else:
            self._post(_settle, future, result, None)

    def _deliver(self, touched: list[ActiveRequest]) -> None:
        """Tell the loop in one call about all that ended, and about each token that somebody follows."""
        news: list[tuple[_Ticket, int, Generation | None]] = []
        for request in touched:
            ticket = self._tickets.get(id(request))
            if ticket is None or ticket.request is not request:
                continue
            if request.finish is not None:
                news.append((ticket, len(request.ids), request.generation()))
            elif ticket.tokens is not None:
                news.append((ticket, len(request.ids), None))
        if news:
            self._post(_tell, news)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop may be closed already when the process ends.
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    @staticmethod
    def _end(left: list[_Ticket], futures: list[asyncio.Future[Any]], failure: BaseException | None) -> None:
        text = "the policy server was closed" if failure is None else f"the engine failed: {failure!r}"
        for future in (*futures, *(ticket.future for ticket in left)):
            if not future.done():
                error = PolicyServerError(text)
                error.__cause__ = failure
                future.set_exception(error)
        for ticket in left:
            if ticket.tokens is not None:
                ticket.tokens.put_nowait(None)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _tell(news: list[tuple[_Ticket, int, Generation | None]]) -> None:
    for ticket, count, generation in news:
        if ticket.tokens is not None:
            ticket.tokens.put_nowait(count)
        if generation is not None:
            if not ticket.future.done():
                ticket.future.set_result(generation)
            if ticket.tokens is not None:
                ticket.tokens.put_nowait(None)
