"""How tokens are chosen: the nucleus by both rules, top-k, in the memory of a few positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TopPLogitsWarper

from shards.noise.nucleus import FIRST_CANDIDATES, truncate_to_nucleus
from tests.trainer.sampling_cases import draw, tiny_student
from trainer.sampling import noise as draws
from trainer.sampling.adaptive import AdaptiveSampler
from trainer.sampling.fill import AncestralSampler
from trainer.sampling.noise import SampleKeys, TokenRule

WIDE = 8 * FIRST_CANDIDATES


class LargestFloat64(TorchDispatchMode):
    """Notes the elements of the largest float64 tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                self.num_elements = max(self.num_elements, value.numel())
        return result


def log_probs_and_keys(num_rows: int, length: int, size: int) -> tuple[torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows * length, size + 1, generator=generator)
    where = torch.ones(num_rows, length, dtype=torch.bool)
    return logits.log_softmax(-1), SampleKeys(1, torch.arange(num_rows)).at("test", where)


@pytest.mark.parametrize("nucleus_p", [1.0, 0.9])
@pytest.mark.parametrize("size", [50, 2000])
def test_float64_is_held_for_a_few_positions(
    size: int, nucleus_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_probs, keys = log_probs_and_keys(8, 16, size)
    rule = TokenRule(nucleus_p=nucleus_p)
    whole = rule.choose(log_probs, keys)
    for limit in (3 * size, 40 * size):
        monkeypatch.setattr(draws, "MOST_ELEMENTS", {"cpu": limit})
        with LargestFloat64() as watch:
            assert torch.equal(rule.choose(log_probs, keys), whole)
        assert 0 < watch.num_elements <= limit + limit // size  # the mask has an entry, too


def test_samplers_hold_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_student("ar", "none").save_pretrained(tmp_path)
    student, ids = tiny_student(conditioning="none"), torch.arange(40)
    nucleus, apd = AncestralSampler(nfe=1, nucleus_p=0.9), AdaptiveSampler(verifier=str(tmp_path))
    for sampler in (nucleus, apd):
        whole = draw(student, sampler, ids)
        with monkeypatch.context() as patch, LargestFloat64() as watch:
            patch.setattr(draws, "MOST_ELEMENTS", {"cpu": 1200})  # of 440 positions x 11 tokens
            assert torch.equal(draw(student, sampler, ids).tokens, whole.tokens)
        assert 0 < watch.num_elements <= 1320


def test_no_position_no_token() -> None:
    log_probs, keys = log_probs_and_keys(0, 4, 2000)
    for rule in (TokenRule(), TokenRule(nucleus_p=0.9), TokenRule("argmax")):
        assert rule.choose(log_probs, keys).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "probs", "expected"),
    [
        ({"temperature": 0.5}, [2, 1, 1], [4, 1, 1]),
        # at temperature 1/2 probabilities are squared, so fewer tokens make up the nucleus
        ({"temperature": 0.5, "nucleus_p": 0.7}, [2, 1, 1], [1, 0, 0]),
        ({"nucleus_p": 0.8}, [2, 1, 1], [2, 1, 0]),
        ({"top_k": 2}, [4, 3, 2, 1], [4, 3, 0, 0]),
        # of 4 and 3 in 7 the nucleus of 0.8 keeps one: top-k comes first
        ({"top_k": 2, "nucleus_p": 0.8}, [4, 3, 2, 1], [1, 0, 0, 0]),
        ({"top_k": 9}, [4, 3, 2, 1], [4, 3, 2, 1]),
    ],
)
def test_settings_by_hand(settings: Any, probs: list[float], expected: list[float]) -> None:
    found = TokenRule(**settings).probabilities(torch.tensor([probs], dtype=torch.float64).log())
    wanted = torch.tensor([expected], dtype=torch.float64)
    assert torch.allclose(found, wanted / wanted.sum())


