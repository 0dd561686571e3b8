"""Philox4x32-10: random bits as a pure function of (seed, row, position, vocabulary id, draw).

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One
call turns a counter of four 32-bit words and a key of two into four 32-bit words. There is no
state: the noise of any token is found again on any machine, in any order, in any tile.

A token position and a vocabulary id j name the counter

    (j // 4,  position + 2^20 * (row >> 32),  row mod 2^32,  draw mod 2^32)      lane j mod 4

and the seed names the key (low word, high word). Rows go up to 2^44 and positions up to 2^20.
Blocks from 2^31 on are no vocabulary ids; they are streams for other draws at the same position.

Words are kept in int64 tensors, since torch has no 32-bit unsigned product. The product of two
words wraps in int64; its low 64 bits are right, and so are both halves once masked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar, cast, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import GdistillError, UsageError, first_line

Index = Int[Tensor, "m"] | Bool[Tensor, "n"] | slice
"""Which of n positions: their places, a mask, or a range."""
This = TypeVar("This", bound="OfPositions")
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
POSITION_BITS = 20
STREAM_BLOCK, STREAM_STRIDE = 1 << 31, 1 << 24
"""Stream s owns the blocks STREAM_BLOCK + s * STREAM_STRIDE onwards."""
RACE_EPS = 1e-10

Words = tuple[Tensor, Tensor, Tensor, Tensor]
WordList = list[Tensor]


class OfPositions(ABC):
    """A frozen dataclass whose tensors have one entry, or row, for each of n positions.

    Fields that have ``select`` and ``to`` of their own are asked; numbers and functions stay, and so
    do the fields ``of_vocabulary``.
    """

    of_vocabulary: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """n."""

    def select(self: This, index: Index) -> This:
        """The same of some of the positions."""
        return self._changed(
            lambda value: value[index] if isinstance(value, Tensor) else value.select(index), but=self.of_vocabulary
        )

    def to(self: This, device: torch.device | str) -> This:
        """The same on another device."""
        return self._changed(lambda value: value.to(device))

    def split(self: This, width: int) -> list[This]:
        """The same of ``width`` consecutive positions at a time; there is always one part."""
        num_parts = max(1, -(-self.num_positions // width))
        parts: list[dict[str, Any]] = [{} for _ in range(num_parts)]

        def split(value: Any) -> Any:
            if isinstance(value, tuple):
                return zip(*map(split, value), strict=True)
            return value.split(width) if hasattr(value, "split") else [value] * num_parts

        for name in self._names(but=self.of_vocabulary):
            for part, value in zip(parts, split(getattr(self, name)), strict=True):
                part[name] = value
        return [replace(cast(Any, self), **part) for part in parts]

    def _names(self, but: tuple[str, ...] = ()) -> list[str]:
        return [field.name for field in fields(cast(Any, self)) if field.name not in but]

    def _changed(self: This, change: Callable[[Any], Any], but: tuple[str, ...] = ()) -> This:
        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            return change(value) if hasattr(value, "to") else value

        return replace(cast(Any, self), **{name: changed(getattr(self, name)) for name in self._names(but)})


@dataclass(frozen=True)
class PositionKeys(OfPositions):
    """Names n token positions for the counter-based generator.

    Attributes:
        seed: 63-bit stream seed (see :func:`shards.settings.derive_seed`).
        rows: Row index in the split, or sample index when sampling; [n] int64, below 2^44.
        positions: Token position in the row; [n] int64, below 2^20.
        draw: Which draw of the same position: 0 for a frozen draw, else the visit (epoch).
    """

    seed: int
    rows: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]
    draw: int = 0

    @property
    def num_positions(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def row_rounds(self) -> list[Int[Tensor, "n 1"]]:
        """What the first two rounds make of the positions alone: r0, r2, r3 (24 bytes each)."""
        (k0, _), (next_k0, _) = round_keys(self.seed)[:2]
        c1, c2, _ = position_words(self)
        row = c2 * MULTIPLIERS[1]
        c0, c1 = ((row >> 32) ^ c1 ^ k0) & MASK, row & MASK
        row = c0 * MULTIPLIERS[0]
        return [c1 ^ next_k0, (row >> 32) & MASK, row]

    def redrawn(self, draw: int) -> PositionKeys:
        """The same positions, ``draw`` draws further on."""
        return replace(self, draw=self.draw + draw)

    def exponentials(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """E_j, Exp(1), of vocabulary ids start..stop-1."""
        return keyed_exponentials(self, start, stop)

    def first_arrivals(self) -> Float[Tensor, "n"]:
        """E_0, Exp(1): stream 0, apart from every vocabulary id."""
        return stream_exponentials(self, 0, 1)[:, 0]


def round_keys(seed: int) -> list[tuple[int, int]]:
    """The ten key pairs of a 64-bit seed."""
    low, high = seed & MASK, (seed >> 32) & MASK
    return [((low + r * WEYL[0]) & MASK, (high + r * WEYL[1]) & MASK) for r in range(NUM_ROUNDS)]


def philox4x32(counter: Words, seed: int) -> Words:
    """Four words per counter of four words: int64 tensors with values below 2^32, of shapes that broadcast."""
    return _rounds(*counter, round_keys(seed))


@no_type_check  # part of a compiled kernel, which cannot trace checks of annotations
def _rounds(c0, c1, c2, c3, keys) -> Words:
    for k0, k1 in keys:
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & MASK, ((p0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = p1, p0
    return c0, c1 & MASK, c2, c3 & MASK


def position_words(keys: PositionKeys) -> tuple[Int[Tensor, "n 1"], Int[Tensor, "n 1"], int]:
    """Counter words 1, 2 and 3 of n positions."""
    c1 = (keys.positions & ((1 << POSITION_BITS) - 1)) | ((keys.rows >> 32) << POSITION_BITS)
    return (c1 & MASK)[:, None], (keys.rows & MASK)[:, None], keys.draw & MASK


def keyed_bits(keys: PositionKeys, start: int, stop: int) -> Int[Tensor, "n tile"]:
    """32 random bits per position and vocabulary id start..stop-1, as int64."""
    first = start // 4
    blocks = torch.arange(first, -(-stop // 4), dtype=torch.int64, device=keys.rows.device)
    c1, c2, c3 = position_words(keys)
    draw = torch.full_like(blocks, c3)
    words = philox4x32((blocks[None], c1, c2, draw[None]), keys.seed)
    return torch.stack(words, dim=-1).flatten(1)[:, start - 4 * first : stop - 4 * first]


def stream_bits(keys: PositionKeys, stream: int, count: int) -> Int[Tensor, "n count"]:
    """``count`` words per position from stream 0..126, apart from every vocabulary id."""
    start = 4 * (STREAM_BLOCK + stream * STREAM_STRIDE)
    return keyed_bits(keys, start, start + count)


# Exp(1) variates keyed by position and vocabulary id, a tile at a time: the trainer's hot path.
#
# A student with 4,096 masked tokens and V = 50257 asks for 2 x 10^8 of them per step, twice. So one
# Philox call serves four vocabulary ids, its first two rounds are shared along rows and columns
# (only their exclusive or is per entry), and the rest is one of two kernels with the same results:
#
#     eager      in place, on blocks that stay in a core's cache; 8 to 9 ns per variate and core
#     compiled   fused by torch.compile, which needs a C++ compiler (Triton on GPUs); 2.8 ns


SHARED_ROUNDS = 2
BLOCK_ELEMENTS = 1 << 15
"""Counters per block and thread: six int64 buffers of that size fit a level-2 cache of 2 MB."""
SMALLEST_COMPILED = 1 << 12
"""Below this many counters a call of the compiled kernel costs more than it saves."""
LARGEST_ULPS = {"cpu": 0, "cuda": 2}
"""How far the kernels may differ, in units of the last place: results on a CPU are reproduced bit
for bit, and a GPU's compiler has a logarithm of its own."""
compiled_kernels: dict[str, Callable[..., Tensor]] = {}


