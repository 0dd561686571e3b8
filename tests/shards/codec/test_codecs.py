"""Codecs by name, ours and others'; what holds for all, and what is told of each alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from shards.codec import registry
from shards.codec.full import FullCodec, frozen_posterior, round_down_to_half
from shards.codec.ids import from_planes, most_probable_tokens
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import PART_ELEMENTS, Codec, TeacherOutput
from shards.codec.quantized import QuantizedCodec
from shards.codec.registry import CODECS, make_codec
from shards.errors import GdistillError, UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import KeyedPosterior, dense_arrivals
from shards.store.writer import ShardWriter
from shards.testing import check_codec
from tests.shards.codec_cases import SEED, decode, flat_log_probs, teacher_output
from tests.shards.store_cases import make_arrays, make_manifest

AGREEMENT = {"posterior": 0.99, "hidden": 0.95, "topk": 0.0}


@pytest.mark.parametrize("name", CODECS)
def test_our_codecs_pass_the_kit(name: str) -> None:
    codec = make_codec(name)
    check_codec(codec, min_agreement=AGREEMENT.get(name, 1.0))
    assert isinstance(codec, Codec) and codec.name == name


@dataclass(frozen=True)
class Redrawing(FullCodec):
    """Says that it is fresh, and is not."""

    is_fresh = True


@dataclass(frozen=True)
class Undeclared(FullCodec):
    """Keeps an array that it does not declare."""

    def encode(self, output, seed, resources):
        return {**super().encode(output, seed, resources), "more": output.tokens}


@dataclass(frozen=True)
class Batchwise(FullCodec):
    """Encodes a row by its place in the batch."""

    def encode(self, output, seed, resources):
        arrays = super().encode(output, seed, resources)
        moved = arrays["gumbels"] + torch.arange(len(output.rows))[:, None, None].half()
        return {**arrays, "gumbels": moved}


@pytest.mark.parametrize("codec", [Redrawing(), Undeclared(), Batchwise()])
def test_the_kit_sees_what_is_wrong(codec: FullCodec) -> None:
    with pytest.raises(AssertionError):
        check_codec(codec, min_agreement=1.0)


def test_codecs_from_outside_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("acme/whole", "shards.codec.full:FullCodec", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert isinstance(make_codec("acme/whole"), FullCodec)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("posterior", {"num_entries": 0}, "num_entries"),
        ("posterior", {"min_probability": 1.0}, r"min_probability.*\[1e-12, 1\)"),
        ("posterior", {"num_entrys": 3}, "did you mean 'num_entries'"),
        ("posteriors", {}, "did you mean 'posterior'"),
        ("hidden", {"dtype": "int4"}, "dtype"),
        ("topk", {"num_entries": 0}, "num_entries"),
        ("quantized", {"bits": 3}, "bits"),
        ("seeded", {"tolerance_nats": 0.9}, "tolerance_nats"),
        ("seeded", {"max_entries": 0}, "max_entries"),
        ("acme-codecs/path", {"width": 3}, "pip install acme-codecs"),
    ],
)
def test_what_no_codec_can_be_is_refused(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_codec(name, **parameters)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "hidden"])
def test_parts_and_batches_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, resources = teacher_output()
    codec = make_codec(name)
    whole = codec.encode(output, SEED, resources)
    monkeypatch.setitem(PART_ELEMENTS, "cpu", 700)
    for array, expected in codec.encode(output, SEED, resources).items():
        assert torch.equal(expected, whole[array])
    one_row = TeacherOutput(output.log_probs[2:3], output.tokens[2:3], output.rows[2:3])
    for array, expected in codec.encode(one_row, SEED, resources).items():
        assert torch.equal(expected[0], whole[array][2])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("full", {}), ("topk", {"num_entries": 90}), ("quantized", {}), ("quantized", {"bits": 4})],
)
def test_the_token_stays_the_argmax_of_what_is_stored(name: str, parameters: dict) -> None:
    """Entries that rounding would lift past the token are rounded down."""
    for seed in range(3):
        output, resources = teacher_output(100, 30, 60, spread=1.0, seed=seed)
        noise = decode(make_codec(name, **parameters), output, resources)
        scores = flat_log_probs(output).double() + noise.gumbels().double()
        assert torch.equal(scores.argmax(1), output.tokens.flatten())


# full and quantized: every entry within its rounding.


def test_every_entry_is_the_posterior_draw_rounded() -> None:
    output, resources = teacher_output()
    decoded = decode(make_codec("full"), output, resources).gumbels()
    exact = frozen_posterior(output, SEED).gumbels()
    # Half precision has 11 significant bits; a rounding down doubles the largest error.
    assert bool(((decoded - exact).abs() <= exact.abs() * 2.0**-10 + 1e-6).all())
    tokens = output.tokens.flatten()[:, None]
    torch.testing.assert_close(decoded.gather(1, tokens), exact.gather(1, tokens))


def test_round_down_to_half() -> None:
    values = torch.cat([torch.randn(10_000) * 10, torch.tensor([1e-9, -1e-9, 0.0, 2.0])])
    rounded = round_down_to_half(values).float()
    assert bool((rounded <= values).all())
    assert bool((rounded >= values - values.abs() * 2.0**-10 - 1e-7).all())


@pytest.mark.parametrize("vocab_size", [90, 91])
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_half_a_level(bits: Literal[4, 8], vocab_size: int) -> None:
    output, resources = teacher_output(vocab_size=vocab_size)
    codec = QuantizedCodec(bits)
    arrays = codec.encode(output, SEED, resources)
    noise = decode(codec, output, resources, arrays=arrays)
    decoded, exact = noise.gumbels(), frozen_posterior(output, SEED).gumbels()
    levels = (decoded - exact).abs() / arrays["spacing"].flatten()[:, None]
    assert float((levels <= 0.5001).float().mean()) > 0.99
    assert float(levels.max()) <= 1.0001
    own = output.tokens.flatten()[:, None]
    torch.testing.assert_close(decoded.gather(1, own), exact.gather(1, own))
    for start, stop in [(0, 7), (7, 12), (13, vocab_size)]:
        assert torch.equal(noise.tile(start, stop), dense_arrivals(noise)[:, start:stop])


# posterior: the distribution kept, fresh draws, coupling agreement 1 / (1 + d).


@pytest.mark.parametrize("kept", [1, 8, 90, 1000])
def test_the_stored_distribution_is_normalised_and_keeps_the_token(kept: int) -> None:
    output, resources = teacher_output()
    noise = decode(make_codec("posterior", num_entries=kept), output, resources)
    assert isinstance(noise, KeyedPosterior)
    probs = noise.probabilities.tile(0, noise.vocab_size)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=2e-3)
    exact = flat_log_probs(output).exp()
    own = output.tokens.flatten()[:, None]
    torch.testing.assert_close(probs.gather(1, own), exact.gather(1, own))


def test_agreement_is_one_over_one_plus_the_total_variation() -> None:
    output, resources = teacher_output(60, 60, 40, spread=2.0)
    codec = make_codec("posterior", num_entries=4)
    wins = []
    for draw in range(1, 5):
        noise = decode(codec, output, resources, draw)
        chosen = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise))
        wins.append(chosen == output.tokens.flatten())
    assert isinstance(noise, KeyedPosterior)
    missing = (flat_log_probs(output).exp() - noise.probabilities.tile(0, 40)).clamp(min=0).sum(1)
    expected = float((1 / (1 + missing)).mean())
    agreement = torch.stack(wins).float()
    sigma = float(agreement.std()) / agreement.numel() ** 0.5
    assert abs(float(agreement.mean()) - expected) < 4.5 * sigma
    assert expected < 0.97, "the case must be able to tell"


def test_every_listed_probability_is_within_half_a_step_the_least_included() -> None:
    step = 0.25
    least = math.exp(-12.8 * step)  # nearer to 13 steps than to 12
    probs = torch.tensor([0.5, 0.3, least, *[(0.2 - least) / 7] * 7])
    output = TeacherOutput(probs.log()[None, None], torch.tensor([[0]]), torch.tensor([0]))
    codec = PosteriorCodec(3, min_probability=0.999 * least, log_prob_step_nats=step)
    arrays = codec.encode(output, 0, {"unigram_log_probs": torch.full((10,), -math.log(10))})
    steps = from_planes("entry_step", arrays, codec._max_step).flatten()
    errors = step * steps.cumsum(0) + probs[:3].log()
    assert float(errors.abs().max()) <= step / 2 + 1e-6


KEPT = 8


def scored(num: int) -> tuple[TeacherOutput, dict[str, Tensor], tuple[Tensor, ...]]:
    """A teacher's output, resources, and its ``num`` most probable tokens as engines give them."""
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 6, 40, generator=drawn) * 2
    tokens = torch.randint(40, (1, 6), generator=drawn)
    output = TeacherOutput(logits.log_softmax(-1), tokens, torch.tensor([0]))
    values, ids = output.log_probs[0].topk(num)
    resources = {"unigram_log_probs": torch.log_softmax(-torch.arange(40) / 9.0, 0)}
    return output, resources, (ids, values, tokens[0], output.token_log_probs[0])