def test_nuclei_by_hand() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]], dtype=torch.float64)
    strict = truncate_to_nucleus(probs, 0.8)
    assert torch.allclose(strict, torch.tensor([[0, 2 / 3, 1 / 3, 0]], dtype=torch.float64))
    assert int((truncate_to_nucleus(probs, 0.8, "crossing") > 0).sum()) == 3
    # Three tokens add up to p exactly: the strict rule keeps a sum of p, crossing needs no more.
    for rule in ("strict", "crossing"):
        assert (truncate_to_nucleus(probs, 0.875, rule) > 0).tolist() == [[True, True, True, False]]
        assert (truncate_to_nucleus(probs, 0.75, rule) > 0).tolist() == [[False, True, True, False]]
    assert truncate_to_nucleus(probs, 1e-9).tolist() == [[0, 1, 0, 0]]
    assert truncate_to_nucleus(probs, 1.0) is probs


@pytest.mark.parametrize("p", ["0.9", "0.5", "0.05"])
def test_nuclei_of_the_authors(golden: Path, p: str) -> None:
    ops = load_file(golden / "ops.safetensors")
    ours = truncate_to_nucleus(ops["nucleus.p"].flatten(0, 1), float(p))
    theirs = ops[f"nucleus.out.{p}"].flatten(0, 1)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


def random_probs(num_rows: int, size: int, scale: float, dtype: Any = None) -> torch.Tensor:
    logits = scale * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    return logits.to(dtype).double().softmax(-1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
def test_crossing_rule_is_that_of_transformers(p: float) -> None:
    probs = random_probs(50, 300, 2.0)
    theirs = TopPLogitsWarper(p)(torch.zeros(50, 1, dtype=torch.long), probs.log()).softmax(-1)
    assert torch.allclose(truncate_to_nucleus(probs, p, "crossing"), theirs)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
@pytest.mark.parametrize("scale", [0.1, 4.0])  # flat: the nucleus is wider than the first look
def test_large_vocabularies_agree_with_a_full_sort(rule: Any, scale: float) -> None:
    probs = random_probs(4, WIDE, scale)
    ordered, ids = probs.sort(descending=True)
    before = ordered.cumsum(-1) - (ordered if rule == "crossing" else 0)
    kept = before < 0.9
    kept[:, 0] = True
    expected = torch.zeros_like(probs).scatter_(1, ids, ordered * kept)
    expected /= expected.sum(-1, keepdim=True)
    assert torch.allclose(truncate_to_nucleus(probs, 0.9, rule), expected)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
def test_a_nucleus_depends_on_no_other_row(rule: Any) -> None:
    """A flat row needs a full sort; beside it the others keep their sets, ties and all."""
    probs = random_probs(20, 2 * WIDE, 3.0, torch.bfloat16)  # many tokens of equal probability
    flat = torch.full_like(probs[:1], 1 / probs.shape[1])
    together = truncate_to_nucleus(torch.cat((probs, flat)), 0.8, rule)[:-1]
    alone = torch.cat([truncate_to_nucleus(row, 0.8, rule) for row in probs.split(1)])
    assert torch.equal(together > 0, alone > 0)
    assert torch.allclose(together, alone, rtol=1e-12)


@pytest.mark.parametrize("rule", ["strict", "crossing"])
@pytest.mark.parametrize("num_above", [0, FIRST_CANDIDATES // 2, 2 * FIRST_CANDIDATES])
def test_ties_are_broken_by_id(rule: Any, num_above: int) -> None:
    """Equal tokens across the edge of the first look: the smallest ids are kept."""
    probs, p = torch.ones(1, WIDE, dtype=torch.float64), 0.6
    probs[0, WIDE - num_above :] = 3.0
    probs /= probs.sum()
    found = (truncate_to_nucleus(probs, p, rule) > 0)[0].nonzero()[:, 0]
    left = p - float(probs[0, WIDE - num_above :].sum())
    num_ties = int(left / float(probs[0, 0])) + (rule == "crossing")
    assert found.tolist() == [*range(num_ties), *range(WIDE - num_above, WIDE)]
