"""Rotary positions, attention patterns and the key/value cache of the backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import (
    dropout,
    embedding,
    layer_norm,
    pad,
    scaled_dot_product_attention,
    silu,
)

from trainer.students.hugging_face import StudentConfig
from trainer.students.noise_attention import NoiseToRead, make_readings

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


# The diffusion transformer: a DiT over token embeddings with adaLN, rotary positions, linear head.
#
# Parameter names and shapes are the authors', so that their checkpoints load by name.


LAYER_NORM_EPS = 1e-5
NUM_FREQUENCIES = 128
Modulation = Float[Tensor, "rows 1 d"] | float
Half = Callable[..., Any]


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


class LayerNorm(nn.Module):
    """LayerNorm without bias, computed in float32 whatever the weights and autocast say."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def reset_parameters(self) -> None:
        """Weight 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        with torch.autocast(x.device.type, enabled=False):
            return layer_norm(x.float(), self.weight.shape, self.weight.float(), eps=LAYER_NORM_EPS)


def sigma_features(sigma: Float[Tensor, "b"]) -> Float[Tensor, "b features"]:
    """128 cosines, then 128 sines, of sigma * 1e4^(-i/128)."""
    index = torch.arange(NUM_FREQUENCIES, device=sigma.device, dtype=torch.float32)
    angles = sigma.float()[:, None] * torch.exp(-math.log(10_000) * index / NUM_FREQUENCIES)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class SigmaEmbedding(nn.Module):
    """sigma -> SiLU(MLP(features)), the vector c behind every adaLN."""

    def __init__(self, condition_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(2 * NUM_FREQUENCIES, condition_size),
            nn.SiLU(),
            nn.Linear(condition_size, condition_size),
        )

    def forward(self, sigma: Float[Tensor, "b"]) -> Float[Tensor, "b c"]:
        features = sigma_features(sigma)
        return silu(self.mlp(features.to(next(self.mlp.parameters()).dtype)))


class AdaLN(nn.Linear):
    """c -> shifts, scales and gates, zero-initialised."""

    def __init__(self, condition_size: int, hidden_size: int, num_chunks: int) -> None:
        super().__init__(condition_size, num_chunks * hidden_size)
        self.num_chunks = num_chunks

    def reset_parameters(self) -> None:
        """Zero, so that every block starts as the identity."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def chunks(self, sigma_embedding: Float[Tensor, "rows c"]) -> tuple[Tensor, ...]:
        """The modulations, each [rows, 1, D]."""
        return self(sigma_embedding)[:, None, :].chunk(self.num_chunks, dim=-1)


class OutputProjection(nn.Linear):
    """Linear to logits, zero-initialised."""

    def reset_parameters(self) -> None:
        """Zero, so that training starts from the uniform distribution."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


# A compiler traces the halves of a block, and cannot trace run-time type checks.
@no_type_check
def _before_attention(
    block: Block, x: Tensor, shift: Modulation, scale: Modulation, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [B, L, D] -> queries, keys, values, each [B, heads, L, head width]."""
    batch, length, width = x.shape
    normed = block.norm1(x) * (1 + scale) + shift
    packed = block.attn_qkv(normed.to(block.attn_qkv.weight.dtype))
    heads = packed.view(batch, length, 3, block.num_heads, width // block.num_heads)
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
    rotary = Rotary(cos, sin)
    return rotary.rotate(query), rotary.rotate(key), value


@no_type_check
def _after_attention(
    block: Block,
    x: Tensor,
    attended: Tensor,
    gate1: Modulation,
    shift2: Modulation,
    scale2: Modulation,
    gate2: Modulation,
) -> Tensor:
    """Hidden states and what was attended to -> hidden states behind the block."""
    attended = block.attn_out(attended.transpose(1, 2).reshape(x.shape))
    x = x + gate1 * dropout(attended, block.dropout, block.training)
    normed = block.norm2(x) * (1 + scale2) + shift2
    updated = block.mlp(normed.to(block.attn_qkv.weight.dtype))
    return x + gate2 * dropout(updated, block.dropout, block.training)


HALVES: tuple[Half, Half] = (_before_attention, _after_attention)


def compiled_halves(backend: str | Callable[..., Any] = "inductor") -> tuple[Half, Half]:
    """For all blocks of a student: their weights are arguments of the graphs.

    A graph is made for each of: with gradients and without, one row and more.
    """

    def compiled(half: Half) -> Half:
        kernel = torch.compile(half, backend=backend, fullgraph=True, isolate_recompiles=True)  # type: ignore[call-overload]

        def run(block: Block, *inputs: Tensor | float) -> Any:
            for each in inputs:  # one graph for all batch sizes but 1; cosines and sines have none
                if isinstance(each, Tensor) and each.ndim > 2 and each.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(each, 0)
            return kernel(block, *inputs)

        return run

    return compiled(_before_attention), compiled(_after_attention)


class Block(nn.Module):
    """Pre-norm attention and MLP; with a noise-level width also adaLN shifts, scales and gates.

    Attention lies between two halves, of which :func:`compiled_halves` are a faster form: whatever
    attends, and with whatever cache, they are the same graphs, and the weights keep their names.
    """

    def __init__(self, config: StudentConfig, layer: int, condition_size: int | None) -> None:
        super().__init__()
        settings = config.settings
        width = settings.hidden_size
        self.layer, self.num_heads, self.dropout = layer, settings.num_heads, settings.dropout
        self.norm1 = LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, settings.mlp_ratio * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(settings.mlp_ratio * width, width),
        )
        self.adaLN_modulation = AdaLN(condition_size, width, 6) if condition_size else None
        self.halves = HALVES

    @property
    def is_compiled(self) -> bool:
        """Whether its halves are compiled ones."""
        return self.halves is not HALVES

    def _modulations(self, sigma_embedding: Tensor | None) -> tuple[Modulation, ...]:
        if self.adaLN_modulation is None or sigma_embedding is None:
            return 0.0, 0.0, 1.0, 0.0, 0.0, 1.0
        return self.adaLN_modulation.chunks(sigma_embedding)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        sigma_embedding: Float[Tensor, "rows c"] | None,
        rotary: Rotary,
        attend: Attend,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b l d"]:
        shift, scale, *others = self._modulations(sigma_embedding)
        # A rank's share of a last batch may be empty, which neither graphs nor attention kernels
        # of GPUs take.
        before, after = self.halves if len(x) else HALVES
        query, key, value = before(self, x, shift, scale, rotary.cos, rotary.sin)
        if cache is not None:
            key, value = cache.write(self.layer, key, value)
        attended = attend(query, key, value) if len(x) else value
        return after(self, x, attended, *others)


