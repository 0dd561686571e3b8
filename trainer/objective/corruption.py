"""Corruption and objective of masked diffusion: times, masks, loss weights, SUBS.

Everything is a pure function of given uniforms, which ``row_uniforms`` draws.
Symbols: t time in (0, 1], p masking probability, L row length, nb blocks per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import GdistillError, UsageError
from shards.noise.embedding import Noise
from shards.noise.gumbel import KeyedPosterior
from shards.noise.philox import PositionKeys, stream_bits
from shards.settings import derive_seed
from trainer.objective.batch import Batch, Places
from trainer.students.configuration import DiffusionSettings

OPEN_BOUND = 1e-3
"""A lower clip of 1e-3 (and an upper one of 1) is never enforced by resampling."""
MASK_LOGIT_OFFSET = -1e6
NUM_STREAMS = 100
ROUNDS_AT_ONCE = 16
"""Redraws between two questions whether any is left, on a GPU, whose answer the host waits for; one
too many changes nothing."""
MAX_ROUNDS = 10_000
FLOOR = 1e-3
"""Of the authors' schedules, where p or 1 - p would vanish."""
Clips = tuple[float, float]
"""Least and largest t."""
FULL: Clips = (1e-3, 1.0)


@dataclass(frozen=True)
class Schedule:
    """Masking probability p(t) and the weight p'(t) / p(t) of a masked token's NLL."""

    masking_probability: Callable[[Tensor], Tensor]
    loss_weight: Callable[[Tensor], Tensor]


def _power(exponent: float) -> Schedule:
    def probability(t: Tensor) -> Tensor:
        return t.pow(exponent).clamp_min(FLOOR)

    return Schedule(probability, lambda t: exponent * t.pow(exponent - 1) / probability(t))


def _cosine_probability(t: Tensor) -> Tensor:
    return 1 - (1 - FLOOR) * torch.cos(t * math.pi / 2)


def _cosine_weight(t: Tensor) -> Tensor:
    slope = (1 - FLOOR) * torch.sin(t * math.pi / 2) * math.pi / 2
    return slope / (_cosine_probability(t) + FLOOR)


def _log_probability(t: Tensor) -> Tensor:
    return torch.log1p(t) / math.log(2.0)


SCHEDULES: dict[str, Schedule] = {
    "loglinear": Schedule(lambda t: t, lambda t: 1 / t),
    "square": _power(2.0),
    "square_root": _power(0.5),
    "log": Schedule(_log_probability, lambda t: 1 / (_log_probability(t) * math.log(2.0) * (1 + t))),
    "cosine": Schedule(_cosine_probability, _cosine_weight),
}


