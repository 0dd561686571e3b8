"""Categorical draws in one kernel: the eager form's tokens, or the eager form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_counts
from shards.noise import keyed_race
from shards.noise import philox as keyed_exponentials
from shards.noise.keyed_race import race, uniforms
from shards.noise.philox import PositionKeys
from trainer.sampling.token_rule import TokenRule

CPU = torch.device("cpu")


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws by the kernel on the CPU, nothing tried yet; compiled as told."""
    monkeypatch.setattr(keyed_race.KERNELS, "forms", {})
    monkeypatch.setattr(keyed_race, "RACED_ON", ("cpu",))
    monkeypatch.setattr(keyed_exponentials, "_compiled", {"cpu": keyed_exponentials._by_lane})
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)


def logits_and_keys(num: int, vocab_size: int) -> tuple[Tensor, PositionKeys]:
    generator = torch.Generator().manual_seed(num)
    logits = 2 * torch.randn(num, vocab_size + 1, generator=generator)
    index = torch.arange(num)
    return logits.log_softmax(-1), PositionKeys(2**40 + 77, index % 5, index, draw=3)


def eager_tokens(rule: TokenRule, logits: Tensor, keys: PositionKeys) -> Tensor:
    probs = rule.probabilities(logits)
    return race(probs, uniforms(keys, 0, probs.shape[-1]))


@pytest.mark.parametrize(
    "rule", [TokenRule(), TokenRule(temperature=0.7), TokenRule(nucleus_p=0.9)]
)
@pytest.mark.parametrize("vocab_size", [2, 5, 300, 1023, 1024])
def test_tokens_are_those_of_the_eager_form(raced: None, rule: TokenRule, vocab_size: int) -> None:
    """Any size of vocabulary: the last counter's words beyond it never win."""
    logits, keys = logits_and_keys(400, vocab_size)
    found = rule.choose(logits, keys)
    assert keyed_race.draws_kernel("cpu") == "compiled"
    assert torch.equal(found, eager_tokens(rule, logits, keys))
    assert len(found.unique()) > min(vocab_size, 20) / 2


def test_ties_go_to_the_smaller_id(raced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As argmax does: all waits alike, then the first of the largest scores."""
    monkeypatch.setitem(keyed_race.KERNELS.forms, ("cpu", True), lambda *_: equal_winners())
    logits, keys = logits_and_keys(2, 9)
    tokens = keyed_race.race_of_logits(logits[:, :-1], 1.0, keys)
    assert tokens is not None and tokens.tolist() == [3, 4]


def equal_winners() -> tuple[Tensor, Tensor]:
    best = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 0.0, 7.0, 7.0]])
    return best, torch.tensor([[0, 5, 3, 1], [8, 1, 6, 4]])


def test_one_position_and_other_devices_stay_eager(
    raced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, keys = logits_and_keys(1, 50)
    assert torch.equal(TokenRule().choose(logits, keys), eager_tokens(TokenRule(), logits, keys))
    assert not keyed_race.KERNELS.forms
    monkeypatch.setattr(keyed_race, "RACED_ON", ("cuda",))
    logits, keys = logits_and_keys(9, 50)
    assert keyed_race.race_of_logits(logits, 1.0, keys) is None


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_kernel_that_draws_other_tokens_is_not_used_and_said_once(
    raced: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_wrong: bool,
) -> None:
    def compiled(work: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def run(*given: Any) -> tuple[Tensor, Tensor]:
            if not is_wrong:
                raise RuntimeError("no Triton here")
            best, ids = work(*given)
            best[7] = best[7].flip(0)  # of one position, another lane wins
            return best, ids

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    logits, keys = logits_and_keys(60, 200)
    for rule in (TokenRule(), TokenRule(nucleus_p=0.9), TokenRule()):
        assert torch.equal(rule.choose(logits, keys), eager_tokens(rule, logits, keys))
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("categorical draws: eager on cpu;") == 1
    assert ("1 other tokens" if is_wrong else "no Triton here") in text
    assert keyed_race.draws_kernel("cpu") == "eager"


def test_the_compiler_keeps_tokens_and_makes_one_graph(
    compiled_noise: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or its code is refused, as PyTorch 2.13's under AVX2 is: said once, and the tokens stay."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(keyed_race.KERNELS, "forms", {})
    monkeypatch.setattr(keyed_race, "RACED_ON", ("cpu",))
    before = counters["stats"]["unique_graphs"]
    rule = TokenRule(temperature=0.8)
    for num, vocab_size in ((2, 1003), (40, 50), (300, 4096)):
        logits, keys = logits_and_keys(num, vocab_size)
        assert torch.equal(rule.choose(logits, keys), eager_tokens(rule, logits, keys))
    is_refused = keyed_race.draws_kernel("cpu") == "eager"
    # Where the kernel of logits is refused, that of probabilities is tried as well.
    assert counters["stats"]["unique_graphs"] - before == (2 if is_refused else 1)
    assert not is_refused or torch.backends.cpu.get_cpu_capability() != "AVX512"
    said = capsys.readouterr().err
    assert said.count("categorical draws: eager on cpu;") == int(is_refused)


def test_few_bytes() -> None:
    """Scores are read once: 4 bytes a token without truncation; hundreds before."""
    fused = gpu_counts.draws(12, 1.0, "as on a GPU")
    eager = gpu_counts.draws(12, 1.0, "noise kernel compiled")
    assert fused["bytes_per_position_and_token"] <= 7 and fused["kernels"] <= 8
    assert eager["bytes_per_position_and_token"] > 300
