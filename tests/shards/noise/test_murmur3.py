"""vLLM's stream: its own numbers, in any tile, as priors and posteriors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from scipy import stats

from shards.noise.kinds import DenseProbabilities, KeyedPosterior, KeyedPrior
from shards.noise.murmur3 import (
    MASK,
    SECOND_WORD,
    EngineKeys,
    engine_arrivals,
    engine_bits,
    engine_gumbels,
    uniforms,
    uniforms64,
)

VECTORS = json.loads(Path(__file__).with_name("murmur3_vectors.json").read_text())


def each_id(domain: int = 0) -> torch.Tensor:
    """[9, 16] bits at the vectors' seeds, positions and ids."""
    seeds, positions = torch.tensor(VECTORS["seeds"]), torch.tensor(VECTORS["positions"])
    columns = [engine_bits(seeds, positions, j, j + 1, domain) for j in VECTORS["token_ids"]]
    return torch.cat(columns, dim=1)


def numbers(name: str) -> torch.Tensor:
    rows = [[float.fromhex(value) for value in row] for row in VECTORS[name]]
    return torch.tensor(rows, dtype=torch.float64)


def test_bits_and_uniforms_are_the_engines_own() -> None:
    first, second = each_id(), each_id(SECOND_WORD)
    assert (first.long() & MASK).tolist() == VECTORS["bits"]
    assert (second.long() & MASK).tolist() == VECTORS["bits_of_second_word"]
    assert torch.equal(uniforms(first).double(), numbers("uniforms32"))
    assert torch.equal(uniforms64(first, second), numbers("uniforms64"))


def test_variates_are_the_engines_to_the_rounding_of_a_logarithm() -> None:
    seeds, positions = torch.tensor(VECTORS["seeds"]), torch.tensor(VECTORS["positions"])
    found = torch.cat(
        [engine_gumbels(seeds, positions, j, j + 1) for j in VECTORS["token_ids"]], dim=1
    )
    torch.testing.assert_close(found.double(), numbers("gumbels32"), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tile_is_a_part_of_the_whole(dtype: torch.dtype) -> None:
    seeds, positions = torch.tensor([3, -9]), torch.tensor([0, 77])
    whole = engine_arrivals(seeds, positions, 0, 300, dtype)
    assert torch.equal(engine_arrivals(seeds, positions, 17, 210, dtype), whole[:, 17:210])
    assert torch.equal(engine_arrivals(seeds[1:], positions[1:], 0, 300, dtype), whole[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrivals_are_exponential(dtype: torch.dtype) -> None:
    seeds, positions = torch.arange(50), torch.arange(50) + 3
    arrivals = engine_arrivals(seeds, positions, 0, 400, dtype).flatten()
    assert stats.kstest(arrivals.double().numpy(), "expon").pvalue > 1e-3


def test_the_largest_bits_leave_the_variates_finite() -> None:
    extreme = torch.tensor([0, -1], dtype=torch.int32)
    assert uniforms(extreme).tolist() == [2.0**-33, 1.0]
    assert bool(((u := uniforms64(extreme, extreme)) > 0).all()) and bool((u < 1).all())


def test_noise_of_keys_is_what_the_engine_draws_the_token_with() -> None:
    seeds, places = torch.tensor([5, 5, 8]), torch.tensor([1, 2, 1])
    noise = KeyedPrior(EngineKeys(seeds, places), 60)
    expected = engine_gumbels(seeds, places - 1, 0, 60)
    torch.testing.assert_close(noise.gumbels(), expected)
    assert not torch.equal(noise.redrawn(1).gumbels(), noise.gumbels())
    assert torch.equal(noise.select(torch.tensor([2])).gumbels(), noise.gumbels()[2:])


def test_a_store_decoded_under_the_engines_noise_gives_back_its_tokens() -> None:
    torch.manual_seed(0)
    log_p = torch.randn(200, 30).log_softmax(dim=-1)
    tokens = torch.distributions.Categorical(logits=log_p).sample()
    keys = EngineKeys(torch.arange(200), torch.arange(200) % 7 + 1)
    own = log_p.gather(1, tokens[:, None])[:, 0]
    noise = KeyedPosterior(keys, tokens, own, DenseProbabilities(log_p))
    assert torch.equal((log_p + noise.gumbels()).argmax(dim=-1), tokens)
    gumbels = noise.gumbels().double().flatten()
    assert stats.kstest(gumbels.numpy(), "gumbel_r").pvalue > 1e-3
    assert math.isfinite(float(gumbels.sum()))
