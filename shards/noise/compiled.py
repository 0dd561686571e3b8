"""The noise kernel fused by torch.compile: the same numbers as the eager one, three times as fast.

It needs a C++ compiler (Triton on GPUs): 2.8 ns per variate and core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from shards.errors import GdistillError, UsageError, first_line
from shards.noise.philox import (
    MASK,
    MULTIPLIERS,
    PositionKeys,
    compiled_kernels,
    eager,
    exponential_from_bits,
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
def compiled_kernel(arguments: Sequence[Tensor], expected: Float[Tensor, "n blocks 4"]) -> Callable[..., Tensor]:
    """The first form of the kernel whose numbers are those of the eager one."""
    most, apart = LARGEST_ULPS.get(expected.device.type, 0), []
    for form in (_by_lane, _all_lanes):
        kernel: Callable[..., Tensor] = torch.compile(form, dynamic=True, fullgraph=True)
        try:
            found = kernel(*arguments)
        except Exception as error:
            what, remedy = "cannot compile the noise kernel", "install a C++ compiler, or use eager"
            raise GdistillError(what, got=first_line(error), remedy=remedy) from error
        ours, theirs = (numbers.view(torch.int32).long() for numbers in (found, expected))
        apart.append(int((ours - theirs).abs().max()))  # in units of the last place
        if apart[-1] <= most:
            return kernel
    what, remedy = "the compiled noise kernel gives other numbers", "choose the kernel eager"
    where, got = expected.device, f"{min(apart)} units of the last place apart"
    raise GdistillError(what, where=where, got=got, expected=f"at most {most}", remedy=remedy)


def use_noise_kernel(kernel: str, device: torch.device | str = "cpu") -> str:
    """Choose this process's kernel for a kind of device; ``eager`` until told otherwise.

    ``compiled`` compiles at once (some seconds) and is compared with ``eager`` on the device: bit
    for bit on a CPU, within 2 units of the last place on a GPU. ``auto`` does so on CUDA, where the
    eager one is bound by memory traffic, and stays with ``eager`` elsewhere, or where it cannot be compiled.

    Returns:
        Why ``auto`` went without the compiled kernel on a CUDA device; else empty.

    Raises:
        UsageError: For an unknown name.
        GdistillError: If ``compiled`` cannot be compiled, or differs; the kernel is then unchanged.
    """
    if kernel not in ("auto", "eager", "compiled"):
        expected = "one of auto, eager, compiled"
        raise UsageError("unknown noise kernel", got=kernel, expected=expected)
    device = torch.device(device)
    if kernel == "eager" or (kernel == "auto" and device.type != "cuda"):
        compiled_kernels.pop(device.type, None)
        return ""
    try:
        compiled_kernels[device.type] = _compile(device)
    except GdistillError as error:
        if kernel == "compiled":
            raise
        compiled_kernels.pop(device.type, None)
        return str(error)
    return ""


def _compile(device: torch.device) -> Callable[..., Tensor]:
    index = torch.arange(96, device=device)
    keys = PositionKeys(0x123456789ABCDEF, index, index + 1, 7)
    rows, columns = shared_rounds(keys, 0, 1000)
    arguments = (*rows, *columns, later_keys(keys.seed, index.device))
    return compiled_kernel(arguments, eager(rows, columns, keys.seed))


def noise_kernel(device: torch.device | str = "cpu") -> str:
    """The kernel in use on a kind of device, ``eager`` or ``compiled``."""
    return "compiled" if torch.device(device).type in compiled_kernels else "eager"
