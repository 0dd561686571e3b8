"""Codecs by name, ours and others'; what holds for all, and what is told of each alone."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from torch import Tensor
from torch.nn.functional import pad

from shards.codec import protocol
from shards.codec.full import FullCodec, frozen_posterior, passes_token, round_down_to_half
from shards.codec.ids import FrequencyOrder, from_planes, most_probable_tokens, plane_names, unigram_log_probs
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import CODECS, PART_ELEMENTS, ArraySpec, Codec, TeacherOutput, make_codec, position_keys
from shards.codec.quantized import QuantizedCodec
from shards.codec.seeded import SeededCodec, ShiftScale, _codes, _level, _scale_table
from shards.codec.topk import TopKCodec
from shards.errors import GdistillError, UsageError
from shards.noise import order_statistics as statistics
from shards.noise.embedding import Noise, dense_arrivals
from shards.noise.gumbel import KeyedPosterior, gumbel_argmax
from shards.noise.philox import PositionKeys
from shards.testing import check_codec

Arrays = dict[str, Tensor]
SEED = 1234
AGREEMENT = {"posterior": 0.99, "hidden": 0.95, "topk": 0.0}


def teacher_output(
    shape: tuple[int, int, int] = (6, 20, 90), spread: float = 3.0, width: int = 0, seed: int = 0
) -> tuple[TeacherOutput, Arrays]:
    """A random teacher whose tokens were drawn from it, and the resources of its store.

    ``shape``: rows, tokens of each, vocabulary; ``width``: of its hidden states, if it has any.
    """
    generator = torch.Generator().manual_seed(seed)
    unigram = (torch.randn(shape[2], generator=generator) * spread / 2).log_softmax(-1)
    known, hidden = {"unigram_log_probs": unigram}, None
    if width:
        hidden = torch.randn(*shape[:2], width, generator=generator)
        head = torch.randn(shape[2], width, generator=generator) * spread
        known["lm_head"] = head / width**0.5
        logits = hidden @ known["lm_head"].T
    else:
        logits = unigram + torch.randn(shape, generator=generator) * spread
    log_probs = logits.log_softmax(-1)
    flat = log_probs.flatten(0, 1).exp()
    tokens = torch.multinomial(flat, 1, generator=generator).view(shape[:2])
    return TeacherOutput(log_probs, tokens, torch.arange(shape[0]) + 3, hidden), known


def flat_log_probs(output: TeacherOutput) -> Tensor:
    """[n, V] log-probabilities of all positions."""
    return output.log_probs.flatten(0, 1)


def of_tokens(values: Tensor, output: TeacherOutput) -> Tensor:
    """[n] the entries of [n, V] that belong to the tokens."""
    return values.gather(1, output.tokens.flatten()[:, None]).squeeze(1)


def exact_gumbels(output: TeacherOutput) -> Tensor:
    """[n, V] the draw that codecs of a frozen draw keep."""
    return frozen_posterior(output, SEED).gumbels()


def decode(codec: Codec, output: TeacherOutput, known: Arrays, draw: int = 0, arrays: Arrays | None = None) -> Noise:
    """Encode, unless that was done, and decode all positions."""
    arrays = arrays or codec.encode(output, SEED, known)
    flat = {name: array.flatten(0, 1) for name, array in arrays.items()}
    keys = position_keys(output, SEED, draw)
    assert isinstance(keys, PositionKeys)
    assert torch.equal(keys.rows, output.rows.repeat_interleave(output.tokens.shape[1]))
    assert keys.positions.tolist() == [*range(1, output.tokens.shape[1] + 1)] * len(output.rows), "0 has no noise"
    own = of_tokens(flat_log_probs(output), output)
    return codec.decode(flat, output.tokens.flatten(), own, keys, known)


def probabilities(noise: Noise) -> Tensor:
    """[n, V] the distribution of noise that is drawn anew; it is normalised."""
    assert isinstance(noise, KeyedPosterior)
    probs = noise.probabilities.tile(0, noise.vocab_size)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)), rtol=0, atol=2e-3)
    return probs


OTHER_PARAMETERS: list[tuple[str, dict]] = [
    ("posterior", {"num_entries": 1000}),
    ("posterior", {"num_entries": 8}),
    ("hidden", {"dtype": "float16"}),
    ("topk", {"num_entries": 8}),
    ("quantized", {"bits": 4}),
    ("seeded", {"tolerance_nats": 0.3, "max_entries": 57}),
]


DEFAULTS = {
    "posterior": {"num_entries": 64, "min_probability": 3e-4, "log_prob_step_nats": 1 / 64},
    "hidden": {"dtype": "int8"}, "topk": {"num_entries": 128}, "quantized": {"bits": 8},
    "seeded": {"tolerance_nats": 0.01, "max_entries": None}, "full": {},
}  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), [*((name, {}) for name in CODECS), *OTHER_PARAMETERS])
def test_our_codecs_pass_the_kit(name: str, parameters: dict) -> None:
    codec = make_codec(name, **parameters)
    check_codec(codec, min_agreement=0.0 if parameters else AGREEMENT.get(name, 1.0))
    assert isinstance(codec, Codec) and codec.name == name
    assert parameters or protocol.codec_parameters(codec) == DEFAULTS[name], "other ones would make other stores"


def moved_by_its_place(self: FullCodec, output: TeacherOutput, *others: Any) -> Arrays:
    arrays = FullCodec.encode(self, output, *others)
    return {**arrays, "gumbels": arrays["gumbels"] + torch.arange(len(output.rows))[:, None, None].half()}


def wider(self: FullCodec, *sizes: Any) -> dict[str, ArraySpec]:
    specs = FullCodec.array_specs(self, *sizes)
    return {**specs, "gumbels": replace(specs["gumbels"], dtype="float32")}


BAD: dict[str, dict[str, Any]] = {
    "says that it is fresh": {"is_fresh": True},
    "keeps what it does not declare": {
        "encode": lambda self, output, *others: {**FullCodec.encode(self, output, *others), "more": output.tokens}
    },
    "encodes a row by its place in the batch": {"encode": moved_by_its_place},
    "declares another dtype": {"array_specs": wider},
    "gives each token the noise of another": {
        "decode": lambda self, arrays, tokens, *others: FullCodec.decode(self, arrays, tokens.roll(1), *others)
    },
    "cuts off what rows use": {"cut": lambda self, arrays: {**arrays, "gumbels": arrays["gumbels"].clamp(max=1.0)}},
    "samples with more than it trains on": {"prior": Codec.prior},
}


@pytest.mark.parametrize("fault", BAD)
def test_the_kit_sees_what_is_wrong(fault: str) -> None:
    base, size, agreement = (TopKCodec, (8,), 0.0) if "prior" in BAD[fault] else (FullCodec, (), 1.0)
    with pytest.raises(AssertionError):
        check_codec(type("Bad", (base,), BAD[fault])(*size), min_agreement=agreement)


def test_codecs_from_outside_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("acme/whole", "posterior")
    points = [EntryPoint(name, "shards.codec.full:FullCodec", protocol.ENTRY_POINTS) for name in names]
    monkeypatch.setattr(protocol, "entry_points", lambda group: points)
    assert isinstance(make_codec("acme/whole"), FullCodec)
    assert isinstance(make_codec("posterior"), PosteriorCodec), "a name of ours stays ours"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("posterior", {"num_entries": 0}, "num_entries"),
        ("posterior", {"min_probability": 1.0}, r"min_probability.*\[1e-12, 1\)"),
        ("posterior", {"log_prob_step_nats": 0.0}, r"log_prob_step_nats.*\[0.001, 1\]"),
        ("posterior", {"num_entrys": 3}, "did you mean 'num_entries'"),
        ("posteriors", {}, "did you mean 'posterior'"),
        ("hidden", {"dtype": "int4"}, "dtype"),
        ("topk", {"num_entries": 0}, "num_entries"),
        ("quantized", {"bits": 3}, "bits"),
        ("seeded", {"tolerance_nats": 0.9}, "tolerance_nats"),
        ("seeded", {"max_entries": 0}, "max_entries"),
        ("acme-codecs/path", {"width": 3}, "pip install acme-codecs$"),
    ],
)
def test_what_no_codec_can_be_is_refused(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_codec(name, **parameters)


def test_what_stands_for_an_id_and_for_a_shift_in_a_store_stays() -> None:
    """Writers and readers share these: no round trip would show a change."""
    order = FrequencyOrder.of(torch.tensor([-3.0, -1.0, -3.0, -2.0]))
    assert order.id_of_rank.tolist() == [1, 3, 0, 2] and order.rank_of_id.tolist() == [2, 0, 3, 1]
    assert [len(plane_names("rank", most)) for most in (0, 255, 256, 65_535, 65_536)] == [1, 1, 2, 2, 3]
    numbers = [(scale.num_nearest, scale.max_code) for scale in map(ShiftScale, (0.001, 0.01, 0.5))]
    assert numbers == [(3457, 29483), (230, 2833), (0, 53)]
    assert _level(torch.tensor([0, 1, 6])).tolist() == [0, 129, 134]
    units, nearest = _scale_table(0.01, torch.device("cpu"))  # older stores have c = 2 for codes of 0.01 times 4
    assert units[[0, 2, 130]].tolist() == [ShiftScale(0.01).unit, 4 * ShiftScale(0.01).unit, ShiftScale(0.04).unit]
    assert nearest[[0, 2, 130]].tolist() == [230, 230, ShiftScale(0.04).num_nearest]
    assert SeededCodec(0.3)._scales == [ShiftScale(0.3), ShiftScale(0.5)]
    assert SeededCodec().array_specs(50_257, None)["shift_gap_byte1"].trailing_shape == (1907,)


@pytest.mark.parametrize(
    ("codec", "name", "other"),
    [("posterior", "entry_rank", "entry_step"), ("seeded", "shift_gap", "shift_code"), ("topk", "entry_gap", "x")],
)
def test_ids_below_the_vocabulary_pass_and_no_others(codec: str, name: str, other: str) -> None:
    planes = {f"{name}_byte{i}": np.uint8([[[0, byte]]]) for i, byte in enumerate((88, 2))}
    assert make_codec(codec).check_ids(planes, 600) == ""
    assert make_codec(codec).check_ids(planes, 599) == f"{name}: id 599, of 599"
    for width, rows in ((2, ([7, 0, 0], [0, 1, 0], [4, 0, 0])), (0, ([0, 0, 0],) * 3)):  # 256 has no low byte
        entries = dict(zip((f"{name}_byte0", f"{name}_byte1", f"{other}_byte0"), rows, strict=True))
        whole = {key: torch.tensor([[row]]) for key, row in {**entries, "tail_log_mass": [5, 6, 7]}.items()}
        for key, array in make_codec(codec).cut(whole).items():
            assert array.tolist() == whole[key][..., : width if key in entries and codec != "topk" else 3].tolist()


@pytest.mark.parametrize("vocab_size", [2, 5, 600])
@pytest.mark.parametrize(("name", "parameters"), [c for c in OTHER_PARAMETERS if c[0] != "hidden"])
def test_what_is_kept_of_a_teacher_without_doubt_is_finite(name: str, parameters: dict, vocab_size: int) -> None:
    """All other tokens are impossible: nothing is left for a tail."""
    log_probs = torch.full((1, 3, vocab_size), -math.inf)
    log_probs[..., 1] = 0.0
    output = TeacherOutput(log_probs, log_probs.argmax(-1), torch.tensor([0]))
    resources = {"unigram_log_probs": torch.full((vocab_size,), -math.log(vocab_size))}
    arrays = make_codec(name, **parameters).encode(output, SEED, resources)
    assert [key for key, values in arrays.items() if not bool(values.isfinite().all())] == []


@pytest.mark.parametrize("name", [name for name in CODECS if name != "hidden"])
def test_parts_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, resources = teacher_output()
    codec = make_codec(name)
    whole = codec.encode(output, SEED, resources)
    for elements in (700, 50):  # of some positions, or of less than one
        monkeypatch.setitem(PART_ELEMENTS, "cpu", elements)
        for array, expected in codec.encode(output, SEED, resources).items():
            assert torch.equal(expected, whole[array])


@pytest.mark.parametrize(
    ("name", "parameters"), [("full", {}), ("topk", {"num_entries": 90}), ("quantized", {}), ("quantized", {"bits": 4})]
)
def test_the_token_stays_the_argmax_of_what_is_stored(name: str, parameters: dict) -> None:
    """Entries that rounding would lift past the token, or as far, are rounded down."""
    for seed in range(3):
        output, resources = teacher_output((100, 30, 60), spread=1.0, seed=seed)
        noise = decode(make_codec(name, **parameters), output, resources)
        scores = flat_log_probs(output).double() + noise.gumbels().double()
        assert torch.equal(scores.argmax(1), output.tokens.flatten())
    even = TeacherOutput(torch.full((1, 4, 2), -math.log(2)), torch.tensor([[0, 1, 0, 1]]), torch.tensor([0]))
    noise = frozen_posterior(even, SEED)
    rows, columns, passes = passes_token(noise, noise.token_gumbels[:, None].expand(4, 2))
    assert rows.tolist() == [0, 1, 2, 3] and columns.tolist() == [1, 0, 1, 0] and bool(passes.all())


# full and quantized: every entry within its rounding.


def test_every_entry_is_the_posterior_draw_rounded() -> None:
    output, resources = teacher_output()
    decoded, exact = decode(make_codec("full"), output, resources).gumbels(), exact_gumbels(output)
    # Half precision has 11 significant bits; a rounding down doubles the largest error.
    assert bool(((decoded - exact).abs() <= exact.abs() * 2.0**-10 + 1e-6).all())
    torch.testing.assert_close(of_tokens(decoded, output), of_tokens(exact, output))
    values = torch.cat([torch.randn(10_000) * 10, torch.tensor([1e-9, -1e-9, 0.0, 2.0])])
    rounded = round_down_to_half(values).float()
    assert bool((rounded <= values).all())
    assert bool((rounded >= values - values.abs() * 2.0**-10 - 1e-7).all())
    assert torch.equal(round_down_to_half(values.half().float()), values.half()), "what has a place stays"


@pytest.mark.parametrize("vocab_size", [3, 90, 91])  # of three the token's is often the lowest
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_half_a_level(bits: Literal[4, 8], vocab_size: int) -> None:
    output, resources = teacher_output((6, 20, vocab_size))
    codec = QuantizedCodec(bits)
    arrays = codec.encode(output, SEED, resources)
    noise = decode(codec, output, resources, arrays=arrays)
    decoded, exact = noise.gumbels(), exact_gumbels(output)
    own = output.tokens.flatten()[:, None]
    spread = exact.scatter(1, own, -math.inf).amax(1) - exact.scatter(1, own, math.inf).amin(1)
    torch.testing.assert_close(arrays["spacing"].flatten(), spread / (2**bits - 1))
    levels = (decoded - exact).abs() / arrays["spacing"].flatten()[:, None]
    assert float((levels <= 0.5001).float().mean()) > 0.99
    assert float(levels.max()) <= 1.0001
    torch.testing.assert_close(of_tokens(decoded, output), of_tokens(exact, output))
    for start, stop in [(0, 2), (1, vocab_size // 2 + 1), (vocab_size // 2, vocab_size)]:
        assert torch.equal(noise.tile(start, stop), dense_arrivals(noise)[:, start:stop])


# posterior: the distribution kept, fresh draws, coupling agreement 1 / (1 + d).


@pytest.mark.parametrize("kept", [1, 8, 90, 1000])
def test_the_stored_distribution_is_normalised_and_keeps_the_token(kept: int) -> None:
    output, resources = teacher_output()
    probs = probabilities(decode(make_codec("posterior", num_entries=kept), output, resources))
    exact = flat_log_probs(output).exp()
    torch.testing.assert_close(of_tokens(probs, output), of_tokens(exact, output))


def test_agreement_is_one_over_one_plus_the_total_variation() -> None:
    output, resources = teacher_output((60, 60, 40), spread=2.0)
    codec = make_codec("posterior", num_entries=4)
    wins = []
    for draw in range(1, 5):
        noise = decode(codec, output, resources, draw)
        chosen = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise))
        wins.append(chosen == output.tokens.flatten())
    missing = (flat_log_probs(output).exp() - probabilities(noise)).clamp(min=0).sum(1)
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
    resources = {"unigram_log_probs": torch.full((10,), -math.log(10))}
    arrays = codec.encode(output, 0, resources)
    steps = from_planes("entry_step", arrays, codec._max_step).flatten()
    errors = step * steps.cumsum(0) + probs[:3].log()
    assert float(errors.abs().max()) <= step / 2 + 1e-6
    # To add up to 1 with a token of any probability they move by a factor of 2 at most.
    flat, listed = {name: array.flatten(0, 1) for name, array in arrays.items()}, (-step * steps.cumsum(0)).exp()
    tail = float(flat["tail_log_mass"].double().exp())
    for own, factor in ((1 - tail - 1e-4, 0.5), (1e-4, 2.0), (1.0, 1.0)):
        found = codec.distribution(flat, torch.tensor([0]), torch.tensor([own]).log(), resources).tile(0, 10)[0, :3]
        torch.testing.assert_close(found, torch.cat([torch.tensor([own]), factor * listed[1:]]))


KEPT = 8


def scored(num: int) -> tuple[TeacherOutput, Arrays, tuple[Tensor, ...]]:
    """A teacher's output, resources, and its ``num`` most probable tokens as engines give them."""
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 6, 40, generator=drawn) * 2
    tokens = torch.randint(40, (1, 6), generator=drawn)
    output = TeacherOutput(logits.log_softmax(-1), tokens, torch.tensor([0]))
    values, ids = output.log_probs[0].topk(num)
    resources = {"unigram_log_probs": torch.log_softmax(-torch.arange(40) / 9.0, 0)}
    return output, resources, (ids, values, tokens[0], output.token_log_probs[0])