def test_the_arrays_of_the_most_probable_tokens_are_those_of_the_distribution() -> None:
    output, resources, given = scored(KEPT)
    codec = PosteriorCodec(num_entries=KEPT)
    whole = codec.encode(output, 0, resources)
    found = codec.encode_likeliest(*given, resources)
    assert found.keys() == whole.keys()
    for name in found:
        if name == "tail_log_mass":  # a difference here, a sum there
            torch.testing.assert_close(found[name], whole[name][0], atol=2e-3, rtol=2e-3)
        else:
            assert torch.equal(found[name], whole[name][0]), name


def test_fewer_known_tokens_leave_their_mass_to_the_tail() -> None:
    _, resources, (ids, values, tokens, own) = scored(3)
    codec = PosteriorCodec(num_entries=KEPT)
    arrays = codec.encode_likeliest(ids, values, tokens, own, resources)
    listed = (ids == tokens[:, None]).any(1)
    expected = 1 - values.exp().sum(1) - torch.where(listed, 0.0, own.exp())
    tail = arrays["tail_log_mass"].float().exp()
    torch.testing.assert_close(tail, expected, atol=1e-3, rtol=2e-3)
    found = codec.distribution(arrays, tokens, own, resources).tile(0, 40)
    torch.testing.assert_close(found.sum(1), torch.ones(6), atol=5e-3, rtol=0)
    torch.testing.assert_close(found.gather(1, tokens[:, None])[:, 0], own.exp())


