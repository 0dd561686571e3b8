"""The target, a Llama, and text of its own: what every drafter learns from and is measured on.

The target is written with the same ``Layer`` as the drafters, so that the time of one over the
time of the other says what the sizes say, not which library ran them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import silu

Keys = tuple[Tensor, Tensor]
"""Keys and values, each [b, t, kv, d]."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama layer; ``theta`` is the base of its rotary positions."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    theta: float

    def flops(self, context: float) -> float:
        """Floating point operations of one row in one layer that attends to ``context`` rows."""
        head = self.width // self.heads
        weights = self.width * (2 * self.width + 2 * self.kv_heads * head + 3 * self.inner)
        return 2.0 * weights + 4.0 * context * self.width


class Layer(nn.Module):
    """One Llama layer. Rows lie as [b, a, s]: s slots of a anchors of b texts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv = shape.width, shape.kv_heads * shape.width // shape.heads
        self.shape = shape
        self.before, self.between = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, width + 2 * kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(
        self,
        rows: Float[Tensor, "b a s w"],
        turns: tuple[Tensor, Tensor],
        own: Bool[Tensor, "b a s js"],
        prefix: Keys | None = None,
        seen: Bool[Tensor, "b a t"] | None = None,
        earlier: Keys | None = None,
    ) -> tuple[Float[Tensor, "b a s w"], Keys]:
        """The rows behind the layer, and the keys and values [b, a, j + s, kv, d] of their anchors.

        Args:
            turns: Cosines and sines of the rows' positions, from :func:`rotary`.
            own: Which rows of its own anchor a row attends to.
            prefix: Keys and values of the text, the same for all anchors.
            seen: Which of them an anchor attends to.
            earlier: Keys and values of j rows of the same anchors that came before.
        """
        b, a, s, width = rows.shape
        kv, d = self.shape.kv_heads, width // self.shape.heads
        mixed = self.qkv(self.before(rows)).view(b, a, s, -1, d)
        turned, v = mixed[:, :, :, :-kv], mixed[:, :, :, -kv:]
        first, second = turned.chunk(2, -1)
        turned = turned * turns[0] + torch.cat([-second, first], -1) * turns[1]
        q, k = turned.split([self.shape.heads, kv], -2)
        if earlier is not None:
            k, v = torch.cat([earlier[0], k], 2), torch.cat([earlier[1], v], 2)
        q = q.reshape(b, a, s, kv, -1, d) * d**-0.5
        scores = torch.einsum("baskgd,bajkd->bkgasj", q, k)
        scores = scores.masked_fill(~own[:, None, None], -torch.inf)
        if prefix is not None and seen is not None:
            far = torch.einsum("baskgd,btkd->bkgast", q, prefix[0])
            far = far.masked_fill(~seen[:, None, None, :, None], -torch.inf)
            scores = torch.cat([scores, far], -1)
        weights = scores.float().softmax(-1).to(v.dtype)
        mean = torch.einsum("bkgasj,bajkd->baskgd", weights[..., : v.shape[2]], v)
        if prefix is not None:
            mean = mean + torch.einsum("bkgast,btkd->baskgd", weights[..., v.shape[2] :], prefix[1])
        rows = rows + self.out(mean.reshape(b, a, s, width))
        gate, up = self.gate_up(self.between(rows)).chunk(2, -1)
        return rows + self.down(silu(gate) * up), (k, v)


def rotary(shape: Shape, positions: Int[Tensor, "*n"]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [*n, 1, d] of rotary positions; halves are rotated, as in transformers."""
    d = shape.width // shape.heads
    rates = shape.theta ** -(torch.arange(0, d, 2, dtype=torch.float32) / d)
    angles = positions[..., None, None].float() * torch.cat([rates, rates])
    return angles.cos(), angles.sin()


