"""Which attention kernel of transformers the slots of a training step run on.

Their pattern has a block mask, so FlexAttention skips the keys that no slot of a block sees; the
network's own kernel (SDPA) gets the pattern as a dense mask. Tokens are read, and samples drawn,
with the network's own: there every call has another shape, and a kernel to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from shards.base import UsageError, stderr
from trainer.students.attention import flex_obstacle
from trainer.students.drafter.layout import SlotLayout, flex_slot_mask, slot_mask

FLEX = "flex_attention"
NARROWEST_HEAD = 16
"""FlexAttention's kernels multiply tiles at least that wide."""


@contextmanager
def attention_kernel(network: Any, name: str | None) -> Iterator[None]:
    """Within the context the network attends by that kernel of transformers; None is its own."""
    own = network.config._attn_implementation
    if name in (None, own):
        yield
        return
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(own)


def kernel_mask(
    network: Any, layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int
) -> Any:
    """The slots' pattern as the network's attention wants it; see :func:`slot_mask`."""
    kernel = network.config._attn_implementation
    if kernel == FLEX:
        return flex_slot_mask(layout, key_places, num_read)
    seen = slot_mask(layout, key_places, num_read)
    if kernel == "sdpa":
        return seen
    lowest = torch.finfo(network.dtype).min
    return torch.where(seen, 0.0, lowest).to(network.dtype)  # added to the scores


def training_kernel(network: Any, choice: str, device: torch.device) -> str:
    """FlexAttention on CUDA, or the network's own kernel; what is in the way is said once.

    Args:
        network: Of transformers.
        choice: ``model.attention``.
        device: Where it computes.

    Raises:
        UsageError: When FlexAttention is asked for and cannot be had.
    """
    own = network.config._attn_implementation
    if choice == "sdpa" or (choice == "auto" and device.type != "cuda"):
        return own
    obstacle = network_obstacle(network)
    if not obstacle and (device.type == "cuda" or torch.is_grad_enabled()):
        obstacle = flex_obstacle(device)
    if not obstacle:
        return FLEX
    if choice == "flex":
        raise UsageError(
            "FlexAttention cannot be had here",
            where="model.attention",
            got=obstacle,
            remedy=f"set model.attention=auto, which takes {own} here",
        )
    _tell(f"attention: {own} on {device}; no FlexAttention for slots: {obstacle}")
    return own


def network_obstacle(network: Any) -> str:
    """Why this network cannot attend by FlexAttention; else empty."""
    if not getattr(network, "_supports_flex_attn", False):
        return f"{type(network).__name__} has none in transformers"
    config = network.config.get_text_config(decoder=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return "" if width >= NARROWEST_HEAD else f"heads of width {width} are narrower than 16"


@functools.lru_cache(maxsize=64)
def _tell(line: str) -> None:
    stderr.print(line, markup=False)
