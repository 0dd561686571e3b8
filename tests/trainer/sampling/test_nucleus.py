"""Nucleus truncation: the authors' rule, transformers' rule, goldens, large vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TopPLogitsWarper

from trainer.sampling.nucleus import FIRST_CANDIDATES, truncate_to_nucleus


def random_probs(num_rows: int, size: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return (scale * torch.randn(num_rows, size, generator=generator)).double().softmax(-1)


def test_by_hand() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]], dtype=torch.float64)
    strict = truncate_to_nucleus(probs, 0.8)
    assert torch.allclose(strict, torch.tensor([[0, 2 / 3, 1 / 3, 0]], dtype=torch.float64))
    crossing = truncate_to_nucleus(probs, 0.8, "crossing")
    assert int((crossing > 0).sum()) == 3
    # Three tokens add up to p exactly: the strict rule keeps a sum of p, crossing needs no more.
    for rule in ("strict", "crossing"):
        assert (truncate_to_nucleus(probs, 0.875, rule) > 0).tolist() == [[True, True, True, False]]
        assert (truncate_to_nucleus(probs, 0.75, rule) > 0).tolist() == [[False, True, True, False]]
    assert truncate_to_nucleus(probs, 1e-9).tolist() == [[0, 1, 0, 0]]
    assert truncate_to_nucleus(probs, 1.0) is probs


@pytest.mark.parametrize("p", ["0.9", "0.5", "0.05"])
def test_goldens(golden: Path, p: str) -> None:
    ops = load_file(golden / "ops.safetensors")
    ours = truncate_to_nucleus(ops["nucleus.p"].flatten(0, 1), float(p))
    theirs = ops[f"nucleus.out.{p}"].flatten(0, 1)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
def test_crossing_rule_is_that_of_transformers(p: float) -> None:
    probs = random_probs(50, 300)
    theirs = TopPLogitsWarper(p)(torch.zeros(50, 1, dtype=torch.long), probs.log()).softmax(-1)
    assert torch.allclose(truncate_to_nucleus(probs, p, "crossing"), theirs)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
@pytest.mark.parametrize("scale", [0.1, 4.0])  # flat: the nucleus is wider than the first look
def test_large_vocabularies_agree_with_a_full_sort(rule: str, scale: float) -> None:
    probs = random_probs(4, 8 * FIRST_CANDIDATES, scale)
    ordered, ids = probs.sort(descending=True)
    before = ordered.cumsum(-1) - (ordered if rule == "crossing" else 0)
    kept = before < 0.9
    kept[:, 0] = True
    expected = torch.zeros_like(probs).scatter_(1, ids, ordered * kept)
    expected /= expected.sum(-1, keepdim=True)
    assert torch.allclose(truncate_to_nucleus(probs, 0.9, rule), expected)


def tied_probs(num_rows: int, size: int, scale: float) -> torch.Tensor:
    """What bf16 autocast hands over: many tokens of equal probability."""
    generator = torch.Generator().manual_seed(size)
    logits = scale * torch.randn(num_rows, size, generator=generator)
    return logits.bfloat16().double().softmax(-1)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
def test_a_nucleus_depends_on_no_other_row(rule: str) -> None:
    """A flat row needs a full sort; beside it the others keep their sets, ties and all."""
    probs = tied_probs(20, 16 * FIRST_CANDIDATES, 3.0)
    flat = torch.full_like(probs[:1], 1 / probs.shape[1])
    together = truncate_to_nucleus(torch.cat((probs, flat)), 0.8, rule)[:-1]
    alone = torch.cat([truncate_to_nucleus(row, 0.8, rule) for row in probs.split(1)])
    assert torch.equal(together > 0, alone > 0)
    assert torch.allclose(together, alone, rtol=1e-12)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
@pytest.mark.parametrize("num_above", [0, FIRST_CANDIDATES // 2, 2 * FIRST_CANDIDATES])
def test_ties_are_broken_by_id(rule: str, num_above: int) -> None:
    """Equal tokens across the edge of the first look: the smallest ids are kept."""
    size, p = 8 * FIRST_CANDIDATES, 0.6
    probs = torch.ones(1, size, dtype=torch.float64)
    probs[0, size - num_above :] = 3.0
    probs /= probs.sum()
    found = (truncate_to_nucleus(probs, p, rule) > 0)[0].nonzero()[:, 0]
    left = p - float(probs[0, size - num_above :].sum())
    num_ties = int(left / float(probs[0, 0])) + (rule == "crossing")
    expected = [*range(num_ties), *range(size - num_above, size)]
    assert found.tolist() == expected
