"""The openai policy server against a local HTTP server that answers what each test says."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from harness_fakes import MemorySandbox, policies
from pydantic import ValidationError

from orchard_api.errors import (
    ConfigError,
    ContextOverflowError,
    DeadlineError,
    OverloadedError,
    PolicyServerError,
)
from orchard_api.messages import Message, Tool, ToolCall
from orchard_api.openai_address import normalise_base_url
from orchard_api.policy import ChatRequest, GenerateRequest, PolicyServerContext, SamplingParams
from orchard_api.task import Task
from orchard_harnesses.openai_config import OpenAIConfig
from orchard_harnesses.openai_server import OpenAIEndpoint, OpenAIServer
from orchard_harnesses.react import ReactConfig, ReactHarness

KEY = "sk-very-secret-0123456789"
CONTEXT = PolicyServerContext(name="main", model=None, store=None)
ASK = ChatRequest(messages=[Message(role="user", content="hi")], sampling=SamplingParams(max_tokens=5, seed=3))
Answer = web.StreamResponse | tuple[int, Any]


class Api:
    """An OpenAI-compatible server; `answers` are given in order, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Any] = [completion("hello")]
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[Any] = []
        self.models: Any = (200, {"data": [{"id": "m"}]})
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.headers.append(request.headers)
        if request.path.endswith("/models"):
            return respond(self.models)
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Callable):  # type: ignore[arg-type]
            answer = await answer()
        return respond(answer)


def respond(answer: Any) -> web.StreamResponse:
    if isinstance(answer, web.StreamResponse):
        return answer
    status, body, *headers = answer
    return web.json_response(body, status=status, headers=headers[0] if headers else None)


def completion(text: str, **choice: Any) -> tuple[int, Any]:
    message = {"role": "assistant", "content": text}
    entry = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    return 200, {"choices": [entry], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def refusal(message: str, **fields: Any) -> Any:
    return {"error": {"message": message, **fields}}


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    api = Api()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()


@pytest.fixture
async def connect(api: Api) -> AsyncIterator[Callable[..., Any]]:
    servers: list[OpenAIServer] = []

    async def start(**options: Any) -> OpenAIEndpoint:
        server = OpenAIServer(OpenAIConfig(**{"base_url": api.url, "model": "m", "max_retries": 2, **options}))
        servers.append(server)
        await server.start(CONTEXT)
        return server.endpoint()

    yield start
    for server in servers:
        await server.aclose()
        await server.aclose()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
async def test_the_address_is_taken_with_and_without_v1(end: str, api: Api, connect: Any) -> None:
    endpoint = await connect(base_url=api.url + end)
    reply = await endpoint.chat(ASK)
    assert reply.message == Message(role="assistant", content="hello")
    assert (reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("stop", 7, 3)
    assert api.paths == ["/v1/models", "/v1/chat/completions"]
    assert api.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert api.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "temperature": 1.0,
        "seed": 3,
    }


def test_addresses() -> None:
    assert normalise_base_url("https://openrouter.ai/api/v1") == "https://openrouter.ai/api/v1"
    assert normalise_base_url("https://host/v1beta/openai/") == "https://host/v1beta/openai"
    assert normalise_base_url("http://host:8000/proxy") == "http://host:8000/proxy/v1"
    for url in ("host:8000", "ftp://host", "http://user:secret@host/v1"):
        with pytest.raises(ValidationError) as caught:
            OpenAIConfig(base_url=url)
        assert "expected a URL" in str(caught.value)


def test_a_key_in_the_run_file_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a key"):
        OpenAIConfig(api_key_env=KEY)


async def test_a_missing_key_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match=r"api\.openai\.com/v1 needs a key, and \$OPENAI_API_KEY is not set"):
        await OpenAIServer(OpenAIConfig(model="m")).start(CONTEXT)


