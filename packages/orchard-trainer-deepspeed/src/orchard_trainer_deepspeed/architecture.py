"""The shape of a decoder, read from `config.json` in Hugging Face's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard_api.errors import ConfigError

SUPPORTED = ("llama", "qwen2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder of the Llama and Qwen2 family.

    Attributes:
        hidden: width d of the residual stream.
        intermediate: width of the gated MLP.
        heads, kv_heads: query heads, and key/value heads (each serves `heads // kv_heads` queries).
        head_dim: width of a head; even.
        qkv_bias, output_bias: whether the attention projections have biases.
        tied: the output matrix is the embedding.
        context: longest sequence, in tokens.
        init_std: deviation of random weights.
        eos_ids: ids that end a response.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    output_bias: bool = False
    tied: bool = False
    context: int = 2048
    init_std: float = 0.02
    eos_ids: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of weights."""
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = rows * self.hidden + self.heads * self.head_dim * self.hidden
        biases = rows * self.qkv_bias + self.hidden * self.output_bias
        layer = attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden


def load_architecture(folder: Path) -> Architecture:
    """Read a model folder's `config.json` (and the stop ids of `generation_config.json`).

    Raises:
        ConfigError: a file is missing or broken, or the model is of a kind that this decoder isn't.
    """
    path = folder / "config.json"
    raw = _json(path)
    if raw is None:
        raise ConfigError(f"the model folder {folder} has no config.json", hint="[model] path names the folder")
    generation = _json(folder / "generation_config.json") or {}
    return parse_architecture(raw, generation, source=str(path))


def parse_architecture(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, source: str = "config.json"
) -> Architecture:
    """Check a config of Hugging Face's form; see `load_architecture`."""
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise ConfigError(f"{source}: model_type {kind!r} is not supported here; {' and '.join(SUPPORTED)} are")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"{source}: rope type {rope.get('rope_type', rope.get('type'))!r} is not supported here")
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if raw.get(key, wanted) != wanted:
            raise ConfigError(f"{source}: {key} = {raw[key]!r} is not supported here, only {wanted!r}")
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        architecture = Architecture(
            vocab=int(raw["vocab_size"]),
            hidden=hidden,
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias", False)),
            output_bias=kind == "llama" and bool(raw.get("attention_bias", False)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            context=int(raw.get("max_position_embeddings", 2048)),
            init_std=float(raw.get("initializer_range", 0.02)),
            eos_ids=_ids(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        )
    except KeyError as error:
        raise ConfigError(f"{source}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{source} can't be read: {error}") from None
    if min(architecture.vocab, hidden, architecture.intermediate, architecture.layers, heads) < 1:
        raise ConfigError(f"{source}: sizes must be at least 1")
    if heads % architecture.kv_heads or architecture.head_dim % 2:
        raise ConfigError(f"{source}: heads must be a multiple of key/value heads, and head_dim even")
    return architecture


def _ids(*values: Any) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if type(item) is int:
                found[item] = None
    return tuple(found)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value
