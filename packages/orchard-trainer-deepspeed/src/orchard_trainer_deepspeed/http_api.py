"""The in-process policy server over HTTP: models, completions and chat completions as OpenAI and vLLM shape them."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from orchard_api.errors import (
    ContextOverflowError,
    DeadlineError,
    OrchardError,
    OverloadedError,
    PolicyServerError,
)
from orchard_api.policy import GenerateRequest, Generation, PolicyInfo
from orchard_trainer_deepspeed.chat import RequestError, TextCodec
from orchard_trainer_deepspeed.config import InProcessConfig
from orchard_trainer_deepspeed.engine import ActiveRequest
from orchard_trainer_deepspeed.http_shapes import ChatShape, CompletionShape, ParsedRequest, Shape

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Served(Protocol):
    """What the HTTP API needs of the endpoint."""

    codec: TextCodec | None

    @property
    def info(self) -> PolicyInfo:
        """What is served."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole response."""
        ...

    def prepare(self, request: GenerateRequest) -> ActiveRequest:
        """A request to be streamed."""
        ...

    def stream(self, active: ActiveRequest, *, deadline_s: float) -> AsyncGenerator[int, None]:
        """Its progress."""
        ...


class HttpApi:
    """Listens on one address. On loopback without a token unless one is set; elsewhere always with one.

    Args:
        endpoint: the policy.
        config: address and limits.
        token: the bearer token, or None.
    """

    def __init__(self, endpoint: Served, config: InProcessConfig, *, token: str | None) -> None:
        self._endpoint = endpoint
        self._config = config
        self.token = token if token or _is_loopback(config.host) else secrets.token_urlsafe(32)
        self._runner: web.AppRunner | None = None
        self._began = int(time.time())

    async def start(self) -> str:
        """Listen, and return the API's root URL.

        Raises:
            PolicyServerError: the address is taken or not ours.
        """
        app = web.Application(client_max_size=self._config.max_body_mb << 20, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        # A client that goes away cancels its handler, which frees the request's slot.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, self._config.host, self._config.port or 0)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise PolicyServerError(
                f"can't listen on {self._config.host}:{self._config.port}: {error.strerror}",
                hint="port = 0 takes a free one",
            ) from error
        self._runner = runner
        host = self._config.host
        port = runner.addresses[0][1]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    async def aclose(self) -> None:
        """Stop listening; requests under way are cancelled."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.token is not None and request.path != "/health":
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
                return _problem(401, "a bearer token is needed", "authentication_error", code="invalid_api_key")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _problem(error.status, error.reason, "invalid_request_error")
        except OrchardError as error:
            return _refusal(error)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        info = self._endpoint.info
        model = {"id": info.model, "object": "model", "created": self._began, "owned_by": "orchard"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": info.context_length}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionShape(self._endpoint.codec, self._endpoint.info))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatShape(self._endpoint.codec, self._endpoint.info))

    async def _answer(self, request: web.Request, shape: Shape) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            raise RequestError("the body is not JSON") from None
        parsed = shape.parse(body)
        if parsed.stream:
            return await self._stream(request, shape, parsed)
        generation = await self._endpoint.generate(parsed.generate)
        return web.json_response(shape.whole(parsed, generation))

    async def _stream(self, request: web.Request, shape: Shape, parsed: ParsedRequest) -> web.StreamResponse:
        active = self._endpoint.prepare(parsed.generate)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        sent = 0
        try:
            async with contextlib.aclosing(
                self._endpoint.stream(active, deadline_s=parsed.generate.deadline_s)
            ) as counts:
                async for count in counts:
                    if not response.prepared:
                        await response.prepare(request)
                    for piece in shape.pieces(parsed, active, sent, count):
                        await response.write(_event(piece))
                    sent = count
        except OrchardError as error:
            if not response.prepared:
                raise
            await response.write(_event(_error_body(str(error), "server_error", None)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def _error_body(message: str, kind: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _problem(status: int, message: str, kind: str, *, code: str | None = None) -> web.Response:
    return web.json_response(_error_body(message, kind, code), status=status)


def _refusal(error: OrchardError) -> web.Response:
    if isinstance(error, ContextOverflowError):
        text = (
            f"This model's maximum context length is {error.context_length} tokens; "
            f"the prompt has {error.prompt_tokens} tokens."
        )
        return _problem(400, text, "invalid_request_error", code="context_length_exceeded")
    if isinstance(error, RequestError):
        return _problem(400, str(error), "invalid_request_error")
    if isinstance(error, OverloadedError):
        response = _problem(429, str(error), "overloaded_error")
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s or 1.0)))
        return response
    status = 504 if isinstance(error, DeadlineError) else 500
    return _problem(status, str(error), "server_error")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
