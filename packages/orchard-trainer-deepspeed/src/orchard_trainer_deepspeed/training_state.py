"""Checkpoints of a learner: a model folder that other tools load, and what continuing exactly needs. No pickles."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from orchard_api.errors import ConfigError
from orchard_trainer_deepspeed.checkpoint import (
    WeightsError,
    export_weights,
    load_weights,
    read_weights,
    save_model,
    write_tensors,
)
from orchard_trainer_deepspeed.update import LearnerState

STATE = "trainer.json"
MOMENTS = "optimizer.safetensors"
REFERENCE = "reference.safetensors"
FORMAT = 1


def save_state(state: LearnerState, folder: Path, *, source: Path, stage: Mapping[str, Any]) -> None:
    """Write a checkpoint; the folder appears whole, replacing an earlier one of that name.

    Args:
        state: what to save.
        folder: where to.
        source: the model folder that config and tokenizer are copied from.
        stage: the options that the present stage overrides.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        save_model(state.model, work, source=source)
        write_tensors(work / MOMENTS, {**_moments(state), "rng": state.generator.get_state()})
        if state.reference is not None:
            write_tensors(work / REFERENCE, export_weights(state.reference))
        record = {
            "format": FORMAT,
            "version": state.version,
            "updates_done": state.updates_done,
            "updates_planned": state.updates_planned,
            "stage": dict(stage),
        }
        (work / STATE).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        work.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
            folder.replace(old)
            work.replace(folder)
            shutil.rmtree(old)
        else:
            work.replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_record(folder: Path) -> dict[str, Any]:
    """The plain part of a checkpoint.

    Raises:
        ConfigError: there is none, or it is of another format.
    """
    try:
        record = json.loads((folder / STATE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not a checkpoint of the torch trainer: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{folder / STATE} has a format that this version doesn't read")
    return record


def load_state(state: LearnerState, folder: Path, record: Mapping[str, Any]) -> None:
    """Put a checkpoint's weights, moments, random state and counters into the learner.

    Raises:
        ConfigError: it doesn't fit this model or is damaged.
    """
    try:
        tensors = load_file(folder / MOMENTS)
        weights = read_weights(folder)
        load_weights(state.model, weights)
        if state.reference is not None:
            load_weights(state.reference, load_file(folder / REFERENCE))
        state.generator.set_state(tensors.pop("rng"))
        _restore(state, tensors)
    except (OSError, KeyError, WeightsError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"the checkpoint {folder} can't be continued from: {error}") from error
    state.version = int(record["version"])
    state.updates_done = int(record["updates_done"])
    state.updates_planned = record["updates_planned"]


def _moments(state: LearnerState) -> dict[str, Tensor]:
    found = {}
    for name, weight in state.model.named_parameters():
        for key, value in state.optimizer.state.get(weight, {}).items():
            found[f"{key}/{name}"] = value.detach().to("cpu", copy=True).contiguous()
    return found


def _restore(state: LearnerState, tensors: Mapping[str, Tensor]) -> None:
    weights = dict(state.model.named_parameters())
    state.optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        weight = weights[name]
        # The step counter of the fused optimizer is a float32 tensor beside the weights; moments are as the weights.
        if kind != "step" and value.shape != weight.shape:
            raise WeightsError(f"{key} has shape {tuple(value.shape)} instead of {tuple(weight.shape)}")
        state.optimizer.state[weight][kind] = value.to(weight.device)
