"""The comparison of loaders is fair: what is on the clock, and in which order rows are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import stream, stream_data, stream_loaders
from benchmarks.stream_data import ARRAYS, Shape
from benchmarks.stream_loaders import MIN_SECONDS, measure, zarr_chunks
from shards.codec.protocol import ArraySpec

SHAPE = Shape(32, 4)


class Loader:
    """Eight batches of four rows; starting costs ``start`` seconds, an epoch ``epoch``."""

    def __init__(self, start: float, epoch: float, spoil: int | None = None) -> None:
        self.now, self.epoch, self.spoil, self.epochs = 0.0, epoch, spoil, 0
        self.start = start

    def clock(self) -> float:
        return self.now

    def begin(self) -> Loader:
        self.now += self.start
        return self

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.epochs += 1
        for number in range(8):
            self.now += self.epoch / 8
            tokens = torch.full((4, 4), number, dtype=torch.int32)
            yield {"tokens": tokens + (self.epochs == self.spoil)}


@pytest.fixture
def only_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_loaders, "ARRAYS", {"tokens": ArraySpec("int32")})


@pytest.mark.usefixtures("only_tokens")
def test_starting_up_and_the_first_epoch_are_off_the_clock() -> None:
    loader = Loader(start=5.0, epoch=0.3)
    found = measure(loader.begin, SHAPE, loader.clock)
    assert found.rows_per_second == pytest.approx(32 / 0.3)
    assert found.first_rows_per_second == pytest.approx(32 / 5.3)
    assert found.seconds >= MIN_SECONDS and found.epochs == 7 == loader.epochs - 1
    assert found.rows == 32 and found.checksum == 16 * sum(range(8))


@pytest.mark.usefixtures("only_tokens")
def test_there_are_two_epochs_however_long_they_are() -> None:
    loader = Loader(start=0.0, epoch=3.0)
    assert measure(loader.begin, SHAPE, loader.clock).epochs == 2


@pytest.mark.usefixtures("only_tokens")
def test_an_epoch_of_other_rows_is_refused() -> None:
    loader = Loader(start=0.0, epoch=1.0, spoil=3)
    with pytest.raises(ValueError, match="the epochs differ"):
        measure(loader.begin, SHAPE, loader.clock)


def test_zarr_python_reads_whole_chunks_in_our_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        name: torch.zeros(1 << 10, *spec.trailing_shape).numpy().astype(spec.dtype)
        for name, spec in ARRAYS.items()
    }
    small["tokens"] = torch.arange(1 << 10, dtype=torch.int32).numpy()
    monkeypatch.setattr(stream_data, "token_pool", lambda: small)
    monkeypatch.setattr(stream_data, "POOL_TOKENS", 1 << 10)
    monkeypatch.setattr(stream_data, "TOKENS_PER_CHUNK", 16)
    shape = Shape(64, 4)
    stream_data.write_store(tmp_path / "store", shape)
    ours = stream_loaders.stream(tmp_path, shape, 0, 8)
    theirs = zarr_chunks(tmp_path, shape, 0, 8)
    for _ in range(2):  # epochs differ in their order, and both loaders in the same way
        for one, two in itertools.zip_longest(ours, theirs):
            assert set(one) == set(two) == set(ARRAYS)
            assert all(torch.equal(one[name], two[name]) for name in ARRAYS)
    reader = stream_loaders.ZarrChunks(tmp_path / "store")
    assert len(reader.read_chunk(0)["tokens"]) == reader.rows_per_chunk == 4


def test_each_loader_gets_its_better_number_of_workers() -> None:
    rates = {("a", 0): [5.0, 7.0], ("a", 2): [9.0], ("b", 0): [50.0], ("b", 2): [1.0]}
    assert (stream.best_workers("a", rates), stream.best_workers("b", rates)) == (2, 0)
    found = stream.entry("a", Shape(10, 4), rates, [1.0, 3.0], 400)
    assert (found["rows_per_second"], found["workers"]) == (9.0, 2)
    assert found["first_epoch_rows_per_second"] == 3.0
    assert found["bytes_per_token_on_disk"] == 10.0