def test_unknown_entries_are_no_entries() -> None:
    ids, log_probs = torch.tensor([[4, -1, -1]]), torch.tensor([[0.5, 0.0, 0.0]]).log()
    codec, own, resources = PosteriorCodec(KEPT), torch.tensor([math.log(0.25)]), scored(1)[1]
    arrays = codec.encode_likeliest(ids, log_probs, torch.tensor([7]), own, resources)
    found = codec.distribution(arrays, torch.tensor([7]), own, resources).tile(0, 40)[0]
    assert abs(float(found[4]) - 0.5) < 0.01 and abs(float(found[7]) - 0.25) < 1e-6
    assert abs(float(arrays["tail_log_mass"].float().exp()) - 0.25) < 1e-3
    with pytest.raises(UsageError, match="not a whole distribution"):
        PosteriorCodec(num_entries=40).encode_likeliest(*scored(5)[2], resources)


@pytest.mark.parametrize(
    ("vocab_size", "num_entries"),
    [(1, 1), (7, 7), (23, 5), (512, 64), (4096, 64), (4099, 100), (50257, 64)],
)
def test_values_and_ids_are_those_of_topk(vocab_size: int, num_entries: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    log_probs = torch.randn(9, vocab_size, generator=generator).mul(4).log_softmax(-1)
    values, ids = most_probable_tokens(log_probs, num_entries)
    expected, expected_ids = log_probs.topk(num_entries, dim=-1)
    assert torch.equal(values, expected)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)


@pytest.mark.parametrize("vocab_size", [40, 4096])
def test_equal_probabilities_give_distinct_ids(vocab_size: int) -> None:
    log_probs = torch.zeros(3, vocab_size)
    log_probs[:, vocab_size // 2] = 1.0
    values, ids = most_probable_tokens(log_probs, 10)
    assert values.tolist() == [[1.0] + [0.0] * 9] * 3
    assert ids[:, 0].tolist() == [vocab_size // 2] * 3
    assert all(len(set(row)) == 10 for row in ids.tolist())


def test_the_largest_of_one_block_are_all_found() -> None:
    log_probs, stride = torch.zeros(1, 4096), 4096 // 8  # block b holds ids b, b + 512, ...
    log_probs[0, 3::stride] = torch.arange(8, 0, -1.0)
    values, ids = most_probable_tokens(log_probs, 8)
    assert values.tolist() == [[8, 7, 6, 5, 4, 3, 2, 1]]
    assert ids.tolist() == [list(range(3, 4096, stride))]


# hidden: the distribution rebuilt from rounded hidden states.


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
    with pytest.raises(UsageError, match="hidden states"):
        make_codec("hidden").encode(teacher_output()[0], SEED, resources)


@pytest.mark.parametrize(("nats", "refused"), [(0.02, False), (0.3, True)])
def test_logits_may_be_off_by_rounding_only(nats: float, refused: bool) -> None:
    """One of the most probable tokens differs from what the head gives, by so many nats."""
    output, resources = teacher_output(vocab_size=80, hidden_size=16)
    best = output.log_probs.argmax(-1, keepdim=True)
    log_probs = output.log_probs.scatter_add(-1, best, torch.full(best.shape, nats))
    off = TeacherOutput(log_probs.log_softmax(-1), output.tokens, output.rows, output.hidden)
    codec = make_codec("hidden", dtype="float16")
    if not refused:
        codec.encode(off, SEED, resources)
        return
    with pytest.raises(GdistillError, match="off by"):
        codec.encode(off, SEED, resources)


def test_a_hidden_state_too_large_for_half_precision_is_not_stored(tmp_path: Path) -> None:
    codec = make_codec("hidden", dtype="float16")
    named = {"name": "hidden", "parameters": {"dtype": "float16"}}
    manifest = make_manifest(codec=named, arrays=codec.array_specs(50, 4))
    writer = ShardWriter.create_or_resume(tmp_path / "store", manifest, {})
    shard = writer.shards("train")[1]
    arrays = make_arrays(manifest, shard)
    hidden = torch.zeros(shard.num_rows, manifest.row_length, 4)
    hidden[2, 3, 1] = 1e5
    arrays["hidden"] = codec._round(hidden.flatten(0, 1))["hidden"].view(hidden.shape).numpy()
    with pytest.raises(GdistillError, match=r"hidden.*train row 10, position 3.*inf.*dtype"):
        writer.write(shard, arrays)
