"""The same rows in every loader's own format: what a store of the default codec holds.

Real encodings of synthetic posteriors (rank-frequency laws, :mod:`benchmarks.codec_teachers`),
made for 131,072 tokens and repeated beyond: the copies lie 30 MB apart, out of the reach of the
compressors' windows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.codec_teachers import SyntheticTeacher
from shards.codec.protocol import ArraySpec
from shards.codec.registry import codec_parameters, make_codec
from shards.store.manifest import Manifest
from shards.store.writer import ShardWriter

VOCAB_SIZE, POOL_TOKENS = 8192, 1 << 17
CODEC = make_codec("posterior")
CODEC_ARRAYS = CODEC.array_specs(VOCAB_SIZE, None)
ARRAYS = {"tokens": ArraySpec("int32"), "token_log_probs": ArraySpec("float32"), **CODEC_ARRAYS}
TOKENS_PER_CHUNK = 4096
ROWS_AT_ONCE = 256
PARQUET_FILES, PARQUET_ROWS_PER_GROUP = 8, 64
SHARD_BYTES = 1 << 26


@dataclass(frozen=True)
class Shape:
    """A data set: rows of a length."""

    num_rows: int
    row_length: int

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of an array."""
        return (self.row_length, *ARRAYS[name].trailing_shape)


@cache
def token_pool() -> dict[str, np.ndarray]:
    """Array name -> [POOL_TOKENS, *trailing]: the encoded records of that many tokens."""
    teacher = SyntheticTeacher(POOL_TOKENS, vocab_size=VOCAB_SIZE, row_length=129)
    parts = []
    for output in teacher.batches(rows_per_batch=8):
        encoded = CODEC.encode(output, 0, teacher.resources())
        chosen = output.log_probs.gather(-1, output.tokens[..., None])[..., 0]
        parts.append({"tokens": output.tokens.int(), "token_log_probs": chosen, **encoded})
    return {
        name: torch.cat([part[name].flatten(0, 1) for part in parts]).numpy() for name in ARRAYS
    }


def make_rows(shape: Shape, start: int, stop: int) -> dict[str, np.ndarray]:
    """Rows start..stop-1, a pure function of the row."""
    places = np.arange(start * shape.row_length, stop * shape.row_length) % POOL_TOKENS
    arrays = {}
    for name, pool in token_pool().items():
        arrays[name] = pool[places].reshape(stop - start, *shape.row_shape(name))
        if name != "tokens":
            arrays[name][:, 0] = 0
    return arrays


def each_row(shape: Shape) -> Iterator[dict[str, np.ndarray]]:
    """All rows one by one."""
    for start in range(0, shape.num_rows, ROWS_AT_ONCE):
        rows = make_rows(shape, start, min(start + ROWS_AT_ONCE, shape.num_rows))
        for index in range(len(rows["tokens"])):
            yield {name: values[index] for name, values in rows.items()}


def write_store(folder: Path, shape: Shape) -> None:
    """Our store."""
    rows_per_chunk = max(1, TOKENS_PER_CHUNK // shape.row_length)
    manifest = Manifest(
        codec={"name": CODEC.name, "parameters": codec_parameters(CODEC)},
        arrays=CODEC_ARRAYS,
        vocab_size=VOCAB_SIZE,
        row_length=shape.row_length,
        splits={"train": shape.num_rows},
        rows_per_shard=rows_per_chunk * 64,
        rows_per_chunk=rows_per_chunk,
        teacher={"id": "synthetic", "weights_sha256": ""},
        tokenizer={"id": "none", "sha256": ""},
        tokens={"fingerprint": "benchmark", "corpus": {"name": "synthetic"}},
        seed=0,
        versions={},
    )
    writer = ShardWriter.create_or_resume(folder, manifest, {})
    for shard in writer.pending("train"):
        writer.write(shard, make_rows(shape, shard.start, shard.stop))


def write_parquet(folder: Path, shape: Shape) -> None:
    """Parquet files, zstd, every array a fixed-size list."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    sizes = {name: int(np.prod(shape.row_shape(name))) for name in ARRAYS}
    types = {name: pa.from_numpy_dtype(np.dtype(spec.dtype)) for name, spec in ARRAYS.items()}
    schema = pa.schema([(name, pa.list_(types[name], sizes[name])) for name in ARRAYS])
    step = -(-shape.num_rows // PARQUET_FILES)
    for file, first in enumerate(range(0, shape.num_rows, step)):
        with pq.ParquetWriter(
            folder / f"part-{file}.parquet", schema, compression="zstd", use_dictionary=False
        ) as writer:
            for start in range(first, min(first + step, shape.num_rows), PARQUET_ROWS_PER_GROUP):
                stop = min(start + PARQUET_ROWS_PER_GROUP, first + step, shape.num_rows)
                columns = [
                    pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), sizes[name])
                    for name, values in make_rows(shape, start, stop).items()
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def write_mosaic(folder: Path, shape: Shape, compression: str | None) -> None:
    """MDS shards of mosaicml-streaming."""
    from streaming import MDSWriter

    columns = {
        name: f"ndarray:{spec.dtype}:{','.join(map(str, shape.row_shape(name)))}"
        for name, spec in ARRAYS.items()
    }
    with MDSWriter(
        out=str(folder), columns=columns, compression=compression, size_limit=SHARD_BYTES
    ) as writer:
        for row in each_row(shape):
            writer.write(row)


def write_litdata(folder: Path, shape: Shape, compression: str | None) -> None:
    """Chunks of litdata."""
    from litdata.streaming.cache import Cache

    folder.mkdir(parents=True)
    cache = Cache(str(folder), chunk_bytes=SHARD_BYTES, compression=compression)
    for index, row in enumerate(each_row(shape)):
        cache[index] = row
    cache.done()
    cache.merge()


def write_shape(folder: Path, shape: Shape) -> None:
    """The sizes, for the processes that read."""
    (folder / "shape.json").write_text(json.dumps(shape.__dict__))


def read_shape(folder: Path) -> Shape:
    """The sizes that :func:`write_shape` left."""
    return Shape(**json.loads((folder / "shape.json").read_text()))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
