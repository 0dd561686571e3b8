"""Rotary positions, attention patterns and the key/value cache of the backbone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from shards.base import first_line

Heads = Float[Tensor, "b heads l width"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value), each [B, heads, length, head width] -> attended values like query."""

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of L positions: [L, head width], float32, the half repeated."""

    cos: Float[Tensor, "l width"]
    sin: Float[Tensor, "l width"]

    @classmethod
    def of(cls, positions: Int[Tensor, "l"], head_width: int) -> Rotary:
        """Angles position * base^(-2i / width) for i = 0..width/2 - 1 (RoFormer, base 1e4)."""
        steps = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
        inverse_frequency = 1.0 / (ROTARY_BASE ** (steps / head_width))
        angles = positions.float()[:, None] * inverse_frequency[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Heads) -> Heads:
        """Rotate the first half of each head with the second; in float32, back in x's dtype."""
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x.float() * self.cos + turned * self.sin).to(x.dtype)


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: bool
) -> Tensor:
    """PyTorch's fused attention; on the CPU always in float32.

    Its bf16 kernel is 2 to 7 times slower there, forward and backward, than the float32 one.
    """
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return scaled_dot_product_attention(query, key, value, attn_mask, **options)
    with torch.autocast("cpu", enabled=False):
        wide = (query.float(), key.float(), value.float())
        return scaled_dot_product_attention(*wide, attn_mask, **options).to(query.dtype)


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every position attends to every position."""
    return dot_product_attention(query, key, value)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Position i attends to positions 0..i."""
    return dot_product_attention(query, key, value, is_causal=True)


def masked_attention(allowed: Bool[Tensor, "*rows q k"]) -> Attend:
    """SDPA restricted to the allowed (query, key) pairs; [B, 1, q or 1, k] tells rows apart."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dot_product_attention(query, key, value, attn_mask=allowed)

    return attend


# FlexAttention traces this function, and cannot trace run-time type checks.
@no_type_check
def training_pattern(
    query: Int[Tensor, "*i"], key: Int[Tensor, "*j"], row_length: int, block_size: int
) -> Bool[Tensor, "*k"]:
    """Which entries of [x_t ; x_0] (indices 0..2L-1) see which others (BD3-LM, section 3.2).

    x_t sees x_t of its own block and x_0 of strictly earlier blocks; x_0 sees x_0 of its own and
    earlier blocks.
    """
    noised_query, noised_key = query < row_length, key < row_length
    block_query = (query % row_length) // block_size
    block_key = (key % row_length) // block_size
    own = noised_query & noised_key & (block_query == block_key)
    history = noised_query & ~noised_key & (block_key < block_query)
    clean = ~noised_query & ~noised_key & (block_key <= block_query)
    return own | history | clean


@functools.lru_cache(maxsize=16)
def training_mask(row_length: int, block_size: int, device: torch.device) -> Tensor:
    """The pattern as a [2L, 2L] boolean tensor; built once per shape and device."""
    index = torch.arange(2 * row_length, device=device)
    return training_pattern(index[:, None], index[None, :], row_length, block_size)


@functools.lru_cache(maxsize=16)
def block_causal_mask(length: int, block_size: int, device: torch.device) -> Tensor:
    """[length, length] mask of a sampling pass: each block sees itself and earlier blocks."""
    block = torch.arange(length, device=device) // block_size
    return block[:, None] >= block[None, :]


@functools.lru_cache(maxsize=16)
def flex_obstacle(device: torch.device) -> str:
    """Why FlexAttention cannot train on this device, tried once on a few tokens; else empty."""
    if device.type != "cuda":
        return f"it has no gradient on {device.type}"
    try:
        attend = flex_training_attention(64, 16, device)
        query, key, value = (
            torch.zeros(2, 1, 128, 16, device=device, requires_grad=True) for _ in range(3)
        )
        attend(query, key, value).sum().backward()
    except Exception as error:  # whatever a compiler may lack
        return first_line(error)
    return ""


@functools.lru_cache(maxsize=16)
def flex_training_attention(row_length: int, block_size: int, device: torch.device) -> Attend:
    """FlexAttention with the training pattern; the block mask is built once per shape and device.

    On CUDA the kernel is compiled; elsewhere it runs uncompiled and without gradients, which
    PyTorch does not offer there.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = 2 * row_length
    mask = create_block_mask(
        lambda batch, head, query, key: training_pattern(query, key, row_length, block_size),
        None,
        None,
        length,
        length,
        device=device,
    )
    kernel = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, block_mask=mask)  # type: ignore[return-value]

    return attend


@dataclass
class KeyValueCache:
    """Keys and values of finished tokens, in preallocated memory; inference only.

    Attributes:
        keys: [layers, B, heads, capacity, head width].
        values: Same shape.
        length: Finished tokens; a forward pass writes behind them and attends to both.
    """

    keys: Float[Tensor, "layers b heads capacity width"]
    values: Float[Tensor, "layers b heads capacity width"]
    length: int = 0

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new tokens behind the finished ones; return all keys and values so far."""
        stop = self.length + key.shape[-2]
        if stop > self.keys.shape[-2]:
            raise ValueError(f"cache of {self.keys.shape[-2]} tokens cannot hold {stop}")
        self.keys[layer, :, :, self.length : stop] = key
        self.values[layer, :, :, self.length : stop] = value
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def select(self, rows: Int[Tensor, "m"], room: int | None = None) -> KeyValueCache:
        """A copy of some rows' finished tokens, with room for further ones (None: the capacity)."""
        spare = self.keys.shape[-2] - self.length if room is None else room
        keys, values = (
            pad(memory[..., : self.length, :].index_select(1, rows), (0, 0, 0, spare))
            for memory in (self.keys, self.values)
        )
        return KeyValueCache(keys, values, self.length)
