"""argmax(l / T + g) on a CPU in one loop, with the logarithms that matter: numba comes with vLLM.

Nearly all tokens cannot win whatever the last bits of their noise are: z leading zeros of the
hash bound u from below by 2^-(z + 1), and so g = -log(-log(1 - u)) from above. The loop takes a
logarithm only where that bound reaches the best score so far: a few times a row. The scores it
compares are those of :func:`trainer.serving.coupling.draw`, to the rounding of a logarithm.
"""

# numba is there where vLLM is.
# pyright: reportMissingImports=false

from __future__ import annotations

import math

import numpy as np
from numba import njit, uint32

INVERSE_LOG2 = 1.4426
"""Rounded down: the bound stays one."""
SLACK = 1e-3
"""Above every rounding of a score that is compared."""


@njit(nogil=True)
def fast_draw(logits, begun, positions, scrambled, is_greedy, out):  # type: ignore[no-untyped-def]
    """The drawn token of each row; see :func:`trainer.serving.coupling.draw`.

    Args:
        logits: [n, v] float32.
        begun: [n] uint32, the hash once it has read the seeds.
        positions: [n] int64.
        scrambled: [v] uint32, the token ids as the hash mixes them in.
        is_greedy: [n] bool.
        out: [n] int64, the result.
    """
    for row in range(logits.shape[0]):
        best, winner = np.float32(-np.inf), 0
        for j in range(logits.shape[1]):
            if logits[row, j] > best:
                best, winner = logits[row, j], j
        out[row] = winner
        if is_greedy[row]:
            continue
        key = uint32(uint32(positions[row]) * uint32(0xCC9E2D51))  # products are 64 bits wide
        key = uint32((key << uint32(15)) | (key >> uint32(17))) * uint32(0x1B873593)
        prefix = begun[row] ^ uint32(key)
        prefix = uint32((prefix << uint32(13)) | (prefix >> uint32(19)))
        prefix = uint32(prefix * uint32(5) + uint32(0xE6546B64))
        start = winner
        best = _score(logits[row, start], _bits(prefix, scrambled[start]))
        for j in range(logits.shape[1]):
            # g <= log 2 (zeros + 1), with zeros at most 32: where all bits are, u is 2^-33
            needed = (best - logits[row, j] - SLACK) * INVERSE_LOG2 - 1.0
            if needed > 32.0:
                continue
            h = _bits(prefix, scrambled[j])
            if needed > 0.0 and h >> uint32(32 - math.ceil(needed)):
                continue
            score = _score(logits[row, j], h)
            if score > best or (score == best and j < winner):
                best, winner = score, j
        out[row] = winner


@njit(nogil=True, inline="always")
def _bits(prefix, scrambled):  # type: ignore[no-untyped-def]
    h = uint32(prefix ^ scrambled)
    h = uint32((h << uint32(13)) | (h >> uint32(19)))
    h = uint32(h * uint32(5) + uint32(0xE6546B64))
    h = uint32(h ^ uint32(16))
    h = uint32(h ^ (h >> uint32(16)))
    h = uint32(h * uint32(0x85EBCA6B))
    h = uint32(h ^ (h >> uint32(13)))
    h = uint32(h * uint32(0xC2B2AE35))
    return uint32(h ^ (h >> uint32(16)))


@njit(nogil=True)
def _score(logit, h):  # type: ignore[no-untyped-def]
    high = np.float32(h >> uint32(16))
    low = np.float32(h & uint32(0xFFFF))
    u = high * np.float32(2.0**-16) + (low + np.float32(0.5)) * np.float32(2.0**-32)
    if u < np.float32(0.25):
        e = np.float32(1.0 / 8.0)
        for n in (7, 6, 5, 4, 3, 2, 1):
            e = np.float32(e * u) + np.float32(1.0 / n)
        e = np.float32(e * u)
    else:
        e = -np.float32(math.log(max(np.float32(1.0) - u, np.float32(5.960464477539063e-08))))
    return np.float32(logit - np.float32(math.log(e)))