class Head(nn.Module):
    """Final norm, modulation and projection to V + 1 logits, applied to the rows that need them."""

    def __init__(self, config: StudentConfig, condition_size: int | None) -> None:
        super().__init__()
        width = config.settings.hidden_size
        self.norm_final = LayerNorm(width)
        self.linear = OutputProjection(width, config.vocab_size + 1)
        self.adaLN_modulation = AdaLN(condition_size, width, 2) if condition_size else None

    def features(
        self, x: Float[Tensor, "b l d"], sigma_embedding: Float[Tensor, "rows c"] | None
    ) -> Float[Tensor, "b l d"]:
        """What the projection sees."""
        normed = self.norm_final(x)
        if self.adaLN_modulation is not None and sigma_embedding is not None:
            shift, scale = self.adaLN_modulation.chunks(sigma_embedding)
            normed = normed * (1 + scale) + shift
        return normed.to(self.linear.weight.dtype)

    def forward(self, features: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v1"]:
        return self.linear(features)


class DiT(nn.Module):
    """Embedding, blocks and head; ``uses_sigma`` False gives a plain transformer.

    The caller looks up and edits embeddings (``embed``), runs ``forward`` and projects only the
    rows that it needs with ``output_layer``.
    """

    def __init__(self, config: StudentConfig, *, uses_sigma: bool = True) -> None:
        super().__init__()
        settings = config.settings
        condition_size = settings.condition_size if uses_sigma else None
        self.head_width = settings.hidden_size // settings.num_heads
        self.vocab_embed = Embedding(
            config.vocab_size + 1, settings.hidden_size, settings.embedding_init_std
        )
        self.sigma_map = SigmaEmbedding(condition_size) if condition_size else None
        self.blocks = nn.ModuleList(
            Block(config, layer, condition_size) for layer in range(settings.num_layers)
        )
        self.output_layer = Head(config, condition_size)
        self.num_candidates = settings.noise.top_k
        self.noise_readings = make_readings(
            config.vocab_size, settings.hidden_size, settings.noise.layers
        )
        self.num_matrix_weights = (4 + 2 * settings.mlp_ratio) * settings.hidden_size**2
        self.num_matrix_weights *= settings.num_layers
        self.attended_width = settings.hidden_size

    def embed_sigma(self, sigma: Float[Tensor, "b"]) -> Float[Tensor, "b c"] | None:
        """The adaLN vector of each noise level; None for a plain transformer."""
        return None if self.sigma_map is None else self.sigma_map(sigma)

    def forward(
        self,
        x: Float[Tensor, "b l e"],
        sigma_embedding: Float[Tensor, "rows c"] | None,
        positions: Int[Tensor, "l"],
        attend: Attend,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b l d"]:
        """Embeddings -> hidden states before the final norm.

        Behind the D numbers of an embedding may lie the noise that later layers read, packed
        (``Student.inject``). ``sigma_embedding`` has one row per batch row, or a single row
        for all of them.
        """
        x, noise = NoiseToRead.split(x, self.vocab_embed.embedding.shape[1], self.num_candidates)
        rotary = Rotary.of(positions, self.head_width)
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x, sigma_embedding, rotary, attend, cache)
            if noise is not None and str(depth) in self.noise_readings:
                x = self.noise_readings[str(depth)](x, noise, self.output_layer.linear.weight)
        return x

    def start_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Empty key/value memory for ``capacity`` tokens per row."""
        weight = self.vocab_embed.embedding
        num_heads = self.blocks[0].num_heads
        shape = (len(self.blocks), batch_size, num_heads, capacity, self.head_width)
        zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)  # type: ignore[arg-type]
        return KeyValueCache(zeros, zeros.clone())
