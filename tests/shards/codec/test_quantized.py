"""``quantized``: half a level of error, one level where the order demands it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from shards.codec.full import frozen_posterior
from shards.codec.quantized import QuantizedCodec
from shards.codec.registry import make_codec
from shards.errors import UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import dense_arrivals
from tests.shards.codec_cases import SEED, decode, flat_log_probs, teacher_output


@pytest.mark.parametrize("vocab_size", [90, 91])
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_half_a_level(bits: Literal[4, 8], vocab_size: int) -> None:
    output, resources = teacher_output(vocab_size=vocab_size)
    codec = QuantizedCodec(bits)
    arrays = codec.encode(output, SEED, resources)
    noise = decode(codec, output, resources, arrays=arrays)
    decoded = noise.gumbels()
    exact = frozen_posterior(output, SEED).gumbels()
    levels = (decoded - exact).abs() / arrays["spacing"].flatten()[:, None]
    assert float((levels <= 0.5001).float().mean()) > 0.99
    assert float(levels.max()) <= 1.0001
    own = output.tokens.flatten()[:, None]
    torch.testing.assert_close(decoded.gather(1, own), exact.gather(1, own))
    for start, stop in [(0, 7), (7, 12), (13, vocab_size)]:
        assert torch.equal(noise.tile(start, stop), dense_arrivals(noise)[:, start:stop])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_token_stays_the_argmax(bits: Literal[4, 8]) -> None:
    output, resources = teacher_output(30, 50, 60, spread=1.0)
    noise = decode(QuantizedCodec(bits), output, resources)
    chosen = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise))
    assert torch.equal(chosen, output.tokens.flatten())


def test_bad_bits() -> None:
    with pytest.raises(UsageError, match="bits"):
        make_codec("quantized", bits=5)
