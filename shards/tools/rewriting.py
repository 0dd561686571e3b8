"""New stores from old, shard by shard, resumable: another codec, fewer rows, parts merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from shards.codec.ids import unigram_log_probs
from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import codec_parameters
from shards.console import Bar
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.noise.kinds import KeyedPosterior
from shards.noise.philox import PositionKeys
from shards.store.layout import RESOURCES
from shards.store.location import Location
from shards.store.manifest import (
    STORE_ARRAYS,
    Manifest,
    ShardRange,
    ShardRecord,
    read_record,
    read_ways,
    record_ways,
    rewrite_remedy,
)
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter

Rows = dict[str, np.ndarray]
POSITIONS_AT_ONCE = 1 << 22
"""Positions times V decoded at once: 16 MiB of float32 a temporary."""


def convert(store: ShardStore, out: str | Location, codec: Codec, bar: Bar) -> ShardWriter:
    """Write a store's rows with another codec: a posterior becomes one frozen draw of it.

    The draw is the one that extraction with ``codec`` would have stored, but for what the source
    codec rounds off: same seed, same rows, same generator. A ``hidden`` store has no unigram;
    where ``codec`` needs one, that of the store's own tokens is kept.

    Raises:
        UsageError: If the source holds a frozen draw, or ``codec`` would hold a distribution.
    """
    require_convertible(store.codec, codec)
    source = store.manifest
    if "counted" in source.arrays:
        remedy = f"extract again with --codec {codec.name}"
        raise UsageError("a store of conversations stays as it is", remedy=remedy)
    teacher = {**source.teacher, "converted_from": {**source.codec, "store": source.sha256}}
    manifest = replace(
        source,
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(source.vocab_size, None),
        teacher=teacher,
    )
    resources = _resources(store, codec)

    return _rewrite(store, out, manifest, resources, partial(_encode, store, codec, resources), bar)


def subset(store: ShardStore, out: str | Location, splits: Mapping[str, int], bar: Bar) -> ShardWriter:
    """Keep the first rows of some splits.

    Only the first: a row's number names its noise, so a row that moved would lose a seeded draw.

    Args:
        splits: Rows to keep of each split to keep.

    Raises:
        UsageError: For an unknown split, or more rows than there are.
    """
    source = store.manifest
    for name, rows in splits.items():
        if not 0 < rows <= source.splits.get(name, 0):
            expected = f"1 to the store's rows {dict(source.splits)}"
            what, where = "cannot keep so many rows", f"split {name}"
            raise UsageError(what, where=where, got=rows, expected=expected)
    tokens = {**source.tokens, "subset_of": source.sha256}
    manifest = replace(source, splits=dict(splits), tokens=tokens)
    return _rewrite(store, out, manifest, store.resources, lambda _, rows: rows, bar)


def merge(stores: Sequence[ShardStore], out: str | Location, bar: Bar) -> tuple[ShardWriter, list[ShardRange]]:
    """Copy every finished shard, byte for byte and checked, into one store; resumable.

    What ``out`` has already is taken up as any writer does it: a shard is done if the ledger has
    it and its files are there with their sizes, and one that another process holds is left to it.

    Returns:
        The store at ``out``, and the shards pending there that none of the stores has finished.

    Raises:
        UsageError: If the stores, or what lies at ``out``, are not of one identity: names the first
            field that differs.
        IntegrityError: If a file to copy is damaged in every store that has it.
    """
    first = stores[0]
    for other in stores[1:]:
        difference = first.manifest.difference(other.manifest)
        if difference:
            name, expected, got = difference
            what, where = "the stores are not parts of one extraction", other.location.url
            got, expected, where = repr(got), repr(expected), f"{where}: {name}"
            remedy = "merge stores that were written by the same command"
            raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    content = {name: first.file(name) for name in first.manifest.files}
    writer = ShardWriter.create_copy(out, first.manifest, content)
    record_ways(writer.location, [way for store in stores for way in read_ways(store.location)])
    missing = []
    for split in first.manifest.splits:
        pending = set(writer.pending(split))
        for shard in writer.shards(split):
            if shard in pending and not _fill(writer, stores, shard):
                missing.append(shard)
            bar.advance(shard.num_rows * first.manifest.row_length)
    return writer, missing


def _rewrite(
    store: ShardStore,
    out: str | Location,
    manifest: Manifest,
    resources: Mapping[str, Tensor],
    transform: Callable[[ShardRange, Rows], Rows],
    bar: Bar,
) -> ShardWriter:
    arrays = {name: value.numpy() for name, value in resources.items()}
    writer = ShardWriter.create_or_resume(out, manifest, arrays, side_files(store))
    record_ways(writer.location, read_ways(store.location))
    for split in manifest.splits:
        reader = store.split(split)
        pending = set(writer.pending(split))
        for shard in writer.shards(split):
            if shard in pending:
                with writer.claim(shard) as mine:
                    if mine:
                        rows = reader.read_rows(shard.start, shard.stop)
                        writer.write(shard, transform(shard, rows))
            bar.advance(shard.num_rows * manifest.row_length)
    return writer


def side_files(store: ShardStore) -> dict[str, bytes]:
    """Tokenizer and corpus files of a store: what is neither Zarr's nor a resource."""
    own = (*(f"{split}/" for split in store.manifest.splits), f"{RESOURCES}/")
    names = [n for n in store.manifest.files if n != "zarr.json" and not n.startswith(own)]
    return {name: store.file(name) for name in names}


