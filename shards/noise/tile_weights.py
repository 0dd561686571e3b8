"""Softmax weights of a tile of noise in one kernel: the last wait, clamp, reciprocal, sum and cast.

One operation after the other, they read and write a tile six times over. Here the arrival times
are read once, and what the matrix product reads is written once. The few entries of a tile that
are no E_j + a_i b_j the kernel tells by their sign, and the token's by its id.

The eager path of :mod:`shards.noise.embedding` stays the reference. Each form of the kernel (a
precision, a tau of 1 or not) is tried before its first use on a kind of device; where it cannot be
compiled, or gives other numbers, one line says so and the eager path goes on. A CPU, whose results
are reproduced bit for bit, always takes the eager path: the kernel sums in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.errors import first_line
from shards.noise.keyed_race import Kernel, TriedKernels
from shards.noise.philox import noise_kernel, ordinary

LARGEST_LOG_RATE = 80.0
"""Rates F^-tau are capped at e^80, so that sums of them stay finite in float32 (and in bf16)."""
FUSED_ON = ("cuda",)
LARGEST_ULPS = 16
"""F is rounded once less where a product is added in one instruction (1 unit), reciprocals and
powers of GPUs are within 2 and 4 units, tau multiplies what came before: 8 at tau 1.3, doubled."""
TRIAL_POSITIONS, TRIAL_WIDTH = 96, 1000

KERNELS = TriedKernels("conditioner")


@dataclass(frozen=True)
class OpenTile:
    """Arrival times F of n positions and some vocabulary ids, not yet put together.

    F = E + a_i b_j where E is positive, -E where it is negative, and the token's own where a
    position has one. E may be overwritten.

    Attributes:
        arrivals: E.
        waits: a, one per position, and b, one per id of the vocabulary; None is 0.
        tokens: The tokens and their own F; None where no entry is known apart.
    """

    arrivals: Float[Tensor, "n tile"]
    waits: tuple[Float[Tensor, "n"], Float[Tensor, "v"]] | None = None
    tokens: tuple[Int[Tensor, "n"], Float[Tensor, "n"]] | None = None


def least_arrival(tau: float) -> float:
    """The arrival time at which rates are capped."""
    return math.exp(-LARGEST_LOG_RATE / max(tau, 1.0))


def fused_weights(
    kernel: Kernel,
    tile: OpenTile,
    ids: slice,
    vocab_size: int,
    tau: float,
    prior: Float[Tensor, "v"] | None,
) -> tuple[Float[Tensor, "n tile"], Float[Tensor, "n 1"]]:
    """F^-tau q of a tile, cast as :func:`fused_kernel` was told, and its float32 sums."""
    device, num = tile.arrivals.device, len(tile.arrivals)

    def neutral(*names: str) -> tuple[Tensor, ...]:
        sizes = {"columns": vocab_size, "prior": vocab_size}
        return tuple(_filled(name, sizes.get(name, num), device) for name in names)

    given = [
        # Neither with gaps (the last tile alone) nor a view: both would be compiled apart.
        tile.arrivals.contiguous().data,
        *(tile.waits or neutral("rows", "columns")),
        *(tile.tokens or neutral("tokens", "own")),
        _ids(ids.start, ids.stop, device),
        *(neutral("prior") if prior is None else [prior]),
        *_scalars(tau, device),
    ]
    # Noise has no gradients; under one mode there is one compiled kernel for all callers.
    with torch.inference_mode(False), torch.no_grad():
        return kernel(*ordinary(given))


def fused_kernel(device: torch.device, dtype: torch.dtype, tau: float) -> Kernel | None:
    """The kernel, if one is in use; the first question about a form of it compiles and tries it."""
    if device.type not in FUSED_ON or noise_kernel(device) == "eager":
        return None
    return KERNELS.find(device, (dtype, tau == 1.0), partial(_trial, device, dtype, tau))


def conditioner_kernel(device: torch.device | str) -> str:
    """What has run on a kind of device so far: ``fused``, or ``eager`` if any of it could not."""
    return "fused" if KERNELS.all_run(device) else "eager"


NEUTRAL = {"rows": 0.0, "columns": 0.0, "tokens": -1, "own": 0.0, "prior": 1.0}


@lru_cache(maxsize=512)
def _filled(name: str, size: int, device: torch.device) -> Tensor:
    """What changes nothing; a tensor for each name, since equal arguments would be compiled in."""
    with torch.inference_mode(False):
        return torch.full((size,), NEUTRAL[name], device=device)


@lru_cache(maxsize=128)
def _ids(start: int, stop: int, device: torch.device) -> Int[Tensor, "tile"]:
    with torch.inference_mode(False):
        return torch.arange(start, stop, device=device)


@lru_cache(maxsize=16)
def _scalars(tau: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept on the device: as Python numbers they would be compiled in, one graph for each."""
    with torch.inference_mode(False):
        least, power = torch.tensor([least_arrival(tau), -tau], device=device)
    return least, power


