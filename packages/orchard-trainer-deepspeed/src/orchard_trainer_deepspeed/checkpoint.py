"""Weights in and out under Hugging Face's names: folders, random starts, swaps."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from orchard_api.errors import ConfigError
from orchard_api.policy import ModelSource
from orchard_trainer_deepspeed.architecture import load_architecture
from orchard_trainer_deepspeed.model import Decoder

WEIGHTS = "model.safetensors"
COMPANIONS = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class WeightsError(ValueError):
    """Weights that don't fit the model; nothing was changed."""


def named_weights(model: Decoder) -> dict[str, Tensor]:
    """Views of the model's weights under Hugging Face's names; a tied output matrix is there once, as embedding."""
    shape = model.shape
    query, single = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, Tensor] = {EMBEDDING: model.embedding.detach()}
    for number, layer in enumerate(model._blocks):
        prefix = f"model.layers.{number}."
        found[prefix + "input_layernorm.weight"] = layer.input_norm.detach()
        for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if fused is not None:
                for name, part in zip("qkv", torch.split(fused.detach(), [query, single, single]), strict=True):
                    found[f"{prefix}self_attn.{name}_proj.{kind}"] = part
        found[prefix + "self_attn.o_proj.weight"] = layer.output.detach()
        if layer.output_bias is not None:
            found[prefix + "self_attn.o_proj.bias"] = layer.output_bias.detach()
        found[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.detach()
        gate, up = layer.gate_up.detach().chunk(2)
        found[prefix + "mlp.gate_proj.weight"] = gate
        found[prefix + "mlp.up_proj.weight"] = up
        found[prefix + "mlp.down_proj.weight"] = layer.down.detach()
    found["model.norm.weight"] = model.norm.detach()
    if model.head is not None:
        found[HEAD] = model.head.detach()
    return found


def export_weights(model: Decoder) -> dict[str, Tensor]:
    """Copies of the weights on the CPU, named and ordered as in `named_weights`."""
    return {name: view.to("cpu", copy=True).contiguous() for name, view in named_weights(model).items()}


@torch.no_grad()
def load_weights(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Fill the model; all names and shapes are checked before the first one is changed.

    Raises:
        WeightsError: a tensor is missing, unknown, empty or of another shape, or a tied pair differs.
    """
    targets = named_weights(model)
    given = {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if model.head is None and HEAD in given:
        if EMBEDDING in given and not torch.equal(given[HEAD], given[EMBEDDING]):
            raise WeightsError(f"the config ties {HEAD} to {EMBEDDING}, but the two differ")
        del given[HEAD]
    problems = [f"{name} is missing" for name in targets if name not in given]
    problems += [f"{name} is unknown" for name in given if name not in targets]
    for name, target in targets.items():
        value = given.get(name)
        if value is not None and value.shape != target.shape:
            problems.append(f"{name} has shape {tuple(value.shape)} instead of {tuple(target.shape)}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise WeightsError("the weights don't fit the model: " + "; ".join(problems[:5]) + more)
    for name, target in targets.items():
        target.copy_(given[name])


@torch.no_grad()
def randomise(model: Decoder, seed: int) -> None:
    """Fill the model as a fresh one: matrices normal with `init_std`, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, view in named_weights(model).items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
        elif name.endswith(".bias"):
            view.zero_()
        else:
            view.copy_(torch.empty(view.shape).normal_(0.0, model.shape.init_std, generator=generator))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model folder, sharded or not.

    Raises:
        ConfigError: there are none, or they can't be read.
    """
    index = folder / (WEIGHTS + ".index.json")
    try:
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            paths = [folder / Path(shard).name for shard in shards]
        else:
            paths = [folder / WEIGHTS]
        return {name: value for path in paths for name, value in load_file(path).items()}
    except FileNotFoundError as error:
        hint = 'model.init = "random" makes weights from the seed'
        raise ConfigError(f"the model folder {folder} has no {WEIGHTS}", hint=hint) from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"the weights in {folder} can't be read: {error}") from error


def build_model(source: ModelSource, device: torch.device | str = "cpu") -> Decoder:
    """Make a model from its folder, with weights from there or from the seed.

    Raises:
        ConfigError: the folder can't be used.
    """
    model = Decoder(load_architecture(source.path), device)
    if source.init == "random":
        randomise(model, source.seed)
    else:
        try:
            load_weights(model, read_weights(source.path))
        except WeightsError as error:
            raise ConfigError(f"{source.path}: {error}") from error
    return model


def save_model(model: Decoder, folder: Path, *, source: Path) -> None:
    """Write a model folder that Hugging Face's tools load: weights, and config and tokenizer from `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.name != WEIGHTS + ".index.json" and path.parent != folder:
                shutil.copyfile(path, folder / path.name)
    write_tensors(folder / WEIGHTS, export_weights(model))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors so that the file is whole or absent."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    os.close(handle)
    try:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
