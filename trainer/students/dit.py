"""The diffusion transformer: attention patterns, key/value cache, blocks with adaLN, output head.

Parameter names and shapes are the authors', so that their checkpoints load by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding, layer_norm, pad, scaled_dot_product_attention, silu

from trainer.students.conditioning import LayerNoise
from trainer.students.configuration import StudentSettings
from trainer.students.noise_attention import VocabularyAttention

Tokens = Int[Tensor, "b l"]
States = Float[Tensor, "b l d"]
Level = Float[Tensor, "rows c"] | None
"""The vector behind every adaLN, of each row or one for all; None for a plain transformer."""
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
        """Angles position * 1e4^(-2i / width) for i = 0..width/2 - 1 (RoFormer)."""
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


full_attention: Attend = dot_product_attention
"""Every position attends to every position."""
causal_attention: Attend = partial(dot_product_attention, is_causal=True)
"""Position i attends to positions 0..i."""


def masked_attention(allowed: Bool[Tensor, "*rows q k"]) -> Attend:
    """Attention of the allowed (query, key) pairs alone; [B, 1, q or 1, k] tells rows apart."""
    return partial(dot_product_attention, attn_mask=allowed)


@dataclass
class KeyValueCache:
    """Keys and values of ``length`` finished tokens, in preallocated memory; a pass writes behind them."""

    keys: Float[Tensor, "layers b heads capacity width"]
    values: Float[Tensor, "layers b heads capacity width"]
    length: int = 0

    @classmethod
    def empty(cls, backbone: Any, batch_size: int, capacity: int) -> KeyValueCache:
        """Memory for ``capacity`` tokens of each row, of the backbone's precision and device."""
        weight, heads = backbone.vocab_embed.embedding, backbone.num_key_value_heads
        shape = len(backbone.blocks), batch_size, heads, capacity, backbone.head_width
        zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        return cls(zeros, zeros.clone())

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new tokens behind the finished ones; return all keys and values so far."""
        stop = self.length + key.shape[-2]
        if stop > self.keys.shape[-2]:
            raise ValueError(f"cache of {self.keys.shape[-2]} tokens cannot hold {stop}")
        self.keys[layer, :, :, self.length : stop] = key
        self.values[layer, :, :, self.length : stop] = value
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

    def select(self, rows: Int[Tensor, "m"]) -> KeyValueCache:
        """A copy of some rows' finished tokens, with the capacity of the whole."""
        spare = self.keys.shape[-2] - self.length
        finished = (memory[..., : self.length, :] for memory in (self.keys, self.values))
        keys, values = (pad(f.index_select(1, rows), (0, 0, 0, spare)) for f in finished)
        return KeyValueCache(keys, values, self.length)


NUM_FREQUENCIES = 128


class Embedding(nn.Module):
    """Token embedding [V + 1, D]; the last row is the mask."""

    def __init__(self, num_tokens: int, hidden_size: int, init_std: float | None) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(num_tokens, hidden_size))
        self.init_std = init_std

    def reset_parameters(self) -> None:
        """Normal(0, init_std), or kaiming-uniform with a = sqrt 5 as the authors."""
        if self.init_std is None:
            nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))
        else:
            nn.init.normal_(self.embedding, std=self.init_std)

    def forward(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        return embedding(tokens, self.embedding)


class LayerNorm(nn.LayerNorm):
    """Without bias, and computed in float32 whatever the weights and autocast say."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        with torch.autocast(x.device.type, enabled=False):
            return layer_norm(x.float(), self.normalized_shape, self.weight.float(), eps=self.eps)


class ZeroLinear(nn.Linear):
    """A linear layer that begins at zero: the uniform distribution, or a block that is the identity."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def sigma_features(sigma: Float[Tensor, "b"]) -> Float[Tensor, "b features"]:
    """128 cosines, then 128 sines, of sigma * 1e4^(-i/128)."""
    index = torch.arange(NUM_FREQUENCIES, device=sigma.device, dtype=torch.float32)
    angles = sigma.float()[:, None] * torch.exp(-math.log(10_000) * index / NUM_FREQUENCIES)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class SigmaEmbedding(nn.Module):
    """sigma -> SiLU(MLP(features)), the vector c behind every adaLN."""

    def __init__(self, condition_size: int) -> None:
        super().__init__()
        first = nn.Linear(2 * NUM_FREQUENCIES, condition_size)
        last = nn.Linear(condition_size, condition_size)
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, sigma: Float[Tensor, "b"]) -> Float[Tensor, "b c"]:
        return silu(self.mlp(sigma_features(sigma).to(next(self.mlp.parameters()).dtype)))