def test_the_arrays_of_the_most_probable_tokens_are_those_of_the_distribution() -> None:
    for known in (KEPT, 12):
        output, resources, given = scored(known)
        codec = PosteriorCodec(num_entries=KEPT)
        whole = codec.encode(output, 0, resources)
        found = codec.encode_likeliest(*given, resources)
        assert found.keys() == whole.keys()
        # The tail is a difference here, a sum there.
        tails = found.pop("tail_log_mass"), whole.pop("tail_log_mass")[0]
        torch.testing.assert_close(*tails, atol=2e-3, rtol=2e-3)
        for name in found:
            assert torch.equal(found[name], whole[name][0]), name


def test_fewer_known_tokens_leave_their_mass_to_the_tail() -> None:
    """Where an id is -1 none is known; none at all is listed of a flat teacher, nor where nothing counts."""
    _, resources, (ids, values, tokens, own) = scored(3)
    codec, given = PosteriorCodec(num_entries=KEPT), (pad(ids, (0, 2), value=-1), pad(values, (0, 2), value=-math.inf))
    arrays = codec.encode_likeliest(*given, tokens, own, resources)
    listed = (ids == tokens[:, None]).any(1)
    expected = 1 - values.exp().sum(1) - torch.where(listed, 0.0, own.exp())
    tail = arrays["tail_log_mass"].float().exp()
    torch.testing.assert_close(tail, expected, atol=1e-3, rtol=2e-3)
    found = codec.distribution(arrays, tokens, own, resources).tile(0, 40)
    torch.testing.assert_close(found.sum(1), torch.ones(6), atol=5e-3, rtol=0)
    torch.testing.assert_close(found.gather(1, tokens[:, None])[:, 0], own.exp())
    none = codec.encode_likeliest(torch.full_like(ids, -1), torch.full_like(values, -math.inf), tokens, own, resources)
    found = codec.distribution(none, tokens, own, resources).tile(0, 40)
    torch.testing.assert_close(found.gather(1, tokens[:, None])[:, 0], own.exp())
    assert not any(bool(array.any()) for name, array in none.items() if name.startswith("entry"))
    # One that is known, and too unlikely to be listed, is no part of the tail if it is the token.
    unlikely = torch.tensor([[7, 4]]), torch.tensor([[0.9995, 2e-4]]).log(), torch.tensor([4])
    tail = codec.encode_likeliest(*unlikely, torch.tensor([2e-4]).log(), resources)["tail_log_mass"].float().exp()
    torch.testing.assert_close(tail, torch.tensor([3e-4]), atol=2e-6, rtol=0)
    rounded = torch.tensor([[7, 4]]), torch.tensor([[0.0, -7.0]]), torch.tensor([7])
    sure = codec.encode_likeliest(*rounded, torch.zeros(1), resources)  # more than 1 together
    assert bool(sure["tail_log_mass"].isfinite().all())


