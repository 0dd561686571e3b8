"""Drafters: what each reads of the target, and when a slot learns the one before.

Every drafter gives logits l_i for k slots, and drafts ``argmax(l_i + xi_i)``; l_i may rest on the
drafts of *earlier* slots only, so given them, slot i is a draw from softmax(l_i): the draft may be
checked by the target under the same noise (coupled rule), and as well by the standard rejection
rule, to which the noise is the drafter's own randomness, drawn ahead.

Layers begin as copies of the target's, and read the target's own keys and values of the text: a
drafter keeps no cache, and a draft costs its slots alone.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from benchmarks.drafting.target import Keys, Target, rotary


@dataclass(frozen=True, kw_only=True)
class Form:
    """One rival.

    Args:
        kind: ``slots`` (all slots in one pass of layers; Uno's and DFlash's form) or ``steps``
            (EAGLE: one pass per slot, which reads the last pass's row and token).
        layers: The target's layers that a pass begins as copies of, lowest first.
    """

    name: str
    kind: str
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.kind not in ("slots", "steps"):
            raise ValueError(f"drafter {self.name}: unknown kind {self.kind}")


@dataclass(frozen=True)
class Prefix:
    """What the target knows when a block is drafted behind position t of each anchor.

    ``states`` [b, a, w2] are those of position t - 1, ``tokens`` [b, a] the tokens at t,
    ``positions`` t, ``keys`` the target's, one pair per layer, and ``seen`` [b, a, l] says which
    of them lie before t.
    """

    states: Float[Tensor, "b a w2"]
    tokens: Int[Tensor, "b a"]
    positions: Int[Tensor, "b a"]
    keys: list[Keys]
    seen: Bool[Tensor, "b a l"]


@dataclass(frozen=True)
class Grown:
    """The last rows [b, a, s, w] of the paths of a draft, and keys of all their rows by layer."""

    rows: Float[Tensor, "b a s w"]
    keys: list[Keys]

    def of(self, rows: Int[Tensor, "b s"]) -> Grown:
        """Paths that go on from these of the last rows."""
        last = self.rows.gather(2, rows[:, None, :, None].expand(-1, 1, -1, self.rows.shape[-1]))
        return Grown(last, self.keys)


class Drafter(nn.Module):
    """A drafter of one :class:`Form` with the target's embedding and head, which stay frozen.

    Args:
        ids: The draft vocabulary: the target's ids, the most frequent first; [v].
        slots: Of a block; a trained drafter may be asked for fewer.
    """

    def __init__(self, form: Form, target: Target, ids: Int[Tensor, "v"], slots: int) -> None:
        super().__init__()
        self.form, self.shape, self.slots = form, target.shape, slots
        width, embedding = target.shape.width, target.embedding.detach()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", embedding[ids].contiguous(), persistent=False)
        self.register_buffer("ids", ids)
        self.states = _linear(2 * width, width)
        self.layers = nn.ModuleList(deepcopy(target.layers[index]) for index in form.layers)
        self.norms = nn.ModuleList([deepcopy(target.norm)])
        self.requires_grad_(True)
        if form.kind == "slots":
            self.places = nn.Parameter(torch.randn(slots - 1, width) * 0.02)
            self.ahead = _linear(3 * width, width)
        if form.kind == "steps":
            self.again = _linear(width, width)

    def forward(
        self,
        prefix: Prefix,
        noise: Tensor | None,
        given: Int[Tensor, "b a k"] | None = None,
    ) -> Float[Tensor, "b a k v"]:
        """Logits of the k slots.

        Args:
            noise: xi of the slots, [b, a, k, v]; for ``steps``, which read their drafts.
            given: The true tokens of the slots, which ``steps`` read in training instead.
        """
        if self.form.kind == "steps":
            return self._in_steps(prefix, noise, given)
        first = self.embedding[prefix.tokens] + self.states(_even(prefix.states))
        every = torch.cat([_even(prefix.states), self.embedding[prefix.tokens]], -1)
        ahead = self.ahead(every)[:, :, None] + self.places[: self.slots - 1]
        rows = torch.cat([first[:, :, None], ahead], 2)
        turns = rotary(self.shape, prefix.positions[..., None] + torch.arange(self.slots))
        own = _causal(prefix, self.slots)
        for index, layer in zip(self.form.layers, self.layers, strict=True):
            rows, _ = layer(rows, turns, own, prefix.keys[index], prefix.seen)
        return self._logits(rows)

    def _in_steps(self, prefix: Prefix, noise: Tensor | None, given: Tensor | None) -> Tensor:
        every, grown, logits = _causal(prefix, self.slots), None, []
        tokens = prefix.tokens[:, :, None]
        for slot in range(self.slots):
            own = every[:, :, slot : slot + 1, : slot + 1]
            found, grown = self.grow(prefix, tokens, slot, own, grown)
            logits.append(found)
            if given is not None:
                tokens = given[:, :, slot : slot + 1]
            else:
                assert noise is not None
                tokens = self.ids[(found + noise[:, :, slot : slot + 1]).argmax(-1)]
        return torch.cat(logits, 2)

    def grow(
        self,
        prefix: Prefix,
        tokens: Int[Tensor, "b a s"],
        slot: int,
        own: Bool[Tensor, "b a s j"],
        grown: Grown | None,
    ) -> tuple[Float[Tensor, "b a s v"], Grown]:
        """One step of ``steps`` for s paths: logits behind their tokens, and what was computed.

        Args:
            own: Which of all the rows so far, those of this step last, each row is behind.
            grown: What the step before returned; its rows are those that the paths go on from.
        """
        row = self.embedding[tokens]
        if grown is None:
            row = row + self.states(_even(prefix.states))[:, :, None]
        else:
            row = row + self.again(0.2 * rms_norm(grown.rows, row.shape[-1:]))
        positions = (prefix.positions[..., None] + slot).expand(row.shape[:3])
        turns, every = rotary(self.shape, positions), []
        for index, layer in enumerate(self.layers):
            keys = prefix.keys[self.form.layers[index]]
            earlier = None if grown is None else grown.keys[index]
            row, own_keys = layer(row, turns, own, keys, prefix.seen, earlier)
            every.append(own_keys)
        return self._logits(row), Grown(row, every)

    def _logits(self, rows: Tensor) -> Tensor:
        return self.norms[0](rows) @ self.head.T

    def flops(self, context: float) -> float:
        """Operations of one draft behind ``context`` tokens: layers, heads, what it reads."""
        width, head = self.shape.width, 2.0 * self.head.numel()
        return self.slots * (len(self.layers) * self.shape.flops(context) + head + 8.0 * width**2)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def _even(states: Float[Tensor, "*n w2"]) -> Float[Tensor, "*n w2"]:
    """The two states at one scale, not far above that of embeddings (which is 0.04)."""
    width = states.shape[-1] // 2
    return 0.2 * rms_norm(states.unflatten(-1, (2, width)), (width,)).flatten(-2)


def _causal(prefix: Prefix, slots: int) -> Bool[Tensor, "b a k k"]:
    own = torch.ones(slots, slots, dtype=torch.bool).tril()
    return own.expand(*prefix.tokens.shape, slots, slots)
