"""The `in_process` policy server: a small model, batched, in a thread of this process; over HTTP where asked."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from orchard_api.errors import ConfigError, ContextOverflowError, DeadlineError, PolicyServerError
from orchard_api.messages import Message
from orchard_api.policy import (
    ChatReply,
    ChatRequest,
    GenerateRequest,
    Generation,
    PolicyInfo,
    PolicyServerContext,
    PolicyVersion,
    WeightStore,
)
from orchard_trainer_deepspeed.chat import RequestError, TextCodec
from orchard_trainer_deepspeed.checkpoint import WeightsError, build_model
from orchard_trainer_deepspeed.config import InProcessConfig
from orchard_trainer_deepspeed.device import choose_device, choose_threads
from orchard_trainer_deepspeed.engine import ActiveRequest, Engine
from orchard_trainer_deepspeed.engine_thread import EngineThread
from orchard_trainer_deepspeed.http_api import HttpApi


class InProcessEndpoint:
    """The policy, for coroutines of this process. Prompts are never changed, and no state outlives a request.

    Args:
        info: what is served.
        thread: the engine.
        codec: tokenizer and template, where the folder has them.
        vocabulary: number of token ids.
        context: tokens of prompt and response together.
        stops: ids that end every response.
        seed: of the requests that bring none.
    """

    def __init__(
        self,
        *,
        info: PolicyInfo,
        thread: EngineThread,
        codec: TextCodec | None,
        vocabulary: int,
        context: int,
        stops: frozenset[int],
        seed: int,
    ) -> None:
        self._info = info
        self._thread = thread
        self.codec = codec
        self._vocabulary = vocabulary
        self._context = context
        self._stops = stops
        self._seeds = random.Random(seed)

    @property
    def info(self) -> PolicyInfo:
        """What is behind it."""
        return self._info

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `PolicyEndpoint.generate`."""
        active = self.prepare(request)
        try:
            async with asyncio.timeout(request.deadline_s) as scope:
                return await self._thread.generate(active)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineError(f"the response was not complete within {request.deadline_s:g} s") from error

    async def stream(self, active: ActiveRequest, *, deadline_s: float) -> AsyncGenerator[int, None]:
        """Yield how many tokens a prepared request has, whenever there are more.

        Raises:
            DeadlineError, OverloadedError, PolicyServerError: as for `generate`.
        """
        end = asyncio.get_running_loop().time() + deadline_s
        async with aclosing(self._thread.follow(active)) as counts:
            while True:
                try:
                    async with asyncio.timeout_at(end) as scope:
                        count = await anext(counts, None)
                except TimeoutError as error:
                    if not scope.expired():
                        raise
                    raise DeadlineError(f"the response was not complete within {deadline_s:g} s") from error
                if count is None:
                    return
                yield count

    async def chat(self, request: ChatRequest) -> ChatReply:
        """See `PolicyEndpoint.chat`. Tool calls stay text; special tokens but the last stay in it."""
        codec = self.text()
        tools = [tool.to_openai() for tool in request.tools]
        ids = codec.prompt([message.to_openai() for message in request.messages], tools)
        wanted = GenerateRequest(prompt_ids=ids, sampling=request.sampling, deadline_s=request.deadline_s)
        generation = await self.generate(wanted)
        said = generation.token_ids[:-1] if generation.finish_reason == "stop" else generation.token_ids
        return ChatReply(
            message=Message(role="assistant", content=codec.decode(said, skip_special=False)),
            finish_reason=generation.finish_reason,
            prompt_tokens=len(ids),
            completion_tokens=len(generation.token_ids),
        )

    def text(self) -> TextCodec:
        """The codec.

        Raises:
            RequestError: the model's folder has no tokenizer.
        """
        if self.codec is None:
            raise RequestError(
                "this model's folder has no tokenizer.json; only token ids can be served",
                hint="use generate, or /v1/completions with a list of ids as prompt",
            )
        return self.codec

    def prepare(self, request: GenerateRequest) -> ActiveRequest:
        """Check a request and make the engine's own from it.

        Raises:
            ContextOverflowError: the prompt leaves no room.
            RequestError: a parameter or token can't be served.
        """
        prompt, sampling = tuple(request.prompt_ids), request.sampling
        if request.images:
            raise RequestError("this policy server has no vision")
        if not prompt:
            raise RequestError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise RequestError(f"the prompt has ids outside the vocabulary of {self._vocabulary}")
        if sampling.max_tokens < 1 or not 0 < sampling.top_p <= 1:
            raise RequestError("max_tokens must be at least 1 and top_p in (0, 1]")
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise RequestError("temperature must be 0 or more")
        room = self._context - len(prompt)
        if room < 1:
            raise ContextOverflowError(prompt_tokens=len(prompt), context_length=self._context)
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        return ActiveRequest(
            prompt=prompt,
            sampling=sampling,
            limit=min(sampling.max_tokens, room),
            stops=self._stops.union(sampling.stop_token_ids),
            random=random.Random(seed),
        )


