"""Each loader's way of giving shuffled epochs as batches of tensors; run as its own process.

    python -m benchmarks.stream_loaders LOADER DATA_FOLDER WORKERS BATCH_SIZE

A first epoch starts workers, unpacks what a loader unpacks once, and is not measured; then whole
epochs are, until MIN_SECONDS are over. Printed are rows per second of both, and a checksum of the
tokens of an epoch, which is the same for all loaders when all read the same rows. An epoch that
needs longer than MAX_SECONDS is stopped there and has no checksum.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.stream_data import ARRAYS, Shape, read_shape
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream

PEERS = Path(sys.prefix) / "stream-peers"
MIN_SECONDS = 2.0
"""Of measured epochs, of which there are at least two."""
MAX_SECONDS = 10
MODULES = {
    "ShardStream": "shards.store.store",
    "zarr-python": "zarr",
    "datasets": "datasets",
    "mosaicml-streaming": "streaming",
    "litdata": "litdata",
}
"""What each loader imports, by the first word of its name."""
Batches = Iterable[dict[str, Tensor]]


def import_modules(name: str) -> None:
    """Import what a loader needs, so that its clock does not run during imports."""
    import_peers()
    importlib.import_module(MODULES[re.split(r"[ ,]", name)[0]])


def import_peers() -> None:
    """Put the other loaders on the path, behind everything that is installed.

    mosaicml-streaming imports torchvision for its image data sets; without it, names for them to
    inherit from are enough, as no image is read here.
    """
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    if importlib.util.find_spec("torchvision") is None:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module = ModuleType(f"torchvision{name}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            module.__path__ = []
            module.VisionDataset = module.to_tensor = object  # type: ignore[attr-defined]
            sys.modules[module.__name__] = module


@dataclass
class StreamEpochs:
    """Epoch after epoch of one ShardStream, whoever reads its chunks."""

    batches: ShardStream

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (batch.arrays for batch in self.batches)


def _streamed(reader: Any, workers: int, batch_size: int) -> StreamEpochs:
    return StreamEpochs(
        ShardStream(reader, seed=0, global_batch_size=batch_size, num_workers=workers)
    )


def stream(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(a) ShardStream."""
    return _streamed(ShardStore.open(folder / "store").split("train"), workers, batch_size)


class ZarrChunks:
    """Whole chunks by zarr-python, for the very order, threads and batches of ShardStream."""

    def __init__(self, store: Path) -> None:
        import zarr

        split = ShardStore.open(store).split("train")
        self.num_rows, self.rows_per_chunk = split.num_rows, split.rows_per_chunk
        self.chunk_bytes, self.fingerprint = split.chunk_bytes, split.fingerprint
        group: Any = zarr.open_group(store, path="train", mode="r")
        self.arrays = {name: group[name] for name in ARRAYS}

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        """The rows of one inner chunk."""
        start = index * self.rows_per_chunk
        stop = min(start + self.rows_per_chunk, self.num_rows)
        return {name: array[start:stop] for name, array in self.arrays.items()}


