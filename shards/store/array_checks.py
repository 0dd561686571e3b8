"""What may be written into a shard: arrays that fit the manifest, values that can be right."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shards.base import GdistillError, UsageError
from shards.store.layout import ShardRange
from shards.store.manifest import Manifest

TOO_LARGE = (
    "if the teacher's logits are finite, the value is too large for the array's dtype: extract with"
    " another codec, or another dtype of this one"
)


def check_arrays(manifest: Manifest, shard: ShardRange, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays that do not fit the manifest or hold values that cannot be right.

    Args:
        manifest: Of the store they are for.
        shard: Their rows.
        arrays: By name, [rows, L, *trailing]; see :meth:`shards.store.writer.ShardWriter.write`.

    Raises:
        UsageError: If an array is missing, unknown, or of another dtype or shape.
        GdistillError: For a token or probability out of range, or a float that is not finite:
            names array, row of the split and position.
    """
    _check_shapes(manifest, shard, arrays)
    tokens, log_probs = arrays["tokens"], arrays["token_log_probs"]
    _refuse_where((tokens < 0) | (tokens >= manifest.vocab_size), shard, "tokens", tokens)
    # A rounding above 0 is a probability of 1; anything more is not a log-probability.
    bad = ~np.isfinite(log_probs) | (log_probs > 1e-3)
    bad[:, 0] |= log_probs[:, 0] != 0
    _refuse_where(bad, shard, "token_log_probs", log_probs)
    for name in manifest.arrays:
        values = arrays[name]
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            _refuse_where(~np.isfinite(values), shard, name, values, TOO_LARGE)


def _check_shapes(manifest: Manifest, shard: ShardRange, arrays: Mapping[str, np.ndarray]) -> None:
    specs = manifest.all_arrays
    if set(arrays) != set(specs):
        raise UsageError("wrong arrays", where=shard, got=sorted(arrays), expected=sorted(specs))
    for name, spec in specs.items():
        expected = (shard.num_rows, manifest.row_length, *spec.trailing_shape)
        found = arrays[name]
        if found.shape != expected or found.dtype != np.dtype(spec.dtype):
            raise UsageError(
                "an array does not fit the manifest",
                where=f"{shard}: {name}",
                got=f"{found.dtype} {found.shape}",
                expected=f"{spec.dtype} {expected}",
            )


def _refuse_where(
    bad: np.ndarray, shard: ShardRange, name: str, values: np.ndarray, remedy: str = ""
) -> None:
    """Refuse ``values`` [rows, L, ...] if ``bad``, of the same shape, is true anywhere."""
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        row, position = int(place[0]), int(place[1])
        raise GdistillError(
            f"{name} out of range",
            where=f"{shard.split} row {shard.start + row}, position {position}",
            got=values[place],
            remedy=remedy,
        )