@pytest.mark.parametrize(
    ("vocab_size", "num_entries"), [(1, 1), (7, 7), (23, 5), (512, 64), (4096, 64), (4099, 100), (50257, 64)]
)
def test_values_and_ids_are_those_of_topk(vocab_size: int, num_entries: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    log_probs = torch.randn(9, vocab_size, generator=generator).mul(4).log_softmax(-1)
    log_probs[0, -1] = 0.0
    values, ids = most_probable_tokens(log_probs, num_entries)
    expected, expected_ids = log_probs.topk(num_entries, dim=-1)
    assert torch.equal(values, expected)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected_ids)


def test_equal_probabilities_give_distinct_ids() -> None:
    for vocab_size in (40, 4096):
        log_probs = torch.zeros(3, vocab_size)
        log_probs[:, vocab_size // 2] = 1.0
        values, ids = most_probable_tokens(log_probs, 10)
        assert values.tolist() == [[1.0] + [0.0] * 9] * 3
        assert ids[:, 0].tolist() == [vocab_size // 2] * 3
        assert all(len(set(row)) == 10 for row in ids.tolist())


def test_tokens_are_counted_in_blocks_spread_over_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine rows in blocks of two, three blocks hold 24 tokens; a row's first is no teacher's to score."""
    rows, asked = np.int32([[9, i, i, 8] for i in range(9)]), []

    def read(start: int, stop: int) -> np.ndarray:
        asked.append((start, stop))
        return rows[start:stop]

    for most, counted in ((24, [0, 1, 4, 5, 8]), (32, [0, 1, 2, 3, 6, 7, 8]), (40, range(9)), (1, [0, 1])):
        monkeypatch.setattr("shards.codec.ids.UNIGRAM_TOKENS", most)
        counts = np.full(10, 0.5)
        np.add.at(counts, rows[counted, 1:], 1)
        found = unigram_log_probs(read, 9, 4, 10, block=2)
        np.testing.assert_allclose(np.exp(found), counts / counts.sum(), rtol=1e-5)
        assert found.dtype == np.float32 and len(asked) == -(-len(counted) // 2)
        asked.clear()


# hidden: the distribution rebuilt from rounded hidden states.


def with_log_probs(output: TeacherOutput, logits: Tensor) -> TeacherOutput:
    """The same rows and hidden states, other logits."""
    return TeacherOutput(logits.log_softmax(-1), output.tokens, output.rows, output.hidden)


@pytest.mark.parametrize("slope", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "variation"), [("int8", 0.02), ("float16", 1e-3)])
def test_the_distribution_is_rebuilt(
    dtype: str, variation: float, slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.codec.hidden.VOCABULARY_TILE", 128)
    output, resources = teacher_output((6, 20, 300), width=32)
    bias = torch.linspace(-slope, slope, 300)
    output = with_log_probs(output, output.log_probs + bias)
    noise = decode(make_codec("hidden", dtype=dtype), output, {**resources, "lm_head_bias": bias}, draw=1)
    distance = (probabilities(noise) - flat_log_probs(output).exp()).clamp(min=0).sum(1).mean()
    assert float(distance) < variation
    wins = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise)) == output.tokens.flatten()
    assert float(wins.float().mean()) > 1 - 4 * variation


def test_logits_that_the_head_does_not_give_are_refused() -> None:
    output, resources = teacher_output((6, 20, 20), width=16)
    wrong = with_log_probs(output, torch.tanh(output.log_probs / 3) * 3)
    with pytest.raises(GdistillError, match="posterior"):
        make_codec("hidden").encode(wrong, SEED, resources)
    with pytest.raises(GdistillError, match="does not fit"):
        make_codec("hidden").encode(output, SEED, {**resources, "lm_head": torch.ones(20, 8)})
    with pytest.raises(GdistillError, match="off by nan"):
        make_codec("hidden").encode(output, SEED, {**resources, "lm_head": resources["lm_head"] * math.nan})
    with pytest.raises(UsageError, match="hidden size"):
        make_codec("hidden").array_specs(20, None)
    with pytest.raises(UsageError, match="hidden states"):
        make_codec("hidden").encode(teacher_output()[0], SEED, resources)
    # One of the most probable tokens may be off by so many nats as rounding takes.
    best, codec = output.log_probs.argmax(-1, keepdim=True), make_codec("hidden", dtype="float16")
    near, far = (
        with_log_probs(output, output.log_probs.scatter_add(-1, best, torch.full(best.shape, nats)))
        for nats in (0.09, 0.11)
    )
    codec.encode(near, SEED, resources)
    with pytest.raises(GdistillError, match="off by"):
        codec.encode(far, SEED, resources)
    assert bool(codec._round(torch.tensor([[1e5]]))["hidden"].isinf()), "which no writer takes"
    states, (levels, scale) = output.hidden[0], make_codec("hidden")._round(output.hidden[0]).values()
    assert bool((levels.abs().amax(1) == 127).all())
    assert float(((levels * scale[:, None].float() - states) / scale[:, None]).abs().max()) <= 0.5001


# seeded: every entry within eps, few entries, the token still first.

TOLERANCES = [0.001, 0.01, 0.1, 0.5]


@pytest.mark.parametrize(
    ("tolerance", "vocab_size", "slots"),
    [*((eps, 300, 300) for eps in TOLERANCES), (0.003, 2000, 57), (0.01, 2000, 100), (0.3, 2000, 57)],
)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_every_entry_is_within_its_tolerance_and_the_token_first(
    tolerance: float, vocab_size: int, slots: int, spread: float
) -> None:
    """A position with more shifts than slots has a tolerance of its own."""
    output, resources = teacher_output((20, 40, vocab_size), spread=spread)
    codec = SeededCodec(tolerance, slots)
    arrays = codec.encode(output, SEED, resources)
    noise, level = decode(codec, output, resources, 5, arrays), arrays["coarsening"].flatten().long()
    assert tolerance > 0.2 or spread > 2 or bool(level.any()) == (slots < vocab_size)
    allowed = (tolerance * torch.exp2((level % 128).double())).clamp(max=0.5)
    gumbels = noise.gumbels().double()
    assert bool(((gumbels - exact_gumbels(output).double()).abs().amax(1) <= allowed).all())
    assert torch.equal((flat_log_probs(output) + gumbels).argmax(1), output.tokens.flatten())
    assert torch.equal(gumbel_argmax(flat_log_probs(output), dense_arrivals(noise)), output.tokens.flatten())


@pytest.mark.parametrize("tolerance", [0.01, 0.1])
def test_as_many_entries_are_stored_as_are_expected_to_move(tolerance: float) -> None:
    output, resources = teacher_output((60, 50, 500), spread=2.0)
    codec = SeededCodec(tolerance_nats=tolerance, max_entries=500)
    arrays = codec.encode(output, SEED, resources)
    stored = (from_planes("shift_gap", arrays, 500) > 0).sum(-1).flatten().double()
    probs = flat_log_probs(output).exp().double()
    own = of_tokens(probs, output)  # which is never stored
    expected = (probs / (probs + math.expm1(tolerance))).sum(1) - own / (own + math.expm1(tolerance))
    # Conditional on p the counts are independent.
    sigma = float((stored - expected).std()) / math.sqrt(len(stored))
    assert abs(float((stored - expected).mean())) < 4.5 * sigma + 2e-3 * float(expected.mean())


def test_the_default_slots_hold_every_distribution_and_too_few_are_refused() -> None:
    # Uniform is the worst case; of 4,000 positions one has E_0 near 8. Five times the expected
    # number of entries, 1 / (e^eps - 1), would overflow at about one position in 150.
    tolerance, vocab_size = 0.1, 2000
    codec = SeededCodec(tolerance_nats=tolerance)
    output, resources = teacher_output((40, 101, vocab_size), spread=0.0)
    arrays = codec.encode(output, SEED, resources)
    stored = (from_planes("shift_gap", arrays, vocab_size) > 0).sum(-1)
    assert int((stored > 5.2 / math.expm1(tolerance)).sum()) > 10
    assert int(arrays["coarsening"].max()) == 0
    slots = codec.array_specs(vocab_size, None)["shift_gap_byte0"].trailing_shape[0]
    assert int(stored.max()) < slots
    with pytest.raises(UsageError, match=r"max_entries.*57"):
        make_codec("seeded", max_entries=4).array_specs(300, None)
    assert make_codec("seeded", max_entries=4).array_specs(4, None)
    assert make_codec("seeded", max_entries=57).array_specs(300, None)


def stored_shifts(scale: ShiftScale, shifts: Tensor) -> Tensor:
    """Shifts in nats as they come back from their codes."""
    codes = _codes(shifts, scale.unit, scale.num_nearest)
    assert int(codes.max()) <= scale.max_code
    plain = torch.zeros(1, dtype=torch.uint8)
    return SeededCodec(scale.tolerance_nats)._shifts(codes[None], plain)[0]


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_shift_codes(tolerance: float) -> None:
    scale = ShiftScale(tolerance)
    shifts = torch.linspace(0, 25.9, 200_001, dtype=torch.float64)
    decoded = stored_shifts(scale, shifts)
    assert float((decoded - shifts).abs().max()) <= tolerance
    # Lowering a shift by d passes the token when d > -log(1 - e^-s).
    lowered = shifts - decoded
    assert bool((lowered <= -torch.log(-torch.expm1(-shifts)))[1:].all())
    # Above the nearest region a factor may not fall below the exact one, not by a rounding.
    multiples = torch.arange(2 * scale.num_nearest + 1, int(20 / scale.unit))
    exact = scale.unit * multiples.double()
    for shifts in (exact, exact * (1 - 1e-9), exact * (1 + 1e-9)):
        factors = stored_shifts(scale, shifts).exp().float()
        assert bool((factors.double() > shifts.exp() * (1 + 1e-7)).all())


@pytest.mark.parametrize("max_entries", [None, 1900])
def test_more_entries_than_the_slots_are_held_at_twice_the_tolerance(max_entries: int | None) -> None:
    """Shifts of 1.5 eps everywhere at one position of three: no distribution does that to V."""
    codec, vocab_size = SeededCodec(tolerance_nats=0.01, max_entries=max_entries), 2500
    num_slots = codec._num_slots(vocab_size)
    assert num_slots < vocab_size
    prior = torch.ones(3, vocab_size)
    waits = torch.full_like(prior, 1e-6)
    waits[1], waits[2, :num_slots] = math.expm1(0.015), math.expm1(0.015)  # the last just fits
    assert codec._coarsening(waits, prior).tolist() == [0, 1, 0]
    small = torch.ones(3, num_slots)
    assert codec._coarsening(waits[:, :num_slots], small).tolist() == [0, 0, 0]


# topk: training noise and sampling noise are cut alike, in O(k).


@pytest.mark.parametrize("kept", [1, 7, 90, 500])
def test_the_largest_entries_are_kept_and_the_others_weighed(kept: int) -> None:
    output, resources = teacher_output()
    noise = decode(TopKCodec(kept), output, resources)
    assert isinstance(noise, statistics.SparseNoise)
    exact = dense_arrivals(frozen_posterior(output, SEED))
    expected = statistics.keep_first(exact, min(kept, 90))
    assert torch.equal(noise.ids.sort(1).values, expected.ids.sort(1).values)
    cut = dense_arrivals(noise)
    assert bool((torch.isfinite(cut).sum(1) == min(kept, 90)).all())
    torch.testing.assert_close(cut[cut < torch.inf], exact[cut < torch.inf], rtol=1e-2, atol=0)
    shown, own = (of_tokens(arrivals, output) for arrivals in (cut, exact))
    torch.testing.assert_close(shown[shown < torch.inf], own[shown < torch.inf])
    total = exact.reciprocal().sum(1)
    known = torch.where(cut < torch.inf, exact.reciprocal(), 0).sum(1)
    torch.testing.assert_close(noise.rest_rate, total - known, rtol=1e-3, atol=1e-3)


def test_posterior_noise_cut_is_prior_noise_cut() -> None:
    """Tokens drawn from p: what training shows has the law of what sampling shows."""
    output, resources = teacher_output((100, 40, 60), spread=2.0)
    shown = decode(TopKCodec(8), output, resources)
    keys = PositionKeys(3, torch.arange(4000), torch.ones(4000, dtype=torch.int64))
    drawn = TopKCodec(8).prior(keys, 60).drawn
    assert isinstance(shown, statistics.SparseNoise)
    ranked = [shown.arrivals.sort(1).values, drawn.arrivals]
    for pair in ([shown.rest_rate, drawn.rest_rate], *([n[:, r] for n in ranked] for r in (0, 7))):
        assert ks_2samp(*(values.numpy() for values in pair)).pvalue > 1e-4
    assert chisquare(torch.bincount(shown.ids.flatten(), minlength=60).numpy()).pvalue > 1e-4


def test_the_token_is_known_apart_from_what_a_student_is_shown() -> None:
    """Also one so unlikely that its arrival time is no float32."""
    output, resources = teacher_output((1, 3, 90))
    output.log_probs[0, :, 7] = torch.tensor([-10.0, -95.0, -600.0])
    output = TeacherOutput(output.log_probs, torch.full((1, 3), 7), output.rows)
    noise = decode(make_codec("topk", num_entries=4), output, resources)
    whole = frozen_posterior(output, SEED).token_gumbels
    assert torch.equal(noise.gumbels()[:, 7], whole)
    assert torch.equal(noise.select(slice(1, 3)).gumbels(5, 9)[:, 2], whole[1:])
    shown = torch.isfinite(dense_arrivals(noise)).sum(1)
    assert shown.tolist() == [4, 4, 4] and bool((noise.gumbels() > -torch.inf).sum(1).le(5).all())
