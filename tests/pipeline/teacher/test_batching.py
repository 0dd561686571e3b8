from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pipeline.teacher.batching import (
    BatchSize,
    automatic_batch_size,
    in_batches,
    largest_batch,
)
from shards.base.errors import GdistillError


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is gone must be gone at once: a device out of memory waits for no collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_retry_finds_the_memory_of_the_attempts_that_failed() -> None:
    attempts: list[weakref.ref[torch.Tensor]] = []
    done: list[int] = []

    def work(part: slice) -> None:
        assert not any(attempt() is not None for attempt in attempts)
        big = torch.zeros(1000)
        attempts.append(weakref.ref(big))
        if part.stop - part.start > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        done.extend(range(part.start, part.stop))

    size = BatchSize(8)
    in_batches(work, 11, size)
    assert done == list(range(11))
    assert len(attempts) == 3 + 11, "tried with 8, 4 and 2 rows once each, then with one"
    in_batches(work, 2, size)
    assert size.rows == 1 and len(attempts) == 3 + 11 + 2, "what was found is remembered"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_one_row_that_does_not_fit_is_one_error(error: BaseException) -> None:
    def work(part: slice) -> None:
        raise error

    with pytest.raises(GdistillError, match=r"batch of one row; got \w+.*; use shorter rows"):
        in_batches(work, 4, BatchSize(4))
    with pytest.raises(GdistillError, match="batch of one row"):
        BatchSize(1).halve(error)


def test_other_errors_are_not_tried_again() -> None:
    parts: list[slice] = []

    def work(part: slice) -> None:
        parts.append(part)
        raise ValueError("not about memory")

    with pytest.raises(ValueError, match="not about memory"):
        in_batches(work, 4, BatchSize(9))
    assert parts == [slice(0, 4)]


@pytest.mark.parametrize(("num_rows", "rows"), [(10, 4), (8, 4), (3, 7), (1, 1)])
def test_parts_cover_every_row_once_and_none_is_larger(num_rows: int, rows: int) -> None:
    parts = list(BatchSize(rows).parts(num_rows))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.stop - part.start <= rows for part in parts)
    assert len(parts) == -(-num_rows // rows)


def test_a_batch_that_did_not_fit_is_halved_for_good() -> None:
    size = BatchSize(9)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    seen = []
    while size.rows > 1:
        size.halve(error)
        seen.append(size.rows)
    assert seen == [4, 2, 1]


def test_a_batch_on_a_cpu_fills_a_gibibyte_or_4096_tokens() -> None:
    cpu = torch.device("cpu")
    # Six float32 tensors of 128 x 50,257 logits are 154,389,504 bytes: six such rows in 2^30.
    assert automatic_batch_size(128, 50_257, 0, cpu) == 6
    assert automatic_batch_size(128, 512, 0, cpu) == 4096 // 128
    assert automatic_batch_size(1024, 200_000, 0, cpu) == 1


def test_a_small_batch_that_did_not_fit_is_halved_itself() -> None:
    size = BatchSize(512)
    size.halve(MemoryError(), num_rows=5)
    assert size.rows == 2


def test_no_tensor_of_a_gpu_has_more_elements_than_32_bits_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V = 151,936 on 141 GB: 40% of the memory would hold 15 rows of 1,024 tokens."""
    gpu, row = torch.device("cuda"), 1024 * 151_936
    memory = SimpleNamespace(total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert automatic_batch_size(1024, 151_936, 0, gpu) == 13 == largest_batch(row, gpu)
    assert 13 * row < 2**31 <= 14 * row
    assert automatic_batch_size(1024, 50_257, 0, gpu) == 32, "of 2^15 tokens"
    assert largest_batch(2**31, gpu) == 1 and largest_batch(row, torch.device("cpu")) > 1000
