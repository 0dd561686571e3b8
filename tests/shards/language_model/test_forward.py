"""Rows through a model: batches that fit, TF32, and the question whether it looks ahead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from shards.errors import GdistillError
from shards.language_model.forward import (
    BatchSize,
    allow_tf32,
    in_batches,
    largest_batch,
    memory_bytes,
    require_indexable,
)
from shards.language_model.loading import look_ahead, probe_rows


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
    size, seen = BatchSize(9), []
    while size.rows > 1:
        size.halve(torch.OutOfMemoryError("CUDA out of memory."))
        seen.append(size.rows)
    assert seen == [4, 2, 1]
    size = BatchSize(512)
    size.halve(MemoryError(), num_rows=5)
    assert size.rows == 2, "a smaller batch that did not fit is halved itself"


def test_a_row_that_no_kernel_can_index_is_refused_with_a_way_out() -> None:
    gpu = torch.device("cuda")
    require_indexable(2**31 - 1, gpu, "")
    require_indexable(2**40, torch.device("cpu"), "")
    with pytest.raises(GdistillError) as caught:
        require_indexable(14_135 * 151_936, gpu, "shorter rows")
    assert caught.value.got == "2,147,615,360 logits of a row"
    assert caught.value.expected.startswith("at most 2,147,483,647")
    assert caught.value.remedy == "shorter rows"
    assert largest_batch(2**31, gpu) == 1 < 1000 < largest_batch(2**31, torch.device("cpu"))


def test_a_cpu_has_the_memory_of_its_host() -> None:
    assert memory_bytes(torch.device("cpu")) == psutil.virtual_memory().total


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "override", "runs"),
    [
        *(((9, 0), None, "TF32"), ((8, 0), "1", "TF32")),
        *(((8, 0), "0", "float32"), ((7, 5), None, "float32")),
    ],
)
def test_tf32_is_allowed_where_a_gpu_has_it_and_the_user_does_not_object(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], override: str | None, runs: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert allow_tf32(torch.device("cpu")) == "float32"
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert allow_tf32(GPU) == runs
    assert torch.backends.cuda.matmul.allow_tf32 is (runs == "TF32")


def test_rows_of_the_probe_differ_in_their_last_token_alone() -> None:
    for vocab_size, length in ((50257, 8), (23, 8), (6, 8), (2, 2), (3, 1)):
        rows = probe_rows(vocab_size, length)
        assert torch.equal(rows[0], rows[1]) and (rows[:, :-1] == rows[0, :-1]).all()
        assert (rows[2:, -1] != rows[0, -1]).any()
        assert rows.min() >= 0 and rows.max() < vocab_size


def test_what_moves_equal_rows_too_is_no_look_ahead() -> None:
    logits = torch.randn(1, 8, 50, generator=torch.Generator().manual_seed(0)).repeat(5, 1, 1)
    assert look_ahead(logits, 1e-4) is None
    leaking = logits.clone()
    leaking[3, 2] += 0.01 * torch.arange(50) / 50
    assert look_ahead(leaking, 1e-4) == pytest.approx(0.0058, rel=0.2)
    leaking[1, 4] += 0.01 * torch.arange(50) / 50  # the equal row moved as far
    assert look_ahead(leaking, 1e-4) is None
    masked = logits.clone()
    masked[..., 7] = -torch.inf
    assert look_ahead(masked, 1e-4) is None
