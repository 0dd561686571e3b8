"""Vocabulary ids and other small integers in as few bytes as zstd can make of them.

- Ids become frequency ranks: small numbers for frequent tokens, whatever the tokenizer.
- Integers become one uint8 array per byte of significance. zstd codes a plane of high bytes, which
  take few values, far better than the same bytes between low ones: 12% fewer bytes for the entries of ``seeded`` and
  28% for those of ``posterior`` than uint16 arrays, and fewer than bit-packing, which hides the distribution from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, UInt8
from torch import Tensor

from shards.codec.protocol import Arrays, ArraySpec


def plane_names(name: str, max_value: int) -> list[str]:
    """Array names for integers 0..max_value, least significant byte first."""
    return [f"{name}_byte{i}" for i in range(max(1, -(-max_value.bit_length() // 8)))]


def plane_specs(name: str, max_value: int, trailing: tuple[int, ...]) -> dict[str, ArraySpec]:
    """Declarations of those arrays."""
    return {plane: ArraySpec("uint8", trailing) for plane in plane_names(name, max_value)}


def to_planes(name: str, values: Int[Tensor, "*shape"], max_value: int) -> dict[str, UInt8[Tensor, "*shape"]]:
    """The arrays of some integers in 0..max_value."""
    planes = plane_names(name, max_value)
    return {plane: (values >> 8 * i).to(torch.uint8) for i, plane in enumerate(planes)}


def from_planes(name: str, arrays: Arrays, max_value: int) -> Int[Tensor, "*shape"]:
    """The integers, as int64."""
    planes = plane_names(name, max_value)
    result = arrays[planes[0]].long()
    for i, plane in enumerate(planes[1:], start=1):
        result |= arrays[plane].long() << 8 * i
    return result


def check_ranks(name: str, arrays: Mapping[str, np.ndarray], vocab_size: int, *, are_gaps: bool) -> str:
    """What is wrong with stored numbers, 1 + rank each or gaps that add up to it; empty if nothing.

    ``name`` is that of the planes, arrays [rows, L, m] uint8; V is the most that any number may come to.
    """
    most: Any = 0
    for i, plane in enumerate(plane_names(name, vocab_size)):
        if plane in arrays:
            # No gap is negative, so their sum is the largest number.
            numbers = arrays[plane].sum(-1, dtype=np.int64) if are_gaps else arrays[plane].astype(np.uint32)
            most = most + (numbers << 8 * i)
    largest = int(np.max(most, initial=0))
    return f"{name}: id {largest - 1}, of {vocab_size}" if largest > vocab_size else ""


def used_width(used: Bool[Tensor, "n m"]) -> int:
    """Slots that some position uses, where the first ones of each are used.

    A GPU is not asked, since the host would wait for the answer: rows are cut before they go there.
    """
    if used.device.type != "cpu":
        return used.shape[1]
    return int(used.sum(1).max()) if len(used) else 0


def cut_slots(arrays: Arrays, name: str, *others: str) -> Arrays:
    """Arrays [..., m] of these names cut to the last slot in which ``name`` is not 0."""
    used = [(array != 0).flatten(0, -2).any(0) for key, array in arrays.items() if _is(key, name)]
    slots = torch.stack(used).any(0).nonzero() if used else None
    if slots is None:
        return arrays
    width = int(slots.max()) + 1 if len(slots) else 0
    return {
        key: array[..., :width] if any(_is(key, n) for n in (name, *others)) else array for key, array in arrays.items()
    }


def _is(plane: str, name: str) -> bool:
    return plane.startswith(f"{name}_byte")


@dataclass(frozen=True)
class FrequencyOrder:
    """Ids by falling unigram probability, ties by id: two permutations, [V] int64, each the other's inverse."""

    id_of_rank: Int[Tensor, "v"]
    rank_of_id: Int[Tensor, "v"]

    @staticmethod
    @lru_cache(maxsize=8)  # by identity: a store's resource is one tensor, sorted once
    def of(unigram_log_probs: Float[Tensor, "v"]) -> FrequencyOrder:
        """The order of a store's ``unigram_log_probs``."""
        ids = unigram_log_probs.argsort(descending=True, stable=True)
        ranks = torch.empty_like(ids)
        ranks[ids] = torch.arange(len(ids), device=ids.device)
        return FrequencyOrder(ids, ranks)


