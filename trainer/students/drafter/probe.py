"""What a language model must be able to do before slots stand on it."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from shards.base import UsageError
from shards.language_model import DtypeName
from trainer.students.drafter.kernel import kernel_mask
from trainer.students.drafter.layout import SlotLayout
from trainer.students.drafter.stages import Stages
from trainer.students.on_backbone.backbone import FrozenBackbone

PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""How far tokens read as slots may lie from tokens, as a share of the hidden states' spread."""


@torch.no_grad()
def require_slots(backbone: FrozenBackbone, dtype: DtypeName, stages: Stages | None) -> None:
    """Tokens read as slots, without adapters, must be those of the backbone.

    Args:
        backbone: The language model.
        dtype: Precision of its weights.
        stages: Its layers, where slots are to read them in parts: two of them here.

    Raises:
        UsageError: If the model keeps no keys and values, or takes no mask of ours.
    """
    network, half, size = backbone.network, 4, backbone.vocab_size
    rows = (torch.arange(2 * half, device=network.device) % size)[None]
    places = torch.arange(half, device=network.device)[None]
    layout = SlotLayout(places.new_full((1, 1), half + 1), half, 2 * half + 1)
    got = "a forward pass that fails"
    try:
        wanted, cache = backbone.hidden(rows)[:, half:], DynamicCache()
        network.base_model(input_ids=rows[:, :half], past_key_values=cache, use_cache=True)
        call = {
            "inputs_embeds": network.get_input_embeddings()(rows[:, half:]),
            "position_ids": layout.positions,
            "attention_mask": kernel_mask(network, layout, places, 0),
            "past_key_values": cache,
            "use_cache": True,
        }
        if stages is None:
            found = network.base_model(**call).last_hidden_state
        else:
            with stages.only(0, 1) as behind:
                network.base_model(**call)
            with stages.only(1, stages.count, behind[1]):
                found = network.base_model(**call).last_hidden_state
        error = float((found - wanted).float().square().mean().sqrt() / wanted.float().std())
        got = f"hidden states that differ by {error:.2g} of their spread"
        if error <= PROBE_TOLERANCES[dtype]:
            return
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        got = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    raise UsageError(
        "the backbone cannot read slots",
        where=f"backbone, {backbone.files.name}",
        got=got,
        expected="a transformer with a key/value cache that takes a four-dimensional mask",
    )


def require_whole_attention(backbone: FrozenBackbone, row_length: int) -> None:
    """Refuse a backbone whose tokens see less than the row: slots are masked by hand.

    Raises:
        UsageError: Naming the window.
    """
    window = getattr(backbone.files.text_config, "sliding_window", None)
    if isinstance(window, int) and window < row_length:
        raise UsageError(
            "the backbone's attention has a window shorter than the rows",
            where=f"backbone, {backbone.files.name}",
            got=window,
            expected=f"at least {row_length}",
            remedy="train on shorter rows",
        )
