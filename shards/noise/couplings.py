"""How often two contexts pick the same token when they share their noise, in closed form.

A coupling says how noise and a distribution make a token. Decoding with noise, a student's context
may be wrong, so its distribution is q where the teacher's is p: the chance that both pick the same
token is what the noise still says. No coupling exceeds 1 - TV(p, q); the Gumbel one never falls
below (1 - TV) / (1 + TV), the inverse distribution function may fall to 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def total_variation(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Half the L1 distance of n pairs, in [0, 1]."""
    return (p - q).abs().sum(dim=1) / 2


def gumbel_same_token(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """P(argmax(log p + xi) = argmax(log q + xi)) = sum_k 1 / sum_j max(p_j / p_k, q_j / q_k).

    The max is p_j / p_k where p_j / q_j >= p_k / q_k, so one sort by that ratio and two running
    sums replace the V^2 terms.
    """
    both = (p > 0) & (q > 0)
    ratio = torch.where(q > 0, p / q, torch.where(p > 0, torch.inf, 0.0))
    order = ratio.argsort(dim=1, descending=True)
    p, q, both = p.gather(1, order), q.gather(1, order), both.gather(1, order)
    larger = p.cumsum(1)
    smaller = q.flip(1).cumsum(1).flip(1) - q
    total = larger / p.where(both, 1.0) + smaller / q.where(both, 1.0)
    return torch.where(both, 1 / total, 0.0).sum(1)


def intervals(
    p: Float[Tensor, "n v"], order: Int[Tensor, "n v"] | Int[Tensor, "v"]
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """[F(x-) , F(x)) of every token x, by id, with the tokens laid side by side in some order.

    Args:
        p: Distributions.
        order: Ids in their order; one for all, or one for each.
    """
    order = order.expand(p.shape)
    high = p.gather(1, order).cumsum(1)
    high = torch.zeros_like(p).scatter(1, order, high)
    return high - p, high


def inverse_cdf(
    p: Float[Tensor, "n v"], order: Int[Tensor, "n v"] | Int[Tensor, "v"], u: Float[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """x = F^-1(u): the token in whose interval u lies (Parallel Token Prediction's coupling)."""
    order = order.expand(p.shape)
    cumulative = p.gather(1, order).cumsum(1)
    last = p.shape[1] - 1
    place = torch.searchsorted(cumulative, u[:, None], right=True).clamp(max=last)
    return order.gather(1, place)[:, 0]


def uniform_same_token(
    p: Float[Tensor, "n v"],
    q: Float[Tensor, "n v"],
    order_p: Int[Tensor, "n v"] | Int[Tensor, "v"],
    order_q: Int[Tensor, "n v"] | Int[Tensor, "v"],
) -> Float[Tensor, "n"]:
    """P(F_p^-1(u) = F_q^-1(u)): what the two intervals of every token have in common, summed."""
    low_p, high_p = intervals(p, order_p)
    low_q, high_q = intervals(q, order_q)
    common = torch.minimum(high_p, high_q) - torch.maximum(low_p, low_q)
    return common.clamp(min=0).sum(1)


# A token as a path: binary trees over the vocabulary, with one uniform number at every node.
#
# At a node one goes to the side 0 where its uniform is below P(side 0 | node), else to side 1; the
# leaf is the token. Two contexts that share the uniforms stay together at a node with the smaller
# of their two probabilities of a side, so the tree's shape decides how much they share.


POWER_ITERATIONS = 20


@dataclass(frozen=True)
class TokenTree:
    """A binary tree whose leaves are the V tokens; V - 1 nodes, numbered from 0.

    Attributes:
        nodes: [V, depth] nodes on the way to each token, from the root; V - 1 behind the leaf.
        sides: [V, depth] which side is taken there, 0 or 1; 0 behind the leaf.
    """

    nodes: Int[Tensor, "v depth"]
    sides: Int[Tensor, "v depth"]

    @property
    def lengths(self) -> Int[Tensor, "v"]:
        """Nodes on the way to each token."""
        return self.is_node.sum(1)

    @property
    def is_node(self) -> Bool[Tensor, "v depth"]:
        """Where the path has not ended."""
        return self.nodes < len(self.nodes) - 1

    def branch_probs(self, p: Float[Tensor, "n v"]) -> Iterator[Float[Tensor, "n v"]]:
        """Level by level, the probability of the side that leads to each token; 1 behind leaves.

        A node that p never reaches is left on either side with 1/2.
        """
        num_leaves = len(self.nodes)
        mass = p.new_zeros(len(p), 2 * num_leaves)
        branches = 2 * self.nodes + self.sides
        for level in range(self.nodes.shape[1]):
            inside = torch.where(self.is_node[:, level], p, 0.0)
            mass.index_add_(1, branches[:, level], inside)
        total = mass.unflatten(1, (num_leaves, 2)).sum(2).repeat_interleave(2, dim=1)
        share = torch.where(total > 0, mass / total.where(total > 0, 1.0), 0.5)
        for level in range(self.nodes.shape[1]):
            yield torch.where(self.is_node[:, level], share[:, branches[:, level]], 1.0)

    def same_token(self, p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
        """P(both end at one leaf): the product of the smaller side probabilities, summed."""
        together = torch.ones_like(p)
        for of_p, of_q in zip(self.branch_probs(p), self.branch_probs(q), strict=True):
            together *= torch.minimum(of_p, of_q)
        return together.sum(1)

    def draw(self, p: Float[Tensor, "n v"], u: Float[Tensor, "n nodes"]) -> Int[Tensor, "n"]:
        """The tokens that the uniforms of the V - 1 nodes lead to."""
        reached = torch.ones_like(p, dtype=torch.bool)
        u = torch.nn.functional.pad(u, (0, 1))
        for level, share in enumerate(self.branch_probs(p)):
            own, side = u[:, self.nodes[:, level]], self.sides[:, level]
            goes = torch.where(side == 0, own < share, own >= 1 - share)
            reached &= goes | ~self.is_node[:, level]
        return reached.int().argmax(1)


def huffman_tree(weights: Float[Tensor, "v"]) -> TokenTree:
    """The tree of the shortest mean path under the weights (Huffman 1952); ties by number."""
    size = len(weights)
    heap = [(float(weight), index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    children: list[tuple[int, int]] = []
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        children.append((second[1], first[1]))
        heapq.heappush(heap, (first[0] + second[0], size + len(children) - 1))
    paths: dict[int, list[tuple[int, int]]] = {size + len(children) - 1: []}
    for node in reversed(range(len(children))):
        above = paths.pop(size + node)
        for side, child in enumerate(children[node]):
            paths[child] = [*above, (node, side)]
    return _tree([paths[token] for token in range(size)])


Arrange = Callable[[Tensor], Tensor]
"""Ids of a node -> the same in the order in which they are cut in two."""


def balanced_tree(weights: Float[Tensor, "v"], arrange: Arrange | None = None) -> TokenTree:
    """Cut the tokens in two of nearly equal weight, and each part again, down to single ones.

    Args:
        weights: How much each token counts.
        arrange: Puts the ids of a node in order before they are cut; by weight, heaviest first,
            unless told.
    """
    by_weight = weights.argsort(descending=True, stable=True)
    paths: list[list[tuple[int, int]]] = [[] for _ in weights]
    waiting, num_nodes = [by_weight], 0
    while waiting:
        ids = waiting.pop()
        if len(ids) == 1:
            continue
        ids = ids if arrange is None else arrange(ids)
        cumulative = weights[ids].double().cumsum(0)
        cut = 1 + int((cumulative[:-1] - cumulative[-1] / 2).abs().argmin())
        for side, part in enumerate((ids[:cut], ids[cut:])):
            for token in part.tolist():
                paths[token].append((num_nodes, side))
            waiting.append(part)
        num_nodes += 1
    return _tree(paths)


def along_widest(embedding: Float[Tensor, "v d"]) -> Arrange:
    """Order by place along the direction in which the embeddings of a node spread most."""

    def arrange(ids: Tensor) -> Tensor:
        vectors = embedding[ids].double()
        centred = vectors - vectors.mean(0)
        direction = centred[centred.norm(dim=1).argmax()]
        for _ in range(POWER_ITERATIONS):
            direction = centred.T @ (centred @ direction)
            direction = direction / direction.norm().clamp(min=1e-30)
        return ids[(centred @ direction).argsort(stable=True)]

    return arrange


def _tree(paths: list[list[tuple[int, int]]]) -> TokenTree:
    depth, end = max(map(len, paths)), len(paths) - 1
    padded = [path + [(end, 0)] * (depth - len(path)) for path in paths]
    nodes, sides = torch.tensor(padded, dtype=torch.int64).reshape(len(paths), depth, 2).unbind(2)
    return TokenTree(nodes, sides)
