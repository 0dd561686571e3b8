"""The noise kernel fused by torch.compile: the same numbers as the eager one, three times as fast.

It needs a C++ compiler (Triton on GPUs): 2.8 ns per variate and core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from shards.errors import GdistillError, first_line
from shards.noise.gumbel import exponential_from_bits
from shards.noise.philox import (
    MASK,
    MULTIPLIERS,
    PositionKeys,
    eager_exponentials,
    later_keys,
    shared_rounds,
)

LARGEST_ULPS = {"cpu": 0, "cuda": 2}
"""How far the kernels may differ, in units of the last place: results on a CPU are reproduced bit
for bit, and a GPU's compiler has a logarithm of its own."""


@no_type_check  # torch.compile cannot trace run-time checks of annotations
def keyed_words(
    r0: Tensor, r2: Tensor, r3: Tensor, s0: Tensor, s1: Tensor, s2: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bits of which the eager kernel makes variates, out of place, for the compiler to fuse."""
    c0, c1, c2, c3 = r0 ^ s0, s1, r2 ^ s2, r3
    for i in range(keys.shape[0]):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ keys[i, 0]) & MASK, ((p0 >> 32) ^ c3 ^ keys[i, 1]) & MASK
        c1, c3 = p1, p0
    return c0, c1 & MASK, c2, c3 & MASK


@no_type_check
def _by_lane(*arguments: Tensor) -> Tensor:
    """Variates lane by lane."""
    return torch.stack([exponential_from_bits(words) for words in keyed_words(*arguments)], dim=-1)


@no_type_check
def _all_lanes(*arguments: Tensor) -> Tensor:
    """Variates of all lanes together: 1.5 times as slow under AVX-512, but under AVX2 PyTorch 2.13
    compiles :func:`_by_lane` to code that gives other numbers, and this to code that does not."""
    return exponential_from_bits(torch.stack(keyed_words(*arguments), dim=-1))


@torch.no_grad()
def compiled_kernel(device: torch.device) -> Callable[..., Tensor]:
    """The first form of the kernel whose numbers are those of the eager one."""
    index = torch.arange(96, device=device)
    keys = PositionKeys(0x123456789ABCDEF, index, index + 1, 7)
    rows, columns = shared_rounds(keys, 0, 1000)
    expected = eager_exponentials(rows, columns, keys.seed)
    most, apart = LARGEST_ULPS.get(device.type, 0), []
    for form in (_by_lane, _all_lanes):
        kernel: Callable[..., Tensor] = torch.compile(form, dynamic=True, fullgraph=True)
        try:
            found = kernel(*rows, *columns, later_keys(keys.seed, index.device))
        except Exception as error:
            raise GdistillError(
                "cannot compile the noise kernel",
                got=first_line(error),
                remedy="install a C++ compiler, or choose the kernel eager",
            ) from error
        apart.append(_ulps_apart(found, expected))
        if apart[-1] <= most:
            return kernel
    raise GdistillError(
        "the compiled noise kernel gives other numbers",
        where=str(device),
        got=f"{min(apart)} units of the last place apart",
        expected=f"at most {most}",
        remedy="choose the kernel eager",
    )


def _ulps_apart(one: Float[Tensor, "*s"], other: Float[Tensor, "*s"]) -> int:
    """Largest distance of positive numbers in units of the last place."""
    distance = one.view(torch.int32).long() - other.view(torch.int32).long()
    return int(distance.abs().max())
