"""A store in another codec, shard by shard, resumable; the noise that a store's rows decode to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from shards.codec.ids import unigram_log_probs
from shards.codec.protocol import Codec, TeacherOutput, codec_parameters
from shards.console import Bar
from shards.errors import GdistillError, UsageError
from shards.noise.gumbel import KeyedPosterior
from shards.noise.philox import PositionKeys
from shards.store.layout import RESOURCES
from shards.store.location import Location
from shards.store.manifest import STORE_ARRAYS, ShardRange, read_ways, record_ways
from shards.store.store import ShardStore, ShardWriter

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
    source, kept = store.manifest, store.codec
    if not kept.is_fresh:
        what, got = "this store cannot be converted", "one frozen draw of the noise"
        expected = "the teacher's distribution, as posterior and hidden keep it"
        remedy = "a draw does not tell the distribution it came from: extract again"
        raise UsageError(what, where=f"codec {kept.name}", got=got, expected=expected, remedy=remedy)
    if codec.is_fresh:
        what, expected = "not a codec to convert to", "a frozen draw: seeded, topk, quantized or full"
        remedy = f"extract again with --codec {codec.name}: it needs the teacher itself"
        raise UsageError(what, where=f"codec {codec.name}", expected=expected, remedy=remedy)
    if "counted" in source.arrays:
        remedy = f"extract again with --codec {codec.name}"
        raise UsageError("a store of conversations stays as it is", remedy=remedy)
    manifest = replace(
        source,
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(source.vocab_size, None),
        teacher={**source.teacher, "converted_from": {**source.codec, "store": source.sha256}},
    )
    resources = _resources(store, codec)
    own = (*(f"{split}/" for split in source.splits), f"{RESOURCES}/")
    side_files = {n: store.file(n) for n in source.files if n != "zarr.json" and not n.startswith(own)}
    arrays = {name: value.numpy() for name, value in resources.items()}
    writer = ShardWriter.create_or_resume(out, manifest, arrays, side_files)
    record_ways(writer.location, read_ways(store.location))
    for split in manifest.splits:
        reader = store.split(split)
        pending = set(writer.pending(split))
        for shard in manifest.shards(split):
            if shard in pending:
                with writer.claim(shard) as mine:
                    if mine:
                        rows = reader.read_rows(shard.start, shard.stop)
                        writer.write(shard, _encode(store, codec, resources, shard, rows))
            bar.advance(shard.num_rows * manifest.row_length)
    return writer


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
    result = {n: np.zeros((shard.num_rows, length, *s.trailing_shape), np.dtype(s.dtype)) for n, s in specs.items()}
    for name in STORE_ARRAYS:
        result[name][:] = rows[name]
    step = max(1, POSITIONS_AT_ONCE // (manifest.vocab_size * length))
    for start in range(0, shard.num_rows, step):
        part = slice(start, min(start + step, shard.num_rows))
        here, first_row = {name: array[part] for name, array in rows.items()}, shard.start + start
        posterior = stored_noise(store, shard.split, first_row, here)
        if not isinstance(posterior, KeyedPosterior):
            raise GdistillError("the codec keeps no distribution", where=store.codec.name)
        log_probs = torch.empty(posterior.num_positions, manifest.vocab_size)
        width = max(1, POSITIONS_AT_ONCE // manifest.vocab_size)
        for some, found in zip(posterior.split(width), log_probs.split(width), strict=True):
            probabilities = some.probabilities.tile(0, manifest.vocab_size).double()
            found.copy_((probabilities / probabilities.sum(1, keepdim=True)).log())
            found.scatter_(1, some.tokens[:, None], some.token_log_probs[:, None])
        shape = (part.stop - part.start, length - 1)
        ids = torch.arange(first_row, first_row + shape[0])
        output = TeacherOutput(log_probs.reshape(*shape, -1), posterior.tokens.reshape(shape), ids)
        for name, value in codec.encode(output, manifest.noise_seed(shard.split), resources).items():
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