def zarr_chunks(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(b) zarr-python, the same chunks in the same order."""
    return _streamed(ZarrChunks(folder / "store"), workers, batch_size)


def parquet_streamed(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(c) Parquet through datasets, streamed with a shuffle buffer."""
    import pyarrow as pa

    return torch.utils.data.DataLoader(
        _parquet(folder, streaming=True).shuffle(seed=0, buffer_size=512).with_format("arrow"),
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
        collate_fn=lambda tables: _table_tensors(pa.concat_tables(tables), shape),
    )


def parquet_mapped(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(c) Parquet through datasets, unpacked to a memory-mapped Arrow copy first."""
    rows = _parquet(folder, streaming=False).with_format("arrow")
    order = torch.utils.data.RandomSampler(rows, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(
        rows,
        sampler=torch.utils.data.BatchSampler(order, batch_size, drop_last=True),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=lambda table: _table_tensors(table, shape),
    )


def _parquet(folder: Path, streaming: bool) -> Any:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    return load_dataset(
        "parquet",
        data_files=str(folder / "parquet/*.parquet"),
        split="train",
        streaming=streaming,
        cache_dir=str(folder / "arrow"),
    )


def _table_tensors(table: Any, shape: Shape) -> dict[str, Tensor]:
    """Columns of an Arrow table without a detour through Python objects."""
    columns = {name: table.column(name).combine_chunks().flatten().to_numpy() for name in ARRAYS}
    return {
        name: torch.from_numpy(values.reshape(-1, *shape.row_shape(name)).copy())
        for name, values in columns.items()
    }


def mosaic(name: str) -> Callable[[Path, Shape, int, int], Batches]:
    """(d) mosaicml-streaming; compressed shards are unpacked to a local copy on first use."""

    def batches(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        where = {"local": str(folder / name)}
        if name.endswith("zstd"):
            where = {"remote": str(folder / name), "local": tempfile.mkdtemp(dir=folder)}
        rows = StreamingDataset(**where, shuffle=True, shuffle_seed=0, batch_size=batch_size)
        return _loader(rows, workers, batch_size)

    return batches


def litdata(name: str) -> Callable[[Path, Shape, int, int], Batches]:
    """(e) litdata."""

    def batches(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
        from litdata import StreamingDataLoader, StreamingDataset

        rows = StreamingDataset(str(folder / name), shuffle=True, seed=0, drop_last=False)
        return StreamingDataLoader(
            rows,
            batch_size=batch_size,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_collate,
        )

    return batches


LOADERS: dict[str, Callable[[Path, Shape, int, int], Batches]] = {
    "ShardStream": stream,
    "zarr-python, same chunks and order": zarr_chunks,
    "datasets, Parquet streamed": parquet_streamed,
    "datasets, Arrow copy": parquet_mapped,
    "mosaicml-streaming, zstd": mosaic("mosaic-zstd"),
    "mosaicml-streaming, raw": mosaic("mosaic-raw"),
    "litdata, zstd": litdata("litdata-zstd"),
    "litdata, raw": litdata("litdata-raw"),
}


def _loader(rows: Any, workers: int, batch_size: int) -> Batches:
    return torch.utils.data.DataLoader(
        rows,
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
        collate_fn=_collate,
    )


def _collate(rows: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """Stacked tensors; torch's own collation does not know uint16."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in ARRAYS}


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave.

    Attributes:
        checksum: Of its tokens; None for one that was stopped.
    """

    rows: int
    seconds: float
    checksum: int | None


@dataclass(frozen=True)
class Measured:
    """One process's figures.

    Attributes:
        rows_per_second: Of the measured epochs together.
        first_rows_per_second: Of the epoch before them, starting up included.
        seconds: What was measured.
        epochs: How many.
        rows: Of one epoch.
        checksum: Of one epoch; None where one was stopped.
    """

    rows_per_second: float
    first_rows_per_second: float
    seconds: float
    epochs: int
    rows: int
    checksum: int | None


def measure(
    batches: Callable[[], Batches], shape: Shape, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """Rows per second of warm epochs.

    Args:
        batches: Makes the loader; each pass over it is an epoch.
        shape: Of the rows it must give.
        clock: Seconds.

    Raises:
        ValueError: When epochs differ in their rows.
    """
    begin = clock()
    loader = batches()
    first = _epoch(loader, shape, clock, begin)
    measured: list[Epoch] = []
    while len(measured) < 2 or sum(epoch.seconds for epoch in measured) < MIN_SECONDS:
        measured.append(_epoch(loader, shape, clock, clock()))
        if measured[-1].checksum is None:
            break  # so slow that one cut epoch is enough
    whole = {(epoch.rows, epoch.checksum) for epoch in (first, *measured) if epoch.checksum}
    if len(whole) > 1:
        raise ValueError(f"the epochs differ: {whole}")
    seconds = sum(epoch.seconds for epoch in measured)
    return Measured(
        rows_per_second=sum(epoch.rows for epoch in measured) / seconds,
        first_rows_per_second=first.rows / first.seconds,
        seconds=seconds,
        epochs=len(measured),
        rows=measured[-1].rows,
        checksum=measured[-1].checksum,
    )


def _epoch(loader: Batches, shape: Shape, clock: Callable[[], float], begin: float) -> Epoch:
    rows, checksum = 0, 0
    for batch in loader:
        size = len(batch["tokens"])
        for array, spec in ARRAYS.items():
            found = batch[array]
            assert found.shape == (size, *shape.row_shape(array)), (array, found.shape)
            assert str(found.dtype).removeprefix("torch.") == spec.dtype, (array, found.dtype)
        checksum += int(batch["tokens"].sum())
        rows += size
        if clock() - begin > MAX_SECONDS:
            return Epoch(rows, clock() - begin, None)
    return Epoch(rows, clock() - begin, checksum)


def main(name: str, folder: Path, workers: int, batch_size: int) -> None:
    """Measure one loader and print its figures as JSON."""
    torch.set_num_threads(1)
    import_modules(name)
    shape = read_shape(folder)
    found = measure(lambda: LOADERS[name](folder, shape, workers, batch_size), shape)
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # datasets' streams leave threads that keep the interpreter from ending
