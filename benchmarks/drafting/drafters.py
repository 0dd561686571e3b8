"""Drafters: what each reads of the target and of the noise, and when a slot learns the one before.

Every drafter gives logits l_i for k slots, and drafts ``argmax(l_i + xi_i)``. A drafter that reads
noise reads that of *earlier* slots only, so given it, slot i is a draw from softmax(l_i): the draft
may be checked by the target under the same noise (coupled rule), and as well by the standard
rejection rule, to which the noise is the drafter's own randomness, drawn ahead.

Layers begin as copies of the target's, and read the target's own keys and values of the text: a
drafter keeps no cache, and a draft costs its slots alone.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu

from benchmarks.drafting.target import Keys, Target, rotary

CANDIDATES = 32
"""How many of the noise's ids a drafter with cross-attention reads for a slot."""
WAVES = 12
"""How many octaves of one uniform number a drafter reads."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One rival.

    Args:
        kind: ``heads`` (Medusa: a residual block per slot on the target's last state), ``slots``
            (all slots in one pass of layers; Uno's and DFlash's form), ``steps`` (EAGLE: one pass
            per slot, which reads the last pass's row and token) or ``loop`` (heads guess the
            tokens, a pass of layers reads the guesses in the place of the tokens and drafts
            again; ``loops`` such passes; as many as slots is the autoregressive drafter).
        layers: The target's layers that a pass begins as copies of, lowest first.
        noise: What a slot reads of the noise of the slots before it. ``slots`` and ``heads``:
            ``ids``, the token argmax(log q + xi), q the unigram; ``soft``, softmax(xi + w log q) E;
            ``cross``, attention to the 32 most probable ids of log q + xi in the later layers;
            ``uniform``, one uniform a token in the place of a noise vector (PTP). ``loop``:
            ``race``, its guess is argmax(l + xi); without noise it is softmax(l) E.
    """

    name: str
    kind: str
    layers: tuple[int, ...] = ()
    noise: str = "none"
    loops: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        known = {"kind": ("heads", "slots", "steps", "loop")}
        known["noise"] = ("none", "ids", "soft", "cross", "uniform", "race")
        for key, values in known.items():
            if getattr(self, key) not in values:
                raise ValueError(f"drafter {self.name}: {key} must be one of {values}")


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


