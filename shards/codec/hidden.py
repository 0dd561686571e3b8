"""``hidden``: the teacher's last hidden state, and its LM head once per store; fresh noise.

Logits are rebuilt by one matrix product per vocabulary tile. The bytes per token do not depend on
V, and the distribution is exact up to the rounding of the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.protocol import Arrays, ArraySpec, FreshDraws, TeacherOutput, encode_in_parts
from shards.errors import GdistillError, UsageError
from shards.noise.probabilities import HeadLogits

LARGEST_LEVEL = 127
HEAD_TOLERANCE_NATS = 0.1
VOCABULARY_TILE = 8192


@dataclass(frozen=True)
class HiddenCodec(FreshDraws):
    """Arrays: ``hidden`` [D] int8 or float16; ``scale`` float16 (int8 only); ``normalizer``
    float16, log-sum-exp of the rebuilt logits less (the token's rebuilt logit - log p_x), near 0.

    The resources ``lm_head`` [V, D] and ``lm_head_bias`` [V] (zero where the teacher has none)
    turn hidden states into logits.

    Attributes:
        dtype: int8, scaled per token by its largest component, or float16.
    """

    dtype: Literal["int8", "float16"] = "int8"

    name: ClassVar[str] = "hidden"
    needs_hidden: ClassVar[bool] = True
    resource_names: ClassVar[tuple[str, ...]] = ("lm_head", "lm_head_bias")

    def __post_init__(self) -> None:
        if self.dtype not in ("int8", "float16"):
            expected = "int8 or float16"
            raise UsageError(
                "bad codec parameter", where="dtype", got=self.dtype, expected=expected
            )

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        if hidden_size is None:
            raise UsageError("codec hidden needs the teacher's hidden size", where="hidden_size")
        specs = {
            "hidden": ArraySpec(self.dtype, (hidden_size,)),
            "normalizer": ArraySpec("float16"),
        }
        return specs if self.dtype == "float16" else {**specs, "scale": ArraySpec("float16")}

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        if output.hidden is None:
            raise UsageError("codec hidden needs the teacher's hidden states", where="hidden")
        hidden, log_probs = output.hidden.flatten(0, 1).float(), output.log_probs.flatten(0, 1)
        tokens = output.tokens.flatten()
        _check_head(hidden, log_probs, resources)
        own = output.token_log_probs.flatten()
        return encode_in_parts(
            output, lambda part: self._encode(hidden[part], tokens[part], own[part], resources)
        )

    def _encode(
        self,
        hidden: Float[Tensor, "n d"],
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        resources: Arrays,
    ) -> dict[str, Tensor]:
        arrays = self._round(hidden)
        rebuilt = _head_logits(_unscaled(arrays), torch.zeros_like(token_log_probs), resources)
        normalizer = _log_sum_exp(rebuilt) - (rebuilt.logits_at(tokens) - token_log_probs)
        return {**arrays, "normalizer": normalizer.half()}

    def _round(self, hidden: Float[Tensor, "n d"]) -> dict[str, Tensor]:
        if self.dtype == "float16":
            return {"hidden": hidden.half()}
        scale = (hidden.abs().amax(1) / LARGEST_LEVEL).clamp(min=2.0**-14).half()
        levels = (hidden / scale[:, None].float()).round().clamp(-LARGEST_LEVEL, LARGEST_LEVEL)
        return {"hidden": levels.to(torch.int8), "scale": scale}

    def distribution(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        resources: Arrays,
    ) -> HeadLogits:
        """The teacher's distribution as rebuilt (for distillation losses too)."""
        unnormalised = _head_logits(_unscaled(arrays), torch.zeros_like(token_log_probs), resources)
        lse = unnormalised.logits_at(tokens) - token_log_probs + arrays["normalizer"].float()
        return _head_logits(unnormalised.hidden, lse, resources)


def _unscaled(arrays: Arrays) -> Float[Tensor, "n d"]:
    hidden = arrays["hidden"].float()
    return hidden * arrays["scale"][:, None].float() if "scale" in arrays else hidden


def _head_logits(
    hidden: Float[Tensor, "n d"], log_normalizers: Float[Tensor, "n"], resources: Arrays
) -> HeadLogits:
    head, bias = resources["lm_head"].float(), resources.get("lm_head_bias")
    bias = torch.zeros_like(head[:, 0]) if bias is None else bias.float()
    return HeadLogits(hidden, log_normalizers, head, bias)


def _log_sum_exp(rebuilt: HeadLogits) -> Float[Tensor, "n"]:
    """log sum_j exp(logit_j), a tile at a time."""
    size = rebuilt.vocab_size
    tiles = [
        rebuilt.log_tile(start, min(start + VOCABULARY_TILE, size)).logsumexp(1)
        for start in range(0, size, VOCABULARY_TILE)
    ]
    return torch.stack(tiles).logsumexp(0)


def _check_head(
    hidden: Float[Tensor, "n d"], log_probs: Float[Tensor, "n v"], resources: Arrays
) -> None:
    """Refuse a teacher whose logits are not ``hidden @ lm_head.T (+ bias)``."""
    head = resources["lm_head"]
    if head.shape != (log_probs.shape[1], hidden.shape[1]):
        expected = f"[{log_probs.shape[1]}, {hidden.shape[1]}]"
        raise GdistillError(
            "the LM head does not fit", where="lm_head", got=tuple(head.shape), expected=expected
        )
    best = log_probs[:8].topk(min(32, log_probs.shape[1]), dim=1)
    probe = _head_logits(hidden[:8], torch.zeros_like(log_probs[:8, 0]), resources)
    logits = probe.log_tile(0, probe.vocab_size).gather(1, best.indices)
    error = float(((logits - logits[:, :1]) - (best.values - best.values[:, :1])).abs().max())
    if not error <= HEAD_TOLERANCE_NATS:
        raise GdistillError(
            "the teacher's logits are not its hidden states times its LM head",
            where="codec hidden",
            got=f"log-probabilities off by {error:.2g} nats",
            expected=f"<= {HEAD_TOLERANCE_NATS}",
            remedy="use the codec posterior",
        )
