"""Where tensors live and how many threads work on them."""

from __future__ import annotations

import torch

from orchard_api.errors import ConfigError
from orchard_trainer_deepspeed.architecture import Architecture
from orchard_trainer_deepspeed.config import Device

SMALL = 16_000_000


def choose_device(wanted: Device) -> torch.device:
    """The device: `auto` is a GPU where there is one.

    Raises:
        ConfigError: `cuda` was asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda": torch sees no GPU', hint='device = "auto" falls back to the CPU')
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def choose_threads(wanted: int | None, shape: Architecture) -> int:
    """CPU threads: the option, else 1 for small models.

    A small model's operations take microseconds. Handing them to several threads costs more than it brings, and
    milliseconds for each of them when other programs keep the cores busy.
    """
    if wanted is not None:
        return wanted
    return 1 if shape.parameters < SMALL else torch.get_num_threads()