def require_convertible(source: Codec, target: Codec) -> None:
    """Only a distribution becomes a draw; see :func:`convert` for the errors."""
    if not source.is_fresh:
        what, got = "this store cannot be converted", "one frozen draw of the noise"
        where = f"codec {source.name}"
        expected = "the teacher's distribution, as posterior and hidden keep it"
        remedy = "a draw does not tell the distribution it came from: extract again"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    if target.is_fresh:
        what = "not a codec to convert to"
        expected = "a frozen draw: seeded, topk, quantized or full"
        remedy = f"extract again with --codec {target.name}: it needs the teacher itself"
        raise UsageError(what, where=f"codec {target.name}", expected=expected, remedy=remedy)


def _resources(store: ShardStore, codec: Codec) -> dict[str, Tensor]:
    """What ``codec`` decodes with; the unigram stays even if only a student's prior wants it."""
    kept = {*codec.resource_names, "unigram_log_probs"}
    resources = {name: value for name, value in store.resources.items() if name in kept}
    missing = sorted(set(codec.resource_names) - set(resources))
    if missing == ["unigram_log_probs"]:
        resources["unigram_log_probs"] = torch.from_numpy(count_unigram(store))
    elif missing:
        what, where = "the store lacks what the codec needs", f"codec {codec.name}"
        raise UsageError(what, where=where, expected=missing)
    return resources


def _encode(store: ShardStore, codec: Codec, resources: Mapping[str, Tensor], shard: ShardRange, rows: Rows) -> Rows:
    """The rows' arrays under ``codec``, from the distribution as the store approximates it.

    p of the token is exact: probabilities below e^-103 are 0 in float32, its own must stay.
    """
    manifest, length = store.manifest, store.manifest.row_length
    specs = {**STORE_ARRAYS, **codec.array_specs(manifest.vocab_size, None)}
    shapes = {name: (shard.num_rows, length, *spec.trailing_shape) for name, spec in specs.items()}
    result = {name: np.zeros(shapes[name], np.dtype(specs[name].dtype)) for name in specs}
    for name in STORE_ARRAYS:
        result[name][:] = rows[name]
    step = max(1, POSITIONS_AT_ONCE // (manifest.vocab_size * length))
    for start in range(0, shard.num_rows, step):
        part = slice(start, min(start + step, shard.num_rows))
        here, first_row = {name: array[part] for name, array in rows.items()}, shard.start + start
        posterior = stored_noise(store, shard.split, first_row, here)
        if not isinstance(posterior, KeyedPosterior):
            raise GdistillError("the codec keeps no distribution", where=store.codec.name)
        probabilities = posterior.probabilities.tile(0, manifest.vocab_size).double()
        log_probs = (probabilities / probabilities.sum(1, keepdim=True)).log().float()
        log_probs.scatter_(1, posterior.tokens[:, None], posterior.token_log_probs[:, None])
        shape = (part.stop - part.start, length - 1)
        output = TeacherOutput(
            log_probs=log_probs.reshape(*shape, -1),
            tokens=posterior.tokens.reshape(shape),
            rows=torch.arange(first_row, first_row + shape[0]),
        )
        seed = manifest.noise_seed(shard.split)
        for name, value in codec.encode(output, seed, resources).items():
            result[name][part, 1:] = value.numpy()
    return result


def stored_noise(store: ShardStore, split: str, first_row: int, rows: Mapping[str, Any], draw: int = 0) -> Any:
    """The noise of positions 1..L-1 of consecutive rows, row-major, as the codec decodes it."""
    num_rows, length = rows["tokens"].shape
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array[:, 1:])).flatten(0, 1) for name, array in rows.items()}
    ids = torch.arange(first_row, first_row + num_rows).repeat_interleave(length - 1)
    positions = torch.arange(1, length).repeat(num_rows)
    keys = PositionKeys(store.manifest.noise_seed(split), ids, positions, draw)
    tokens = tensors.pop("tokens").long()
    log_probs = tensors.pop("token_log_probs")
    return store.codec.decode(tensors, tokens, log_probs, keys, store.resources)


def _fill(writer: ShardWriter, stores: Sequence[ShardStore], shard: ShardRange) -> bool:
    """Copy a shard from the first store that has it whole; False if none has finished it."""
    with writer.claim(shard) as mine:
        if not mine:  # another process is at it, or was a moment ago
            return True
        damage: GdistillError | None = None
        for store in stores:
            try:
                record = read_record(store.location, store.manifest, shard)
                if record is not None:
                    writer.write_copy(record, _files(store, record))
                    return True
            except IntegrityError as error:  # another store may have it whole
                damage = error
        if damage:
            raise damage
        return False


def _files(store: ShardStore, record: ShardRecord) -> dict[str, bytes]:
    """All files of a shard, every one checked before the first is written."""
    files = {}
    for name, entry in record.files.items():
        where = f"{store.location.url}/{name}: {record.shard}"
        remedy = rewrite_remedy(store.location.url)
        try:
            files[name] = store.location.read(name)
        except FileNotFoundError as error:
            raise IntegrityError("a shard file is missing", where=where, remedy=remedy) from error
        if not entry.matches(files[name]):
            raise IntegrityError("a shard file was altered", where=where, remedy=remedy)
    return files


def count_unigram(store: ShardStore) -> Float[np.ndarray, "v"]:
    """The unigram of a store's training rows, or of the last split that has any."""
    manifest = store.manifest
    names = ["train", *reversed([*manifest.splits])]
    split = next((name for name in names if manifest.splits.get(name)), "train")
    reader = store.split(split, ["tokens"])

    def read_rows(start: int, stop: int) -> np.ndarray:
        return reader.read_rows(start, stop)["tokens"]

    sizes = (manifest.row_length, manifest.vocab_size, manifest.rows_per_shard)
    return unigram_log_probs(read_rows, reader.num_rows, *sizes)
