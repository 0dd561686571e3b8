"""AdamW, its learning rate over time, gradient clipping, the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from trainer.training.settings import OptimizationConfig

RATE_RATIO = "learning_rate_ratio"
"""Key of a group's learning rate over the first group's."""


def learning_rate(config: OptimizationConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimiser step ``step`` (counted from 0) of ``num_steps``.

    (step + 1) / warmup_steps of the peak during the warm-up; then constant, or a half cosine that
    reaches ``final_learning_rate_ratio`` of the peak at the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    low = config.final_learning_rate_ratio
    share = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizationConfig,
    noise_parameters: Iterable[nn.Parameter] = (),
) -> torch.optim.AdamW:
    """AdamW with the fused kernel, except over sharded parameters.

    Args:
        parameters: All that are trained.
        config: Rates and decays.
        noise_parameters: Those among them whose rate is ``noise_learning_rate_ratio`` times that
            of the others.
    """
    parameters = list(parameters)
    apart = set(noise_parameters) if config.noise_learning_rate_ratio != 1 else set()
    groups: list[dict[str, object]] = [{"params": [p for p in parameters if p not in apart]}]
    if apart:
        noise = [p for p in parameters if p in apart]
        groups.append({"params": noise, RATE_RATIO: config.noise_learning_rate_ratio})
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=not sharded,
        foreach=sharded,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use ``value`` from the next step on; a group with a ratio of its own, that times it."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(RATE_RATIO, 1.0)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most ``max_norm``.

    Returns:
        The norm before clipping, a float32 scalar; not finite when any gradient is not.
    """
    norm = clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
        weights = [self._parameters[name].detach() for name in self.shadows]
        torch._foreach_lerp_(list(self.shadows.values()), weights, 1.0 - decay)

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
