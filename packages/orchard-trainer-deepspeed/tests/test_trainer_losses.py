"""Losses, divergences and corrections against the golden vectors, and against what public trainers got wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orchard_trainer_deepspeed.config import CispoConfig, PpoClipConfig
from orchard_trainer_deepspeed.corrections import effective_sample_share, kl_terms, token_tis
from orchard_trainer_deepspeed.losses import Cispo, PolicyGradient, PpoClip, cross_entropy, reference_divergence

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())
PPO = GOLDEN["ppo"]


def ppo_columns(aggregation: str, **replaced):
    inputs = {
        key: torch.tensor(PPO["inputs"][key], dtype=torch.float64)
        for key in ("logp", "old_logp", "rollout_logp", "mask", "advantages")
    }
    mask = inputs["mask"].bool()
    if aggregation == "token_mean":
        scale = torch.full_like(inputs["logp"], 1 / float(mask.sum()))
    else:
        scale = (1 / (mask.shape[0] * mask.sum(1, keepdim=True).double())).expand_as(inputs["logp"])
    columns = {
        "rl_mask": mask,
        "rl": inputs["advantages"],
        "scale": scale,
        "proximal_logprobs": inputs["old_logp"],
        "behaviour_logprobs": inputs["rollout_logp"],
        "correction": torch.ones_like(inputs["logp"]),
        **replaced,
    }
    flat = {name: value.flatten() for name, value in columns.items()}
    return inputs["logp"].flatten(), flat, {"rl": float(mask.sum())}


def ppo():
    options = {key: PPO["inputs"][key] for key in ("clip_low", "clip_high", "dual_clip")}
    return PpoClip(PpoClipConfig(**options))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_ppo_matches_the_golden_vectors(aggregation):
    loss, _ = ppo()(*ppo_columns(aggregation))
    assert float(loss) == pytest.approx(PPO["values"][aggregation], abs=1e-6)


def test_token_tis_matches_the_golden_vector():
    logprobs, columns, totals = ppo_columns("token_mean")
    columns["correction"] = token_tis(columns["proximal_logprobs"], columns["behaviour_logprobs"], cap=2.0)
    loss, _ = ppo()(logprobs, columns, totals)
    assert float(loss) == pytest.approx(PPO["values"]["token_mean_with_token_tis_2.0"], abs=1e-6)


def test_cispo_matches_the_golden_vector():
    options = CispoConfig(clip_low=PPO["inputs"]["clip_low"], clip_high=PPO["inputs"]["clip_high"])
    loss, _ = Cispo(options)(*ppo_columns("token_mean"))
    assert float(loss) == pytest.approx(PPO["values"]["cispo_token_mean"], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences_match_the_golden_vectors(estimator):
    inputs = GOLDEN["kl"]["inputs"]
    terms = kl_terms(
        torch.tensor(inputs["logp"], dtype=torch.float64),
        torch.tensor(inputs["ref_logp"], dtype=torch.float64),
        estimator,
    )
    assert terms[0].tolist() == pytest.approx(GOLDEN["kl"]["values"][estimator], abs=1e-6)


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_terms(torch.zeros(1), torch.zeros(1), "k4")


def test_each_option_changes_the_loss_on_the_fixed_vector():
    # ms-swift#10167: an option that isn't passed on silently trains the default.
    values = {
        float(PpoClip(PpoClipConfig(**options))(*ppo_columns("token_mean"))[0])
        for options in ({}, {"clip_low": 0.05}, {"clip_high": 0.05}, {"dual_clip": 1.01})
    }
    values |= {float(loss(*ppo_columns("token_mean"))[0]) for loss in (PolicyGradient(), Cispo())}
    assert len(values) >= 5
    steep = dict(zip(("logprobs", "columns", "totals"), ppo_columns("token_mean"), strict=True))
    steep["logprobs"] = steep["logprobs"] + 3.0
    plain, metrics = PpoClip(PpoClipConfig())(**steep)
    assert metrics["clip_fraction"] == pytest.approx(3 / 5)
    dual, _ = PpoClip(PpoClipConfig(dual_clip=1.5))(**steep)
    assert float(dual) < float(plain)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("loss", [ppo(), Cispo(), PolicyGradient()], ids=lambda loss: type(loss).__name__)
def test_masked_values_change_nothing(loss, poison):
    # OpenRLHF#1240 and Search-R1#21: NaN times 0 is NaN, and masked tokens counted.
    clean_logprobs, clean, totals = ppo_columns("token_mean")
    clean_logprobs.requires_grad_()
    expected, metrics = loss(clean_logprobs, clean, totals)
    expected.backward()
    poisoned = {
        name: torch.where(clean["rl_mask"], value, poison) if value.is_floating_point() else value
        for name, value in clean.items()
    }
    logprobs = torch.where(clean["rl_mask"], clean_logprobs.detach(), poison).requires_grad_()
    got, got_metrics = loss(logprobs, poisoned, totals)
    got.backward()
    assert float(got.detach()) == float(expected.detach())
    assert got_metrics == metrics
    assert torch.equal(logprobs.grad, clean_logprobs.grad)


def test_masked_values_change_nothing_in_the_linear_streams():
    mask = torch.tensor([True, False, True])
    weights = torch.tensor([1.0, 0.0, 0.5])
    columns = {"ce": weights, "ref_kl": weights, "reference_logprobs": torch.tensor([-1.0, float("nan"), -2.0])}
    logprobs = torch.tensor([-0.5, float("nan"), -3.0], requires_grad=True)
    totals = {"ce": 2.0, "ref_kl": 2.0}
    ce = cross_entropy(logprobs, columns, totals)
    assert float(ce.detach()) == pytest.approx((0.5 + 0.5 * 3.0) / 2)
    kl = reference_divergence(logprobs, columns, totals, "k2")
    assert float(kl.detach()) == pytest.approx((0.125 + 0.5 * 0.5) / 2)
    (ce + kl).backward()
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[~mask].tolist() == [0.0]


def test_ratios_stay_finite():
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    columns = {
        "rl_mask": torch.tensor([True, True]),
        "rl": torch.tensor([-1.0, 1.0]),
        "scale": torch.ones(2),
        "proximal_logprobs": torch.tensor([-500.0, 0.0]),
        "correction": torch.ones(2),
    }
    loss, _ = PpoClip()(logprobs, columns, {"rl": 2.0})
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_the_effective_sample_share_falls_as_policies_part():
    assert effective_sample_share(torch.zeros(10)) == pytest.approx(1.0)
    assert effective_sample_share(torch.tensor([3.0] + [0.0] * 9)) < 0.5
    assert effective_sample_share(torch.empty(0)) == 1.0
