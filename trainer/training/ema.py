"""Exponential moving average of the weights, kept by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shards.base import GdistillError


def ema_decay(update: int, limit: float) -> float:
    """min(limit, (1 + n) / (10 + n)) for the n-th update, n counted from 1."""
    return min(limit, (1 + update) / (10 + update))


class ExponentialMovingAverage:
    """Shadow weights s <- s - (1 - d) (s - w), in the precision (and sharding) of the weights.

    Attributes:
        shadows: Parameter name -> averaged weights.
        num_updates: Updates so far.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._parameters = dict(module.named_parameters())
        self.shadows: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        self.num_updates += 1
        decay = ema_decay(self.num_updates, self.decay)
        shadows = list(self.shadows.values())
        weights = [self._parameters[name].detach() for name in self.shadows]
        torch._foreach_lerp_(shadows, weights, 1.0 - decay)

    @torch.no_grad()
    def load(self, shadows: Mapping[str, Tensor], num_updates: int) -> None:
        """Take over saved averages.

        Raises:
            GdistillError: When names do not agree.
        """
        unknown = sorted(set(shadows) ^ set(self.shadows))
        if unknown:
            raise GdistillError("the saved average has other weights", got=unknown[0])
        for name, shadow in self.shadows.items():
            shadow.copy_(shadows[name])
        self.num_updates = num_updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module carries the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, shadow in self.shadows.items():
            weights = self._parameters[name]
            kept = weights.detach().clone()
            weights.copy_(shadow)
            shadow.copy_(kept)
