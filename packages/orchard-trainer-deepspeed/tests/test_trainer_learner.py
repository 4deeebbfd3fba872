"""The torch trainer: gradients, masks, denominators, corrections, versions, resuming, cancelling."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest
import torch
from trainer_models import memory_store, rl_row, sft_row, trainer, write_model

from orchard_api.errors import ConfigError, OrchardError
from orchard_api.training import Batch, Row
from orchard_trainer_deepspeed.checkpoint import export_weights
from orchard_trainer_deepspeed.model import Layout
from orchard_trainer_deepspeed.update import NonFiniteUpdateError

LENGTHS = (5, 12, 7, 30, 9, 22, 3, 15)


def gradient(learner) -> torch.Tensor:
    """The last step's whole gradient, from AdamW's first moment after one fresh step."""
    state = learner._state
    beta = state.config.betas[0]
    moments = [state.optimizer.state[weight]["exp_avg"].flatten() for weight in state.model.parameters()]
    return torch.cat(moments) / (1 - beta)


def weights(learner) -> dict[str, torch.Tensor]:
    return export_weights(learner._state.model)


def mixed_rows(seed=0, *, logprobs=None, ref_kl=0.0) -> list[Row]:
    """Eight rows of unequal length: policy gradient, with gaps of tool tokens, and two of cross entropy."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(2, 40, (length,), generator=generator).tolist()
        mask = [place > 0 and place % 5 != 0 for place in range(length)]
        if number in (2, 5):
            rows.append(sft_row(ids, mask, f"e{number}"))
        else:
            known = [-3.0 - 0.01 * place for place in range(length)] if logprobs is None else logprobs[number]
            rows.append(rl_row(ids, mask, 1.0 - 0.5 * number, known, name=f"e{number}", ref_kl=ref_kl))
    return rows


async def test_gradients_do_not_depend_on_micro_batches(model_folder):
    # ms-swift#10117, trl#6024, open-instruct#1137: a global loss divided again, or a mean of means.
    found = []
    for budget in (1, 32, 60, 10_000):
        async with trainer(model_folder, micro_batch_tokens=budget, max_grad_norm=None) as learner:
            report = await learner.update(Batch(rows=mixed_rows()))
            assert report.metrics["optimizer_steps"] == 1
            found.append(gradient(learner))
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) < 1e-5


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "dr_grpo"])
async def test_the_gradient_is_that_of_the_formula(model_folder, aggregation):
    rows = [row for row in mixed_rows() if row.rl != row.ce]
    rl = [row for row in rows if any(row.rl)]
    ce = [row for row in rows if any(row.ce)]
    options = {"max_response_tokens": 50} if aggregation == "dr_grpo" else {}
    async with trainer(
        model_folder, loss="policy_gradient", aggregation=aggregation, max_grad_norm=None, **options
    ) as learner:
        model = learner._state.model

        def logprobs(row):
            ids = torch.tensor(row.ids)
            found = torch.log_softmax(model.logits(model.hidden(ids, Layout.of([len(row.ids)]))), -1)
            return found[:-1].gather(1, ids[1:, None])[:, 0]

        total = torch.zeros(())
        tokens = sum(sum(row.mask) for row in rl)
        for row in rl:
            below = {
                "token_mean": tokens,
                "seq_mean_token_mean": len(rl) * sum(row.mask),
                "dr_grpo": len(rl) * 50,
            }[aggregation]
            total = total - (logprobs(row) * torch.tensor(row.rl)[1:]).sum() / below
        for row in ce:
            total = total - (logprobs(row) * torch.tensor(row.ce)[1:]).sum() / sum(sum(other.mask) for other in ce)
        expected = torch.cat([part.flatten() for part in torch.autograd.grad(total, list(model.parameters()))])
        report = await learner.update(Batch(rows=rows))
        assert float((gradient(learner) - expected).norm() / expected.norm()) < 1e-5
        assert report.metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)


async def test_episodes_without_rows_and_rows_of_one_episode_count_as_episodes(model_folder):
    rows = [row for row in mixed_rows() if any(row.rl)][:4]
    halves = [replace(row, episode_id=f"e{place // 2}") for place, row in enumerate(rows)]
    losses = {}
    for name, batch in {
        "four": Batch(rows=rows),
        "two": Batch(rows=halves),
        "eight": Batch(rows=rows, sequences=8),
    }.items():
        async with trainer(model_folder, aggregation="dr_grpo", max_response_tokens=9) as learner:
            losses[name] = (await learner.update(batch)).metrics["loss"]
    assert losses["two"] == pytest.approx(2 * losses["four"], rel=1e-5)
    assert losses["eight"] == pytest.approx(losses["four"] / 2, rel=1e-5)


