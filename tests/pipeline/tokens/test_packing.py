from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tokens.build import SpecialIds, make_packer
from shards.errors import UsageError

IDS = SpecialIds(bos=100, eos=101, separator=101)


def documents(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


def test_concat_by_hand() -> None:
    packer = make_packer("concat", 4, IDS)
    rows = packer.pack(documents([1, 2, 3], [4], [5, 6, 7, 8]))
    assert rows.tolist() == [[1, 2, 3, 101], [4, 101, 5, 6]]
    packer.finish()
    assert packer.num_dropped_tokens == 3  # 7 8 and the last separator


def test_wrap_by_hand() -> None:
    packer = make_packer("wrap", 5, IDS)
    rows = packer.pack(documents([1, 2, 3], [4], [5]))
    assert rows.tolist() == [[100, 1, 2, 3, 101], [100, 101, 4, 101, 101]]
    packer.finish()
    assert packer.num_dropped_tokens == 2  # 5 and its separator


def test_pad_by_hand() -> None:
    packer = make_packer("pad", 5, IDS)
    rows = packer.pack(documents([1, 2, 3], [4], [], [5, 6, 7, 8, 9]))
    assert rows.tolist() == [
        [100, 1, 2, 3, 101],
        [100, 4, 101, 101, 101],
        [100, 101, 101, 101, 101],
        [100, 5, 6, 7, 101],
    ]
    assert packer.num_dropped_tokens == 2


def test_no_separator_and_groups() -> None:
    bare = make_packer("concat", 2, SpecialIds(100, 101, None))
    assert bare.pack(documents([1], [2, 3], [4])).tolist() == [[1, 2], [3, 4]]
    grouped = make_packer("concat", 2, SpecialIds(100, 101, None), group_documents=2)
    assert grouped.pack(documents([1], [2, 3], [4])).tolist() == [[1, 2]]
    assert grouped.pack(documents([5])).tolist() == [[4, 5]]
    assert grouped.num_dropped_tokens == 1


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12),
    st.integers(0, 12),
    st.sampled_from(["concat", "wrap", "pad"]),
    st.sampled_from([0, 3]),
)
def test_batch_borders_and_resumes_leave_no_trace(
    texts: list[list[int]], cut: int, packing: str, group: int
) -> None:
    group = 0 if packing == "pad" else group
    whole = make_packer(packing, 4, IDS, group)  # type: ignore[arg-type]
    rows = whole.pack(documents(*texts))
    whole.finish()
    first = make_packer(packing, 4, IDS, group)  # type: ignore[arg-type]
    second = make_packer(packing, 4, IDS, group)  # type: ignore[arg-type]
    head = first.pack(documents(*texts[:cut]))
    second.restore(json.loads(json.dumps(first.state())))
    tail = second.pack(documents(*texts[cut:]))
    second.finish()
    assert np.concatenate([head, tail]).tolist() == rows.tolist()
    assert second.num_dropped_tokens == whole.num_dropped_tokens
    assert rows.dtype == np.int32 and rows.shape[1] == 4


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12))
def test_concat_loses_only_what_it_counts(texts: list[list[int]]) -> None:
    packer = make_packer("concat", 4, IDS)
    rows = packer.pack(documents(*texts))
    packer.finish()
    stream = [token for text in texts for token in [*text, 101]]
    assert rows.reshape(-1).tolist() == stream[: rows.size]
    assert rows.size + packer.num_dropped_tokens == len(stream)


@pytest.mark.parametrize(("packing", "length"), [("concat", 1), ("wrap", 2), ("pad", 2)])
def test_rows_without_room_are_refused(packing: str, length: int) -> None:
    with pytest.raises(UsageError, match="too short"):
        make_packer(packing, length, IDS)  # type: ignore[arg-type]
