"""Sampling and continuous batching: exact logprobs, streams of randomness, swaps in the middle, slots and prefixes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_models import random_source, write_model

from orchard_api.policy import SamplingParams
from orchard_trainer_deepspeed.checkpoint import WeightsError, build_model, export_weights
from orchard_trainer_deepspeed.engine import ActiveRequest, Engine
from orchard_trainer_deepspeed.model import Layout
from orchard_trainer_deepspeed.prefix_cache import PrefixCache
from orchard_trainer_deepspeed.sampling import sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("engine"))


def active(prompt, *, seed=0, stops=(), limit=None, **sampling) -> ActiveRequest:
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return ActiveRequest(
        prompt=tuple(prompt),
        sampling=params,
        limit=limit or params.max_tokens,
        stops=frozenset(stops),
        random=random.Random(seed),
    )


def play(engine, *requests):
    for item in requests:
        engine.add(item)
    while not engine.idle():
        engine.step()
    return requests


def engine(folder, **options):
    return Engine(build_model(random_source(folder)), **options)


@torch.no_grad()
def trainer_logprobs(model, request, *, temperature=1.0):
    full = torch.tensor((*request.prompt, *request.ids))
    logits = model.logits(model.hidden(full, Layout.of([len(full)]))) / temperature
    start = len(request.prompt) - 1
    return torch.log_softmax(logits, -1)[start:-1].gather(1, full[start + 1 :, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_the_learner_computes(folder, temperature):
    # trl#4159: the engine's logprobs were of another temperature.
    made = engine(folder, max_batch=3)
    prompts = [[2 + n] * (1 + 3 * n) for n in range(7)]
    requests = [active(prompt, seed=n, temperature=temperature) for n, prompt in enumerate(prompts)]
    for request in play(made, *requests):
        assert len(request.ids) == 12
        expected = trainer_logprobs(made.model, request, temperature=temperature)
        assert request.logprobs == pytest.approx(expected, abs=1e-4)
        assert request.generation().versions == (0,) * 12


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_seeded_response_does_not_depend_on_its_neighbours(folder, data):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    prompts = [[rng.randrange(2, 40) for _ in range(size)] for size in sizes]
    together = play(
        engine(folder, max_batch=data.draw(st.integers(1, 9)), prefill_tokens=data.draw(st.integers(1, 64))),
        *[active(prompt, seed=n, stops=(7, 9)) for n, prompt in enumerate(prompts)],
    )
    alone = engine(folder, prefix_cache_bytes=0)
    for number, prompt in enumerate(prompts):
        (expected,) = play(alone, active(prompt, seed=number, stops=(7, 9)))
        assert together[number].ids == expected.ids
        assert together[number].finish == expected.finish
        assert together[number].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_group_shares_its_prompt_and_differs_in_its_responses(folder):
    made = engine(folder)
    group = play(made, *[active([5, 6, 7, 8], seed=n) for n in range(8)])
    assert len({tuple(item.ids) for item in group}) > 4
    for item in group:
        assert item.logprobs == pytest.approx(trainer_logprobs(made.model, item), abs=1e-4)


def test_later_turns_reuse_what_is_computed_and_stay_exact(folder):
    made = engine(folder)
    (first,) = play(made, active([5, 6, 7]))
    longer = [*first.prompt, *first.ids, 3, 4]
    found = made._prefixes.find(longer)
    assert found is not None
    assert found[0] == len(first.prompt) + len(first.ids) - 1
    (second,) = play(made, active(longer, seed=1))
    assert second.logprobs == pytest.approx(trainer_logprobs(made.model, second), abs=1e-4)


def test_a_stop_id_ends_the_response_and_belongs_to_it(folder):
    made = engine(folder)
    (free,) = play(made, active([5, 6], seed=3))
    stop = free.ids[4]
    (stopped,) = play(made, active([5, 6], seed=3, stops=[stop]))
    end = free.ids.index(stop) + 1
    assert stopped.ids == free.ids[:end]
    assert stopped.finish == "stop"
    assert free.finish == "length"


def test_greedy_takes_the_likeliest_and_reports_it_at_temperature_one(folder):
    made = engine(folder)
    (item,) = play(made, active([5, 6, 7], temperature=0.0))
    full = torch.tensor((*item.prompt, *item.ids))
    with torch.no_grad():
        best = made.model.logits(made.model.hidden(full, Layout.of([len(full)]))).argmax(-1)
    assert item.ids == best[2:-1].tolist()
    assert item.logprobs == pytest.approx(trainer_logprobs(made.model, item), abs=1e-4)


def test_a_swap_in_the_middle_gives_each_token_its_version_and_the_new_weights_logprobs(folder):
    made, other = engine(folder), build_model(random_source(folder, 5))
    requests = [active([5, 6, 7 + n], seed=n) for n in range(3)]
    for item in requests:
        made.add(item)
    for _ in range(5):
        made.step()
    before = trainer_logprobs(made.model, requests[0])
    made.swap(3, export_weights(other))
    late = active([5, 6, 7], seed=9)
    play(made, late)
    for item in requests:
        assert item.versions == [0] * 5 + [3] * 7
    assert late.versions == [3] * 12
    after = trainer_logprobs(other, requests[0])
    assert requests[0].logprobs == pytest.approx(before + after[5:], abs=1e-4)
    assert late.logprobs == pytest.approx(trainer_logprobs(other, late), abs=1e-4)


def test_the_same_weights_twice_change_nothing(folder):
    # vllm#42821, vllm#42043: a layout transform applied twice; a token lost at a pause.
    plain = play(engine(folder), active([5, 6, 7], seed=1), active([8, 9], seed=2))
    made = engine(folder)
    weights = export_weights(made.model)
    requests = [active([5, 6, 7], seed=1), active([8, 9], seed=2)]
    for item in requests:
        made.add(item)
    for version in range(1, 7):
        made.step()
        made.swap(version, weights)
        made.swap(version, weights)
    play(made)
    assert [item.ids for item in requests] == [item.ids for item in plain]
    for got, expected in zip(requests, plain, strict=True):
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert all(torch.equal(weights[name], value) for name, value in export_weights(made.model).items())


def test_a_repeated_prompt_after_a_swap_uses_nothing_of_the_old_weights(folder):
    # NeMo-RL#4018, vllm#9744: a prefix cache keyed by text serves old keys and values.
    made = engine(folder)
    play(made, active([5, 6, 7, 8], seed=1))
    changed = {name: value + 0.5 * torch.randn_like(value) for name, value in export_weights(made.model).items()}
    made.swap(1, changed)
    (again,) = play(made, active([5, 6, 7, 8], seed=1))
    assert again.logprobs == pytest.approx(trainer_logprobs(made.model, again), abs=1e-4)


def test_a_failed_swap_leaves_the_old_version_serving(folder):
    made = engine(folder)
    (before,) = play(made, active([5, 6], seed=1))
    weights = export_weights(made.model)
    broken = {**weights, "model.norm.weight": torch.zeros(0)}
    with pytest.raises(WeightsError):
        made.swap(4, broken)
    (after,) = play(made, active([5, 6], seed=1))
    assert (after.ids, after.versions) == (before.ids, before.versions)


def test_a_cancelled_request_frees_its_slot(folder):
    made = engine(folder, max_batch=2)
    first, second, third = (active([5, 6, n], seed=n) for n in (7, 8, 9))
    for item in (first, second, third):
        made.add(item)
    made.step()
    assert made.running == [first, second]
    first.cancelled = True
    made.step()
    assert set(map(id, made.running)) == {id(second), id(third)}
    play(made)
    assert first.finish == "abort"
    assert len(first.ids) == 1
    for item in (second, third):
        assert item.logprobs == pytest.approx(trainer_logprobs(made.model, item), abs=1e-4)


def test_the_nucleus_keeps_the_likeliest_and_renormalises():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(400, 1)
    draws = [(place + 0.5) / 400 for place in range(400)]
    ids, logprobs = sample(logits, temperatures=[1.0] * 400, top_ps=[0.75] * 400, uniforms=draws)
    assert set(ids) == {0, 1}
    share = ids.count(0) / 400
    assert share == pytest.approx(0.5 / 0.8, abs=0.01)
    assert logprobs[ids.index(1)] == pytest.approx(torch.log(torch.tensor(0.3 / 0.8)).item(), abs=1e-5)
    mixed, _ = sample(logits[:2], temperatures=[1.0] * 2, top_ps=[0.1, 1.0], uniforms=[0.999, 0.999])
    assert mixed == [0, 3]


@given(st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_what_has_no_probability_is_never_sampled(seed, draw):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 30, generator=generator) * 5
    dead = torch.rand(1, 30, generator=generator) < 0.7
    dead[0, seed % 30] = False
    logits[dead] = float("-inf")
    for uniform in (draw, 0.0, 1 - 2**-53):
        ids, logprobs = sample(logits, temperatures=[1.0], top_ps=[1.0], uniforms=[uniform])
        assert not dead[0, ids[0]]
        assert logprobs[0] > float("-inf")


def test_the_prefix_cache_forgets_the_oldest_within_its_bound():
    entry = torch.zeros(10)
    cache = PrefixCache(3 * entry.numel() * entry.element_size())
    for number in range(3):
        cache.put((number, 1), entry)
    assert cache.find([0, 1, 5]) is not None
    cache.put((9, 9, 9), entry)
    assert [cache.holds((number, 1)) for number in range(3)] == [True, False, True]
    assert cache.find([9, 9, 9]) is not None
    assert cache.find([9, 9, 9])[0] == 2
    assert cache.find([1, 1, 1]) is None
    cache.put((1,) * 5, torch.zeros(1000))
    assert len(cache) == 3
    cache.clear()
    assert cache.find([0, 1, 5]) is None
