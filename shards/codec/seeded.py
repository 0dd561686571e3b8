"""``seeded``: one frozen draw, as the entries that differ from what the generator gives anyway.

The posterior is F_j = E_j + p_j E_0, and both E_j and E_0 come from the counter-based generator.
Only the shift s_j = log(F_j / E_j) of each entry is news, and it is below eps for all but a few
entries: E[number above] = sum_j p_j / (p_j + e^eps - 1) <= 1 / (e^eps - 1), whatever V is.
Shifts are stored to within eps; entries whose shift rounds to nothing are not stored.

The token stays the argmax of log p + xi. A lowered F_j passes the token only if it falls below
p_j E_0, that is by more than -log(1 - e^-s); up to the shift where that is eps, rounding to the
nearest multiple of 2 eps is safe, and above it shifts are rounded up to multiples of eps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from shards.codec.full import encode_draw
from shards.codec.ids import FrequencyOrder, check_ranks, cut_slots, from_planes, plane_specs, to_planes, used_width
from shards.codec.protocol import Arrays, ArraySpec, Codec, LogProbs, TeacherOutput, Tokens
from shards.errors import GdistillError, UsageError
from shards.noise.gumbel import Entries, KeyedPosterior, KeyedPrior, TokenNoise, add_wait_, token_gumbels
from shards.noise.murmur3 import EngineKeys
from shards.noise.philox import PositionKeys
from shards.settings import check_bounds, setting

LARGEST_EXPONENTIAL = 16.7
LARGEST_SHIFT_NATS = 26.0
"""log(E_0 / E_j) with E_0 <= 16.7 and E_j >= 1.2e-10."""
LARGEST_TOLERANCE_NATS = 0.5
"""Beyond log 2 a shift left out could make another token the argmax."""
COARSENED = 128
"""A position's ``coarsening`` is 0, or COARSENED + c: its shifts have a tolerance of their own,
min(eps 2^c, 0.5). Older stores have c itself, for codes of the tolerance eps times 2^c."""


@dataclass(frozen=True)
class ShiftedNoise(TokenNoise):
    """Prior noise of the keys with some arrival times multiplied: F_j = E_j * factor_j.

    Attributes:
        keys: Seed, rows, positions and draw.
        tokens: [n] int64, the observed tokens; F_x = p_x E_0.
        token_log_probs: [n] float32, nats.
        factors: The entries that moved.
        vocab_size: V.
    """

    keys: PositionKeys | EngineKeys
    tokens: Int[Tensor, "n"]
    token_log_probs: Float[Tensor, "n"]
    factors: Entries
    vocab_size: int

    @cached_property
    def token_gumbels(self) -> Float[Tensor, "n"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """xi_x = -log E_0 - log p_x."""
        return token_gumbels(self.token_log_probs, self.keys.first_arrivals())

    def other_arrivals(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        arrivals = self.keys.exponentials(start, stop)
        rows, columns, factors = self.factors.in_tile(start, stop)
        arrivals[rows, columns] *= factors
        return arrivals


@dataclass(frozen=True)
class ShiftScale:
    """Shifts <-> codes at a tolerance; code 0 stands for shifts that are not stored."""

    tolerance_nats: float

    @property
    def unit(self) -> float:
        """The tolerance, less what float32 arithmetic may add to an error."""
        return self.tolerance_nats * (1 - 2.0**-10)

    @property
    def num_nearest(self) -> int:
        """Codes up to here are multiples of 2 units, rounded to the nearest."""
        return int(-math.log(-math.expm1(-self.tolerance_nats)) / (2 * self.unit))

    @property
    def max_code(self) -> int:
        return self.num_nearest + math.ceil(LARGEST_SHIFT_NATS / self.unit)


@dataclass(frozen=True)
class SeededCodec(Codec):
    """Arrays: ``shift_gap`` [M] in byte planes, frequency rank less that of the stored entry before
    (the first plus 1), 0 where unused; ``shift_code`` [M] in byte planes; ``coarsening`` uint8.

    Given E_0 the number of shifts above eps is a sum of independent events with a mean of at most E_0 / (e^eps - 1),
    and the generator gives no E_0 above 16.7: the default M is that mean plus six standard deviations, which no
    distribution fills. Unused slots cost next to nothing once compressed. Where ``max_entries`` is set lower, a
    position with more shifts than slots is stored at the least tolerance eps * 2^c that fits, up to 0.5: its error may
    pass eps, and its token stays the argmax.

    Attributes:
        tolerance_nats: eps, the largest error of any xi where ``coarsening`` is 0.
        max_entries: M, at least 57; None for as many as any distribution takes, at most V.
    """

    tolerance_nats: float = setting(0.01, within="[0.001, 0.5]")
    max_entries: int | None = setting(None, within="[1, inf)")

    name: ClassVar[str] = "seeded"

    def __post_init__(self) -> None:
        check_bounds(self, "codec")

    @property
    def _scale(self) -> ShiftScale:
        return ShiftScale(self.tolerance_nats)

    @property
    def _scales(self) -> list[ShiftScale]:
        """The scale of every coarsening c = 0, 1, ..."""
        num = max(0, math.ceil(math.log2(LARGEST_TOLERANCE_NATS / self.tolerance_nats)))
        tolerances = [self.tolerance_nats * 2**c for c in range(num + 1)]
        return [ShiftScale(min(tolerance, LARGEST_TOLERANCE_NATS)) for tolerance in tolerances]

    def _num_slots(self, vocab_size: int) -> int:
        return min(self.max_entries or _slots_for(self.tolerance_nats), vocab_size)

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        least = min(vocab_size, _slots_for(LARGEST_TOLERANCE_NATS))
        num = self._num_slots(vocab_size)
        if num < least:
            what, expected = "too few entries to keep every token the argmax", f">= {least}"
            where = "codec.max_entries"
            raise UsageError(what, where=where, got=self.max_entries, expected=expected)
        return {
            **plane_specs("shift_gap", vocab_size, (num,)),
            **plane_specs("shift_code", self._scale.max_code, (num,)),
            "coarsening": ArraySpec("uint8"),
        }

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        order = FrequencyOrder.of(resources["unigram_log_probs"])
        return encode_draw(output, seed, lambda noise: self._encode(noise, order))

    def _encode(self, noise: KeyedPosterior, order: FrequencyOrder) -> dict[str, Tensor]:
        vocab_size = noise.vocab_size
        prior = KeyedPrior(noise.keys, vocab_size).tile(0, vocab_size)
        waits = noise.probabilities.tile(0, vocab_size) * noise.first[:, None]
        waits.scatter_(1, noise.tokens[:, None], 0.0)
        coarsening = self._coarsening(waits, prior)
        moved = self._moved(waits, prior, coarsening)
        # The moved entries by row, then by rising frequency rank.
        rows, ids = moved.nonzero(as_tuple=True)
        by_rank = (rows * vocab_size + order.rank_of_id[ids]).argsort()
        rows, ids = rows[by_rank], ids[by_rank]
        counts, ranks = moved.sum(1), order.rank_of_id[ids]
        slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        gaps = ranks - torch.where(slots > 0, ranks.roll(1), -1)  # 1 + rank in slot 0
        ratios = waits[rows, ids] / prior[rows, ids]
        shifts = add_wait_(torch.ones_like(ratios), ratios).double().log()
        level = _level(coarsening)
        scales = _scale_table(self.tolerance_nats, rows.device)
        codes = _codes(shifts, *(numbers[level[rows]] for numbers in scales)).clamp(min=1)
        shape = (len(moved), self._num_slots(vocab_size))

        def table(values: Int[Tensor, "k"]) -> Int[Tensor, "n m"]:
            empty = torch.zeros(shape, dtype=torch.int64, device=rows.device)
            return empty.index_put_((rows, slots), values)

        return {
            **to_planes("shift_gap", table(gaps), vocab_size),
            **to_planes("shift_code", table(codes), self._scale.max_code),
            "coarsening": level.to(torch.uint8),
        }

    def _moved(
        self, waits: Float[Tensor, "n v"], prior: Float[Tensor, "n v"], coarsening: Int[Tensor, "n"]
    ) -> Bool[Tensor, "n v"]:
        """log(1 + p_j E_0 / E_j) > the unit of the position's scale."""
        units, _ = _scale_table(self.tolerance_nats, waits.device)
        least = torch.expm1(units[_level(coarsening)]).float()
        return waits > prior * least[:, None]

    def _coarsening(self, waits: Float[Tensor, "n v"], prior: Float[Tensor, "n v"]) -> Int[Tensor, "n"]:
        """The least c at which the moved entries fit."""
        coarsening = torch.zeros(len(waits), dtype=torch.int64, device=waits.device)
        num_slots, vocab_size = self._num_slots(waits.shape[1]), waits.shape[1]
        if num_slots == vocab_size:
            return coarsening
        if num_slots >= _slots_for(self.tolerance_nats):
            # No distribution fills them, let alone at twice the tolerance: no need to wait for a
            # GPU's word that none did.
            return (self._moved(waits, prior, coarsening).sum(1) > num_slots).long()
        for _ in self._scales:
            excess = self._moved(waits, prior, coarsening).sum(1) > num_slots
            if not bool(excess.any()):
                return coarsening
            coarsening += excess
        what, got = "more entries moved than the codec has slots for", f"{num_slots} slots"
        # Six standard deviations at the largest E_0: never seen.
        raise GdistillError(what, where="codec seeded", got=got, remedy="leave max_entries out")

    def _shifts(self, codes: Int[Tensor, "n m"], coarsening: UInt8[Tensor, "n"]) -> Float[Tensor, "n m"]:
        """Shifts in nats (float64)."""
        units, nearest = _scale_table(self.tolerance_nats, codes.device)
        level = coarsening.long()
        doubled = codes.minimum(nearest[level][:, None])
        return units[level][:, None] * (codes + doubled).double()

    def cut(self, arrays: Arrays) -> Arrays:
        return cut_slots(arrays, "shift_gap", "shift_code")

    def check_ids(self, arrays: Mapping[str, np.ndarray], vocab_size: int) -> str:
        return check_ranks("shift_gap", arrays, vocab_size, are_gaps=True)

    def decode(
        self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, keys: PositionKeys, resources: Arrays
    ) -> ShiftedNoise:
        order = FrequencyOrder.of(resources["unigram_log_probs"])
        vocab_size = len(order.id_of_rank)
        gaps = from_planes("shift_gap", arrays, vocab_size)
        used = gaps > 0
        width = used_width(used)
        used, gaps = used[:, :width], gaps[:, :width]
        codes = from_planes("shift_code", arrays, self._scale.max_code)[:, :width]
        factors = self._shifts(codes, arrays["coarsening"]).exp().float()
        ids = order.id_of_rank[(gaps.cumsum(1) - 1).clamp(min=0)]
        frozen = PositionKeys(keys.seed, keys.rows, keys.positions)
        entries = Entries(ids, factors, used, vocab_size)
        return ShiftedNoise(frozen, tokens, log_p, entries, vocab_size)


