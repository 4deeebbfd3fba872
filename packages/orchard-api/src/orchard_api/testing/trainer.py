"""Checks of a `Trainer`: versions, exact continuation, and that it learns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchard_api.errors import ConfigError
from orchard_api.policy import ModelSource, WeightStore
from orchard_api.testing.suite import Check, Suite
from orchard_api.training import Batch, Row, Trainer, TrainerContext


class TrainerSuite(Suite):
    """What every trainer owes the run."""

    def trainer(self) -> Trainer:
        """The trainer under test, not started; large enough a learning rate to see it learn in ten updates."""
        raise NotImplementedError("say how the trainer is made: a method named `trainer`")

    def store(self) -> WeightStore:
        """A fresh weight store."""
        raise NotImplementedError("give a weight store: a method named `store`")

    def model(self, folder: Path) -> ModelSource:
        """A small model of at least 32 token ids; `folder` is empty and may be used for it."""
        raise NotImplementedError("give a small model: a method named `model`")

    def batch(self) -> Batch:
        """Two rows of token ids below 32 whose responses are learnt by cross entropy."""
        rows = []
        for shift in (0, 5):
            ids = [(3 * position + shift) % 29 + 1 for position in range(12)]
            mask = [position >= 4 for position in range(12)]
            rows.append(
                Row(
                    ids=ids,
                    mask=mask,
                    rl=[0.0] * 12,
                    ce=[1.0 if response else 0.0 for response in mask],
                    ref_kl=[0.0] * 12,
                    logprobs=[0.0] * 12,
                    versions=[-1] * 12,
                    group_id=f"g{shift}",
                    episode_id=f"e{shift}",
                )
            )
        return Batch(rows=rows)

    async def run(self, check: Check) -> None:
        """Make a folder."""
        with tempfile.TemporaryDirectory(prefix="orchard-suite-") as folder:
            await check(Path(folder))

    @contextlib.asynccontextmanager
    async def started(self, folder: Path, store: WeightStore | None = None) -> AsyncIterator[Trainer]:
        """A trainer that has started a stage of ten updates, with the suite's model and seed."""
        model_folder = folder / "model"
        if not model_folder.exists():
            model_folder.mkdir()
        trainer = self.trainer()
        run_dir = folder / "run"
        run_dir.mkdir(exist_ok=True)
        source = self.model(model_folder)
        try:
            await trainer.start(TrainerContext(model=source, store=store or self.store(), run_dir=run_dir, seed=1))
            await trainer.configure({}, updates=10)
            yield trainer
        finally:
            await trainer.aclose()

    async def loss(self, trainer: Trainer) -> float:
        """Mean negative logprob of the batch's responses."""
        batch = self.batch()
        columns = await trainer.forward(batch, "logprobs")
        found = [
            -value
            for row, column in zip(batch.rows, columns["logprobs"], strict=True)
            for value, response in zip(column, row.mask, strict=True)
            if response
        ]
        return sum(found) / len(found)

    async def check_versions_grow_by_one(self, folder: Path) -> None:
        """From 0, with each update."""
        async with self.started(folder) as trainer:
            assert await trainer.publish() == 0
            assert [(await trainer.update(self.batch())).version for _ in range(3)] == [1, 2, 3]
            assert await trainer.publish() == 3

    async def check_it_learns(self, folder: Path) -> None:
        """Ten updates on the same rows make them likelier."""
        async with self.started(folder) as trainer:
            before = await self.loss(trainer)
            for _ in range(10):
                await trainer.update(self.batch())
            assert await self.loss(trainer) < before

    async def check_forward_changes_nothing(self, folder: Path) -> None:
        """Twice the same, one number per token, and no new version."""
        async with self.started(folder) as trainer:
            batch = self.batch()
            first = await trainer.forward(batch, "logprobs")
            assert [len(column) for column in first["logprobs"]] == [len(row.ids) for row in batch.rows]
            second = await trainer.forward(batch, "logprobs")
            assert [list(column) for column in first["logprobs"]] == [list(column) for column in second["logprobs"]]
            assert await trainer.publish() == 0

    async def check_a_checkpoint_continues_exactly(self, folder: Path) -> None:
        """Weights, optimizer, schedule and version: the next updates are the same to the last bit."""
        async with self.started(folder) as trainer:
            for _ in range(3):
                await trainer.update(self.batch())
            await trainer.save(folder / "checkpoint")
            going_on = []
            for _ in range(2):
                report = await trainer.update(self.batch())
                going_on.append((report.version, await self.loss(trainer)))
        async with self.started(folder) as other:
            await other.load(folder / "checkpoint")
            loaded = []
            for _ in range(2):
                report = await other.update(self.batch())
                loaded.append((report.version, await self.loss(other)))
        assert loaded == going_on

    async def check_published_weights_are_in_the_store(self, folder: Path) -> None:
        """Under the version that it says, and they differ after an update."""
        store = self.store()
        async with self.started(folder, store) as trainer:
            assert await trainer.publish() == await store.latest() == 0
            first = {name: str(value) for name, value in (await store.get(0)).items()}
            await trainer.update(self.batch())
            assert await trainer.publish() == await store.latest() == 1
            second = {name: str(value) for name, value in (await store.get(1)).items()}
            assert first.keys() == second.keys()
            assert first != second

    async def check_unknown_options_are_refused(self, folder: Path) -> None:
        """By name, before anything is learnt."""
        async with self.started(folder) as trainer:
            with pytest.raises(ConfigError):
                await trainer.configure({"no_such_option": 1}, updates=1)

    async def check_the_event_loop_is_free(self, folder: Path) -> None:
        """While it computes, others are served."""
        async with self.started(folder) as trainer:
            ticks = [time.monotonic()]

            async def tick() -> None:
                while True:
                    await asyncio.sleep(0.005)
                    ticks.append(time.monotonic())

            ticking = asyncio.ensure_future(tick())
            for _ in range(5):
                await trainer.update(self.batch())
            ticking.cancel()
            ticks.append(time.monotonic())
            longest = max(after - before for before, after in itertools.pairwise(ticks))
            taken = ticks[-1] - ticks[0]
            assert longest < max(0.25, taken / 2), f"nothing else ran for {longest:.2f} s of {taken:.2f} s"

    async def check_closing_twice_is_fine(self, folder: Path) -> None:
        """`aclose` is idempotent."""
        async with self.started(folder) as trainer:
            await trainer.aclose()
            await trainer.aclose()
