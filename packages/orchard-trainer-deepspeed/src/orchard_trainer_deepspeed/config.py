"""Options of this package's plugins; plain data, no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from orchard_api.config import RunPath
from orchard_api.registry import PluginConfig

Aggregation = Literal["token_mean", "seq_mean_token_mean", "dr_grpo"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["bypass", "token_tis"]
Schedule = Literal["constant", "linear", "cosine"]
Device = Literal["auto", "cpu", "cuda"]


class PpoClipConfig(PluginConfig):
    """Options of the loss `ppo_clip`."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(default=0.2, ge=0, description="and above 1 + clip_high (DAPO: 0.28)")
    dual_clip: float | None = Field(default=None, gt=1, description="bounds the loss of negative advantages (verl: 3)")


class CispoConfig(PluginConfig):
    """Options of the loss `cispo`."""

    clip_low: float = Field(default=1.0, ge=0, le=1, description="the weight is clipped below 1 - clip_low")
    clip_high: float = Field(default=0.28, ge=0, description="and above 1 + clip_high")


class TorchTrainerConfig(PluginConfig):
    """Options of the trainer `torch`; a stage may override any but `device`, `threads` and `dtype`."""

    lr: float = Field(default=1e-3, ge=0, description="peak learning rate")
    schedule: Schedule = Field(default="constant", description="how it goes over a stage, after the warm-up")
    warmup_updates: int = Field(default=0, ge=0, description="updates in which it rises from 0")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="where linear and cosine end, as share of lr")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's")
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="on matrices; not on norms and biases")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="gradients are scaled down to it")
    epochs: int = Field(default=1, ge=1, description="passes over each batch")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    micro_batch_tokens: int = Field(default=4096, ge=1, description="tokens computed at once; no effect on the result")
    loss: dict[str, Any] = Field(default={"name": "ppo_clip"}, description="what the rl stream minimises")
    aggregation: Aggregation = Field(default="token_mean", description="how the rl stream's tokens are averaged")
    max_response_tokens: int | None = Field(default=None, ge=1, description="the constant of aggregation dr_grpo")
    correction: Correction | None = Field(
        default=None,
        description="engine against learner: `bypass` anchors the ratio at the engine's logprobs, `token_tis` at the "
        "learner's own before the update, weighted by the truncated ratio of the two; default bypass, which an "
        "asynchronous run must say",
    )
    tis_cap: float = Field(default=2.0, gt=0, description="where token_tis truncates")
    kl: KlEstimator = Field(default="k2", description="estimator of the ref_kl stream")
    reference: Literal["none", "stage"] = Field(
        default="none", description="`stage` keeps the weights of the stage's begin for the ref_kl stream"
    )
    reset_optimizer: bool = Field(default=True, description="a stage begins with fresh AdamW moments")
    logits_chunk: int = Field(default=1 << 22, ge=1, description="logits alive at once, in elements")
    device: Device = "auto"
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the forward pass; masters are fp32"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads; 1 for small models by default")

    @field_validator("loss", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> TorchTrainerConfig:
        if self.aggregation == "dr_grpo" and self.max_response_tokens is None:
            raise ValueError("aggregation dr_grpo divides by max_response_tokens; set it")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        return self


class InProcessConfig(PluginConfig):
    """Options of the policy server `in_process`."""

    max_batch: int = Field(default=64, ge=1, description="requests that generate at once")
    max_waiting: int = Field(default=1024, ge=0, description="requests that may wait; more are refused")
    context_length: int | None = Field(default=None, ge=2, description="tokens; the model's own by default")
    prefill_tokens: int = Field(default=4096, ge=1, description="prompt tokens computed between two decode steps")
    prefix_cache_mb: int = Field(default=64, ge=0, description="memory for keys and values of earlier turns")
    device: Device = "auto"
    threads: int | None = Field(default=None, ge=1, description="CPU threads; 1 for small models by default")
    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=0, le=65535, description="serve HTTP there; 0 takes a free one")
    api_key_env: str = Field(
        default="ORCHARD_POLICY_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="variable with the bearer token; beyond loopback one is made up where it is unset",
    )
    max_body_mb: int = Field(default=16, ge=1, description="largest HTTP request")


class MemoryStoreConfig(PluginConfig):
    """Options of the weight store `memory`."""

    keep: int = Field(default=1, ge=0, description="released versions that stay")


class FolderStoreConfig(PluginConfig):
    """Options of the weight store `folder`."""

    path: RunPath = Field(description="folder of the versions")
    keep: int = Field(default=1, ge=0, description="released versions that stay")
