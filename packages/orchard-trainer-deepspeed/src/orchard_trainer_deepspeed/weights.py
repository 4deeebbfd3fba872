"""Weight stores: versions of tensors from the trainer to the policy servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from orchard_api.errors import InfraError
from orchard_api.policy import PolicyVersion
from orchard_trainer_deepspeed.checkpoint import write_tensors
from orchard_trainer_deepspeed.config import FolderStoreConfig, MemoryStoreConfig


class DamagedWeightsError(InfraError):
    """A stored version's file is not what was written."""


def _check(version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
    if version < 0:
        raise ValueError(f"a policy version is 0 or more, not {version}")
    empty = [name for name, value in weights.items() if value.numel() == 0]
    if empty or not weights:
        raise ValueError(f"version {version} has empty tensors: {', '.join(empty[:5]) or 'none at all'}")


class MemoryWeightStore:
    """Versions in this process's memory. A released version goes once `keep` newer released ones are there.

    Args:
        config: its options.
    """

    def __init__(self, config: MemoryStoreConfig) -> None:
        self._keep = config.keep
        self._versions: dict[PolicyVersion, dict[str, Tensor]] = {}
        self._released: PolicyVersion = -1

    async def put(self, version: PolicyVersion, weights: Mapping[str, Any]) -> None:
        """See `WeightStore.put`.

        Raises:
            ValueError: a tensor is empty, or the version is stored with other contents.
        """
        copies = await asyncio.to_thread(
            lambda: {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        )
        _check(version, copies)
        stored = self._versions.get(version)
        if stored is not None:
            same = stored.keys() == copies.keys() and all(torch.equal(stored[name], copies[name]) for name in copies)
            if not same:
                raise ValueError(f"version {version} is stored already, with other weights")
            return
        self._versions[version] = copies

    async def get(self, version: PolicyVersion) -> Mapping[str, Any]:
        """See `WeightStore.get`."""
        return self._versions[version]

    async def latest(self) -> PolicyVersion | None:
        """See `WeightStore.latest`."""
        return max(self._versions, default=None)

    async def release(self, version: PolicyVersion) -> None:
        """See `WeightStore.release`; what isn't released is never dropped."""
        self._released = max(self._released, version)
        for old in _expendable(list(self._versions), self._released, self._keep):
            del self._versions[old]


class FolderWeightStore:
    """Versions as safetensors files with their SHA-256, for policy servers in other processes.

    A version is there when its manifest is: the manifest is renamed into place after the tensors.

    Args:
        config: its options.
    """

    def __init__(self, config: FolderStoreConfig) -> None:
        self._folder = config.path
        self._keep = config.keep

    async def put(self, version: PolicyVersion, weights: Mapping[str, Any]) -> None:
        """See `WeightStore.put`.

        Raises:
            ValueError: a tensor is empty, or the version is stored with other contents.
        """
        await asyncio.to_thread(self._put, version, weights)

    def _put(self, version: PolicyVersion, weights: Mapping[str, Any]) -> None:
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}
        _check(version, copies)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._manifest(version).exists():
            stored = self._get(version)
            same = stored.keys() == copies.keys() and all(torch.equal(stored[name], copies[name]) for name in copies)
            if not same:
                raise ValueError(f"version {version} is stored already, with other weights")
            return
        write_tensors(self._tensors(version), copies)
        record = {"version": version, "sha256": _digest(self._tensors(version))}
        with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False) as file:
            json.dump(record, file)
        Path(file.name).replace(self._manifest(version))

    async def get(self, version: PolicyVersion) -> Mapping[str, Any]:
        """See `WeightStore.get`.

        Raises:
            KeyError: not stored, or already released.
            DamagedWeightsError: the file is not what was written.
        """
        return await asyncio.to_thread(self._get, version)

    def _get(self, version: PolicyVersion) -> dict[str, Tensor]:
        try:
            record = json.loads(self._manifest(version).read_text("utf-8"))
            found = _digest(self._tensors(version))
            if found != record["sha256"]:
                raise DamagedWeightsError(f"the weights of version {version} in {self._folder} are damaged")
            return load_file(self._tensors(version))
        except FileNotFoundError as error:
            raise KeyError(version) from error

    async def latest(self) -> PolicyVersion | None:
        """See `WeightStore.latest`."""
        return max(self._stored(), default=None)

    async def release(self, version: PolicyVersion) -> None:
        """See `WeightStore.release`; what isn't released is never dropped."""
        for old in _expendable(self._stored(), version, self._keep):
            self._manifest(old).unlink(missing_ok=True)
            self._tensors(old).unlink(missing_ok=True)

    def _stored(self) -> list[PolicyVersion]:
        names = (re.fullmatch(r"version-(\d+)\.json", path.name) for path in self._folder.glob("version-*.json"))
        return [int(name.group(1)) for name in names if name]

    def _manifest(self, version: PolicyVersion) -> Path:
        return self._folder / f"version-{version}.json"

    def _tensors(self, version: PolicyVersion) -> Path:
        return self._folder / f"version-{version}.safetensors"


def _expendable(stored: list[PolicyVersion], released: PolicyVersion, keep: int) -> list[PolicyVersion]:
    """The released versions beyond the newest `keep` of them."""
    old = sorted(version for version in stored if version <= released)
    return old[: len(old) - keep] if keep else old


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