class Target(nn.Module):
    """A Llama language model with tied embeddings, read from a folder as transformers writes it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        self.shape = Shape(*(config[name] for name in names), float(theta))
        weights = load_file(folder / "model.safetensors")
        self.embedding = nn.Parameter(weights["model.embed_tokens.weight"].float())
        self.layers = nn.ModuleList(Layer(self.shape) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(self.shape.width, eps=config["rms_norm_eps"])
        parts = {
            "before": ["input_layernorm"],
            "between": ["post_attention_layernorm"],
            "qkv": [f"self_attn.{name}_proj" for name in "qkv"],
            "out": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }
        for index, layer in enumerate(self.layers):
            for own, theirs in parts.items():
                found = [weights[f"model.layers.{index}.{name}.weight"] for name in theirs]
                layer.get_submodule(own).load_state_dict({"weight": torch.cat(found)})
        self.norm.load_state_dict({"weight": weights["model.norm.weight"]})
        self.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.embedding.shape[0]

    def flops(self, rows: int, context: float) -> float:
        """Floating point operations of one pass over ``rows`` rows behind ``context`` others."""
        head = 2.0 * self.shape.width * self.vocab_size
        return rows * (len(self.layers) * self.shape.flops(context) + head)

    def read(
        self, tokens: Int[Tensor, "b s"], cache: Cache | None = None, behind: Bool[Tensor, "b s s"] | None = None
    ) -> tuple[Float[Tensor, "b s v"], Float[Tensor, "b s w2"]]:
        """Logits behind the tokens, and the states that drafters read.

        The states are the rows behind the middle layer and behind the last norm, side by side
        (EAGLE-3 reads several layers too). ``behind`` says of a tree of tokens which of them each
        follows, itself included.
        """
        b, s = tokens.shape
        start = torch.zeros(b, dtype=torch.long) if cache is None else cache.lengths
        places = start[:, None] + torch.arange(s)
        if behind is None:
            behind = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
        turns = rotary(self.shape, (start[:, None] + behind.sum(-1) - 1)[:, None])
        seen = None if cache is None else cache.seen()
        rows = middle = self.embedding[tokens][:, None]
        for index, layer in enumerate(self.layers):
            prefix = None if cache is None else cache.keys[index]
            rows, keys = layer(rows, turns, behind[:, None], prefix, seen)
            if cache is not None:
                cache.put(index, places, keys)
            middle = rows if 2 * (index + 1) <= len(self.layers) else middle
        last = self.norm(rows)[:, 0]
        return last @ self.embedding.T, torch.cat([middle[:, 0], last], -1)


@dataclass
class Cache:
    """Keys and values of b texts, and how many positions of each text are valid."""

    keys: list[Keys]
    lengths: Int[Tensor, "b"]

    @classmethod
    def empty(cls, layers: int, shape: Shape, rows: int, positions: int) -> Cache:
        """A cache of ``positions`` places for each of ``rows`` texts."""
        size = (rows, positions, shape.kv_heads, shape.width // shape.heads)
        keys = [(torch.zeros(size), torch.zeros(size)) for _ in range(layers)]
        return cls(keys, torch.zeros(rows, dtype=torch.long))

    def seen(self) -> Bool[Tensor, "b 1 t"]:
        """Which places are valid."""
        return (torch.arange(self.keys[0][0].shape[1]) < self.lengths[:, None])[:, None]

    def put(self, layer: int, positions: Int[Tensor, "b s"], keys: Keys) -> None:
        """Write keys and values [b, 1, s, kv, d]; ``lengths`` says later which of them count."""
        texts = torch.arange(len(positions))[:, None]
        for place, new in zip(self.keys[layer], keys, strict=True):
            place[texts, positions] = new[:, 0]

    def follow(self, path: Int[Tensor, "b k"]) -> None:
        """Behind the first of a tree's tokens, keep those of a path, in its order."""
        texts, old = torch.arange(len(path))[:, None], self.lengths[:, None] + path
        new = self.lengths[:, None] + 1 + torch.arange(path.shape[1])
        for pair in self.keys:
            for place in pair:
                place[texts, new] = place[texts, old]


def row_noise(seed: int, row: int, shape: tuple[int, int]) -> Float[Tensor, "t v"]:
    """Gumbel noise of one text, keyed by seed and row: position i is for the token at i."""
    generator = np.random.Generator(np.random.Philox(key=[seed, row]))
    arrivals = generator.standard_exponential(shape, dtype=np.float32)
    return -torch.from_numpy(arrivals).clamp_(min=2.0**-126).log_()


def uniform(xi: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """One uniform of a position, for those who draw by quantiles: of the noise of id 0."""
    return (-(-xi[..., 0]).exp()).exp()


def at_quantile(law: Float[Tensor, "*n v"], quantile: Float[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The token at a quantile of a law (of any sum), in the order of ids: F^-1(u)."""
    sums = law.cumsum(-1)
    return (sums < quantile[..., None] * sums[..., -1:]).sum(-1).clamp_(max=law.shape[-1] - 1)


@torch.no_grad()
def own_text(target: Target, prompts: Int[Tensor, "b p"], length: int, seed: int, first_row: int) -> Int[Tensor, "b l"]:
    """The prompts, continued to ``length`` tokens by argmax(l + xi) with :func:`row_noise`."""
    b, p = prompts.shape
    rows = range(first_row, first_row + b)
    noise = torch.stack([row_noise(seed, row, (length, target.vocab_size)) for row in rows])
    cache = Cache.empty(len(target.layers), target.shape, b, length)
    tokens = new = prompts
    for position in range(p, length):
        logits = target.read(new, cache)[0]
        cache.lengths += new.shape[1]
        new = (logits[:, -1] + noise[:, position]).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def target_text(
    target: Target, prompts: Int[Tensor, "n p"], length: int, seed: int, folder: Path
) -> Int[Tensor, "n l"]:
    """:func:`own_text` of all prompts, 64 to a file; files that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for start in range(0, len(prompts), 64):
        path = folder / f"{start:06d}.npz"
        if not path.exists():
            tokens = own_text(target, prompts[start : start + 64], length, seed, start)
            np.savez(path.with_suffix(".part.npz"), tokens=tokens.numpy().astype(np.int32))
            os.replace(path.with_suffix(".part.npz"), path)
        rows.append(np.load(path)["tokens"])
    return torch.from_numpy(np.concatenate(rows)).long()


def story_prompts(folder: Path, texts: list[Path], count: int, length: int) -> Int[Tensor, "n p"]:
    """The first ``length`` tokens, <s> included, of ``count`` stories (cycled when fewer)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = [p for path in texts for p in path.read_text("utf-8").split("<|endoftext|>")]
    stories = [part.strip() for part in parts if len(part) > 200]
    ids = [tokenizer.encode(story[:200]).ids[:length] for story in stories[:count]]
    return torch.tensor([ids[i % len(ids)] for i in range(count)])
