"""``seeded``: every entry within eps, few entries, the token still first."""

from __future__ import annotations

import math

import pytest
import torch

from shards.codec.full import frozen_posterior
from shards.codec.ids import from_planes
from shards.codec.registry import make_codec
from shards.codec.seeded import SeededCodec, ShiftedNoise, ShiftScale, _codes
from shards.errors import UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import dense_arrivals
from tests.shards.codec_cases import SEED, decode, flat_log_probs, teacher_output


@pytest.mark.parametrize("tolerance", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_every_entry_is_within_the_tolerance(tolerance: float, spread: float) -> None:
    output, resources = teacher_output(20, 30, 300, spread=spread)
    codec = SeededCodec(tolerance_nats=tolerance, max_entries=300)
    noise = decode(codec, output, resources, draw=5)
    decoded = noise.gumbels().double()
    exact = frozen_posterior(output, SEED).gumbels().double()
    assert float((decoded - exact).abs().max()) <= tolerance
    chosen = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise))
    assert torch.equal(chosen, output.tokens.flatten())


@pytest.mark.parametrize("tolerance", [0.01, 0.1])
def test_number_of_entries_is_at_or_below_its_bound(tolerance: float) -> None:
    output, resources = teacher_output(60, 50, 500, spread=2.0)
    codec = SeededCodec(tolerance_nats=tolerance, max_entries=500)
    arrays = codec.encode(output, SEED, resources)
    stored = (from_planes("shift_gap", arrays, 500) > 0).sum(-1).flatten().double()
    probs = flat_log_probs(output).exp().double()
    bound = (probs / (probs + math.expm1(tolerance))).sum(1)
    assert bool((bound <= 1 / math.expm1(tolerance)).all())
    # Conditional on p the counts are independent: the mean may exceed its expectation by chance.
    sigma = float((stored - bound).std()) / math.sqrt(len(stored))
    assert float(stored.mean()) <= float(bound.mean()) + 3 * sigma
    # The bound is tight but for the token's own entry, which is never stored.
    own = probs.gather(1, output.tokens.flatten()[:, None]).squeeze(1)
    expected = bound - own / (own + math.expm1(tolerance))
    assert abs(float((stored - expected).mean())) < 4.5 * sigma + 2e-3 * float(expected.mean())


@pytest.mark.parametrize(("tolerance", "least"), [(0.003, 57), (0.01, 100), (0.3, 57)])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_coarsened_positions_keep_the_token_first(
    tolerance: float, least: int, spread: float
) -> None:
    output, resources = teacher_output(20, 60, 2000, spread=spread)
    codec = SeededCodec(tolerance_nats=tolerance, max_entries=least)
    arrays = codec.encode(output, SEED, resources)
    noise = decode(codec, output, resources, arrays=arrays)
    level = arrays["coarsening"].flatten().long()
    assert tolerance > 0.2 or bool((level > 0).any())
    allowed = (tolerance * torch.exp2((level % 128).double())).clamp(max=0.5)
    exact = frozen_posterior(output, SEED).gumbels().double()
    assert bool(((noise.gumbels().double() - exact).abs().amax(1) <= allowed).all())
    chosen = (flat_log_probs(output).double() + noise.gumbels().double()).argmax(1)
    assert torch.equal(chosen, output.tokens.flatten())


def test_positions_coarsened_by_an_older_version_are_read() -> None:
    """There a code stood for 2^c times the shift that it stands for at eps."""
    output, resources = teacher_output(4, 10, 300, spread=1.0)
    codec = SeededCodec(tolerance_nats=0.01)
    arrays = codec.encode(output, SEED, resources)
    plain = decode(codec, output, resources, arrays=arrays)
    arrays["coarsening"] = torch.full_like(arrays["coarsening"], 2)
    older = decode(codec, output, resources, arrays=arrays)
    assert isinstance(plain, ShiftedNoise) and isinstance(older, ShiftedNoise)
    used = plain.factors.used
    shifts, theirs = (n.factors.values[used].log() for n in (plain, older))
    torch.testing.assert_close(theirs[shifts < 5], 4 * shifts[shifts < 5], rtol=1e-5, atol=1e-5)


