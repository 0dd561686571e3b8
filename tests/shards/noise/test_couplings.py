"""Couplings: marginals, chances of one token by hand, by simulation and within their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shards.noise.couplings import (
    TokenTree,
    along_widest,
    balanced_tree,
    gumbel_same_token,
    huffman_tree,
    intervals,
    inverse_cdf,
    total_variation,
    uniform_same_token,
)

VOCAB, DRAWS = 7, 200_000
BY_ID = torch.arange(VOCAB)


def pair(seed: int = 0, spread: float = 0.7) -> tuple[Tensor, Tensor]:
    """Two related distributions, [1, V] each."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, VOCAB, generator=random, dtype=torch.float64)
    other = logits + spread * torch.randn(1, VOCAB, generator=random, dtype=torch.float64)
    return logits.softmax(1), other.softmax(1)


def own_order(p: Tensor) -> Tensor:
    return p.argsort(dim=1, descending=True)


EMBEDDING = torch.randn(VOCAB, 3, generator=torch.Generator().manual_seed(9))
WEIGHTS = pair(5)[0][0]
TREES: dict[str, TokenTree] = {
    "huffman": huffman_tree(WEIGHTS),
    "balanced": balanced_tree(WEIGHTS),
    "embedding": balanced_tree(WEIGHTS, along_widest(EMBEDDING)),
}
Draw = Callable[[Tensor, Tensor], Tensor]


def draws(name: str) -> tuple[int, Draw]:
    """(uniforms per draw, distributions and uniforms -> tokens)."""
    if name == "gumbel":
        return VOCAB, lambda p, u: (p / -u.log()).argmax(1)
    if name in TREES:
        return VOCAB - 1, TREES[name].draw
    if name == "by id":
        return 1, lambda p, u: inverse_cdf(p, BY_ID, u[:, 0])
    return 1, lambda p, u: inverse_cdf(p, own_order(p), u[:, 0])


def chance(name: str, p: Tensor, q: Tensor) -> Tensor:
    if name == "gumbel":
        return gumbel_same_token(p, q)
    if name in TREES:
        return TREES[name].same_token(p, q)
    if name == "by id":
        return uniform_same_token(p, q, BY_ID, BY_ID)
    return uniform_same_token(p, q, own_order(p), own_order(q))


NAMES = ["gumbel", "by id", "own order", *TREES]


@pytest.mark.parametrize("name", NAMES)
def test_marginals_are_the_distributions_and_the_chance_is_the_simulated_one(name: str) -> None:
    """Tolerance: 5 standard errors of a share of DRAWS draws, at most 0.0056."""
    p, q = pair()
    num_uniforms, draw = draws(name)
    u = torch.rand(DRAWS, num_uniforms, generator=torch.Generator().manual_seed(3)).double()
    first, second = draw(p.expand(DRAWS, -1), u), draw(q.expand(DRAWS, -1), u)
    bound = 5 * 0.5 / math.sqrt(DRAWS)
    for tokens, wanted in ((first, p[0]), (second, q[0])):
        assert float((tokens.bincount(minlength=VOCAB) / DRAWS - wanted).abs().max()) < bound
    simulated = float((first == second).double().mean())
    assert abs(simulated - float(chance(name, p, q))) < bound


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_no_coupling_beats_total_variation_and_equal_contexts_agree(name: str, seed: int) -> None:
    p, q = pair(seed, spread=2.0)
    variation = float(total_variation(p, q))
    assert float(chance(name, p, q)) <= 1 - variation + 1e-9
    assert float(chance(name, p, p)) == pytest.approx(1, abs=1e-9)
    assert float(chance(name, q, p)) == pytest.approx(float(chance(name, p, q)), abs=1e-9)
    if name == "gumbel":
        assert float(chance(name, p, q)) >= (1 - variation) / (1 + variation) - 1e-9


def test_gumbel_by_its_definition_also_with_impossible_tokens() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.5, 0.0, 0.3, 0.0]], dtype=torch.float64)
    expected = sum(
        1 / sum(max(float(p[0, j] / p[0, k]), float(q[0, j] / q[0, k])) for j in range(5))
        for k in range(2)
    )
    assert float(gumbel_same_token(p, q)) == pytest.approx(expected, rel=1e-12)
    apart = torch.eye(2, dtype=torch.float64)
    assert float(gumbel_same_token(apart[:1], apart[1:])) == 0


def test_intervals_that_shift_past_each_other_share_nothing() -> None:
    """One extra token in front moves every other by its probability: TV 0.25, chance 0."""
    p = torch.tensor([[0.0, 0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]], dtype=torch.float64)
    order = torch.arange(5)
    assert float(total_variation(p, q)) == 0.25
    assert float(uniform_same_token(p, q, order, order)) == 0
    low, high = intervals(p, torch.tensor([4, 3, 2, 1, 0]))
    assert low.tolist() == [[1, 0.75, 0.5, 0.25, 0]] and high.tolist() == [[1, 1, 0.75, 0.5, 0.25]]


def test_a_tree_by_hand() -> None:
    """Weights 1/2, 1/4, 1/4: the first token is a branch of the root in both kinds of tree.

    p goes (1/2, 1/4, 1/4), q (1/4, 3/8, 3/8): they part at the root only, and agree with
    1/4 there, with 1/2 on the other side, where both halves are equal.
    """
    weights = torch.tensor([0.5, 0.25, 0.25])
    p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.375, 0.375]], dtype=torch.float64)
    for tree in (huffman_tree(weights), balanced_tree(weights)):
        assert tree.lengths.tolist() == [1, 2, 2]
        assert float(tree.same_token(p, q)) == pytest.approx(0.25 + 0.5)


def test_trees_have_every_token_once_and_huffman_is_shortest() -> None:
    weights = torch.rand(40, generator=torch.Generator().manual_seed(1)) ** 4
    weights /= weights.sum()
    entropy = float(-(weights * weights.log2()).sum())
    means = {}
    for name, tree in (("huffman", huffman_tree(weights)), ("balanced", balanced_tree(weights))):
        assert sum(2.0 ** -int(length) for length in tree.lengths) == 1  # Kraft's equality
        ways = {tuple(path) for path in (2 * tree.nodes + tree.sides).tolist()}
        assert len(ways) == 40
        means[name] = float((weights * tree.lengths).sum())
        assert entropy <= means[name] < entropy + 1.5
    assert entropy <= means["huffman"] < entropy + 1
    assert means["huffman"] <= means["balanced"] + 1e-6


def test_embedding_trees_keep_neighbours_together() -> None:
    """Two clusters, ids mixed: the root parts them."""
    embedding = torch.tensor([[0.0], [10.0], [0.1], [10.1], [0.2], [10.2]])
    tree = balanced_tree(torch.full((6,), 1 / 6), along_widest(embedding))
    first = tree.sides[:, 0].tolist()
    assert first[0] == first[2] == first[4] != first[1] == first[3] == first[5]