def _form(dtype: torch.dtype, is_reciprocal: bool) -> Kernel:
    """What is compiled for one precision, at tau 1 or any other."""

    @no_type_check  # torch.compile cannot trace run-time checks of annotations
    def weights(arrivals, rows, columns, tokens, own, ids, prior, least, power):
        waited = torch.where(arrivals < 0, -arrivals, arrivals + rows[:, None] * columns[ids])
        waited = torch.where(tokens[:, None] == ids, own[:, None], waited)
        waited = torch.maximum(waited, least)
        rates = waited.reciprocal() if is_reciprocal else waited.pow(power)
        rates = rates * prior[ids]
        return rates.to(dtype), rates.sum(dim=-1, keepdim=True)

    return weights


def _trial(device: torch.device, dtype: torch.dtype, tau: float) -> tuple[Kernel | None, str]:
    """The compiled form, or why not."""
    form = _form(dtype, tau == 1.0)
    with torch.inference_mode(False), torch.no_grad():
        given = _trial_inputs(device, tau)
        try:
            # No two sizes are alike: then one graph serves tiles of every shape.
            kernel: Kernel = torch.compile(form, dynamic=True, fullgraph=True)
            found = kernel(*given)
        except Exception as error:
            return None, f"cannot compile the kernel of the softmax weights: {first_line(error)}"
        wrong = _difference(found, form(*given))
    return (None, wrong) if wrong else (kernel, "")


def _trial_inputs(device: torch.device, tau: float) -> list[Tensor]:
    """A tile with every kind of entry: waiting, known (negative), the token's, cut off, capped."""
    num, width, size = TRIAL_POSITIONS, TRIAL_WIDTH, 4096
    steps = torch.arange(num * width, device=device).view(num, -1)
    arrivals = -torch.log1p(-((steps * 7919 % 10007).float() + 0.5) / 10008)
    arrivals[:, ::7] *= -1
    arrivals[:, 5], arrivals[:, 6] = torch.inf, 1e-38
    rows, columns = (torch.arange(n, device=device) / n for n in (num, size))
    ids = torch.arange(2048, 2048 + width, device=device)
    tokens = torch.arange(num, device=device) * 50  # some inside
    given = [arrivals, rows, columns, tokens, rows + 0.25, ids, columns + 0.5]
    return [*given, *_scalars(tau, device)]


def _difference(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str:
    """What is wrong with a compiled form's numbers; empty if nothing is.

    Weights may differ by their rounding, and one unit more once they are cast; a sum of w numbers
    by w roundings.
    """
    narrow = expected[0].dtype != torch.float32
    integers = torch.int16 if narrow else torch.int32
    distance = found[0].view(integers).long() - expected[0].view(integers).long()
    ulps, most = int(distance.abs().max()), 1 if narrow else LARGEST_ULPS
    if ulps > most:
        return f"its weights are {ulps} units of the last place apart, at most {most} expected"
    bound = (expected[0].shape[1] + LARGEST_ULPS) * torch.finfo(torch.float32).eps
    apart = float(((found[1] - expected[1]).abs() / expected[1]).max())
    return "" if apart <= bound else f"its sums are {apart:.2g} apart, at most {bound:.2g} expected"
