"""What the byte planes of the codecs buy: the same entries written in other ways.

Each layout is compressed by zstd at the store's level, all tokens in one chunk.
"""

from __future__ import annotations

import numpy as np
import torch
from numcodecs.zstd import compress
from torch import Tensor

from benchmarks.codec_peers import id_bits, pack_bits
from shards.codec.ids import FrequencyOrder, from_planes
from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import Arrays
from shards.store.layout import ZSTD_LEVEL


def compressed_bytes(*arrays: np.ndarray) -> int:
    """Total size of the arrays, each compressed by itself."""
    return sum(len(compress(np.ascontiguousarray(a), ZSTD_LEVEL)) for a in arrays)


def planes(values: Tensor) -> list[np.ndarray]:
    """Low and high bytes of integers below 2^16."""
    return [(values & 0xFF).byte().numpy(), (values >> 8).byte().numpy()]


def id_layouts(codec: PosteriorCodec, encoded: list[dict[str, Tensor]], resources: Arrays) -> dict:
    """Bytes per token of the ids of ``posterior``, by layout; V must be below 2^16."""
    order = FrequencyOrder.of(resources["unigram_log_probs"])
    vocab_size = len(order.id_of_rank)
    arrays = {name: torch.cat([part[name] for part in encoded]) for name in encoded[0]}
    ranks = from_planes("entry_rank", arrays, vocab_size).flatten(0, 1)
    used = ranks > 0
    ids = torch.where(used, order.id_of_rank[(ranks - 1).clamp(min=0)] + 1, 0)
    rising = torch.where(used, ranks, 1 << 17).sort(dim=1).values
    gaps = torch.where(rising < 1 << 17, rising.diff(dim=1, prepend=rising[:, :1] * 0), 0)
    packed = pack_bits(torch.where(used, ids - 1, 0), id_bits(vocab_size))
    layouts = {
        "bit-packed ids, unused slots included": packed.numel(),
        "bit-packed ids, then zstd": compressed_bytes(packed.numpy()),
        "uint16 ids, then zstd": compressed_bytes(ids.numpy().astype(np.uint16)),
        "byte planes of ids, then zstd": compressed_bytes(*planes(ids)),
        "byte planes of frequency ranks, then zstd (in use)": compressed_bytes(*planes(ranks)),
        "rank-major byte planes of ranks, then zstd": compressed_bytes(
            *(plane.T for plane in planes(ranks))
        ),
        "byte planes of rank gaps, entries sorted by rank, then zstd": compressed_bytes(
            *planes(gaps)
        ),
    }
    steps = from_planes("entry_step", arrays, codec._max_step).flatten(0, 1)
    by_rank = torch.where(used, ranks, 1 << 17).argsort(dim=1)
    levels = torch.where(used, steps.cumsum(1) + 1, 0).gather(1, by_rank)
    layouts |= {
        "ids and log p: falling log p as steps (in use)": compressed_bytes(
            *planes(ranks), *planes(steps)
        ),
        "ids and log p: rank gaps, log p as levels": compressed_bytes(
            *planes(gaps), *planes(levels)
        ),
    }
    return {name: size / len(ranks) for name, size in layouts.items()}
