"""Things known of n positions, field by field: some of the positions, or all on another device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Index = Int[Tensor, "m"] | Bool[Tensor, "n"] | slice
"""Which of n positions: their places, a mask, or a range."""
This = TypeVar("This", bound="OfPositions")


class OfPositions(ABC):
    """A frozen dataclass whose tensors have one entry, or row, for each of n positions.

    Fields that have ``select`` and ``to`` of their own are asked; numbers and functions stay.

    Attributes:
        of_vocabulary: Fields that speak of vocabulary ids instead.
    """

    of_vocabulary: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """n."""

    def select(self: This, index: Index) -> This:
        """The same of some of the positions."""

        def part(value: Any) -> Any:
            return value[index] if isinstance(value, Tensor) else value.select(index)

        return self._changed(part, but=self.of_vocabulary)

    def to(self: This, device: torch.device | str) -> This:
        """The same on another device."""
        return self._changed(lambda value: value.to(device))

    def split(self: This, width: int) -> list[This]:
        """The same of ``width`` consecutive positions at a time; there is always one part."""
        starts = range(0, max(1, self.num_positions), width)
        return [self.select(slice(start, start + width)) for start in starts]

    def _changed(self: This, change: Callable[[Any], Any], but: tuple[str, ...] = ()) -> This:
        this: Any = self
        names = [field.name for field in fields(this) if field.name not in but]
        return replace(this, **{name: _changed(getattr(this, name), change) for name in names})


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_changed(entry, change) for entry in value)
    return change(value) if hasattr(value, "to") else value
