"""The decoder layers of a language model, run in parts.

A slot that is to know which token the one before it takes waits below the last layers until the
network has said so, and goes on from there::

    h <- h + gate W[argmax_x(l + tau xi)]      l: logits of the slot before, xi: its noise

W are the noise embeddings, which begin as token embeddings. The slots' layers are run after the
tokens' pass, not beside it: L + d + (L - d) R layers in a row for R readings at depth d of L.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from shards.console import stderr
from shards.errors import UsageError
from shards.language_model.forward import DtypeName
from trainer.objective.batch import Places
from trainer.students.backbone import FrozenBackbone, attention_window
from trainer.students.bd3lm import flex_obstacle
from trainer.students.decoder import layer_lists


class TokenReading(nn.Module):
    """What is added to the state of a slot once the token before it is known.

    Args:
        width: D of the backbone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """One: the token's embedding as it is."""
        nn.init.ones_(self.gate)

    def forward(
        self,
        logits: Float[Tensor, "n v"],
        shares: Float[Tensor, "n v"],
        table: Float[Tensor, "v d"],
    ) -> Float[Tensor, "n d"]:
        """The gated embedding of argmax(l + tau xi); gradients reach gate and table.

        Args:
            logits: l of the slots before.
            shares: softmax(tau xi) of their places.
            table: W.
        """
        return self.gate * table[(logits + shares.log()).argmax(dim=-1)]


class Stages:
    """The decoder layers of one network.

    Args:
        network: Of transformers.
        depths: Layers below each part that is to be run.

    Raises:
        UsageError: If it has no list of ``num_hidden_layers`` layers, or none above a depth.
    """

    def __init__(self, network: Any, depths: Sequence[int]) -> None:
        count = network.config.get_text_config(decoder=True).num_hidden_layers
        lists = layer_lists(network)
        if len(lists) != 1:
            raise UsageError(
                "the backbone's layers cannot be run in parts",
                where="model.noise.layers",
                got=f"{len(lists)} lists of {count} layers in {type(network).__name__}",
                expected="one",
            )
        if list(depths) != sorted(depths) or depths[-1] >= count:
            raise UsageError(
                "no such places to read the noise",
                where="model.noise.layers",
                got=list(depths),
                expected=f"rising depths in 1..{count - 1}: the backbone has {count} layers",
            )
        self.count = count
        self._parent, self._name = lists[0]

    def forget(self, cache: DynamicCache, depth: int, num_new: int) -> None:
        """Drop the last keys and values of the layers above a depth, which are run again."""
        layers: Any = cache.layers
        for layer in layers[depth:]:
            layer.crop(-num_new)

    @contextmanager
    def only(
        self, first: int, last: int, states: Float[Tensor, "b n d"] | None = None
    ) -> Iterator[dict[int, Tensor]]:
        """Within the context a call of the network runs the layers first + 1 .. last alone.

        Args:
            first: Layers below the part.
            last: Layers up to the part's end.
            states: What the part reads in place of what the network hands it.

        Yields:
            The states behind each depth that was run, filled by the call.
        """
        whole = getattr(self._parent, self._name)
        part, behind = whole[first:last], {}

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (states, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": states}

        def keep(depth: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                behind[depth] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [
            layer.register_forward_hook(keep(first + index + 1)) for index, layer in enumerate(part)
        ]
        if states is not None:
            hooks.append(part[0].register_forward_pre_hook(enter, with_kwargs=True))
        setattr(self._parent, self._name, part)
        try:
            yield behind
        finally:
            setattr(self._parent, self._name, whole)
            for handle in hooks:
                handle.remove()


# Which attention kernel of transformers the slots of a training step run on.
#
# Their pattern has a block mask, so FlexAttention skips the keys that no slot of a block sees; the
# network's own kernel (SDPA) gets the pattern as a dense mask. Tokens are read, and samples drawn,
# with the network's own: there every call has another shape, and a kernel to compile.


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


# What a language model must be able to do before slots stand on it.


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
    window = attention_window(backbone.files)
    if window is not None and window < row_length:
        raise UsageError(
            "the backbone's attention has a window shorter than the rows",
            where=f"backbone, {backbone.files.name}",
            got=window,
            expected=f"at least {row_length}",
            remedy="train on shorter rows",
        )


# Many starting points of one row, packed behind it: where slots stand and what they see.
#
# A call reads tokens and slots together. Keys are w tokens, of which the last m are read now and
# the others lie in a cache, and behind them the slots of S starting points, K each::
#
#     keys       cached tokens .. w - m | tokens read now .. w | slots of point 1 | of point 2 | ..
#     queries                             0 .. m                 m ..
#
# A token sees the tokens up to itself. Slot k of a point sees the tokens before the point, and
# slots 1..k of the same point; no token sees a slot. So every point's slots read what they would if
# nothing else had been packed, and the tokens' keys and values are those of a row without slots.


EMPTY = -1
"""Place of a key that holds no token: what lies before the beginning of a shorter row."""


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one call.

    Attributes:
        starts: [B, S] tokens in front of each starting point; its first slot proposes the token at
            that position.
        num_slots: K, slots of a point.
        row_length: L; slots that reach past the row's end propose nothing.
    """

    starts: Int[Tensor, "b s"]
    num_slots: int
    row_length: int

    @property
    def places(self) -> Int[Tensor, "b n"]:
        """The row positions that the n = S K slots propose a token for, point by point."""
        steps = torch.arange(self.num_slots, device=self.starts.device)
        return (self.starts[:, :, None] + steps).flatten(1)

    @property
    def positions(self) -> Int[Tensor, "b n"]:
        """Where the slots stand: from there a causal model would propose the token at ``places``.

        So the first slot of a point stands where the last token before it does.
        """
        return (self.places - 1).clamp(max=self.row_length - 1)

    @property
    def indexable_starts(self) -> Int[Tensor, "b s1"]:
        """``starts``, or a column that belongs to no slot where there are none."""
        return self.starts if self.starts.shape[1] else self.starts.new_zeros(len(self.starts), 1)

    @property
    def prefix_lengths(self) -> Int[Tensor, "b n"]:
        """Tokens in front of each slot's starting point."""
        return self.starts.repeat_interleave(self.num_slots, dim=1)


def states_at(
    states: Float[Tensor, "b t d"], columns: Int[Tensor, "b s"]
) -> Float[Tensor, "b s d"]:
    """The states in these columns."""
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))


