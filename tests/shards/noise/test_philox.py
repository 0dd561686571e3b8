"""Philox against its published vectors, and the use of the counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shards.noise.philox import PositionKeys, keyed_bits, philox4x32, stream_bits

# Random123, kat_vectors: counter, key, expected.
ZERO, ONES = "00000000 " * 3 + "00000000", "ffffffff " * 3 + "ffffffff"
PI = "243f6a88 85a308d3 13198a2e 03707344"
KNOWN = [
    (ZERO, "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (ONES, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    low, high = words(key)
    seed = low | high << 32
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), seed)] == words(expected)


def keys(seed: int = 5, draw: int = 0) -> PositionKeys:
    rows = torch.tensor([0, 1, 1, 7, (1 << 32) + 1, (1 << 44) - 1])
    return PositionKeys(seed, rows, torch.tensor([1, 1, 2, 1023, 1, (1 << 20) - 1]), draw)


def test_keyed_bits_follow_the_documented_counter() -> None:
    bits = keyed_bits(keys(draw=3), 0, 10)
    row, position, vocab_id = (1 << 44) - 1, (1 << 20) - 1, 9
    counter = [vocab_id // 4, position | (row >> 32) << 20, row & 0xFFFFFFFF, 3]
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    expected = philox4x32((c0, c1, c2, c3), 5)[vocab_id % 4]
    assert int(bits[5, vocab_id]) == int(expected)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (1, 2), (3, 9), (4, 8), (6, 6), (50250, 50257)]
)
def test_a_tile_is_a_slice_of_the_whole(start: int, stop: int) -> None:
    assert torch.equal(keyed_bits(keys(), start, stop), keyed_bits(keys(), 0, 50257)[:, start:stop])


def test_every_part_of_the_key_matters() -> None:
    whole = keyed_bits(keys(), 0, 400)
    assert len(set(whole.flatten().tolist())) > 0.999 * whole.numel()
    assert not (keyed_bits(keys(seed=6), 0, 400) == whole).any()
    assert not (keyed_bits(keys(seed=5 + (1 << 40)), 0, 400) == whole).any()
    assert not (keyed_bits(keys(draw=1), 0, 400) == whole).any()
    streams = torch.cat([stream_bits(keys(), stream, 200) for stream in range(3)], dim=1)
    assert not np.isin(streams.numpy(), whole.numpy()).any()


def test_selecting_positions_selects_their_bits() -> None:
    index = torch.tensor([4, 0])
    assert torch.equal(keyed_bits(keys().select(index), 0, 40), keyed_bits(keys(), 0, 40)[index])