@no_type_check  # part of a compiled kernel, which cannot trace checks of annotations
def exponential_from_bits(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Exp(1) variates from 32 random bits each, float32, in [1.2e-10, 16.7].

    The inverse transform E = -log(1 - u), u = (bits + 1/2) / 2^32, is finest near E = 0, where
    the large Gumbel values lie.
    """
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def keyed_exponentials(keys: PositionKeys, start: int, stop: int) -> Float[Tensor, "n tile"]:
    """Exp(1) variates of n positions and vocabulary ids start..stop-1, float32.

    Equal to ``exponential_from_bits(keyed_bits(keys, start, stop))``.
    """
    # Integers have no gradients; under one mode there is one compiled kernel for all callers.
    with torch.inference_mode(False), torch.no_grad():
        rows, columns = shared_rounds(keys, start, stop)
        compiled = compiled_kernels.get(rows[0].device.type)
        num, blocks = rows[0].shape[0], columns[0].shape[1]
        # Sizes of 1 would be compiled apart.
        if compiled is not None and min(num, blocks) > 1 and num * blocks >= SMALLEST_COMPILED:
            variates = compiled(*rows, *columns, later_keys(keys.seed, rows[0].device))
        else:
            variates = eager(rows, columns, keys.seed)
    offset = start % 4
    return variates.flatten(1)[:, offset : offset + stop - start]


def stream_exponentials(keys: PositionKeys, stream: int, count: int) -> Float[Tensor, "n count"]:
    """``count`` Exp(1) variates per position from a stream apart from every vocabulary id."""
    start = 4 * (STREAM_BLOCK + stream * STREAM_STRIDE)
    return keyed_exponentials(keys, start, start + count)


def shared_rounds(keys: PositionKeys, start: int, stop: int) -> tuple[WordList, WordList]:
    """Two rounds in factored form, [r0, r2, r3], each [n, 1], and [s0, s1, s2], each [1, blocks].

    c0 = r0 ^ s0, c1 = s1, c2 = r2 ^ s2, c3 = r3.
    """
    device = keys.rows.device
    return keys.row_rounds, _column_rounds(keys.seed, keys.draw, start, stop, device)


@lru_cache(maxsize=128)
def _column_rounds(seed: int, draw: int, start: int, stop: int, device: torch.device) -> WordList:
    """[s0, s1, s2]: alike for all positions, and so kept for the next ones (36 bytes a block)."""
    (_, k1), (_, next_k1) = round_keys(seed)[:SHARED_ROUNDS]
    column = torch.arange(start // 4, -(-stop // 4), device=device)[None] * MULTIPLIERS[0]
    c2, c3 = ((column >> 32) ^ (draw & MASK) ^ k1) & MASK, column & MASK
    column = c2 * MULTIPLIERS[1]
    return [(column >> 32) & MASK, column, c3 ^ next_k1]


@lru_cache(maxsize=64)
def later_keys(seed: int, device: torch.device) -> Tensor:
    """Kept on the device: copying them there at every call would make the host wait."""
    return torch.tensor(round_keys(seed)[SHARED_ROUNDS:], device=device)


def eager(rows: WordList, columns: WordList, seed: int) -> Float[Tensor, "n blocks 4"]:
    """The remaining rounds and the inverse transform, in place."""
    num_positions, num_blocks = rows[0].shape[0], columns[0].shape[1]
    out = torch.empty(num_positions, num_blocks, 4, device=rows[0].device)
    step = max(1, num_positions)
    if out.device.type == "cpu":
        step = max(1, BLOCK_ELEMENTS * torch.get_num_threads() // max(1, num_blocks))
    for first in range(0, num_positions, step):
        part = slice(first, first + step)
        _fill(out[part], [word[part] for word in rows], columns, seed)
    return out


def _fill(out: Tensor, rows: WordList, columns: WordList, seed: int) -> None:
    """Run the remaining rounds for [rows, blocks] counters and write [rows, blocks, 4] variates."""
    c0, c2 = rows[0] ^ columns[0], rows[1] ^ columns[2]
    given = columns[1], rows[2]
    # Copies even where nothing is expanded: the rounds write over c1 and c3, and the columns
    # belong to every block of rows.
    c1, c3 = (word.expand_as(c0).clone(memory_format=torch.contiguous_format) for word in given)
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for k0, k1 in round_keys(seed)[SHARED_ROUNDS:]:
        torch.mul(c0, MULTIPLIERS[0], out=p0)
        torch.mul(c2, MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        torch.bitwise_right_shift(p0, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, p1, c3, p0 = p1, c1, p0, c3
    c1.bitwise_and_(MASK)
    c3.bitwise_and_(MASK)
    for lane, words in enumerate((c0, c1, c2, c3)):
        out[..., lane] = exponential_from_bits(words)


# What the compiler is to fuse: out of place, one lane after the other, or all of them together. That is 1.5 times as
# slow under AVX-512, but under AVX2 PyTorch 2.13 compiles the first form to code that gives other numbers.


@no_type_check
def _by_lane(r0, r2, r3, s0, s1, s2, keys) -> Tensor:
    lanes = _rounds(r0 ^ s0, s1, r2 ^ s2, r3, keys)
    return torch.stack([exponential_from_bits(words) for words in lanes], dim=-1)


@no_type_check
def _all_lanes(r0, r2, r3, s0, s1, s2, keys) -> Tensor:
    return exponential_from_bits(torch.stack(_rounds(r0 ^ s0, s1, r2 ^ s2, r3, keys), dim=-1))


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
    eager one is bound by memory traffic, and says why it had to stay with ``eager`` there.

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


def uniforms(keys: PositionKeys, start: int, stop: int) -> Float[Tensor, "n tile"]:
    """U(0, 1) in float64 with 32 random bits, for entries start..stop-1 of each position.

    float32 has no value within 6e-8 of 1, which silences tokens of small probability and so lowers
    the effective temperature (Zheng et al., arXiv 2409.02908).
    """
    return (keyed_bits(keys, start, stop).double() + 0.5) * 2.0**-32


def race(probs: Float[Tensor, "n v"], uniform: Float[Tensor, "n v"]) -> Int[Tensor, "n"]:
    """Categorical draws by the exponential race argmax_k p_k / (1e-10 - log(U_k + 1e-10)).

    The authors' form, in the precision of its arguments; ``probs`` need not be normalised.
    """
    return (probs / (RACE_EPS - (uniform + RACE_EPS).log())).argmax(dim=-1)