async def test_this_machine_needs_no_key(api: Api, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    await (await connect()).chat(ASK)
    assert "Authorization" not in api.headers[-1]


async def test_the_address_of_the_environment_is_the_default(
    api: Api, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", api.url)
    assert (await connect(base_url=None)).info.base_url == f"{api.url}/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "nonsense")
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL"):
        await connect(base_url=None)


async def test_the_only_model_served_needs_no_name(api: Api, connect: Any) -> None:
    assert (await connect(model=None)).info.model == "m"
    api.models = (200, {"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(ConfigError, match=r"name one of the models .*: a, b"):
        await connect(model=None)


async def test_a_server_that_is_not_there_says_where_it_was_looked_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = OpenAIServer(OpenAIConfig(base_url=f"http://127.0.0.1:{port}", model="m"))
    with pytest.raises(PolicyServerError, match=rf"can't reach http://127\.0\.0\.1:{port}/v1[\s\S]*set base_url"):
        await server.start(CONTEXT)
    await server.aclose()


async def test_a_refused_key_says_which_variable(api: Api, connect: Any) -> None:
    api.models = (401, refusal(f"Incorrect API key provided: {KEY}"))
    with pytest.raises(PolicyServerError) as caught:
        await connect()
    assert "$OPENAI_API_KEY" in str(caught.value) and KEY not in str(caught.value)


async def test_a_server_without_a_list_of_models_is_fine(api: Api, connect: Any) -> None:
    api.models = (404, {"detail": "Not Found"})
    assert (await (await connect()).chat(ASK)).message.text == "hello"


async def test_the_key_is_in_no_repr_error_or_log(api: Api, connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        endpoint = await connect()
        api.answers = [(400, refusal(f"bad {KEY}"))]
        with pytest.raises(PolicyServerError) as caught:
            await endpoint.chat(ASK)
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert KEY not in " ".join([repr(endpoint), repr(endpoint._client), *map(repr, chain), caplog.text])


OVERFLOWS = [
    (refusal("This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens."), 1),
    (refusal("too long", code="context_length_exceeded"), 0),
    (refusal("prompt is too long: 9001 tokens > 8192 maximum"), 0),
    ({"message": "The input is too long: maximum context length is 8192"}, 0),
]


@pytest.mark.parametrize(("body", "numbers"), OVERFLOWS)
async def test_an_overflow_is_an_outcome(body: Any, numbers: int, api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [(400, body)]
    with pytest.raises(ContextOverflowError) as caught:
        await endpoint.chat(ASK)
    if numbers:
        assert (caught.value.prompt_tokens, caught.value.context_length) == (9001, 8192)


async def test_what_may_pass_is_tried_again_after_the_time_asked_for(api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [
        (429, refusal("slow down"), {"Retry-After": "0.2"}),
        (503, refusal("loading"), {"retry-after-ms": "100"}),
        completion("at last"),
    ]
    start = time.monotonic()
    assert (await endpoint.chat(ASK)).message.text == "at last"
    assert 0.3 <= time.monotonic() - start < 2
    assert len(api.bodies) == 3 and api.bodies[0] == api.bodies[2]


@pytest.mark.parametrize(
    ("status", "error"), [(429, OverloadedError), (503, OverloadedError), (500, PolicyServerError)]
)
async def test_retries_are_bounded(status: int, error: type[Exception], api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [(status, refusal("no"), {"Retry-After": "0"})]
    with pytest.raises(error, match="3 attempts"):
        await endpoint.chat(ASK)
    assert len(api.bodies) == 3


async def test_a_wait_beyond_the_deadline_is_not_waited(api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [(429, refusal("slow down"), {"Retry-After": "3600"})]
    start = time.monotonic()
    with pytest.raises(OverloadedError) as caught:
        await endpoint.chat(ASK)
    assert caught.value.retry_after_s == 3600 and time.monotonic() - start < 1


async def test_a_used_up_quota_is_not_retried(api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [(429, refusal("You exceeded your quota", code="insufficient_quota"))]
    with pytest.raises(PolicyServerError, match="quota"):
        await endpoint.chat(ASK)
    assert len(api.bodies) == 1


async def test_the_deadline_bounds_attempts_and_waits_together(api: Api, connect: Any) -> None:
    async def hang() -> Any:
        await asyncio.sleep(30)

    endpoint = await connect(max_retries=9)
    api.answers = [(503, refusal("no"), {"Retry-After": "0.05"}), hang]
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.4 s"):
        await endpoint.chat(ChatRequest(messages=ASK.messages, sampling=ASK.sampling, deadline_s=0.4))
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize(
    "answer",
    [
        web.Response,
        lambda: (200, []),
        lambda: (200, {"choices": []}),
        lambda: (200, {"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}),
        lambda: (200, {"choices": [{"message": {"tool_calls": [{}]}, "finish_reason": "stop"}]}),
        lambda: completion("x", finish_reason="exploded"),
    ],
)
async def test_an_answer_that_is_none_is_the_servers_failure(answer: Any, api: Api, connect: Any) -> None:
    endpoint = await connect()

    async def give() -> Any:
        return answer()

    api.answers = [give]
    with pytest.raises(PolicyServerError):
        await endpoint.chat(ASK)


async def test_tools_and_history_go_out_in_the_apis_form(api: Api, connect: Any) -> None:
    endpoint = await connect(extra_body={"reasoning_effort": "low"}, max_tokens_field="max_completion_tokens")
    call = ToolCall(id="c", name="shell", arguments='{"command": "ls"}')
    asked = [
        Message(role="user", content="hi"),
        Message(role="assistant", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", content="x", tool_call_id="c"),
    ]
    answered = {"role": "assistant", "content": None, "tool_calls": [{"id": "d", "type": "function", "function": {}}]}
    answered["tool_calls"][0]["function"] = {"name": "submit", "arguments": "{}"}  # type: ignore[index]
    api.answers = [(200, {"choices": [{"message": answered, "finish_reason": "tool_calls"}]})]
    tool = Tool(name="shell", description="Run.", parameters={"type": "object"})
    reply = await endpoint.chat(ChatRequest(messages=asked, sampling=SamplingParams(top_p=0.5), tools=[tool]))
    assert reply.message.tool_calls == (ToolCall(id="d", name="submit", arguments="{}"),)
    body = api.bodies[0]
    assert body["tools"][0]["function"]["name"] == "shell"
    assert (body["reasoning_effort"], body["top_p"], body["max_completion_tokens"]) == ("low", 0.5, 512)
    assert "max_tokens" not in body and "reasoning" not in json.dumps(body["messages"])


async def test_a_model_that_wants_other_fields_gets_them(api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [
        (400, refusal("'max_tokens' is not supported. Use 'max_completion_tokens' instead.", param="max_tokens")),
        completion("ok"),
        (400, refusal("'temperature' does not support 1.0", param="temperature")),
        completion("ok"),
    ]
    for _ in range(2):
        assert (await endpoint.chat(ASK)).message.text == "ok"
    assert "max_completion_tokens" in api.bodies[1] and "temperature" not in api.bodies[3]
    await endpoint.chat(ASK)
    assert api.bodies[4] == api.bodies[3]


async def test_requests_at_once_are_bounded(api: Api, connect: Any) -> None:
    running = most = 0

    async def count() -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return completion("x")

    endpoint = await connect(max_concurrency=3)
    api.answers = [count]
    await asyncio.gather(*(endpoint.chat(ASK) for _ in range(12)))
    assert most == 3


async def test_a_large_body_goes_through(api: Api, connect: Any) -> None:
    endpoint = await connect()
    text = "x" * (20 << 20)
    await endpoint.chat(ChatRequest(messages=[Message(role="user", content=text)], sampling=ASK.sampling))
    assert len(api.bodies[0]["messages"][0]["content"]) == len(text)


def tokens(sent: list[int], ids: list[int], **changes: Any) -> tuple[int, Any]:
    choice = {
        "text": "?",
        "token_ids": ids,
        "prompt_token_ids": sent,
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        "finish_reason": "stop",
        **changes,
    }
    return 200, {"choices": [{key: value for key, value in choice.items() if value is not None}]}


ASK_IDS = GenerateRequest(prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4, stop_token_ids=(9,)))


async def test_token_in_token_out(api: Api, connect: Any, model_folder: Path) -> None:
    endpoint = await connect(exact=True, model_path=model_folder)
    assert endpoint.info.exact and endpoint.info.model_path == model_folder
    api.answers = [tokens([1, 2, 3], [7, 9], token_versions=[4, 5])]
    generation = await endpoint.generate(ASK_IDS)
    assert (generation.token_ids, generation.logprobs, generation.versions) == ((7, 9), (-0.5, -0.5), (4, 5))
    assert api.paths[-1] == "/v1/completions"
    assert api.bodies[0]["prompt"] == [1, 2, 3] and api.bodies[0]["stop_token_ids"] == [9]
    assert api.bodies[0]["return_token_ids"] is True
    api.answers = [
        tokens(
            [1, 2, 3],
            [7, 8, 9],
            weight_versions=[{"version": "v2", "start": 0, "end": 1}, {"version": "v3", "start": 1, "end": 3}],
        )
    ]
    assert (await endpoint.generate(ASK_IDS)).versions == (2, 3, 3)
    api.answers = [tokens([1, 2, 3], [7])]
    assert (await endpoint.generate(ASK_IDS)).versions == (0,)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (tokens([1, 2], [7]), "tokenised the prompt again"),
        (tokens([1, 2, 3], [7], token_ids=None), "no token_ids"),
        (tokens([1, 2, 3], [7], prompt_token_ids=None), "no prompt_token_ids"),
        (tokens([1, 2, 3], [7], logprobs=None), "no logprobs"),
        (tokens([1, 2, 3], [7], logprobs={"token_logprobs": [None]}), "no logprobs"),
        (tokens([1, 2, 3], [7, 8], logprobs={"token_logprobs": [-1]}), "2 token ids and 1 logprobs"),
        (tokens([1, 2, 3], [7, 8], token_versions=[1]), "2 token ids and 1 versions"),
        (tokens([1, 2, 3], [7, 8], weight_versions=[{"version": 1, "start": 0, "end": 1}]), "every token"),
    ],
)
async def test_exactness_is_checked(answer: Any, message: str, api: Api, connect: Any, model_folder: Path) -> None:
    """rllm#816, sglang#26555."""
    endpoint = await connect(exact=True, model_path=model_folder)
    api.answers = [answer]
    with pytest.raises(PolicyServerError, match=message):
        await endpoint.generate(ASK_IDS)


async def test_exact_needs_a_template(connect: Any) -> None:
    with pytest.raises(ConfigError, match="set model_path"):
        await connect(exact=True)
    with pytest.raises(PolicyServerError, match="exact = false"):
        await (await connect()).generate(ASK_IDS)


async def test_it_loads_no_weights(connect: Any) -> None:
    with pytest.raises(PolicyServerError, match="outside model"):
        await OpenAIServer(OpenAIConfig(model="m")).load(1)


async def test_react_over_http(api: Api, connect: Any) -> None:
    endpoint = await connect()
    api.answers = [completion("<shell>ls</shell>"), completion("<submit>done</submit>")]
    task = Task(task_id="t", instruction="list the files")
    result = await ReactHarness(ReactConfig()).run(task, MemorySandbox(), policies(endpoint))
    assert (result.outcome, result.answer) == ("submitted", "done")
    assert [message["role"] for message in api.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
