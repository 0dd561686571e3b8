"""Each loader's way of giving one shuffled epoch as batches of tensors; run as its own process.

    python -m benchmarks.stream_loaders LOADER DATA_FOLDER WORKERS BATCH_SIZE

prints the rows per second, imports left out and starting up included, and a checksum of the
tokens, which is the same for all loaders when all read the same rows. A loader that needs longer
than MAX_SECONDS is stopped there and has no checksum.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.stream_data import ARRAYS, Shape, read_shape

PEERS = Path(sys.prefix) / "stream-peers"
MAX_SECONDS = 15
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


def stream(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(a) ShardStream."""
    from shards.store import ShardStore
    from shards.stream import ShardStream

    split = ShardStore.open(folder / "store").split("train")
    batches = ShardStream(split, seed=0, global_batch_size=batch_size, num_workers=workers)
    return (batch.arrays for batch in batches)


class _ZarrRows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, folder: Path) -> None:
        self.folder, self.arrays = folder, None

    def __len__(self) -> int:
        return read_shape(self.folder.parent).num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        import zarr

        if self.arrays is None:  # opened in the worker: zarr's event loop does not survive a fork
            group = zarr.open_group(self.folder, path="train", mode="r")
            self.arrays = {name: group[name] for name in ARRAYS}
        return {name: array[index] for name, array in self.arrays.items()}


def zarr_rows(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(b) zarr-python, a row at a time."""
    return _loader(_ZarrRows(folder / "store"), workers, batch_size, shuffle=True)


def parquet_streamed(folder: Path, shape: Shape, workers: int, batch_size: int) -> Batches:
    """(c) Parquet through datasets, streamed with a shuffle buffer."""
    import pyarrow as pa

    return torch.utils.data.DataLoader(
        _parquet(folder, streaming=True).shuffle(seed=0, buffer_size=512).with_format("arrow"),
        batch_size=batch_size,
        num_workers=workers,
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
            rows, batch_size=batch_size, num_workers=workers, collate_fn=_collate
        )

    return batches


LOADERS: dict[str, Callable[[Path, Shape, int, int], Batches]] = {
    "ShardStream": stream,
    "zarr-python rows": zarr_rows,
    "datasets, Parquet streamed": parquet_streamed,
    "datasets, Arrow copy": parquet_mapped,
    "mosaicml-streaming, zstd": mosaic("mosaic-zstd"),
    "mosaicml-streaming, raw": mosaic("mosaic-raw"),
    "litdata, zstd": litdata("litdata-zstd"),
    "litdata, raw": litdata("litdata-raw"),
}


def _loader(rows: Any, workers: int, batch_size: int, shuffle: bool | None = None) -> Batches:
    return torch.utils.data.DataLoader(
        rows,
        batch_size=batch_size,
        num_workers=workers,
        shuffle=shuffle,
        drop_last=True,
        collate_fn=_collate,
    )


def _collate(rows: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """Stacked tensors; torch's own collation does not know uint16."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in ARRAYS}


def measure(name: str, folder: Path, workers: int, batch_size: int) -> dict[str, float | None]:
    """Rows per second of one epoch, starting up included, and a checksum of what was read."""
    shape = read_shape(folder)
    begin, rows, checksum, whole = time.perf_counter(), 0, 0, True
    for batch in LOADERS[name](folder, shape, workers, batch_size):
        for array, spec in ARRAYS.items():
            found, size = batch[array], len(batch["tokens"])
            assert found.shape == (size, *shape.row_shape(array)), (array, found.shape)
            assert str(found.dtype).removeprefix("torch.") == spec.dtype, (array, found.dtype)
        checksum += int(batch["tokens"].sum())
        rows += size
        if time.perf_counter() - begin > MAX_SECONDS:
            whole = False
            break
    seconds = time.perf_counter() - begin
    checked = checksum if whole else None
    return {"rows_per_second": rows / seconds, "rows": rows, "checksum": checked}


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_modules(sys.argv[1])
    result = measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # datasets' streams leave threads that keep the interpreter from ending