def total_noise(t: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """sigma(t) = -log(1 - (1 - 1e-3) t), the older MDLM's loglinear noise."""
    return -torch.log1p(-(1 - FLOOR) * t)


def rate_noise(t: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """d sigma / dt."""
    return (1 - FLOOR) / (1 - (1 - FLOOR) * t)


RATE_SCHEDULE = Schedule(lambda t: -torch.expm1(-total_noise(t)), lambda t: rate_noise(t) / torch.expm1(total_noise(t)))
SIGMA_MAX = float(total_noise(torch.tensor(1.0)))


def masking_sigma(p: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """sigma = min(-log(1 - p), sigma_max), what a time-conditioned backbone is told.

    Not log1p: it differs from the authors' value by up to 1e-3 of sigma at small p, and a trained
    student should see the number that it was trained on.
    """
    return (-torch.log(1 - p)).clamp_max(SIGMA_MAX)


def law_of(settings: DiffusionSettings) -> Schedule:
    """p(t) and the weight of a masked token, as the settings name them."""
    return RATE_SCHEDULE if settings.loss_weighting == "rate" else SCHEDULES[settings.schedule]


def stratified_times(
    uniforms: Float[Tensor, "b blocks"],
    slots: Int[Tensor, "b"],
    global_batch_size: int,
    min_time: float,
    max_time: float,
    fully_masked_share: float = 0.0,
) -> Float[Tensor, "b blocks"]:
    """t = v (max - min) + min, v = (u/N + i/N) mod 1 with i = slot * nb + block, N = batch * nb.

    In float32 in the authors' order: near t = 1 sigma = -log(1 - p) shows every last bit of t.

    ``slots`` are the rows' indices in the *global* batch, so every rank gets its own strata. With a
    share of fully masked blocks v becomes 1 with that probability, else uniform on [0, 1].
    """
    num_blocks = uniforms.shape[1]
    block = torch.arange(num_blocks, device=uniforms.device)
    stratum = slots.to(uniforms.device)[:, None] * num_blocks + block
    num_strata = global_batch_size * num_blocks
    v = (uniforms / num_strata + stratum / num_strata) % 1
    rest = 1 - fully_masked_share
    v = torch.where(v < rest, (v / max(rest, 1e-12)).clamp_max(1), 1.0)
    return v * (max_time - min_time) + min_time


def draw_mask(
    uniforms: Callable[[int], Float[Tensor, "b l"]], probability: Float[Tensor, "b blocks"], bounds: Clips | None = None
) -> Bool[Tensor, "b l"]:
    """Masked positions: U <= p, blocks redrawn (U < p) until within ``bounds``, position 0 kept.

    Args:
        uniforms: Round number -> uniforms; round 0 is the first draw, each later round redraws.
        probability: p per block.
        bounds: (low, high) masked fraction, of which 1e-3 and 1 are open; None enforces nothing.
    """
    first, num_blocks = uniforms(0), probability.shape[1]
    block_size = first.shape[1] // num_blocks
    p = probability.repeat_interleave(block_size, dim=1)
    mask = first <= p
    if bounds is not None:
        require_reachable(bounds, block_size)
        low, high = _enforced(bounds)
        every = 1 if mask.device.type == "cpu" else ROUNDS_AT_ONCE
        for round_number in range(1, MAX_ROUNDS):
            fraction = mask.unflatten(1, (num_blocks, -1)).float().mean(dim=-1)
            outside = (fraction < low) | (fraction > high)
            if (low, high) == (0.0, 1.0) or (round_number % every == 0 and not bool(outside.any())):
                break
            again = outside.repeat_interleave(block_size, dim=1)
            mask = torch.where(again, uniforms(round_number) < p, mask)
        else:
            got, remedy = f"{MAX_ROUNDS} redraws within {bounds}", "widen min_time and max_time"
            raise GdistillError("no mask fits the clips", where="resample", got=got, remedy=remedy)
    mask[:, 0] = False
    return mask


def _enforced(bounds: Clips) -> Clips:
    """The masked fractions that redraws keep."""
    return bounds[0] if bounds[0] > OPEN_BOUND else 0.0, bounds[1]


def require_reachable(bounds: Clips, block_size: int) -> None:
    """Refuse (UsageError) clips that no number of masked tokens in a block can satisfy."""
    low, high = _enforced(bounds)
    if math.floor(high * block_size + 1e-9) < math.ceil(low * block_size - 1e-9):
        what = "no masked fraction of a block lies within the clips"
        got = f"{bounds} with blocks of {block_size}"
        remedy = "widen the clips or turn resample off"
        raise UsageError(what, where="min_time, max_time", got=got, remedy=remedy)


def masked_log_probs(logits: Float[Tensor, "*s v1"], mask_id: int) -> Float[Tensor, "*s v1"]:
    """Log-softmax in float32 of the logits of masked positions; the mask itself gets -1e6."""
    offset = torch.zeros(logits.shape[-1], device=logits.device)
    offset[mask_id : mask_id + 1].fill_(MASK_LOGIT_OFFSET)  # a number set by index is copied
    return torch.log_softmax(logits.float() + offset, dim=-1)


def row_uniforms(purpose: str, batch: Batch, stream: int, count: int) -> Float[Tensor, "b count"]:
    """Uniforms in (0, 1), float32, keyed by (purpose, stream, seed, epoch, row), whatever device and world size."""
    seed = derive_seed(batch.seed, purpose, stream // NUM_STREAMS)
    keys = PositionKeys(seed, batch.row_ids, torch.zeros_like(batch.row_ids), batch.epoch)
    bits = stream_bits(keys, stream % NUM_STREAMS, count)
    return ((bits.double() + 0.5) * 2.0**-32).float().clamp_max(1.0 - 2.0**-24)


@dataclass(frozen=True)
class Corruption:
    """What is hidden from the student in one batch.

    Attributes:
        t: [B, nb] times.
        mask: [B, L] True where masked.
        weight: [B, L] loss weight of each token.
        sigma: [B] noise level of the row's first block.
    """

    t: Float[Tensor, "b blocks"]
    mask: Bool[Tensor, "b l"]
    weight: Float[Tensor, "b l"]
    sigma: Float[Tensor, "b"]

    @cached_property
    def places(self) -> Places:
        """The masked places, counted once."""
        return Places.of(self.mask)


def corruption_from_uniforms(
    time_uniforms: Float[Tensor, "b blocks"],
    mask_uniforms: Callable[[int], Float[Tensor, "b l"]],
    slots: Int[Tensor, "b"],
    global_batch_size: int,
    settings: DiffusionSettings,
    bounds: Clips,
) -> Corruption:
    """Times, masks and weights from given uniforms; see ``stratified_times`` and ``draw_mask``."""
    law, share = law_of(settings), settings.fully_masked_share
    t = stratified_times(time_uniforms, slots, global_batch_size, *bounds, share)
    p = law.masking_probability(t)
    mask = draw_mask(mask_uniforms, p, bounds if settings.resample else None)
    weight = law.loss_weight(t) if bounds[0] <= 0.5 else torch.ones_like(t)
    if settings.max_loss_weight is not None:
        weight = weight.clamp_max(settings.max_loss_weight)
    weight = weight.repeat_interleave(mask.shape[1] // t.shape[1], dim=1)
    return Corruption(t, mask, weight, masking_sigma(p[:, 0]))


def corrupt(rows: Batch, settings: DiffusionSettings, num_blocks: int, bounds: Clips) -> Corruption:
    """Times and masks of a batch, a pure function of (seed, epoch, row ids, slots)."""
    times, length = row_uniforms("time", rows, 0, num_blocks), rows.tokens.shape[1]
    masks = partial(row_uniforms, "mask", rows, count=length)
    drawn = corruption_from_uniforms(times, masks, rows.slots, rows.global_batch_size, settings, bounds)
    return drawn if rows.counted is None else replace(drawn, mask=drawn.mask & rows.counted)


def partly_prior(noise: Noise, batch: Batch, places: Places, share: float) -> Noise:
    """The noise of n masked positions, prior noise at each with probability ``share``.

    Where rows are filled in any order, what is known behind a position was drawn before its own
    token was. In a corpus the two agree, for both follow from one text; in a sample they need not.
    A student that only ever saw noise that explains the text trusts it over what it reads; with
    some positions under prior noise it must ask how well the two agree.

    Which ones, is a function of (seed, epoch, row, position).
    """
    assert isinstance(noise, KeyedPosterior)  # a run on another store is not begun
    uniforms = row_uniforms("prior noise", batch, 0, batch.tokens.shape[1])
    return replace(noise, is_prior=places.read(uniforms.to(noise.device)) < share)