class Drafter(nn.Module):
    """A drafter of one :class:`Form` with the target's embedding and head, which stay frozen.

    Args:
        ids: The draft vocabulary: the target's ids, the most frequent first; [v].
        log_unigram: log q of them; [v].
    """

    def __init__(
        self,
        form: Form,
        target: Target,
        ids: Int[Tensor, "v"],
        log_unigram: Float[Tensor, "v"],
        slots: int,
    ) -> None:
        super().__init__()
        self.form, self.shape = form, target.shape
        self.slots = slots
        """Slots of a block; a trained drafter may be asked for fewer."""
        width, depth = target.shape.width, len(form.layers)
        self.register_buffer("embedding", target.embedding.detach(), persistent=False)
        self.register_buffer("head", target.embedding.detach()[ids].contiguous(), persistent=False)
        self.register_buffer("ids", ids)
        self.register_buffer("log_unigram", log_unigram)
        self.states = _linear(2 * width, width)
        self.layers = nn.ModuleList(deepcopy(target.layers[index]) for index in form.layers)
        self.layers.requires_grad_(True)
        reads = 2 if form.kind == "loop" else 1
        self.norms = nn.ModuleList(deepcopy(target.norm) for _ in range(reads))
        self.norms.requires_grad_(True)
        if form.kind == "slots":
            self.places = nn.Parameter(torch.randn(slots - 1, width) * 0.02)
            self.ahead = _linear(3 * width, width)
        if form.kind == "steps":
            self.again = _linear(width, width)
        if form.kind in ("heads", "loop"):
            self.blocks = nn.Parameter(torch.randn(slots, 3 * width, width) * (3 * width) ** -0.5)
            self.outs = nn.Parameter(torch.zeros(slots, width, width))
        if form.noise in ("ids", "soft", "uniform"):
            self.reading = _linear(
                *((2 * WAVES, width) if form.noise == "uniform" else (width, width))
            )
            self.weight = nn.Parameter(torch.ones(()))
        if form.noise == "cross":
            self.weight = nn.Parameter(torch.ones(()))
            self.queries = nn.ModuleList(
                nn.Linear(width, width, bias=False) for _ in range(depth // 2)
            )
            self.values = nn.ModuleList(_linear(width, width) for _ in range(depth // 2))

    def forward(
        self,
        prefix: Prefix,
        noise: Tensor | None,
        given: Int[Tensor, "b a k"] | None = None,
        loops: int | None = None,
    ) -> list[Float[Tensor, "b a k v"]]:
        """Logits of the k slots; a ``loop`` gives those of its heads and of every pass.

        Args:
            noise: xi of the slots, [b, a, k, v], or uniforms [b, a, k].
            given: The true tokens of the slots, in training: ``steps`` reads them in the place of
                its drafts, and so does ``loop`` behind every other anchor.
            loops: Passes of a ``loop`` (its form's).
        """
        kind = self.form.kind
        if kind == "heads":
            return [self._heads(prefix, noise)]
        if kind == "steps":
            return self._in_steps(prefix, noise, given)
        if kind == "slots":
            return self._at_once(prefix, noise)
        logits = [self._heads(prefix, noise)]
        for _ in range(loops or self.form.loops):
            if noise is None:
                rows = logits[-1].detach().float().softmax(-1).to(self.head.dtype) @ self.head
            else:
                rows = self.head[(logits[-1] + noise).argmax(-1)]
            if given is not None:
                forced = (torch.arange(rows.shape[1]) % 2 == 0)[:, None, None]
                rows = torch.where(forced, self.embedding[given], rows)
            first = self.embedding[prefix.tokens] + self.states(_even(prefix.states))
            rows = torch.cat([first[:, :, None], rows[:, :, :-1]], 2)
            logits.append(self._pass(prefix, rows))
        return logits

    def _heads(self, prefix: Prefix, noise: Tensor | None) -> Tensor:
        width = self.shape.width
        every = torch.cat([_even(prefix.states), self.embedding[prefix.tokens]], -1)
        mixed = torch.einsum("baw,kwu->baku", every, self.blocks[: self.slots])
        if self.form.noise in ("ids", "soft"):
            mixed = mixed + _shifted(self._noise_rows(noise))
        mixed = torch.einsum("baku,kuw->bakw", silu(mixed), self.outs[: self.slots])
        last = prefix.states[:, :, None, width:] / 7
        return self._logits(last + mixed, 0)

    def _pass(self, prefix: Prefix, rows: Tensor) -> Tensor:
        turns = rotary(self.shape, prefix.positions[..., None] + torch.arange(self.slots))
        own = _causal(prefix, self.slots)
        for index, layer in zip(self.form.layers, self.layers, strict=True):
            rows, _ = layer(rows, turns, own, prefix.keys[index], prefix.seen)
        return self._logits(rows, -1)

    def _at_once(self, prefix: Prefix, noise: Tensor | None) -> list[Tensor]:
        form, slots = self.form, self.slots
        token = self.embedding[prefix.tokens]
        ahead = self.ahead(torch.cat([_even(prefix.states), token], -1))[:, :, None]
        ahead = ahead + self.places[: slots - 1]
        rows = torch.cat([(token + self.states(_even(prefix.states)))[:, :, None], ahead], 2)
        kept = None
        if form.noise in ("ids", "soft", "uniform"):
            rows = rows + _shifted(self._noise_rows(noise))
        elif form.noise == "cross":
            kept = (noise[:, :, :-1] + self.weight * self.log_unigram).topk(CANDIDATES)
            kept = (kept[0], self.head[kept[1]])
        turns = rotary(self.shape, prefix.positions[..., None] + torch.arange(slots))
        own = _causal(prefix, slots)
        depth = len(self.layers)
        for index, layer in enumerate(self.layers):
            rows, _ = layer(rows, turns, own, prefix.keys[form.layers[index]], prefix.seen)
            if index + 1 == depth:
                break
            reader = index + 1 - depth + len(self.queries) if kept is not None else -1
            if kept is not None and reader >= 0:
                query = self.queries[reader](rows[:, :, 1:])
                scores = torch.einsum("bakw,bakcw->bakc", query, kept[1]) + kept[0]
                mean = torch.einsum("bakc,bakcw->bakw", scores.softmax(-1), kept[1])
                rows = rows + pad(self.values[reader](mean), (0, 0, 1, 0))
        return [self._logits(rows, -1)]

    def _in_steps(self, prefix: Prefix, noise: Tensor | None, given: Tensor | None) -> list[Tensor]:
        token, logits = self.embedding[prefix.tokens][:, :, None], []
        row = token + self.states(_even(prefix.states))[:, :, None]
        earlier: list[Keys | None] = [None] * len(self.layers)
        every = _causal(prefix, self.slots)
        for slot in range(self.slots):
            turns = rotary(self.shape, prefix.positions[..., None] + slot)
            own = every[:, :, slot : slot + 1, : slot + 1]
            for index, layer in enumerate(self.layers):
                keys = prefix.keys[self.form.layers[index]]
                row, earlier[index] = layer(row, turns, own, keys, prefix.seen, earlier[index])
            logits.append(self._logits(row, 0))
            if slot + 1 < self.slots:
                if given is None:
                    assert noise is not None
                    next_token = self.ids[(logits[-1][:, :, 0] + noise[:, :, slot]).argmax(-1)]
                else:
                    next_token = given[:, :, slot]
                row = self.embedding[next_token][:, :, None] + self.again(
                    0.2 * rms_norm(row, row.shape[-1:])
                )
        return [torch.cat(logits, 2)]

    def _logits(self, rows: Tensor, read: int) -> Tensor:
        return self.norms[read](rows) @ self.head.T

    def _noise_rows(self, noise: Tensor | None) -> Tensor:
        assert noise is not None
        if self.form.noise == "uniform":
            angles = noise[..., None] * (torch.pi * 2.0 ** torch.arange(WAVES))
            return self.reading(torch.cat([angles.sin(), angles.cos()], -1))
        if self.form.noise == "ids":
            return self.reading(self.head[(noise + self.log_unigram).argmax(-1)])
        return self.reading((noise + self.weight * self.log_unigram).softmax(-1) @ self.head)

    def flops(self, context: float, loops: int | None = None) -> float:
        """Operations of one draft behind ``context`` tokens: layers, heads, what it reads."""
        width, head = self.shape.width, 2.0 * self.head.numel()
        passes = (loops or self.form.loops) if self.form.kind == "loop" else 1
        row = passes * (len(self.layers) * self.shape.flops(context) + head) + 8.0 * width**2
        if self.form.kind == "loop":
            row += head + 8.0 * width**2
        if self.form.noise == "soft":
            row += head
        return self.slots * row


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    return layer


def _even(states: Float[Tensor, "*n w2"]) -> Float[Tensor, "*n w2"]:
    """The two states at one scale, not far above that of embeddings (which is 0.04)."""
    width = states.shape[-1] // 2
    return 0.2 * rms_norm(states.unflatten(-1, (2, width)), (width,)).flatten(-2)


def _shifted(rows: Float[Tensor, "b a k w"]) -> Float[Tensor, "b a k w"]:
    """Each slot's row is that of the slot before it; the first has none."""
    return pad(rows[:, :, :-1], (0, 0, 1, 0))


def _causal(prefix: Prefix, slots: int) -> Bool[Tensor, "b a k k"]:
    own = torch.ones(slots, slots, dtype=torch.bool).tril()
    return own.expand(*prefix.tokens.shape, slots, slots)
