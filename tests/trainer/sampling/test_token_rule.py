"""How tokens are chosen: as in one piece, in the memory of a few positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.sampling_cases import draw, tiny_student
from trainer.sampling import noise as draws
from trainer.sampling.adaptive import AdaptiveSampler
from trainer.sampling.fill import AncestralSampler
from trainer.sampling.noise import SampleKeys, TokenRule


class LargestFloat64(TorchDispatchMode):
    """Notes the elements of the largest float64 tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

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
    for sampler in (
        AncestralSampler(nfe=1, nucleus_p=0.9),
        AdaptiveSampler(verifier=str(tmp_path)),
    ):
        whole = draw(student, sampler, ids)
        with monkeypatch.context() as patch, LargestFloat64() as watch:
            patch.setattr(draws, "MOST_ELEMENTS", {"cpu": 1200})  # of 440 positions x 11 tokens
            assert torch.equal(draw(student, sampler, ids).tokens, whole.tokens)
        assert 0 < watch.num_elements <= 1320


def test_no_position_no_token() -> None:
    log_probs, keys = log_probs_and_keys(0, 4, 2000)
    for rule in (TokenRule(), TokenRule(nucleus_p=0.9), TokenRule("argmax")):
        assert rule.choose(log_probs, keys).shape == (0,)


def test_temperature_divides_before_the_nucleus_is_taken() -> None:
    """At temperature 1/2 probabilities are squared, so fewer tokens make up the nucleus."""
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    squared = TokenRule(temperature=0.5).probabilities(probs[:, :3].log())
    assert torch.allclose(squared, torch.tensor([[4, 1, 1]], dtype=torch.float64) / 6)
    cold = TokenRule(temperature=0.5, nucleus_p=0.7).probabilities(probs[:, :3].log())
    assert torch.allclose(cold, torch.tensor([[1.0, 0, 0]], dtype=torch.float64))
    assert (TokenRule(nucleus_p=0.8).probabilities(probs[:, :3].log()) > 0).sum() == 2


def test_top_k_comes_before_the_nucleus() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 the first two are 4/7 and 3/7: the nucleus of 0.8 keeps one."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    both = TokenRule(top_k=2, nucleus_p=0.8).probabilities(logits)
    assert torch.allclose(both, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    alone = TokenRule(top_k=2).probabilities(logits)
    assert torch.allclose(alone, torch.tensor([[4, 3, 0, 0]], dtype=torch.float64) / 7)
    assert torch.allclose(TokenRule(top_k=9).probabilities(logits), logits.exp())
