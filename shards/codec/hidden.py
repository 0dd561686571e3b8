"""``hidden``: the teacher's last hidden state, and its LM head once per store; fresh noise.

Logits are rebuilt by one matrix product per vocabulary tile. The bytes per token do not depend on
V, and the distribution is exact up to the rounding of the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.protocol import Arrays, ArraySpec, FreshDraws, LogProbs, TeacherOutput, Tokens, encode_in_parts
from shards.errors import GdistillError, UsageError
from shards.noise.gumbel import Probabilities

LARGEST_LEVEL = 127
HEAD_TOLERANCE_NATS = 0.1
VOCABULARY_TILE = 8192


@dataclass(frozen=True)
class HeadLogits(Probabilities):
    """Probabilities rebuilt from hidden states, one matrix product per tile.

    Attributes:
        hidden: [n, D] float32.
        log_normalizers: [n] float32, log-sum-exp of the logits.
        weight: [V, D] float32, the LM head.
        bias: [V] float32.
    """

    hidden: Float[Tensor, "n d"]
    log_normalizers: Float[Tensor, "n"]
    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, "v"]

    of_vocabulary: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @property
    def num_positions(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.weight.shape[0]

    def logits_at(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """The logit of one id per position."""
        return (self.hidden * self.weight[ids]).sum(1) + self.bias[ids]

    def log_tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """Log-probabilities of vocabulary ids start..stop-1."""
        logits = torch.addmm(self.bias[start:stop], self.hidden, self.weight[start:stop].T)
        return logits.sub_(self.log_normalizers[:, None])

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.log_tile(start, stop).exp_()


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

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        if hidden_size is None:
            raise UsageError("codec hidden needs the teacher's hidden size", where="hidden_size")
        one = ArraySpec("float16")
        scale = {} if self.dtype == "float16" else {"scale": one}
        return {"hidden": ArraySpec(self.dtype, (hidden_size,)), "normalizer": one, **scale}

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        if output.hidden is None:
            raise UsageError("codec hidden needs the teacher's hidden states", where="hidden")
        hidden, log_probs = output.hidden.flatten(0, 1).float(), output.log_probs.flatten(0, 1)
        tokens, own = output.tokens.flatten(), output.token_log_probs.flatten()
        _check_head(hidden, log_probs, resources)

        def encode(part: slice) -> dict[str, Tensor]:
            arrays = self._round(hidden[part])
            rebuilt = _unnormalised(arrays, resources)
            starts = range(0, rebuilt.vocab_size, VOCABULARY_TILE)
            tiles = [rebuilt.log_tile(i, i + VOCABULARY_TILE).logsumexp(1) for i in starts]
            excess = rebuilt.logits_at(tokens[part]) - own[part]
            return {**arrays, "normalizer": (torch.stack(tiles).logsumexp(0) - excess).half()}

        return encode_in_parts(output, encode)

    def _round(self, hidden: Float[Tensor, "n d"]) -> dict[str, Tensor]:
        if self.dtype == "float16":
            return {"hidden": hidden.half()}
        scale = (hidden.abs().amax(1) / LARGEST_LEVEL).clamp(min=2.0**-14).half()
        return {"hidden": (hidden / scale[:, None].float()).round().to(torch.int8), "scale": scale}

    def distribution(self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, resources: Arrays) -> HeadLogits:
        """The teacher's distribution as rebuilt (for distillation losses too)."""
        rebuilt = _unnormalised(arrays, resources)
        lse = rebuilt.logits_at(tokens) - log_p + arrays["normalizer"].float()
        return replace(rebuilt, log_normalizers=lse)


def _unnormalised(arrays: Arrays, resources: Arrays) -> HeadLogits:
    """The logits of stored hidden states, their log-sum-exp taken for 0."""
    hidden = arrays["hidden"].float()
    if "scale" in arrays:
        hidden = hidden * arrays["scale"][:, None].float()
    head, bias = resources["lm_head"].float(), resources.get("lm_head_bias")
    bias = torch.zeros_like(head[:, 0]) if bias is None else bias.float()
    return HeadLogits(hidden, torch.zeros_like(hidden[:, 0]), head, bias)


def _check_head(hidden: Float[Tensor, "n d"], log_probs: Float[Tensor, "n v"], resources: Arrays) -> None:
    """Refuse a teacher whose logits are not ``hidden @ lm_head.T (+ bias)``."""
    head, wanted = resources["lm_head"], (log_probs.shape[1], hidden.shape[1])
    if head.shape != wanted:
        what, got, expected = "the LM head does not fit", tuple(head.shape), [*wanted]
        raise GdistillError(what, where="lm_head", got=got, expected=expected)
    best = log_probs[:8].topk(min(32, log_probs.shape[1]), dim=1)
    probe = _unnormalised({"hidden": hidden[:8]}, resources)
    logits = probe.log_tile(0, probe.vocab_size).gather(1, best.indices)
    error = float(((logits - logits[:, :1]) - (best.values - best.values[:, :1])).abs().max())
    if not error <= HEAD_TOLERANCE_NATS:
        what = "the teacher's logits are not its hidden states times its LM head"
        got = f"log-probabilities off by {error:.2g} nats, more than {HEAD_TOLERANCE_NATS}"
        remedy = "use the codec posterior"
        raise GdistillError(what, where="codec hidden", got=got, remedy=remedy)