async def test_rows_without_advantage_count_in_the_denominator_but_are_not_computed(model_folder):
    rows = [row for row in mixed_rows() if any(row.rl)]
    idle = [replace(row, rl=[0.0] * len(row.ids), episode_id=f"z{place}") for place, row in enumerate(rows)]
    async with trainer(model_folder) as learner:
        alone = await learner.update(Batch(rows=rows))
    async with trainer(model_folder) as learner:
        both = await learner.update(Batch(rows=rows + idle))
    assert both.metrics["idle_rows"] == len(idle)
    assert both.metrics["loss"] == pytest.approx(alone.metrics["loss"] / 2, rel=1e-5)


async def test_a_response_of_one_token_is_trained(model_folder):
    # verl#3287: a mask that isn't shifted with the labels never trains the first response token.
    row = sft_row([5, 6, 7, 8], [0, 0, 0, 1])
    async with trainer(model_folder, lr=0.01) as learner:
        before = (await learner.forward(Batch(rows=[row]), "logprobs"))["logprobs"][0]
        report = await learner.update(Batch(rows=[row]))
        after = (await learner.forward(Batch(rows=[row]), "logprobs"))["logprobs"][0]
        assert report.metrics["loss"] == pytest.approx(-before[3], abs=1e-5)
    assert before[0] == after[0] == 0.0
    assert after[3] > before[3]


async def test_the_token_that_ends_a_turn_is_trained(model_folder):
    # trl#5988: the model never stops, its end-of-turn token was outside the loss.
    rows = [sft_row([5, 6, n, 1], [0, 0, 1, 1], f"e{n}") for n in range(10, 14)]
    async with trainer(model_folder, lr=0.02) as learner:
        for _ in range(20):
            report = await learner.update(Batch(rows=rows))
        logprobs = (await learner.forward(Batch(rows=rows), "logprobs"))["logprobs"]
    assert report.metrics["ce_tokens"] == 8
    assert all(row[3] > math.log(0.9) for row in logprobs)


def test_rows_that_train_everything_or_nothing_are_refused():
    # Megatron-Bridge#3359, agentcore-rl-toolkit#122.
    for mask in ([1, 1, 1], [0, 0, 0]):
        with pytest.raises(ValueError, match="mask"):
            sft_row([3, 4, 5], mask)


async def test_a_trajectory_of_three_steps_trains_each_step(model_folder):
    # SkyRL#1507: all but the last turn got zero advantage.
    mask = [0, 1, 1, 0, 0, 1, 0, 1, 1]
    row = rl_row(list(range(2, 11)), mask, 0.5, [-2.0] * 9)
    seen = {}

    class Spy:
        linear_in_advantage = True

        def __call__(self, logprobs, columns, totals):
            seen.update({name: value.clone() for name, value in columns.items()})
            return logprobs.sum() * 0, {}

    async with trainer(model_folder) as learner:
        learner._state.loss = Spy()
        await learner.update(Batch(rows=[row]))
    assert seen["rl"].tolist() == [0.5] * 5
    assert all(len(column) == 5 for column in seen.values())
    assert seen["rl_mask"].all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
async def test_logprobs_of_context_tokens_change_nothing(model_folder, poison):
    rows = mixed_rows(ref_kl=0.1)
    spoilt = [
        replace(row, logprobs=[v if m else poison for v, m in zip(row.logprobs, row.mask, strict=True)]) for row in rows
    ]
    found = []
    for some in (rows, spoilt):
        async with trainer(model_folder, reference="stage") as learner:
            report = await learner.update(Batch(rows=some))
            found.append((gradient(learner), {k: v for k, v in report.metrics.items() if "second" not in k}))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


async def test_masters_are_float32_and_tiny_updates_survive(model_folder):
    # AReaL#1634: bf16 weights round updates of 1e-6 away.
    async with trainer(model_folder, lr=1e-6, dtype="bfloat16") as learner:
        norm = learner._state.model.norm
        assert all(weight.dtype == torch.float32 for weight in learner._state.model.parameters())
        assert norm.tolist() == [1.0] * 32
        for _ in range(100):
            await learner.update(Batch(rows=[sft_row([5, 6, 7, 8], [0, 0, 1, 1])]))
        moved = (norm.detach() - 1.0).abs()
    assert 2e-5 < moved.median().item() < 2e-4


