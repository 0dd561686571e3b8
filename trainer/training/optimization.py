"""AdamW, learning rate over time, and one clipped step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from trainer.training.settings import OptimizationConfig


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
    parameters: Iterable[nn.Parameter], config: OptimizationConfig
) -> torch.optim.AdamW:
    """AdamW with the fused kernel, except over sharded parameters."""
    parameters = list(parameters)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=not sharded,
        foreach=sharded,
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most ``max_norm``.

    Returns:
        The norm before clipping, a float32 scalar; not finite when any gradient is not.
    """
    norm = clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use ``value`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value
