"""The in-process policy server: bounds, deadlines, errors, swaps through the store, chat."""

from __future__ import annotations

import asyncio
import copy
import threading

import pytest
import torch
from trainer_models import held, memory_store, random_source, request, server, write_model

from orchard_api.errors import (
    ConfigError,
    ContextOverflowError,
    DeadlineError,
    OverloadedError,
    PolicyServerError,
)
from orchard_api.messages import Message
from orchard_api.policy import ChatRequest, GenerateRequest, PolicyServerContext, SamplingParams
from orchard_trainer_deepspeed.checkpoint import build_model, export_weights
from orchard_trainer_deepspeed.config import InProcessConfig
from orchard_trainer_deepspeed.server import InProcessServer


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "orchard-engine"]


async def test_tokens_in_tokens_out(model_folder):
    async with server(model_folder) as made:
        info = made.endpoint().info
        assert (info.exact, info.context_length, info.model_path) == (True, 64, model_folder)
        found = await made.endpoint().generate(request([5, 6, 7], max_tokens=8))
        assert 1 <= len(found.token_ids) <= 8
        assert set(found.versions) == {0}
        assert found.finish_reason == ("stop" if found.token_ids[-1] == 1 else "length")
    assert engine_threads() == []


async def test_a_request_is_never_changed_and_repeats_with_its_seed(model_folder):
    # verl#6364: the server changed the caller's sampling parameters, and the second turn lost its budget.
    sent = GenerateRequest(prompt_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=9, seed=4, stop_token_ids=(3,)))
    kept = copy.deepcopy(sent)
    async with server(model_folder) as made:
        first = await made.endpoint().generate(sent)
        second = await made.endpoint().generate(sent)
        others = [await made.endpoint().generate(request([5, 6, 7], max_tokens=9)) for _ in range(5)]
    assert sent == kept
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)
    assert len({item.token_ids for item in others}) > 1


async def test_many_at_once(model_folder):
    async with server(model_folder, max_batch=8) as made:
        prompts = [[2 + n % 30] * (1 + n % 11) for n in range(60)]
        found = await asyncio.gather(*(made.endpoint().generate(request(p, max_tokens=6, seed=1)) for p in prompts))
        again = await asyncio.gather(*(made.endpoint().generate(request(p, max_tokens=6, seed=1)) for p in prompts))
    assert [item.token_ids for item in found] == [item.token_ids for item in again]


async def test_the_queue_is_bounded_and_cancelling_makes_room(model_folder):
    async with server(model_folder, max_batch=1, max_waiting=2) as made:
        endpoint = made.endpoint()
        async with held(endpoint):
            tasks = [asyncio.create_task(endpoint.generate(request([5], max_tokens=50))) for _ in range(3)]
            await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError) as refused:
                await endpoint.generate(request([5]))
            assert refused.value.retry_after_s
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            more = asyncio.create_task(endpoint.generate(request([5], max_tokens=2)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks[1:], more)
        assert endpoint._thread.load == 0


async def test_a_deadline_bounds_the_whole_call_and_frees_the_slot(model_folder, monkeypatch):
    async with server(model_folder, max_batch=1) as made:
        endpoint = made.endpoint()
        late = endpoint.prepare(request([5]))
        async with held(endpoint):
            with monkeypatch.context() as patched:
                patched.setattr(endpoint, "prepare", lambda _: late)
                with pytest.raises(DeadlineError):
                    await endpoint.generate(request([5], deadline_s=0.05))
        found = await endpoint.generate(request([5], max_tokens=3))
        assert late.ids == []
        assert len(found.token_ids) <= 3
        assert await endpoint._thread.call(lambda: (len(made._engine.running), len(made._engine.waiting))) == (0, 0)


async def test_an_outer_timeout_is_not_taken_for_the_deadline(model_folder):
    async with server(model_folder) as made, held(made.endpoint()):
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.05):
                await made.endpoint().generate(request([5]))
        assert not isinstance(caught.value, DeadlineError)


async def test_the_models_own_end_of_turn_ends_a_response(model_folder):
    async with server(model_folder) as made:
        found = [await made.endpoint().generate(request([5], max_tokens=60, seed=seed)) for seed in range(8)]
    ended = [item for item in found if item.finish_reason == "stop"]
    assert ended
    assert all(item.token_ids.index(1) == len(item.token_ids) - 1 for item in ended)


async def test_overflow_is_an_error_of_its_own_and_a_response_ends_at_the_context(model_folder):
    async with server(model_folder, context_length=20) as made:
        with pytest.raises(ContextOverflowError) as refused:
            await made.endpoint().generate(request([5] * 20))
        assert (refused.value.prompt_tokens, refused.value.context_length) == (20, 20)
        found = [await made.endpoint().generate(request([5] * 15, max_tokens=100, seed=n)) for n in range(5)]
        assert max(len(item.token_ids) for item in found) == 5
        assert all(item.finish_reason == "stop" or len(item.token_ids) == 5 for item in found)


