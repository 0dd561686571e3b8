"""The authors' Lightning checkpoints -> our Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

NOISE_WEIGHT = "gumbel_noise_embed.linear.weight"
BUFFERS = ("rotary_emb.inv_freq",)


def our_parameters(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' backbone parameters (no prefix) under our names and in our layout.

    Only the noise projection changes shape: theirs is (D, V), ours (V, D).
    """
    ours: dict[str, Tensor] = {}
    for name, value in reference.items():
        if name == NOISE_WEIGHT:
            ours["conditioner.weight"] = value.T.contiguous()
        elif name not in BUFFERS:
            ours[f"backbone.{name}"] = value
    return ours