BLOCK_SIZE = 8
SMALLEST_SHARE = 4
"""Blocks pay where there are at least so many times more of them than wanted entries."""


def most_probable_tokens(
    log_probs: Float[Tensor, "n v"], num_entries: int
) -> tuple[Float[Tensor, "n m"], Int[Tensor, "n m"]]:
    """The M largest of each row, largest first, and their ids (int64); of equal ones at the border any.

    The costliest step of encoding, made cheap: ``torch.topk`` takes 5 us for 64 of 512 entries on one CPU core and 110
    us for 64 of 50,257. Two remedies, both exact: numpy's partition is vectorised (2 us); and with V cut into blocks
    of 8, the k largest entries lie in the k blocks with the largest maxima: 8 k entries are ranked (30 us).
    """
    if log_probs.device.type != "cpu":
        values, ids = log_probs.topk(num_entries, dim=-1)
        return values, ids
    num_blocks = log_probs.shape[1] // BLOCK_SIZE
    if num_blocks < SMALLEST_SHARE * num_entries:
        ids = _partition(log_probs, num_entries)
    else:
        # Block b holds ids b, b + num_blocks, ...: its maximum is taken across whole vectors.
        whole = BLOCK_SIZE * num_blocks
        maxima = log_probs[:, :whole].unflatten(1, (BLOCK_SIZE, num_blocks)).amax(1)
        blocks = _partition(maxima, num_entries)
        candidates = (blocks[:, None] + torch.arange(0, whole, num_blocks)[:, None]).flatten(1)
        rest = torch.arange(whole, log_probs.shape[1]).expand(len(log_probs), -1)
        candidates = torch.cat([candidates, rest], dim=1)
        chosen = _partition(log_probs.gather(1, candidates), num_entries)
        ids = candidates.gather(1, chosen)
    values, order = log_probs.gather(1, ids).sort(1, descending=True)
    return values, ids.gather(1, order)


def _partition(values: Float[Tensor, "n w"], num_entries: int) -> Int[Tensor, "n m"]:
    """Indices of the largest entries, in no order."""
    first = values.shape[1] - num_entries
    if not first:
        return torch.arange(num_entries).expand(len(values), -1)
    return torch.from_numpy(np.argpartition(values.numpy(), first, axis=-1)[:, first:])


UNIGRAM_TOKENS = 1 << 26


def unigram_log_probs(
    read_rows: Callable[[int, int], Int32[np.ndarray, "rows length"]],
    num_rows: int,
    row_length: int,
    vocab_size: int,
    block: int,
) -> Float[np.ndarray, "v"]:
    """Log-probability of each token in the rows; [V] float32, nats: how often each is met.

    (count + 1/2) / (N + V/2): additive smoothing (Krichevsky and Trofimov, 1981). At most 2^26
    tokens are counted, in blocks spread evenly over the rows; the first token of a row is left
    out, as no teacher scores it.

    ``read_rows(start, stop)`` gives token rows, of which ``block`` are read at a time.
    """
    starts = np.arange(0, num_rows, block)
    most = max(1, UNIGRAM_TOKENS // (block * row_length))
    if len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    counts = np.zeros(vocab_size, np.int64)
    for start in starts.tolist():
        tokens = read_rows(start, min(start + block, num_rows))
        counts += np.bincount(tokens[:, 1:].reshape(-1), minlength=vocab_size)
    smooth = counts + 0.5
    return np.log(smooth / smooth.sum()).astype(np.float32)