@pytest.mark.parametrize(
    ("prompt", "sampling", "word"),
    [
        ([], {}, "empty"),
        ([5, 40], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"temperature": float("nan")}, "temperature"),
    ],
)
async def test_what_cannot_be_served_is_refused(model_folder, prompt, sampling, word):
    async with server(model_folder) as made:
        with pytest.raises(PolicyServerError, match=word):
            await made.endpoint().generate(request(prompt, **sampling))
        with pytest.raises(PolicyServerError, match="vision"):
            await made.endpoint().generate(
                GenerateRequest(prompt_ids=[5], sampling=SamplingParams(), images=("sha256:0",))
            )


async def test_versions_come_from_the_store(model_folder):
    store = memory_store()
    other = export_weights(build_model(random_source(model_folder, 7)))
    async with server(model_folder, store=store) as made:
        sent = request([5, 6, 7], max_tokens=10, seed=1)
        zero = await made.endpoint().generate(sent)
        await store.put(4, other)
        await made.load(4)
        assert made.version == 4
        four = await made.endpoint().generate(sent)
        assert set(four.versions) == {4}
        assert four.token_ids != zero.token_ids
        with pytest.raises(PolicyServerError, match="version 9"):
            await made.load(9)
        await store.put(5, {**other, "model.norm.weight": torch.ones(3)})
        with pytest.raises(PolicyServerError, match=r"version 5 .*4 still"):
            await made.load(5)
        after = await made.endpoint().generate(sent)
        assert (after.token_ids, after.versions) == (four.token_ids, four.versions)
    # A server that starts late begins with the newest usable version.
    fresh = memory_store()
    await fresh.put(6, other)
    async with server(model_folder, store=fresh) as made:
        assert set((await made.endpoint().generate(sent)).versions) == {6}


async def test_a_swap_under_load_loses_no_request(model_folder):
    store = memory_store(keep=0)
    source = export_weights(build_model(random_source(model_folder)))
    async with server(model_folder, store=store) as made:
        endpoint = made.endpoint()
        tasks = [asyncio.create_task(endpoint.generate(request([2 + n], max_tokens=40, seed=n))) for n in range(16)]
        for version in range(1, 8):
            await store.put(version, source)
            await made.load(version)
            await store.release(version - 1)
        found = await asyncio.gather(*tasks)
        calm = await asyncio.gather(*(endpoint.generate(request([2 + n], max_tokens=40, seed=n)) for n in range(16)))
    assert [item.token_ids for item in found] == [item.token_ids for item in calm]
    assert all(list(item.versions) == sorted(item.versions) for item in found)


async def test_an_engine_that_fails_fails_its_requests_and_says_why(model_folder, monkeypatch):
    async with server(model_folder) as made:

        def broken():
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(made._engine, "step", broken)
        with pytest.raises(PolicyServerError, match="no such kernel"):
            await made.endpoint().generate(request([5]))
        with pytest.raises(PolicyServerError, match="no such kernel"):
            await made.endpoint().generate(request([5]))


async def test_closing_fails_what_waits(model_folder):
    async with server(model_folder, max_batch=1) as made:
        async with held(made.endpoint()):
            task = asyncio.create_task(made.endpoint().generate(request([5], max_tokens=60)))
            await asyncio.sleep(0.01)
            closing = asyncio.create_task(made.aclose())
            await asyncio.sleep(0.01)
        await closing
        with pytest.raises(PolicyServerError, match="closed"):
            await task
    with pytest.raises(PolicyServerError, match="not been started"):
        made.endpoint()
    await made.aclose()


async def test_a_run_without_a_model_is_told(tmp_path):
    made = InProcessServer(InProcessConfig())
    with pytest.raises(ConfigError, match=r"policies\.main"):
        await made.start(PolicyServerContext(name="main", model=None, store=None))


async def test_chat_goes_through_the_template(tmp_path, model_folder):
    folder = write_model(tmp_path / "text", tokenizer=True)
    async with server(folder) as made:
        sent = ChatRequest(
            messages=[Message(role="user", content="w1 w2")], sampling=SamplingParams(max_tokens=6, seed=1)
        )
        reply = await made.endpoint().chat(sent)
        assert reply.prompt_tokens == 5
        exact = await made.endpoint().generate(request([2, 7, 8, 1, 3], max_tokens=6, seed=1))
        assert reply.completion_tokens == len(exact.token_ids)
        assert reply.message.role == "assistant"
        assert "<|end|>" not in reply.message.text.split()[-1:]
    async with server(model_folder) as made:
        with pytest.raises(PolicyServerError, match="tokenizer"):
            await made.endpoint().chat(sent)