async def test_an_asynchronous_run_must_name_its_correction(model_folder):
    # miles#1829, SkyRL#1315.
    with pytest.raises(ConfigError, match="correction"):
        async with trainer(model_folder, asynchronous=True):
            pass
    async with trainer(model_folder, asynchronous=True, correction="token_tis") as learner:
        with pytest.raises(ConfigError, match="correction"):
            await learner.configure({"correction": None}, updates=1)


async def test_clipping_is_active_on_stale_samples(model_folder):
    # miles#1829: old logprobs recomputed with current weights give ratio 1 for ever.
    rows = [row for row in mixed_rows() if any(row.rl)]
    async with trainer(model_folder, correction="bypass", asynchronous=True) as learner:
        metrics = (await learner.update(Batch(rows=rows))).metrics
    assert metrics["clip_fraction"] > 0
    assert metrics["log_ratio_abs_mean"] > 0.1
    assert metrics["effective_sample_share"] < 1


async def test_token_tis_weighs_by_the_truncated_ratio_and_anchors_at_the_learner(model_folder):
    async with trainer(model_folder) as learner:
        known = (await learner.forward(Batch(rows=mixed_rows()), "logprobs"))["logprobs"]
    shifted = [[value - math.log(5.0) for value in row] for row in known]
    rows = [row for row in mixed_rows(logprobs=shifted) if any(row.rl)]
    async with trainer(model_folder, correction="token_tis", max_grad_norm=None) as learner:
        metrics = (await learner.update(Batch(rows=rows))).metrics
        truncated = gradient(learner)
    assert metrics["truncated_share"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["log_ratio_mean"] == pytest.approx(math.log(5.0), abs=1e-4)
    exact = [row for row in mixed_rows(logprobs=known) if any(row.rl)]
    async with trainer(model_folder, max_grad_norm=None) as learner:
        metrics = (await learner.update(Batch(rows=exact))).metrics
        assert torch.allclose(truncated, 2.0 * gradient(learner), rtol=1e-3, atol=1e-7)
    assert metrics["log_ratio_abs_max"] < 1e-4
    assert metrics["effective_sample_share"] == pytest.approx(1.0)


async def test_the_proximal_policy_is_that_before_the_first_step(model_folder):
    async with trainer(model_folder) as learner:
        known = (await learner.forward(Batch(rows=mixed_rows()), "logprobs"))["logprobs"]
    rows = [row for row in mixed_rows(logprobs=known) if any(row.rl)]
    seen = []

    class Spy:
        linear_in_advantage = True

        def __call__(self, logprobs, columns, totals):
            seen.append(columns["proximal_logprobs"] - columns["behaviour_logprobs"])
            return -(logprobs * columns["scale"]).sum(), {}

    async with trainer(model_folder, lr=0.05, correction="token_tis", epochs=3, micro_batch_tokens=20) as learner:
        learner._state.loss = Spy()
        report = await learner.update(Batch(rows=rows))
        after = (await learner.forward(Batch(rows=rows), "logprobs"))["logprobs"]
    assert report.metrics["optimizer_steps"] == 3
    assert max(float(part.abs().max()) for part in seen) < 1e-4
    assert abs(after[0][1] - known[0][1]) > 1e-3


async def test_logprobs_are_taken_at_the_batch_temperature(model_folder):
    rows = mixed_rows()
    async with trainer(model_folder) as learner:
        model = learner._state.model
        got = (await learner.forward(Batch(rows=rows, temperature=0.6), "logprobs"))["logprobs"]
        for row, found in zip(rows, got, strict=True):
            ids = torch.tensor(row.ids)
            with torch.no_grad():
                logits = model.logits(model.hidden(ids, Layout.of([len(row.ids)])))
            expected = torch.log_softmax(logits / 0.6, -1)[:-1].gather(1, ids[1:, None])[:, 0]
            assert found[0] == 0.0
            assert found[1:] == pytest.approx(expected.tolist(), abs=1e-4)


async def test_the_reference_is_the_model_at_the_stages_begin(model_folder):
    rows = mixed_rows(ref_kl=0.5)
    async with trainer(model_folder, lr=0.05) as learner:
        with pytest.raises(ValueError, match="reference"):
            await learner.update(Batch(rows=rows))
        with pytest.raises(ConfigError, match="reference"):
            await learner.forward(Batch(rows=rows), "reference_logprobs")
        await learner.update(Batch(rows=[row for row in rows if any(row.ce)]))
        await learner.configure({"reference": "stage"}, updates=2)
        begin = (await learner.forward(Batch(rows=rows), "logprobs"))["logprobs"]
        first = await learner.update(Batch(rows=rows))
        second = await learner.update(Batch(rows=rows))
        reference = (await learner.forward(Batch(rows=rows), "reference_logprobs"))["reference_logprobs"]
    assert first.metrics["ref_kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert second.metrics["ref_kl_loss"] > 1e-4
    assert reference[3] == pytest.approx(begin[3], abs=1e-5)


async def test_versions_grow_by_one_and_staleness_is_reported(model_folder):
    store = memory_store()
    async with trainer(model_folder, store=store) as learner:
        assert await learner.publish() == 0
        for expected in (1, 2, 3):
            rows = [row for row in mixed_rows() if any(row.rl)]
            report = await learner.update(Batch(rows=rows))
            assert report.version == expected == await learner.publish()
        assert report.metrics["staleness_max"] == 2.0
        assert await store.latest() == 3
        stored = await store.get(3)
        assert torch.equal(stored["model.norm.weight"], learner._state.model.norm.detach())
        before = dict(stored)
        await learner.update(Batch(rows=mixed_rows()))
        assert all(torch.equal(before[name], value) for name, value in (await store.get(3)).items())


@pytest.mark.parametrize("rows", [[], [rl_row([3, 4, 5], [0, 1, 1], 0.0, [-1.0] * 3)]], ids=["empty", "flat"])
async def test_nothing_to_learn_takes_no_step(model_folder, rows):
    async with trainer(model_folder, weight_decay=0.5) as learner:
        before = weights(learner)
        report = await learner.update(Batch(rows=rows))
        after = weights(learner)
    assert report.version == 1
    assert report.metrics["optimizer_steps"] == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (replace(sft_row([3, 4, 5], [0, 1, 1]), images=("sha256:0",)), "vision"),
        (sft_row([3, 40, 5], [0, 1, 1]), "vocabulary"),
        (sft_row([3] * 65, [0] + [1] * 64), "context"),
        (sft_row([3, 4, 5], [1, 1, 0]), "first token"),
        (replace(sft_row([3, 4, 5], [0, 1, 1]), ce=[0.0, math.nan, 0.0]), "not finite"),
        (rl_row([3, 4, 5], [0, 1, 1], 1.0, [0.0, math.nan, -1.0]), "not finite"),
    ],
)
async def test_rows_that_cannot_be_learnt_from_are_refused_untouched(model_folder, row, word):
    async with trainer(model_folder) as learner:
        with pytest.raises(ValueError, match=word):
            await learner.update(Batch(rows=[*mixed_rows(), row]))
        assert learner.version == 0


