"""A causal decoder of the Llama and Qwen2 family in plain torch, made for small models, where calls cost most.

Linear layers run on flat tokens, so padding costs nothing there; only attention sees rows. The projections of queries,
keys and values are one matrix, and so are gate and up; `checkpoint.named_weights` shows them under the usual names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard_trainer_deepspeed.architecture import Architecture
from orchard_trainer_deepspeed.kv_cache import CacheSlice

Attend = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where N flat tokens of B rows lie in a padded [B, T] block.

    Attributes:
        rows: B.
        longest: T.
        index: [N] flat place of each token in the block, or None when all rows are T long.
    """

    rows: int
    longest: int
    index: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> Layout:
        """The layout of rows of these lengths, one behind the other."""
        longest = max(lengths)
        if all(length == longest for length in lengths):
            return cls(rows=len(lengths), longest=longest, index=None)
        places = [row * longest + place for row, length in enumerate(lengths) for place in range(length)]
        return cls(rows=len(lengths), longest=longest, index=torch.tensor(places, device=device))


class Layer(nn.Module):
    """The weights of one block."""

    qkv_bias: Tensor | None
    output_bias: Tensor | None

    def __init__(self, shape: Architecture, device: torch.device) -> None:
        super().__init__()

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, device=device))

        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.input_norm = weight(shape.hidden)
        self.qkv = weight(rows, shape.hidden)
        self.register_parameter("qkv_bias", weight(rows) if shape.qkv_bias else None)
        self.output = weight(shape.hidden, shape.heads * shape.head_dim)
        self.register_parameter("output_bias", weight(shape.hidden) if shape.output_bias else None)
        self.mlp_norm = weight(shape.hidden)
        self.gate_up = weight(2 * shape.intermediate, shape.hidden)
        self.down = weight(shape.hidden, shape.intermediate)


class Decoder(nn.Module):
    """The model. Weights are uninitialised until `checkpoint` fills them.

    Args:
        shape: sizes and options.
        device: where the weights live.
    """

    def __init__(self, shape: Architecture, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.shape = shape
        place = torch.device(device)
        self.embedding = nn.Parameter(torch.empty(shape.vocab, shape.hidden, device=place))
        self.layers = nn.ModuleList(Layer(shape, place) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.empty(shape.hidden, device=place))
        self.head: Tensor | None
        self.register_parameter(
            "head", None if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.hidden, device=place))
        )
        self._blocks: tuple[Layer, ...] = tuple(self.layers)  # type: ignore[arg-type]
        self._query_rows = shape.heads
        self._rotated = shape.heads + shape.kv_heads
        self._heads = shape.heads + 2 * shape.kv_heads
        self._cos = self._sin = torch.empty(0)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embedding.device

    @property
    def output_matrix(self) -> Tensor:
        """[V, d]: what hidden states are multiplied with."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] hidden states to [N, V] logits."""
        return functional.linear(hidden, self.output_matrix)

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """Hidden states of whole rows; each row attends to itself alone, positions count from 0 in each.

        Args:
            ids: [N] tokens, rows one behind the other.
            layout: where they lie.

        Returns:
            [N, d], normalised, ready for `logits`.
        """
        shape = self.shape
        cos, sin = self._rotation(layout.longest)
        cos, sin = cos[: layout.longest], sin[: layout.longest]
        block = (layout.rows, layout.longest, self._heads, shape.head_dim)
        grouped = shape.heads != shape.kv_heads

        def attend(_: int, qkv: Tensor) -> Tensor:
            if layout.index is not None:
                padded = qkv.new_zeros(layout.rows * layout.longest, qkv.shape[-1])
                qkv = padded.index_copy(0, layout.index, qkv)
            query, key, value = self._split(qkv.view(block), cos, sin)
            out = functional.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=grouped
            )
            out = out.transpose(1, 2).reshape(layout.rows * layout.longest, -1)
            return out if layout.index is None else out.index_select(0, layout.index)

        return self._run(ids, attend)

    def extend(self, ids: Tensor, starts: Tensor, last: Tensor | None, cache: CacheSlice) -> Tensor:
        """Append T tokens to each of B cached sequences.

        Rows with fewer new tokens are padded at the right; what padding leaves in the cache is overwritten before it
        is ever attended to.

        Args:
            ids: [B, T] new tokens.
            starts: [B] tokens already cached of each row.
            last: [B] place of each row's last real token among the T, or None when T is 1.
            cache: keys and values of the B rows, with room for T more.

        Returns:
            [B, d]: hidden states at each row's last token.
        """
        shape = self.shape
        rows, count = ids.shape
        positions = starts[:, None] + torch.arange(count, device=ids.device)
        cos, sin = self._rotation(cache.length)
        flat = positions.flatten()
        cos, sin = cos[flat], sin[flat]
        mask = (torch.arange(cache.length, device=ids.device) <= positions[..., None])[:, None]
        groups = shape.heads // shape.kv_heads
        if groups > 1:
            mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).reshape(rows, 1, groups * count, cache.length)
        slots = torch.arange(rows, device=ids.device).repeat_interleave(count) if count > 1 else None

        def attend(number: int, qkv: Tensor) -> Tensor:
            query, key, value = self._split(qkv.view(-1, self._heads, shape.head_dim), cos, sin)
            keys, values = cache.write(number, key, value, flat, slots)
            if groups == 1:
                query = query.view(rows, count, shape.heads, shape.head_dim).transpose(1, 2)
            else:
                query = query.reshape(rows, count, shape.kv_heads, groups, shape.head_dim).permute(0, 2, 3, 1, 4)
                query = query.reshape(rows, shape.kv_heads, groups * count, shape.head_dim)
            out = functional.scaled_dot_product_attention(
                query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
            )
            if groups > 1:
                out = out.view(rows, shape.heads, count, shape.head_dim)
            return out.transpose(1, 2).reshape(rows * count, -1)

        hidden = self._run(ids.flatten(), attend)
        if last is None:
            return hidden
        return hidden.view(rows, count, -1)[torch.arange(rows, device=ids.device), last]

    def _split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values from [..., heads, head_dim]."""
        both = qkv[..., : self._rotated, :]
        both = torch.addcmul(both * cos, both.roll(self.shape.head_dim // 2, -1), sin)
        return both[..., : self._query_rows, :], both[..., self._query_rows :, :], qkv[..., self._rotated :, :]

    def _run(self, ids: Tensor, attend: Attend) -> Tensor:
        width, eps = (self.shape.hidden,), self.shape.norm_eps
        x = functional.embedding(ids, self.embedding)
        for number, layer in enumerate(self._blocks):
            y = functional.rms_norm(x, width, layer.input_norm, eps)
            y = attend(number, functional.linear(y, layer.qkv, layer.qkv_bias))
            x = x + functional.linear(y, layer.output, layer.output_bias)
            y = functional.rms_norm(x, width, layer.mlp_norm, eps)
            gate, up = functional.linear(y, layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.rms_norm(x, width, self.norm, eps)

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Tables [at least length, 1, head_dim]; the sine carries the sign of the half that it multiplies."""
        if self._cos.shape[0] < length or self._cos.device != self.device:
            size = max(256, 1 << (length - 1).bit_length())
            half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float64) / self.shape.head_dim
            angles = torch.outer(torch.arange(size, dtype=torch.float64), self.shape.rope_theta**-half)
            cos, sin = angles.cos().float(), angles.sin().float()
            # A table made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                self._cos = torch.cat((cos, cos), -1)[:, None].to(self.device)
                self._sin = torch.cat((-sin, sin), -1)[:, None].to(self.device)
        return self._cos, self._sin