class InProcessServer:
    """Serves the run's model.

    Args:
        config: its options.
    """

    def __init__(self, config: InProcessConfig) -> None:
        self._config = config
        self._store: WeightStore | None = None
        self._engine: Engine | None = None
        self._thread: EngineThread | None = None
        self._endpoint: InProcessEndpoint | None = None
        self._http: HttpApi | None = None

    async def start(self, context: PolicyServerContext) -> None:
        """See `PolicyServer.start`. Where the store holds versions already, the newest is served.

        Raises:
            ConfigError: there is no model, or its folder or an option can't be used.
        """
        source, config = context.model, self._config
        if source is None:
            raise ConfigError(
                f"policies.{context.name}: the in_process server needs the run's model",
                hint="add a [model] section with a path",
            )
        self._store = context.store
        model = await asyncio.to_thread(lambda: build_model(source, choose_device(config.device)))
        codec = await asyncio.to_thread(TextCodec.load, source.path)
        shape = model.shape
        length = min(config.context_length or shape.context, shape.context)
        self._engine = Engine(
            model,
            max_batch=config.max_batch,
            prefill_tokens=config.prefill_tokens,
            prefix_cache_bytes=config.prefix_cache_mb << 20,
        )
        self._thread = EngineThread(
            self._engine,
            capacity=config.max_batch + config.max_waiting,
            threads=choose_threads(config.threads, shape),
            loop=asyncio.get_running_loop(),
        )
        info = PolicyInfo(
            name=context.name,
            model=source.path.resolve().name,
            exact=True,
            context_length=length,
            model_path=source.path,
        )
        try:
            endpoint = InProcessEndpoint(
                info=info,
                thread=self._thread,
                codec=codec,
                vocabulary=shape.vocab,
                context=length,
                stops=frozenset(shape.eos_ids),
                seed=source.seed,
            )
            latest = None if self._store is None else await self._store.latest()
            if latest is not None:
                await self.load(latest)
            if config.port is not None:
                self._http = HttpApi(endpoint, config, token=os.environ.get(config.api_key_env) or None)
                url = await self._http.start()
                endpoint._info = replace(info, base_url=url)
            self._endpoint = endpoint
        except BaseException:
            await self.aclose()
            raise

    def endpoint(self) -> InProcessEndpoint:
        """Where to send prompts."""
        if self._endpoint is None:
            raise PolicyServerError("the policy server has not been started")
        return self._endpoint

    @property
    def token(self) -> str | None:
        """The bearer token that HTTP clients must send, or None."""
        return None if self._http is None else self._http.token

    @property
    def version(self) -> PolicyVersion:
        """The policy version that serves."""
        if self._engine is None:
            raise PolicyServerError("the policy server has not been started")
        return self._engine.version

    async def load(self, version: PolicyVersion) -> None:
        """See `PolicyServer.load`. Responses under way go on with the new weights, keys and values recomputed."""
        engine, thread = self._engine, self._thread
        if engine is None or thread is None:
            raise PolicyServerError("the policy server has not been started")
        if self._store is None:
            raise PolicyServerError("this policy server has no weight store to load from")
        try:
            weights = await self._store.get(version)
            await thread.call(lambda: engine.swap(version, weights))
        except KeyError as error:
            raise PolicyServerError(f"version {version} is not in the weight store; {engine.version} serves") from error
        except WeightsError as error:
            raise PolicyServerError(f"version {version} can't be served; {engine.version} still is: {error}") from error

    async def aclose(self) -> None:
        """See `PolicyServer.aclose`."""
        http, self._http = self._http, None
        thread, self._thread = self._thread, None
        self._endpoint = self._engine = None
        if http is not None:
            await http.aclose()
        if thread is not None:
            await thread.aclose()
