"""Server and learner together: a toy is learnt, and nothing drifts when nothing is learnt."""

from __future__ import annotations

import asyncio
import random

import pytest
from trainer_models import generation_row, memory_store, request, server, trainer, write_model

from orchard_api.training import Batch
from orchard_trainer_deepspeed.advantages import Grpo

GROUP = 8


async def play(endpoint, prompts, *, temperature=1.0):
    """Groups of responses to the prompts."""
    return await asyncio.gather(
        *(
            endpoint.generate(request(prompt, max_tokens=4, temperature=temperature))
            for prompt in prompts
            for _ in range(GROUP)
        )
    )


def rows_of(prompts, generations, rewards):
    groups = [str(number // GROUP) for number in range(len(generations))]
    advantages = Grpo()(rewards, groups)
    return [
        generation_row(prompts[number // GROUP], found, advantages[number], name=f"e{number}", group=groups[number])
        for number, found in enumerate(generations)
    ]


async def test_a_bandit_is_learnt(tmp_path):
    """The reward is the share of even tokens; chance gives about a half."""
    folder = write_model(tmp_path / "model", initializer_range=0.05)
    rng = random.Random(0)
    store = memory_store()
    curve = []
    async with trainer(folder, store=store, lr=6e-3) as learner, server(folder, store=store) as made:
        await learner.configure({"schedule": "linear", "min_lr_ratio": 0.2}, updates=30)
        for _ in range(30):
            prompts = [[rng.randrange(2, 40), 0] for _ in range(6)]
            found = await play(made.endpoint(), prompts)
            rewards = [sum(token % 2 == 0 for token in item.token_ids) / 4 for item in found]
            curve.append(sum(rewards) / len(rewards))
            report = await learner.update(Batch(rows=rows_of(prompts, found, rewards)))
            assert report.metrics.get("log_ratio_abs_max", 0.0) < 1e-3
            assert report.metrics["staleness_max"] == 0.0
            await made.load(await learner.publish())
            await store.release(report.version - 1)
        assert made.version == learner.version == 30
    assert sum(curve[:3]) / 3 < 0.65
    assert sum(curve[-3:]) / 3 > 0.9


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_with_a_learning_rate_of_0_the_gap_stays_flat(model_folder, temperature):
    # open-instruct#1473, trl#4159.
    store = memory_store()
    rng = random.Random(1)
    gaps = []
    prompts = [[5, 6, 7], [8]]
    async with trainer(model_folder, store=store, lr=0.0) as learner, server(model_folder, store=store) as made:
        for _ in range(8):
            found = await play(made.endpoint(), prompts, temperature=temperature)
            rewards = [rng.random() for _ in found]
            batch = Batch(rows=rows_of(prompts, found, rewards), temperature=temperature)
            report = await learner.update(batch)
            gaps.append(report.metrics["log_ratio_abs_mean"])
            assert report.metrics["grad_norm"] > 0
            await made.load(await learner.publish())
    assert max(gaps) < 1e-5
    assert report.version == 8


async def test_a_wrong_temperature_shows_as_a_gap(model_folder):
    prompts = [[5, 6, 7], [8]]
    async with trainer(model_folder) as learner, server(model_folder) as made:
        found = await play(made.endpoint(), prompts, temperature=0.6)
        rows = rows_of(prompts, found, [random.Random(n).random() for n in range(len(found))])
        report = await learner.update(Batch(rows=rows, temperature=1.0))
    assert report.metrics["log_ratio_abs_mean"] > 0.05