def proposed_places(
    layout: SlotLayout, tokens: Int[Tensor, "b l"]
) -> tuple[Places, Int[Tensor, "slots"]]:
    """The places that any slot proposes, each once, and which of them is each slot's."""
    proposed = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, layout.places, True)
    where = Places.of(proposed)
    number = torch.zeros_like(tokens).index_put(
        where.index, torch.arange(len(where), device=tokens.device)
    )
    return where, number.gather(1, layout.places).flatten()


# FlexAttention traces this function, and cannot trace run-time type checks.
@no_type_check
def slot_pattern(row, query, key, key_places, starts, num_slots, num_read):
    """Whether a query of ``num_read`` tokens and all slots sees a key; indices that broadcast.

    A token that fills up a row (EMPTY) sees itself, so that it attends to something.
    """
    num_tokens = key_places.shape[1]
    query = query + num_tokens - num_read  # its index among the keys
    key_place = key_places[row, key.clamp(max=num_tokens - 1)]
    query_place = key_places[row, query.clamp(max=num_tokens - 1)]
    slot, other = (query - num_tokens).clamp(min=0), (key - num_tokens).clamp(min=0)
    point = slot // num_slots
    is_known = (key < num_tokens) & (key_place >= 0)
    earlier = is_known & (query < num_tokens) & (key_place <= query_place)
    prefix = is_known & (query >= num_tokens) & (key_place < starts[row, point])
    both = (query >= num_tokens) & (key >= num_tokens)
    together = both & (other // num_slots == point) & (other <= slot)
    return earlier | prefix | together | (key == query)


def slot_mask(
    layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int
) -> Bool[Tensor, "b 1 q k"]:
    """The pattern for SDPA, [B, 1, m + n, w + n].

    Args:
        layout: The slots.
        key_places: Row position of every token key, cached ones first; EMPTY where there is none.
        num_read: m, how many of the last token keys are queries too.
    """
    num_new = layout.places.shape[1]
    device = key_places.device
    row = torch.arange(len(key_places), device=device)[:, None, None]
    query = torch.arange(num_read + num_new, device=device)[None, :, None]
    key = torch.arange(key_places.shape[1] + num_new, device=device)[None, None, :]
    starts = layout.indexable_starts
    seen = slot_pattern(row, query, key, key_places, starts, layout.num_slots, num_read)
    return seen[:, None]


def flex_slot_mask(layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int) -> Any:
    """The same pattern as a block mask of FlexAttention, which skips what no query sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    starts, num_slots = layout.indexable_starts, layout.num_slots
    num_new = layout.places.shape[1]

    @no_type_check
    def sees(batch, head, query, key):
        return slot_pattern(batch, query, key, key_places, starts, num_slots, num_read)

    return create_block_mask(
        sees,
        len(key_places),
        None,
        num_read + num_new,
        key_places.shape[1] + num_new,
        device=key_places.device,
    )
