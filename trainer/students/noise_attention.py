"""Noise cross-attention: inside the network, attention over the vocabulary with the noise as bias.

    h <- h + softmax(beta ((gamma * LN(h)) E^T + tau xi + w log q)) W     at masked positions

E is the output head. With h = 0 this is what the conditioner shows the first layer; with h it is
one soft step of x = argmax(l + xi), l being what the layers below have understood so far. The
learnt beta says how soft: a near tie read with beta = 1 is one half of each and decides nothing.

Over all V a reading costs two products with [V, D] matrices per masked position and holds [n, V]
scores: meant for small vocabularies. Over K candidates, the ids of largest tau xi + w log q, it
gathers 2 K rows of D numbers and holds [n, K]; what is gathered is never written down. The noise
is drawn once more to find them, for a few positions at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag, layer_norm

from shards.noise.embedding import Noise, even_width, tile_shape
from trainer.students.conditioning import LayerNoise

LEAST_SCORE = -1e4
"""Of an entry that was truncated away: its share is 0, and so is its gradient, which -inf makes
NaN."""
FEWEST_POSITIONS = 64
"""Searched at a time: what noise reads for all of them (a teacher's head) is read for that many."""


def noise_scores(noise: Noise, tau: float, log_prior: Float[Tensor, "v"] | float) -> Float[Tensor, "n v"]:
    """tau xi + log prior, held whole; xi = -log F, -inf where it was truncated away."""
    arrivals = noise.tile(0, noise.vocab_size).clamp_min(torch.finfo(torch.float32).tiny)
    return log_prior - tau * arrivals.log()


def layer_scores(
    noise: Noise, tau: float, log_prior: Float[Tensor, "v"] | float, top_k: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"] | None]:
    """What later layers read: scores, the largest of a position 0, and the ids of ``top_k`` > 0, in no order.

    These are looked for over the whole vocabulary of a few positions at a time: about a tile of the conditioner's.
    """
    if top_k:
        positions, size = tile_shape(noise.device)
        width = even_width(noise.num_positions, max(FEWEST_POSITIONS, positions * size // noise.vocab_size))
        found = [noise_scores(part, tau, log_prior).topk(top_k, dim=-1, sorted=False) for part in noise.split(width)]
        ids, scores = torch.cat([each.indices.int() for each in found]), torch.cat([each.values for each in found])
    else:
        ids, scores = None, noise_scores(noise, tau, log_prior)
    return (scores - scores.amax(dim=-1, keepdim=True)).clamp_min(LEAST_SCORE), ids


def mix_rows(
    shares: Float[Tensor, "n k"], table: Float[Tensor, "v d"], ids: Int[Tensor, "n k"] | None
) -> Float[Tensor, "n d"]:
    """sum_k share_k table[id_k]; without ids the table's rows are the k."""
    if ids is None:
        return shares @ table
    return embedding_bag(ids, table, per_sample_weights=shares, mode="sum")


def row_products(
    query: Float[Tensor, "n d"], table: Float[Tensor, "v d"], ids: Int[Tensor, "n k"] | None
) -> Float[Tensor, "n k"]:
    """query . table[id_k]; without ids of all rows."""
    return query @ table.T if ids is None else RowProducts.apply(query, table, ids)


class RowProducts(torch.autograd.Function):
    """The products of each query with the k rows that its ids name, without a [n, k, D].

    They are the derivative of :func:`mix_rows` in its shares, along the query. So the derivative
    in the query is ``mix_rows`` of what comes back, and that in the table is the one that
    ``mix_rows`` of it has there, along the query.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Float[Tensor, "n d"], table: Float[Tensor, "v d"], ids: Int[Tensor, "n k"]
    ) -> Float[Tensor, "n k"]:
        ctx.save_for_backward(query, table, ids)
        # In inference mode nothing has derivatives; what is made outside it, a clone too, has.
        with torch.inference_mode(False), torch.enable_grad():
            shares = torch.zeros(ids.shape, dtype=query.dtype, device=ids.device)
            mixed = mix_rows(shares.requires_grad_(), table.detach(), ids.clone())
            (products,) = torch.autograd.grad(mixed, shares, query)
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "n k"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "v d"], None]:
        query, table, ids = ctx.saved_tensors
        with torch.enable_grad():
            table = table.detach().requires_grad_()
            mixed = mix_rows(grad, table, ids)
            (grad_table,) = torch.autograd.grad(mixed, table, query)
        return mixed.detach(), grad_table, None


class VocabularyAttention(nn.Module):
    """One reading.

    Args:
        vocab_size: V.
        hidden_size: D.
    """

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(hidden_size))
        self.log_beta = nn.Parameter(torch.empty(1))  # FSDP shards no scalars
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def reset_parameters(self) -> None:
        """gamma 1, beta 2; W uniform(+-1/sqrt V), as the conditioner's."""
        nn.init.ones_(self.gamma)
        nn.init.constant_(self.log_beta, math.log(2.0))
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Float[Tensor, "b l d"], noise: LayerNoise, head: Float[Tensor, "v1 d"]
    ) -> Float[Tensor, "b l d"]:
        """Hidden states, with what was read added at the masked positions.

        Args:
            x: Hidden states.
            noise: Of the masked positions.
            head: E, and the mask's row.
        """
        ids, table = noise.ids, head if noise.ids is not None else head[:-1]
        with torch.autocast(x.device.type, enabled=False):  # near ties of l + xi are lost in bf16
            query = self.gamma * layer_norm(noise.places.read(x).float(), self.gamma.shape)
            scores = row_products(query, table.float(), ids) + noise.scores
            shares = torch.softmax(self.log_beta.exp() * scores, dim=-1)
            read = mix_rows(shares, self.weight.float(), ids)
        return x.index_put(noise.places.index, read.to(x.dtype), accumulate=True)
