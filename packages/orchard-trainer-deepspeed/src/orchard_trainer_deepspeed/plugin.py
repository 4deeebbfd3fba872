"""What this package registers; importing it loads nothing heavy."""

from __future__ import annotations

import importlib.util
import os

from orchard_api.hookspecs import DoctorCheck, hookimpl
from orchard_api.registry import Registrar

_PACKAGE = "orchard_trainer_deepspeed"


@hookimpl
def orchard_register(registrar: Registrar) -> None:
    """Register the trainer, the policy server, and what they are configured with."""

    def add(kind: str, name: str, target: str, config: str | None, summary: str) -> None:
        model = f"{_PACKAGE}.config:{config}" if config else None
        registrar.add(kind, name, f"{_PACKAGE}.{target}", config=model, summary=summary)

    add("trainer", "torch", "learner:TorchTrainer", "TorchTrainerConfig", "one process, CPU or one GPU")
    add("policy_server", "in_process", "server:InProcessServer", "InProcessConfig", "small models, in this process")
    add("weight_store", "memory", "weights:MemoryWeightStore", "MemoryStoreConfig", "versions in this process's memory")
    add("weight_store", "folder", "weights:FolderWeightStore", "FolderStoreConfig", "versions as safetensors files")
    add("advantage", "grpo", "advantages:Grpo", None, "reward minus the group's mean, over its deviation")
    add("advantage", "dr_grpo", "advantages:DrGrpo", None, "reward minus the group's mean")
    add("advantage", "rloo", "advantages:Rloo", None, "reward minus the mean of the group's others")
    add("loss", "ppo_clip", "losses:PpoClip", "PpoClipConfig", "clipped surrogate, with dual clip")
    add("loss", "policy_gradient", "losses:PolicyGradient", None, "advantage times log probability")
    add("loss", "cispo", "losses:Cispo", "CispoConfig", "log probability weighted by the clipped ratio")


@hookimpl
def orchard_doctor() -> list[DoctorCheck]:
    """Is torch there, and what would it compute with."""
    if importlib.util.find_spec("torch") is None:
        fix = "pip install 'torch>=2.6,<3'"
        return [DoctorCheck(name="torch", ok=False, detail="torch is not installed", fix=fix)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [DoctorCheck(name="torch", ok=True, detail=f"installed; {cores} CPU cores for small models")]
