"""Drafters: what each reads of the target and of the noise, and when a slot learns the one before.

Every drafter gives logits l_i for k slots, and drafts ``argmax(l_i + xi_i)``; l_i may rest on the
drafts or the noise of *earlier* slots only, so given them, slot i is a draw from softmax(l_i): the
draft may be checked by the target under the same noise (coupled rule), and as well by the standard
rejection rule, to which the noise is the drafter's own randomness, drawn ahead. With one uniform a
token in the place of xi (PTP) a draft is the token at that quantile of softmax(l_i), by id.

Layers begin as copies of the target's, and read the target's own keys and values of the text: a
drafter keeps no cache, and a draft costs its slots alone. Only ``small`` has a cache of its own.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu

from benchmarks.drafting.target import Cache, Keys, Target, rotary, uniform

NOISE = {
    "slots": ("none", "soft", "cross"),
    "lora": ("none", "soft", "ids", "uniform"),
    "heads": ("none", "soft"),
    "steps": ("none",),
    "small": ("none",),
}
"""The kinds of drafters, and what each may read of the noise."""
WAVES = 12
"""Of a uniform: sines and cosines of pi u, 2 pi u, 4 pi u and so on."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One rival.

    Args:
        kind: ``slots`` (all slots in one pass of layers; DFlash's form), ``lora`` (the same, but
            the layers stay the target's, with low-rank adapters on the draft rows alone; Uno's
            and PTP's form), ``heads`` (Medusa: a block per slot over the target's last state),
            ``steps`` (EAGLE: one pass per slot, which reads the last pass's row and token) or
            ``small`` (a language model of its own, which reads tokens alone).
        layers: The target's layers that a pass begins as copies of, lowest first.
        rank: Of the adapters.
        noise: What a slot reads of the noise of earlier slots: ``none``; ``soft``, the embedding
            softmax(xi + w log q) E, q the unigram of the text and w learnt; ``ids``, that of the
            token argmax(xi + log q); ``uniform``, one uniform as sines and cosines; ``cross``,
            what ``soft`` reads, but asked for behind the last two layers.
        rate: Learning rate; the training's own by default.
    """

    name: str
    kind: str
    layers: tuple[int, ...] = ()
    rank: int = 32
    noise: str = "none"
    rate: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.noise not in NOISE.get(self.kind, ()):
            raise ValueError(f"drafter {self.name}: {self.kind} with noise {self.noise}")

    def __str__(self) -> str:
        return self.name


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


class Adapted(nn.Module):
    """A frozen linear map of rows [b, a, s, w] and, on all but the first of s, a low-rank one."""

    def __init__(self, whole: nn.Linear, rank: int) -> None:
        super().__init__()
        self.whole = whole
        self.down = nn.Linear(whole.in_features, rank, bias=False)
        self.up = _linear(rank, whole.out_features)

    def forward(self, rows: Float[Tensor, "b a s w"]) -> Float[Tensor, "b a s u"]:
        """The first row is the text's last token, which the target reads as ever."""
        return self.whole(rows) + pad(self.up(self.down(rows[:, :, 1:])), (0, 0, 1, 0))


class Drafter(nn.Module):
    """A drafter of one :class:`Form` with the target's embedding and head, which stay frozen.

    Args:
        ids: The draft vocabulary: the target's ids, the most frequent first; [v].
        log_q: Their log-frequencies.
        slots: Of a block; a trained drafter may be asked for fewer.
    """

    def __init__(
        self, form: Form, target: Target, ids: Int[Tensor, "v"], log_q: Float[Tensor, "v"], slots: int
    ) -> None:
        super().__init__()
        self.form, self.shape, self.slots = form, target.shape, slots
        self.steps = form.kind in ("steps", "small")
        width, embedding = target.shape.width, target.embedding.detach()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", embedding[ids].contiguous(), persistent=False)
        self.register_buffer("ids", ids)
        self.register_buffer("log_q", log_q, persistent=False)
        self.layers = nn.ModuleList(deepcopy(target.layers[index]) for index in form.layers)
        self.norms = nn.ModuleList([deepcopy(target.norm)])
        if form.kind != "lora":
            self.requires_grad_(True)
        if form.kind in ("slots", "steps"):
            self.states = _linear(2 * width, width)
        if form.kind in ("slots", "lora"):
            self.places = nn.Parameter(torch.randn(slots - 1, width) * 0.02)
        if form.kind == "slots":
            self.ahead = _linear(3 * width, width)
        elif form.kind == "steps":
            self.again = _linear(width, width)
        elif form.kind == "small":
            self.own_text: tuple[Tensor, Cache] | None = None
        elif form.kind == "lora":
            for layer in self.layers:
                for name in ("qkv", "out", "gate_up", "down"):
                    setattr(layer, name, Adapted(getattr(layer, name), form.rank))
        else:
            inner, reads = target.shape.inner, form.noise != "none"
            sizes = [(3 + reads * slot) * width for slot in range(slots)]
            self.blocks = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
            self.outs = nn.ModuleList(_linear(inner, width) for _ in sizes)
        if form.noise in ("soft", "cross"):
            self.prior = nn.Parameter(torch.ones(()))
        if form.noise == "cross":
            options = {"bias": False, "batch_first": True}
            asks = [nn.MultiheadAttention(width, target.shape.heads, **options) for _ in range(2)]
            self.asking = nn.ModuleList(asks)
            for asked in asks:
                nn.init.zeros_(asked.out_proj.weight)
        if form.noise == "uniform":
            self.waves = nn.Linear(2 * WAVES, width)
            nn.init.normal_(self.waves.weight, std=0.01)  # beside embeddings, whose scale is 0.04

    def hears(self, xi: Float[Tensor, "*n vocabulary"]) -> Float[Tensor, "*n v"]:
        """What the drafter knows of the noise: xi of its own ids, or one uniform (v is 1)."""
        return uniform(xi)[..., None] if self.form.noise == "uniform" else xi[..., self.ids]

    def forward(
        self, prefix: Prefix, noise: Tensor | None, given: Int[Tensor, "b a k"] | None = None
    ) -> Float[Tensor, "b a k v"]:
        """Logits of the k slots.

        Args:
            noise: Of the slots, as :meth:`hears` gives it, [b, a, k, v]; ``steps`` draft with it.
            given: The true tokens of the slots, which ``steps`` read in training instead.
        """
        if self.form.kind in ("steps", "small"):
            return self._in_steps(prefix, noise, given)
        every = torch.cat([_even(prefix.states), self.embedding[prefix.tokens]], -1)
        if self.form.kind == "heads":
            return self._by_heads(prefix, every, noise)
        first, ahead = self.embedding[prefix.tokens], self.places[: self.slots - 1]
        if self.form.kind == "slots":
            first = first + self.states(_even(prefix.states))
            ahead = ahead + self.ahead(every)[:, :, None]
        if self.form.noise not in ("none", "cross"):
            ahead = ahead + self._read(noise)
        rows = torch.cat([first[:, :, None], ahead.expand(*first.shape[:2], -1, -1)], 2)
        turns = rotary(self.shape, prefix.positions[..., None] + torch.arange(self.slots))
        own = _causal(prefix, self.slots)
        late = len(self.layers) - 2
        for number, (index, layer) in enumerate(zip(self.form.layers, self.layers, strict=True)):
            rows, _ = layer(rows, turns, own, prefix.keys[index], prefix.seen)
            if self.form.noise == "cross" and number >= late:
                rows = rows + self._ask(self.asking[number - late], rows, self._read(noise))
        return self._logits(rows)

    def _read(self, noise: Tensor | None) -> Float[Tensor, "b a j w"]:
        """What is read of the noise of all slots but the last."""
        assert noise is not None
        noise = noise[:, :, : self.slots - 1]
        if self.form.noise == "uniform":
            angles = torch.pi * noise * 2.0 ** torch.arange(WAVES)
            return self.waves(torch.cat([angles.cos(), angles.sin()], -1))
        if self.form.noise == "ids":
            return self.head[(noise + self.log_q).argmax(-1)]
        return (noise + self.prior * self.log_q).softmax(-1) @ self.head

    def _ask(self, attention: nn.Module, rows: Tensor, noise: Tensor) -> Tensor:
        """Slot s hears the noise of those before it, or nobody, which is place 0."""
        heard = pad(5 * noise, (0, 0, 1, 0)).flatten(0, 1)
        asked = rms_norm(rows, rows.shape[-1:]).flatten(0, 1)
        later = torch.ones(rows.shape[2], rows.shape[2], dtype=torch.bool).triu(1)
        found, _ = attention(asked, heard, heard, attn_mask=later, need_weights=False)
        return found.view_as(rows)

    def _by_heads(self, prefix: Prefix, every: Tensor, noise: Tensor | None) -> Tensor:
        # Medusa's residual; ``every`` holds the last state at a fifth of one scale.
        last, logits = 5 * every[..., self.shape.width : 2 * self.shape.width], []
        read = list(self._read(noise).unbind(2)) if self.form.noise == "soft" else []
        for slot in range(self.slots):
            mixed = silu(self.blocks[slot](torch.cat([every, *read[:slot]], -1)))
            logits.append(self._logits(last + self.outs[slot](mixed)))
        return torch.stack(logits, 2)

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
        self, prefix: Prefix, tokens: Int[Tensor, "b a s"], slot: int, own: Bool[Tensor, "b a s j"], grown: Grown | None
    ) -> tuple[Float[Tensor, "b a s v"], Grown]:
        """One step of ``steps`` for s paths: logits behind their tokens, and what was computed.

        Args:
            own: Which of all the rows so far, those of this step last, each row is behind.
            grown: What the step before returned; its rows are those that the paths go on from.
        """
        row, small = self.embedding[tokens], self.form.kind == "small"
        if grown is None and not small:
            row = row + self.states(_even(prefix.states))[:, :, None]
        elif grown is not None and not small:
            row = row + self.again(0.2 * rms_norm(grown.rows, row.shape[-1:]))
        positions = (prefix.positions[..., None] + slot).expand(row.shape[:3])
        turns, every = rotary(self.shape, positions), []
        for index, layer in enumerate(self.layers):
            keys = prefix.keys[index if small else self.form.layers[index]]
            earlier = None if grown is None else grown.keys[index]
            row, own_keys = layer(row, turns, own, keys, prefix.seen, earlier)
            every.append(own_keys)
        return self._logits(row), Grown(row, every)

    def read(self, tokens: Int[Tensor, "b l"], cache: Cache | None = None) -> Float[Tensor, "b l v"]:
        """Of ``small``: logits behind every token, and its own keys of them into ``cache``."""
        start = 0 if cache is None else cache.lengths[:, None]
        places = (start + torch.arange(tokens.shape[1])).expand(tokens.shape)
        rows, turns = self.embedding[tokens][:, None], rotary(self.shape, places[:, None])
        causal = torch.ones(len(tokens), 1, *[tokens.shape[1]] * 2, dtype=torch.bool).tril()
        for index, layer in enumerate(self.layers):
            far = () if cache is None else (cache.keys[index], cache.seen())
            rows, keys = layer(rows, turns, causal, *far)
            if cache is not None:
                cache.put(index, places, keys)
        return self._logits(rows)[:, 0]

    def knows(self, prefix: Prefix, text: Int[Tensor, "b l"]) -> Prefix:
        """What it reads of the text: the target's keys, or (``small``) its own, of new tokens."""
        if self.form.kind != "small":
            return prefix
        end, (b, length) = prefix.positions[:, 0], text.shape
        known = torch.arange(length) < end[:, None]
        before, cache = self.own_text or (text[:0], Cache.empty(0, self.shape, 0, 0))
        if before.shape != text.shape or bool((before != text)[cache.seen()[:, 0]].any()):
            cache = Cache.empty(len(self.layers), self.shape, b, length)
        if count := int((end - cache.lengths).max()):
            places = (cache.lengths[:, None] + torch.arange(count)).clamp_max(length - 1)
            self.read(text.gather(1, places), cache)
        cache.lengths = end.clone()
        self.own_text = text.where(known, 0), cache
        return replace(prefix, keys=cache.keys, seen=cache.seen())

    def _logits(self, rows: Tensor) -> Tensor:
        return self.norms[0](rows) @ self.head.T

    def flops(self, context: float) -> float:
        """Operations of one draft behind ``context`` tokens: layers, heads, what it reads."""
        head, layers = 2.0 * self.head.numel(), len(self.layers) * self.shape.flops(context)
        if self.form.kind in ("slots", "steps", "small"):
            parts = (self.form.kind != "small") + (self.form.noise == "cross")
            own = self.slots * 8.0 * self.shape.width**2 * parts
        else:
            own = 2.0 * sum(w.numel() for w in self.parameters() if w.requires_grad and w.ndim == 2)
            own *= self.slots if self.form.kind == "lora" else 1
        reads = head if self.form.noise in ("soft", "cross") else 0.0
        return self.slots * (layers + head + reads) + own


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