async def test_a_loss_that_is_not_finite_takes_no_step(model_folder):
    async with trainer(model_folder, max_grad_norm=None) as learner:
        before = weights(learner)
        rows = [rl_row([3, 4, 5], [0, 1, 1], 3e38, [-1.0] * 3), rl_row([3, 4, 5], [0, 1, 1], 3e38, [-1.0] * 3)]
        with pytest.raises(NonFiniteUpdateError):
            await learner.update(Batch(rows=rows))
        after = weights(learner)
        assert learner.version == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lrr": 1.0}, r"trainer\.lrr: unknown"),
        ({"lr": "fast"}, r"trainer\.lr"),
        ({"loss": {"name": "ppo_clip", "clip": 1}}, r"trainer\.loss\.clip: unknown"),
        ({"loss": {"name": "policy_gradient", "clip": 1}}, "takes no options"),
        ({"loss": "nonesuch"}, "nonesuch"),
        ({"device": "cuda"}, "can't change"),
        ({"aggregation": "dr_grpo"}, "max_response_tokens"),
    ],
)
async def test_wrong_stage_options_are_named(model_folder, options, word):
    async with trainer(model_folder) as learner:
        with pytest.raises(OrchardError, match=word):
            await learner.configure(options, updates=1)


async def test_a_stage_restarts_schedule_and_moments(model_folder):
    rows = mixed_rows()
    async with trainer(model_folder, lr=0.01, schedule="linear") as learner:
        rates = []
        for reset in (True, True, False):
            await learner.configure({"reset_optimizer": reset}, updates=2)
            rates += [(await learner.update(Batch(rows=rows))).metrics["lr"] for _ in range(2)]
            steps = {float(state["step"]) for state in learner._state.optimizer.state.values()}
            assert steps == {2.0 if reset else 4.0}
    assert rates == pytest.approx([0.01, 0.005] * 3)


async def test_norms_and_biases_do_not_decay(tmp_path):
    folder = write_model(tmp_path, model_type="qwen2")
    async with trainer(folder, weight_decay=0.1) as learner:
        groups = learner._state.optimizer.param_groups
        decayed = {weight.dim() for group in groups if group["weight_decay"] for weight in group["params"]}
        spared = {weight.dim() for group in groups if not group["weight_decay"] for weight in group["params"]}
    assert (decayed, spared) == ({2}, {1})


