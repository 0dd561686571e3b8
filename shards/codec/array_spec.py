"""What an array of a store is; read by manifests, which must not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store: numpy dtype name and the shape behind [N rows, L positions]."""

    dtype: str
    trailing_shape: tuple[int, ...] = ()
