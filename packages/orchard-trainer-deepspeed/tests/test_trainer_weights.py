"""Weight stores: idempotent, bounded, nothing unreleased dropped, damage noticed."""

from __future__ import annotations

import pytest
import torch

from orchard_trainer_deepspeed.config import FolderStoreConfig, MemoryStoreConfig
from orchard_trainer_deepspeed.weights import DamagedWeightsError, FolderWeightStore, MemoryWeightStore


@pytest.fixture(params=["memory", "folder"])
def make_store(request, tmp_path):
    def make(keep=1):
        if request.param == "memory":
            return MemoryWeightStore(MemoryStoreConfig(keep=keep))
        return FolderWeightStore(FolderStoreConfig(path=tmp_path / "store", keep=keep))

    return make


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), value), "b": torch.arange(4.0)}


async def test_what_is_put_is_got(make_store):
    store = make_store()
    assert await store.latest() is None
    given = tensors(1.0)
    await store.put(3, given)
    given["a"].zero_()
    assert torch.equal((await store.get(3))["a"], torch.ones(2, 3))
    await store.put(7, tensors(2.0))
    assert await store.latest() == 7
    with pytest.raises(KeyError):
        await store.get(5)


async def test_putting_again_is_harmless_and_other_contents_are_refused(make_store):
    store = make_store()
    await store.put(1, tensors(1.0))
    await store.put(1, tensors(1.0))
    with pytest.raises(ValueError, match="other weights"):
        await store.put(1, tensors(2.0))
    assert torch.equal((await store.get(1))["a"], torch.ones(2, 3))


@pytest.mark.parametrize("keep", [0, 1, 2])
async def test_only_released_versions_go_and_the_newest_of_them_stay(make_store, keep):
    # prime-rl#1857: a cleaner deleted a version that was in use.
    store = make_store(keep=keep)
    for version in range(6):
        await store.put(version, tensors(float(version)))
    await store.release(3)
    await store.release(1)
    there = []
    for version in range(6):
        try:
            await store.get(version)
            there.append(version)
        except KeyError:
            pass
    assert there == [*range(4 - keep, 4), 4, 5]
    assert await store.latest() == 5


async def test_empty_tensors_are_refused(make_store):
    store = make_store()
    for wrong in ({}, {"a": torch.zeros(0)}):
        with pytest.raises(ValueError, match="empty"):
            await store.put(1, wrong)
    with pytest.raises(ValueError, match="0 or more"):
        await store.put(-1, tensors(1.0))
    assert await store.latest() is None


async def test_a_damaged_file_is_noticed(tmp_path):
    store = FolderWeightStore(FolderStoreConfig(path=tmp_path))
    await store.put(1, tensors(1.0))
    path = tmp_path / "version-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedWeightsError):
        await store.get(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-1.json", "version-1.safetensors"]
    # Without its manifest a version is not there.
    (tmp_path / "version-1.json").unlink()
    assert await store.latest() is None
    with pytest.raises(KeyError):
        await store.get(1)