async def test_a_stage_starts_from_the_run_files_options(model_folder):
    async with trainer(model_folder, lr=0.5) as learner:
        await learner.configure({"lr": 0.25, "schedule": "linear"}, updates=4)
        assert learner._state.config.lr == 0.25
        await learner.configure({}, updates=4)
        assert learner._state.config.lr == 0.5
        assert learner._state.config.schedule == "constant"


async def test_resuming_continues_exactly(model_folder, tmp_path):
    # DeepSpeed#7786, prime-rl#3164: moments, counters and the order of rows belong to the checkpoint.
    options = {"lr": 0.01, "weight_decay": 0.1, "reference": "stage"}
    stage = {"schedule": "cosine", "minibatches": 3, "warmup_updates": 2, "correction": "token_tis"}

    async def steps(learner, first, last):
        for number in range(first, last):
            await learner.update(Batch(rows=mixed_rows(number, ref_kl=0.1)))

    async with trainer(model_folder, **options) as learner:
        await learner.configure(stage, updates=10)
        await steps(learner, 0, 10)
        whole = weights(learner)
        moments = gradient(learner)
    async with trainer(model_folder, **options) as learner:
        await learner.configure(stage, updates=10)
        await steps(learner, 0, 2)
        await learner.save(tmp_path / "checkpoint")
        await steps(learner, 2, 5)
        await learner.save(tmp_path / "checkpoint")
    async with trainer(model_folder, seed=9, **options) as learner:
        await learner.load(tmp_path / "checkpoint")
        assert learner.version == 5
        await steps(learner, 5, 10)
        assert learner.version == 10
        again = weights(learner)
        assert torch.equal(moments, gradient(learner))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


async def test_a_checkpoint_is_a_model_folder(tmp_path):
    folder = write_model(tmp_path / "model", tokenizer=True)
    async with trainer(folder) as learner:
        await learner.update(Batch(rows=mixed_rows()))
        await learner.save(tmp_path / "checkpoint")
        expected = weights(learner)
    assert (tmp_path / "checkpoint" / "tokenizer.json").is_file()
    async with trainer(tmp_path / "checkpoint", init="checkpoint") as learner:
        assert all(torch.equal(value, expected[name]) for name, value in weights(learner).items())
        # Saved beside the model it came from, with its own trainer files replaced.
        await learner.save(tmp_path / "second")
    assert json.loads((tmp_path / "second" / "trainer.json").read_text())["version"] == 0


@pytest.mark.parametrize("damage", ["absent", "format", "moments", "shape"])
async def test_a_damaged_checkpoint_is_refused(model_folder, tmp_path, damage):
    folder = tmp_path / "checkpoint"
    async with trainer(model_folder) as learner:
        await learner.update(Batch(rows=mixed_rows()))
        await learner.save(folder)
        if damage == "absent":
            (folder / "trainer.json").unlink()
        elif damage == "format":
            (folder / "trainer.json").write_text('{"format": 99}')
        elif damage == "moments":
            (folder / "optimizer.safetensors").write_bytes(b"x" * 100)
    shape = {"hidden_size": 64} if damage == "shape" else {}
    other = write_model(tmp_path / "other", **shape)
    async with trainer(other) as learner:
        with pytest.raises(ConfigError):
            await learner.load(folder)


async def test_cancelling_stops_after_the_step_under_way(model_folder):
    rows = [row for row in mixed_rows() if any(row.rl)]
    async with trainer(model_folder, epochs=100_000) as learner:
        task = asyncio.create_task(learner.update(Batch(rows=rows)))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 5
        # Steps were taken, so the weights are those of a new version; and the learner goes on.
        assert learner.version == 1
        await learner.configure({"epochs": 1}, updates=1)
        assert (await learner.update(Batch(rows=rows))).version == 2


async def test_an_update_leaves_the_event_loop_free(model_folder):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    async with trainer(model_folder, epochs=60) as learner:
        task = asyncio.create_task(tick())
        report = await learner.update(Batch(rows=mixed_rows()))
        task.cancel()
    assert report.metrics["optimizer_steps"] == 60
    assert ticks >= 3


async def test_a_closed_trainer_says_so(model_folder):
    async with trainer(model_folder) as learner:
        pass
    await learner.aclose()
    with pytest.raises(OrchardError, match="closed"):
        await learner.update(Batch(rows=mixed_rows()))