@lru_cache(maxsize=8)
def _scale_table(tolerance_nats: float, device: torch.device) -> tuple[Float[Tensor, "256"], Int[Tensor, "256"]]:
    """(unit, ``num_nearest``) of every value that ``coarsening`` can have."""
    codec = SeededCodec(tolerance_nats)
    scales = [codec._scale] * COARSENED + codec._scales
    scales += scales[-1:] * (256 - len(scales))
    factors = [2.0 ** (level % COARSENED) if level < COARSENED else 1.0 for level in range(256)]
    units = [scale.unit * factor for scale, factor in zip(scales, factors, strict=True)]
    nearest = [scale.num_nearest for scale in scales]
    return torch.tensor(units, dtype=torch.float64, device=device), torch.tensor(nearest, device=device)


def _level(coarsening: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """How a coarsening c is stored."""
    return torch.where(coarsening > 0, coarsening + COARSENED, 0)


def _codes(shifts: Float[Tensor, "k"], unit: float | Tensor, num_nearest: int | Tensor) -> Int[Tensor, "k"]:
    """Codes of shifts in nats (float64)."""
    nearest = (shifts / (2 * unit)).round()
    above = shifts / unit - 2 * num_nearest
    upward = num_nearest + (above + 2.0**-12).ceil()
    return torch.where(above > 0, upward, nearest).long()


def _slots_for(tolerance_nats: float) -> int:
    """As many entries as any distribution moves by more than a tolerance."""
    most = LARGEST_EXPONENTIAL / math.expm1(tolerance_nats)
    return math.ceil(most + 6 * math.sqrt(most))