def noise_layers(settings: StudentSettings, vocab_size: int) -> nn.ModuleDict:
    """Noise cross-attention for each depth of ``noise.layers``, by its name."""
    width = settings.hidden_size
    return nn.ModuleDict({str(d): VocabularyAttention(vocab_size, width) for d in settings.noise.layers})


class Block(nn.Module):
    """Pre-norm attention and MLP; with a noise-level width also adaLN shifts, scales and gates."""

    def __init__(self, settings: StudentSettings, layer: int, condition_size: int | None) -> None:
        super().__init__()
        width, inner = settings.hidden_size, settings.mlp_ratio * settings.hidden_size
        self.layer, self.num_heads, self.dropout = layer, settings.num_heads, settings.dropout
        self.norm1 = LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        gelu = nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(width, inner), gelu, nn.Linear(inner, width))
        self.adaLN_modulation = ZeroLinear(condition_size, 6 * width) if condition_size else None

    def forward(
        self, x: States, level: Level, rotary: Rotary, attend: Attend, cache: KeyValueCache | None = None
    ) -> States:
        modulation: tuple[Tensor | float, ...] = (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)
        if self.adaLN_modulation is not None and level is not None:
            modulation = self.adaLN_modulation(level)[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        dtype = self.attn_qkv.weight.dtype
        packed = self.attn_qkv((self.norm1(x) * (1 + scale1) + shift1).to(dtype))
        heads = packed.view(*x.shape[:2], 3, self.num_heads, x.shape[2] // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotary.rotate(query), rotary.rotate(key)
        if cache is not None:
            key, value = cache.write(self.layer, key, value)
        # A rank's share of a last batch may be empty, which attention kernels of GPUs do not take.
        attended = attend(query, key, value) if len(x) else value
        attended = self.attn_out(attended.transpose(1, 2).reshape(x.shape))
        x = x + gate1 * dropout(attended, self.dropout, self.training)
        updated = self.mlp((self.norm2(x) * (1 + scale2) + shift2).to(dtype))
        return x + gate2 * dropout(updated, self.dropout, self.training)


class Head(nn.Module):
    """Final norm, modulation and projection to V + 1 logits, applied to the rows that need them."""

    def __init__(self, width: int, vocab_size: int, condition_size: int | None) -> None:
        super().__init__()
        self.norm_final = LayerNorm(width)
        self.linear = ZeroLinear(width, vocab_size + 1)
        self.adaLN_modulation = ZeroLinear(condition_size, 2 * width) if condition_size else None

    def features(self, x: States, level: Level) -> States:
        normed = self.norm_final(x)
        if self.adaLN_modulation is not None and level is not None:
            shift, scale = self.adaLN_modulation(level)[:, None].chunk(2, dim=-1)
            normed = normed * (1 + scale) + shift
        return normed.to(self.linear.weight.dtype)

    def forward(self, features: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v1"]:
        return self.linear(features)


class DiT(nn.Module):
    """Embedding, blocks and head; ``uses_sigma`` False gives a plain transformer.

    The caller looks up and edits embeddings, runs ``forward`` and projects only the rows that it
    needs with ``output_layer``.
    """

    def __init__(self, settings: StudentSettings, vocab_size: int, *, uses_sigma: bool = True) -> None:
        super().__init__()
        condition_size = settings.condition_size if uses_sigma else None
        width = settings.hidden_size
        self.num_key_value_heads, self.head_width = settings.num_heads, width // settings.num_heads
        self.vocab_embed = Embedding(vocab_size + 1, width, settings.embedding_init_std)
        self.sigma_map = SigmaEmbedding(condition_size) if condition_size else None
        self.blocks = nn.ModuleList(Block(settings, layer, condition_size) for layer in range(settings.num_layers))
        self.output_layer = Head(width, vocab_size, condition_size)
        self.noise_readings = noise_layers(settings, vocab_size)

    def embed_sigma(self, sigma: Float[Tensor, "b"]) -> Float[Tensor, "b c"] | None:
        return None if self.sigma_map is None else self.sigma_map(sigma)

    def forward(
        self,
        x: States,
        level: Level,
        positions: Int[Tensor, "l"],
        attend: Attend,
        cache: KeyValueCache | None = None,
        noise: LayerNoise | None = None,
    ) -> States:
        """Embeddings -> hidden states before the final norm.

        ``level`` has one row per batch row, or a single row for all of them.
        """
        rotary = Rotary.of(positions, self.head_width)
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x, level, rotary, attend, cache)
            if noise is not None and str(depth) in self.noise_readings:
                x = self.noise_readings[str(depth)](x, noise, self.output_layer.linear.weight)
        return x
