"""The policy server over HTTP: shapes, streams, errors, tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import chain

import aiohttp
import pytest
from trainer_models import held, request, server, write_model

from orchard_api.errors import PolicyServerError


@pytest.fixture
def text_folder(tmp_path):
    return write_model(tmp_path / "text", tokenizer=True)


async def post(session, url, body, **options):
    async with session.post(url, json=body, **options) as response:
        return response.status, await response.json(), response.headers


async def events(session, url, body):
    async with session.post(url, json=body) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line async for line in response.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


async def test_models_and_health(text_folder):
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        base = made.endpoint().info.base_url
        assert base.startswith("http://127.0.0.1:")
        assert made.token is None
        async with session.get(f"{base}/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("text", 64)
        async with session.get(base.removesuffix("/v1") + "/health") as response:
            assert response.status == 200


async def test_completions_take_ids_and_give_them_back_exactly(text_folder):
    # sglang#26555: the prompt's ids that come back are those that were sent.
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        url = f"{made.endpoint().info.base_url}/completions"
        body = {"model": "text", "prompt": [5, 0, 5, 6], "max_tokens": 8, "seed": 3, "logprobs": 1}
        body |= {"return_token_ids": True, "temperature": 0.7, "stop_token_ids": [9]}
        status, answer, _ = await post(session, url, body)
        assert status == 200
        exact = await made.endpoint().generate(
            request([5, 0, 5, 6], max_tokens=8, seed=3, temperature=0.7, stop_token_ids=(9,))
        )
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == answer["prompt_token_ids"] == [5, 0, 5, 6]
        assert choice["token_ids"] == list(exact.token_ids)
        assert choice["token_versions"] == list(exact.versions)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(exact.logprobs, abs=1e-5)
        assert choice["finish_reason"] == exact.finish_reason
        count = len(exact.token_ids)
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}


async def test_plain_requests_need_nothing_of_ours(text_folder):
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        base = made.endpoint().info.base_url
        status, answer, _ = await post(session, f"{base}/completions", {"prompt": "w1 w2", "max_tokens": 3})
        assert status == 200
        assert answer["object"] == "text_completion"
        assert isinstance(answer["choices"][0]["text"], str)
        assert "token_ids" not in answer["choices"][0]
        body = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 5, "logprobs": True}
        status, answer, _ = await post(session, f"{base}/chat/completions", body)
        assert status == 200
        assert answer["object"] == "chat.completion"
        assert answer["usage"]["prompt_tokens"] == 5
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_carries_the_same_record(text_folder, path):
    # agent-lightning#262: token ids were lost when streaming.
    prompt = (
        {"prompt": [2, 7, 8, 1, 3]} if path == "completions" else {"messages": [{"role": "user", "content": "w1 w2"}]}
    )
    body = {**prompt, "max_tokens": 12, "seed": 5, "logprobs": True if "chat" in path else 1, "return_token_ids": True}
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        url = f"{made.endpoint().info.base_url}/{path}"
        _, whole, _ = await post(session, url, body)
        pieces = await events(session, url, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    parts = [piece["choices"][0] for piece in pieces[:-1]]
    (choice,) = whole["choices"]
    assert len({piece["id"] for piece in pieces}) == 1
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [2, 7, 8, 1, 3]
    assert list(chain.from_iterable(part["token_ids"] for part in parts)) == choice["token_ids"]
    assert list(chain.from_iterable(part["token_versions"] for part in parts)) == choice["token_versions"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    if path == "completions":
        assert "".join(part["text"] for part in parts) == choice["text"]
        found = list(chain.from_iterable(part["logprobs"]["token_logprobs"] for part in parts))
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    else:
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert parts[0]["delta"]["role"] == "assistant"
        found = list(chain.from_iterable(part["logprobs"]["content"] for part in parts))
        assert [item["token"] for item in found] == [item["token"] for item in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("completions", {"prompt": [5] * 64}, 400, "maximum context length is 64"),
        ("completions", {"prompt": [99]}, 400, "vocabulary"),
        ("completions", {"prompt": []}, 400, "empty"),
        ("completions", {"prompt": 5}, 400, "prompt"),
        ("completions", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("completions", {"prompt": [5], "n": 2}, 400, "n = 2"),
        ("completions", {"prompt": [5], "temperature": "hot"}, 400, "temperature"),
        ("completions", {"prompt": [5], "stop": "w1 w2"}, 400, "stop"),
        ("completions", {"prompt": [5], "logprobs": 5}, 400, "logprobs"),
        ("completions", [], 400, "object"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "wizard"}]}, 400, "wizard"),
        ("chat/completions", {"messages": ["hello"]}, 400, "messages"),
        ("embeddings", {}, 404, "Not Found"),
    ],
)
async def test_a_bad_request_is_told_what_is_wrong(text_folder, path, body, status, word):
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        url = f"{made.endpoint().info.base_url}/{path}"
        got, answer, _ = await post(session, url, body)
        assert got == status
        assert word in answer["error"]["message"]
        if "prompt" in body and isinstance(body, dict) and status == 400:
            got, streamed, _ = await post(session, url, {**body, "stream": True})
            assert (got, streamed["error"]["message"]) == (status, answer["error"]["message"])
        async with session.post(url, data=b"{nonsense") as response:
            assert response.status in (400, 404)


async def test_a_stop_of_one_token_is_served(text_folder):
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        url = f"{made.endpoint().info.base_url}/completions"
        body = {"prompt": [5, 6], "max_tokens": 30, "seed": 1, "return_token_ids": True}
        _, free, _ = await post(session, url, body)
        third = free["choices"][0]["token_ids"][2]
        name = made.endpoint().codec.token(third)
        _, stopped, _ = await post(session, url, {**body, "stop": [name]})
    ids = free["choices"][0]["token_ids"]
    assert stopped["choices"][0]["token_ids"] == ids[: ids.index(third) + 1]
    assert stopped["choices"][0]["finish_reason"] == "stop"


async def test_a_full_queue_says_when_to_come_back(text_folder):
    async with server(text_folder, port=0, max_batch=1, max_waiting=0) as made, aiohttp.ClientSession() as session:
        async with held(made.endpoint()):
            first = asyncio.create_task(made.endpoint().generate(request([5], max_tokens=3)))
            await asyncio.sleep(0.01)
            url = f"{made.endpoint().info.base_url}/completions"
            status, _, headers = await post(session, url, {"prompt": [5]})
            assert status == 429
            assert int(headers["Retry-After"]) >= 1
        await first


async def test_a_deadline_of_the_request_is_kept(text_folder):
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session, held(made.endpoint()):
        url = f"{made.endpoint().info.base_url}/completions"
        for stream in (False, True):
            status, _, _ = await post(session, url, {"prompt": [5], "deadline_s": 0.05, "stream": stream})
            assert status == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_slot(text_folder, stream):
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session, held(made.endpoint()):
        endpoint = made.endpoint()
        url = f"{endpoint.info.base_url}/completions"
        task = asyncio.create_task(post(session, url, {"prompt": [5], "max_tokens": 60, "stream": stream}))
        async with asyncio.timeout(5):
            while endpoint._thread.load == 0:
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            while endpoint._thread.load:
                await asyncio.sleep(0.005)


async def test_beyond_loopback_a_token_is_needed(text_folder, monkeypatch):
    monkeypatch.delenv("ORCHARD_POLICY_KEY", raising=False)
    async with server(text_folder, port=0, host="0.0.0.0") as made, aiohttp.ClientSession() as session:
        url = f"{made.endpoint().info.base_url}/models"
        assert len(made.token) > 30
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Bearer {made.token}"}, 200),
        ):
            async with session.get(url, headers=headers) as response:
                assert response.status == status


async def test_a_token_from_the_environment_is_asked_for_on_loopback_too(text_folder, monkeypatch):
    monkeypatch.setenv("ORCHARD_POLICY_KEY", "open sesame")
    async with server(text_folder, port=0) as made, aiohttp.ClientSession() as session:
        url = f"{made.endpoint().info.base_url}/completions"
        status, answer, _ = await post(session, url, {"prompt": [5]})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        headers = {"Authorization": "Bearer open sesame"}
        assert (await post(session, url, {"prompt": [5]}, headers=headers))[0] == 200


async def test_a_taken_port_is_a_clear_error(text_folder):
    async with server(text_folder, port=0) as made:
        port = int(made.endpoint().info.base_url.split(":")[2].split("/")[0])
        with pytest.raises(PolicyServerError, match=f"can't listen on 127.0.0.1:{port}"):
            async with server(text_folder, port=port):
                pass
    assert not [thread for thread in threading.enumerate() if thread.name == "orchard-engine"]


async def test_a_model_without_tokenizer_serves_ids_alone(model_folder):
    async with server(model_folder, port=0) as made, aiohttp.ClientSession() as session:
        base = made.endpoint().info.base_url
        body = {"prompt": [5], "max_tokens": 2, "return_token_ids": True, "logprobs": 1}
        status, answer, _ = await post(session, f"{base}/completions", body)
        assert status == 200
        assert answer["choices"][0]["token_ids"]
        for path, body in (
            ("completions", {"prompt": "text"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            status, answer, _ = await post(session, f"{base}/{path}", body)
            assert status == 400
            assert "tokenizer" in answer["error"]["message"]
