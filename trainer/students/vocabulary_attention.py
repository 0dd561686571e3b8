"""Attention over the vocabulary with the noise as bias: the noise read again inside the network.

    h <- h + softmax(beta ((gamma * LN(h)) E^T + tau xi + w log q)) W     at masked positions

E is the output head. With h = 0 this is what the conditioner shows the first layer; with h it is
one soft step of x = argmax(l + xi), l being what the layers below have understood so far. The
learnt beta says how soft: a near tie read with beta = 1 is one half of each and decides nothing. A
reading costs two products with [V, D] matrices per masked position and holds [n, V] scores: meant
for small vocabularies.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from shards.noise import Noise


def noise_shares(
    noise: Noise, tau: float, log_prior: Float[Tensor, "v"] | float
) -> Float[Tensor, "n v"]:
    """softmax(tau xi + log prior), held whole; xi = -log F, nothing where it was truncated away."""
    arrivals = noise.tile(0, noise.vocab_size).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.softmax(log_prior - tau * arrivals.log(), dim=-1)


class VocabularyAttention(nn.Module):
    """One reading.

    Args:
        vocab_size: V.
        hidden_size: D.
    """

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(hidden_size))
        self.log_beta = nn.Parameter(torch.empty(()))
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def reset_parameters(self) -> None:
        """gamma 1, beta 2; W uniform(+-1/sqrt V), as the conditioner's."""
        nn.init.ones_(self.gamma)
        nn.init.constant_(self.log_beta, math.log(2.0))
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        shares: Float[Tensor, "b l v"],
        head: Float[Tensor, "v d"],
    ) -> Float[Tensor, "b l d"]:
        """Hidden states, with what was read added at the masked positions.

        Args:
            x: Hidden states.
            shares: softmax(tau xi + w log q) at masked positions, 0 elsewhere.
            head: E.
        """
        masked = shares.any(dim=-1).nonzero(as_tuple=True)
        with torch.autocast(x.device.type, enabled=False):  # near ties of l + xi are lost in bf16
            query = self.gamma * layer_norm(x[masked].float(), self.gamma.shape)
            scores = query @ head.float().T + shares[masked].log()
            read = torch.softmax(self.log_beta.exp() * scores, dim=-1) @ self.weight.float()
        return x.index_put(masked, read.to(x.dtype), accumulate=True)
