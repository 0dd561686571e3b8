"""``hidden``: the distribution rebuilt from rounded hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shards.codec.protocol import TeacherOutput
from shards.codec.registry import make_codec
from shards.errors import GdistillError, UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import KeyedPosterior, dense_arrivals
from shards.store.writer import ShardWriter
from tests.shards.codec_cases import SEED, decode, flat_log_probs, teacher_output
from tests.shards.store_cases import make_arrays, make_manifest


@pytest.mark.parametrize(("dtype", "variation"), [("int8", 0.02), ("float16", 1e-3)])
def test_the_distribution_is_rebuilt(dtype: str, variation: float) -> None:
    output, resources = teacher_output(vocab_size=300, hidden_size=32)
    noise = decode(make_codec("hidden", dtype=dtype), output, resources, draw=1)
    assert isinstance(noise, KeyedPosterior)
    probs = noise.probabilities.tile(0, 300)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=2e-3)
    distance = (probs - flat_log_probs(output).exp()).clamp(min=0).sum(1).mean()
    assert float(distance) < variation
    wins = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise)) == output.tokens.flatten()
    assert float(wins.float().mean()) > 1 - 4 * variation
    torch.testing.assert_close(
        torch.cat([noise.tile(i, i + 50) for i in range(0, 300, 50)], 1), dense_arrivals(noise)
    )


def test_a_bias_is_used() -> None:
    output, resources = teacher_output(vocab_size=80, hidden_size=16)
    bias = torch.linspace(-3, 3, 80)
    log_probs = (output.log_probs + bias).log_softmax(-1)
    biased = TeacherOutput(log_probs, output.tokens, output.rows, output.hidden)
    noise = decode(make_codec("hidden"), biased, {**resources, "lm_head_bias": bias})
    assert isinstance(noise, KeyedPosterior)
    distance = (noise.probabilities.tile(0, 80) - flat_log_probs(biased).exp()).abs().sum(1)
    assert float(distance.mean()) < 0.04


def test_a_head_that_is_not_linear_is_refused() -> None:
    output, resources = teacher_output(vocab_size=80, hidden_size=16)
    capped = (torch.tanh(output.log_probs / 3) * 3).log_softmax(-1)
    wrong = TeacherOutput(capped, output.tokens, output.rows, output.hidden)
    with pytest.raises(GdistillError, match="posterior"):
        make_codec("hidden").encode(wrong, SEED, resources)
    with pytest.raises(GdistillError, match="does not fit"):
        make_codec("hidden").encode(output, SEED, {**resources, "lm_head": torch.ones(80, 8)})


@pytest.mark.parametrize(("nats", "refused"), [(0.02, False), (0.3, True)])
def test_logits_may_be_off_by_rounding_only(nats: float, refused: bool) -> None:
    """Of the likeliest tokens one differs from what the head gives, by so many nats."""
    output, resources = teacher_output(vocab_size=80, hidden_size=16)
    best = output.log_probs.argmax(-1, keepdim=True)
    log_probs = output.log_probs.scatter_add(
        -1, best, torch.full_like(best, nats, dtype=torch.float32)
    )
    off = TeacherOutput(log_probs.log_softmax(-1), output.tokens, output.rows, output.hidden)
    codec = make_codec("hidden", dtype="float16")
    if refused:
        with pytest.raises(GdistillError, match="off by"):
            codec.encode(off, SEED, resources)
    else:
        codec.encode(off, SEED, resources)


def test_a_hidden_state_too_large_for_half_precision_is_not_stored(tmp_path: Path) -> None:
    codec = make_codec("hidden", dtype="float16")
    manifest = make_manifest(
        codec={"name": "hidden", "parameters": {"dtype": "float16"}},
        arrays=codec.array_specs(50, 4),
    )
    writer = ShardWriter.create_or_resume(tmp_path / "store", manifest, {})
    shard = writer.shards("train")[1]
    arrays = make_arrays(manifest, shard)
    hidden = torch.zeros(shard.num_rows, manifest.row_length, 4)
    hidden[2, 3, 1] = 1e5
    arrays["hidden"] = codec._round(hidden.flatten(0, 1))["hidden"].view(hidden.shape).numpy()
    with pytest.raises(GdistillError, match=r"hidden.*train row 10, position 3.*inf.*dtype"):
        writer.write(shard, arrays)


def test_hidden_states_are_needed() -> None:
    output, resources = teacher_output()
    with pytest.raises(UsageError, match="hidden states"):
        make_codec("hidden").encode(output, SEED, resources)
    with pytest.raises(UsageError, match="dtype"):
        make_codec("hidden", dtype="int4")
