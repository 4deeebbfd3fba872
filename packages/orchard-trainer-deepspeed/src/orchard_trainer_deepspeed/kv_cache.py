"""Keys and values of the sequences under way, in slots that lie side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard_trainer_deepspeed.architecture import Architecture

Saved = Tensor
"""Keys and values of one sequence's first tokens: [layers, 2, tokens, kv_heads, head_dim]."""


class KVCache:
    """Room for `slots` sequences; grows to the longest of them.

    Slots in use are 0 to n-1, so that a step over all of them needs no copies: a freed slot takes the last one's place.
    """

    def __init__(self, shape: Architecture, slots: int, device: torch.device) -> None:
        self._shape = shape
        self._slots = slots
        self._data = torch.empty(shape.layers, 2, slots, 0, shape.kv_heads, shape.head_dim, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that a slot holds now."""
        return int(self._data.shape[3])

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of so many tokens."""
        if tokens <= self.capacity:
            return
        size = max(64, 1 << (tokens - 1).bit_length())
        shape = self._shape
        grown = torch.zeros(
            shape.layers, 2, self._slots, size, shape.kv_heads, shape.head_dim, device=self._data.device
        )
        grown[:, :, :, : self.capacity] = self._data
        self._data = grown

    def view(self, first: int, end: int, tokens: int) -> CacheSlice:
        """The slots `first` to `end - 1`, up to `tokens` tokens."""
        self.reserve(tokens)
        return CacheSlice(data=self._data[:, :, first:end], length=tokens)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy one slot over another."""
        self._data[:, :, target, :tokens] = self._data[:, :, source, :tokens]

    def save(self, slot: int, tokens: int) -> Saved:
        """A copy of a slot's first tokens."""
        return self._data[:, :, slot, :tokens].clone()

    def restore(self, slot: int, saved: Saved, tokens: int) -> None:
        """Put a copy's first tokens into a slot."""
        self.reserve(tokens)
        self._data[:, :, slot, :tokens] = saved[:, :, :tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSlice:
    """Consecutive slots. `data` is [layers, 2, B, capacity, kv_heads, head_dim]; `length` of it is attended to."""

    data: Tensor
    length: int

    def write(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Store [B*T, kv_heads, head_dim] at its positions and return all keys and values, [B, length, ...].

        `rows` is the row of each token, or None with one token per row.
        """
        keys, values = self.data[layer, 0], self.data[layer, 1]
        if rows is None:
            rows = torch.arange(positions.shape[0], device=positions.device)
        keys[rows, positions] = key
        values[rows, positions] = value
        return keys[:, : self.length], values[:, : self.length]
