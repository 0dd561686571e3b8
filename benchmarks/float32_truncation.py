"""Why categorical draws are made in float64: float32 uniforms silence tokens of small probability.

A vocabulary of one likely token and a flat tail of tokens with probability 2^-25 each, such as a
confident model has. In the exponential race a tail token wins when its E = -log U falls below
2^-25 E_head. The float32 uniforms of torch have 24 random bits, so E is a multiple of 2^-24 (zero
cannot occur), and the token needs E_head > 2, 4, ...: it is drawn with probability
2^-24 sum_k exp(-2 k) = 9.3e-9 in place of 3.0e-8, three times too rarely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.sampler_statistics import ChiSquare, chi_square
from shards.noise.philox import PositionKeys, keyed_bits
from shards.provenance import derive_seed
from trainer.sampling import noise as draws
from trainer.sampling.fill import AncestralSampler
from trainer.students.registry import MDLM, StudentSettings

SEED = derive_seed("float32 truncation")
TAIL_PROBABILITY = 2.0**-25
NEAR_ONE = 2.0**-16
"""Tail tokens whose uniform is further from 1 than this lose but with probability exp(-512)."""


@dataclass(frozen=True)
class Precision:
    """How uniforms and the race are computed."""

    name: str
    dtype: torch.dtype
    num_bits: int

    def quantize(self, uniform: Tensor) -> Tensor:
        """Uniforms as a generator of this precision makes them."""
        if self.dtype == torch.float64:
            return (torch.floor(uniform * 2.0**32) + 0.5) * 2.0**-32
        return (torch.floor(uniform * 2.0**self.num_bits) * 2.0**-self.num_bits).to(self.dtype)

    def from_bits(self, keys: PositionKeys, start: int, stop: int) -> Tensor:
        """In place of :func:`shards.noise.philox.uniforms`."""
        bits = keyed_bits(keys, start, stop) >> (32 - self.num_bits)
        return bits.to(self.dtype) * 2.0**-self.num_bits


FLOAT64 = Precision("float64", torch.float64, 32)
FLOAT32 = Precision("float32", torch.float32, 24)


def simulate(precision: Precision, num_tail: int, num_samples: int, seed: int = SEED) -> Tensor:
    """How often the head and any tail token win, [2], over ``num_samples`` draws of the vocabulary.

    Exact, but fast: only tail tokens with a uniform within ``NEAR_ONE`` of 1 can win, so their
    number is drawn (binomial) and then their uniforms; the others need not be drawn at all.
    """
    rng = np.random.default_rng(seed)
    candidates = torch.from_numpy(rng.binomial(num_tail, NEAR_ONE, num_samples))
    width = int(candidates.max())
    uniform = 1 - NEAR_ONE * torch.from_numpy(rng.random((num_samples, width)))
    head = torch.from_numpy(rng.random((num_samples, 1)))
    present = torch.arange(width) < candidates[:, None]
    probs = torch.cat(
        (torch.full_like(head, head_probability(num_tail)), TAIL_PROBABILITY * present), dim=1
    )
    both = precision.quantize(torch.cat((head, uniform), dim=1))
    winner = draws.race(probs.to(precision.dtype), both)
    return torch.stack(((winner == 0).sum(), (winner > 0).sum()))


def head_probability(num_tail: int) -> float:
    """What the tail leaves."""
    return 1 - num_tail * TAIL_PROBABILITY


def judge(name: str, counts: Tensor, num_tail: int) -> ChiSquare:
    """Head and tail against their probabilities."""
    head = head_probability(num_tail)
    return chi_square(name, counts, torch.tensor([head, 1 - head], dtype=torch.float64))


def through_the_sampler(
    precision: Precision, num_tail: int, num_samples: int, advance: Callable[[int], None]
) -> Tensor:
    """The same with ``AncestralSampler.sample`` itself, every uniform of the vocabulary drawn."""
    student = flat_tail_student(num_tail)
    counts = torch.zeros(2, dtype=torch.int64)
    original = draws.uniforms, draws.race
    if precision.dtype != torch.float64:
        draws.uniforms = precision.from_bits
        draws.race = lambda probs, uniform: original[1](probs.to(precision.dtype), uniform)
    try:
        for first in range(0, num_samples, 200):
            ids = torch.arange(first, first + 200)
            tokens = torch.tensor([[0, student.mask_id]]).repeat(200, 1)
            drawn = AncestralSampler(nfe=1).sample(student, tokens, ids, None, SEED).tokens[:, 1]
            counts += torch.stack(((drawn == 0).sum(), (drawn > 0).sum()))
            advance(200)
    finally:
        draws.uniforms, draws.race = original
    return counts


def flat_tail_student(num_tail: int) -> MDLM:
    """A student that predicts the head with the rest spread flat, whatever it sees."""
    settings = StudentSettings(
        hidden_size=2, num_layers=1, num_heads=1, condition_size=1, dropout=0.0
    )
    student = MDLM(MDLM.config_class.build(settings, vocab_size=num_tail + 1, row_length=2))
    logits = torch.full((num_tail + 2,), TAIL_PROBABILITY).log()
    logits[0] = float(np.log(head_probability(num_tail)))
    with torch.no_grad():
        student.backbone.output_layer.linear.bias.copy_(logits)
    return student.eval()