def test_the_default_slots_hold_every_distribution() -> None:
    # Uniform is the worst case; of 4,000 positions one has E_0 near 8. Five times the expected
    # number of entries, 1 / (e^eps - 1), would overflow at about one position in 150.
    tolerance, vocab_size = 0.1, 4000
    codec = SeededCodec(tolerance_nats=tolerance)
    output, resources = teacher_output(40, 101, vocab_size, spread=0.0)
    arrays = codec.encode(output, SEED, resources)
    stored = (from_planes("shift_gap", arrays, vocab_size) > 0).sum(-1)
    assert int((stored > 5.2 / math.expm1(tolerance)).sum()) > 10
    assert int(arrays["coarsening"].max()) == 0
    assert (
        int(stored.max()) < codec.array_specs(vocab_size, None)["shift_gap_byte0"].trailing_shape[0]
    )


def stored_shifts(scale: ShiftScale, shifts: torch.Tensor) -> torch.Tensor:
    """Shifts in nats as they come back from their codes."""
    codes = _codes(shifts, scale.unit, scale.num_nearest, scale.max_code)
    plain = torch.zeros(1, dtype=torch.uint8)
    return SeededCodec(scale.tolerance_nats)._shifts(codes[None], plain)[0]


@pytest.mark.parametrize("tolerance", [0.001, 0.01, 0.1, 0.5])
def test_shift_codes(tolerance: float) -> None:
    scale = ShiftScale(tolerance)
    shifts = torch.linspace(0, 25.9, 200_001, dtype=torch.float64)
    decoded = stored_shifts(scale, shifts)
    assert float((decoded - shifts).abs().max()) <= tolerance
    # Lowering a shift by d passes the token when d > -log(1 - e^-s).
    lowered = shifts - decoded
    assert bool((lowered <= -torch.log(-torch.expm1(-shifts)))[1:].all())


def test_slots_too_few_for_any_tolerance_are_refused() -> None:
    with pytest.raises(UsageError, match=r"max_entries.*57"):
        make_codec("seeded", max_entries=4).array_specs(300, None)
    assert make_codec("seeded", max_entries=4).array_specs(4, None)


@pytest.mark.parametrize("tolerance", [0.001, 0.01, 0.1, 0.5])
def test_shifts_rounded_up_stay_up_in_float32(tolerance: float) -> None:
    """Above the nearest region a factor may not fall below the exact one, not by a rounding."""
    scale = ShiftScale(tolerance)
    multiples = torch.arange(2 * scale.num_nearest + 1, int(20 / scale.unit))
    exact = scale.unit * multiples.double()
    for shifts in (exact, exact * (1 - 1e-9), exact * (1 + 1e-9)):
        factors = stored_shifts(scale, shifts).exp().float()
        assert bool((factors.double() > shifts.exp() * (1 + 1e-7)).all())


@pytest.mark.parametrize("max_entries", [None, 1900])
def test_more_entries_than_the_default_slots_are_held_at_twice_the_tolerance(
    max_entries: int | None,
) -> None:
    """Shifts of 1.5 eps everywhere at one position of three: no distribution does that to V."""
    codec, vocab_size = SeededCodec(tolerance_nats=0.01, max_entries=max_entries), 2500
    num_slots = codec._num_slots(vocab_size)
    assert num_slots < vocab_size
    prior = torch.ones(3, vocab_size)
    waits = torch.full_like(prior, 1e-6)
    waits[1] = math.expm1(0.015)
    assert codec._coarsening(waits, prior).tolist() == [0, 1, 0]
    small = torch.ones(3, num_slots)
    assert codec._coarsening(waits[:, :num_slots], small).tolist() == [0, 0, 0]
