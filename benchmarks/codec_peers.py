"""What other projects store of a teacher per token, as codecs of the codec benchmark only.

Both keep a top-k of the distribution and neither keeps the observed token; what the k leave over
is spread evenly, the better of DistillKit's two options. Ids are bit-packed: 16 bits at V = 50257
(DistillKit's published sizes, 121 and 328 bytes, and Megatron's 528 are for 17-bit ids).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from shards.codec.protocol import Arrays, ArraySpec, TeacherOutput
from shards.noise.kinds import KeyedPosterior, KeyedPrior
from shards.noise.philox import PositionKeys
from shards.noise.probabilities import Entries, HeadAndTail


def id_bits(vocab_size: int) -> int:
    """Bits of a packed id."""
    return (vocab_size - 1).bit_length()


def pack_bits(values: Int[Tensor, "n k"], bits: int) -> UInt8[Tensor, "n w"]:
    """k integers of some bits each, lowest bit first, in ceil(k bits / 8) bytes."""
    places = torch.arange(bits)
    flat = (values[..., None] >> places & 1).flatten(1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).unflatten(1, (-1, 8))
    return (flat << torch.arange(8)).sum(-1).to(torch.uint8)


def unpack_bits(packed: UInt8[Tensor, "n w"], bits: int, count: int) -> Int[Tensor, "n count"]:
    """The integers that :func:`pack_bits` packed."""
    flat = (packed.long()[..., None] >> torch.arange(8) & 1).flatten(1)[:, : count * bits]
    return (flat.unflatten(1, (count, bits)) << torch.arange(bits)).sum(-1)


@dataclass(frozen=True)
class PeerCodec:
    """A top-k whose log-probabilities are kept in ``exact_k`` 16-bit floats and a fitted curve.

    The curve over the rank fits the k - exact_k others by least squares, in float32 coefficients
    of the powers of the rank up to ``degree`` and its square root (DistillKit). With
    exact_k = k there is no curve (Megatron).
    """

    k: int
    exact_k: int
    degree: int
    exact_dtype: str

    name: ClassVar[str] = "peer"
    is_fresh: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = False
    resource_names: ClassVar[tuple[str, ...]] = ("unigram_log_probs",)

    @property
    def _basis(self) -> Float[Tensor, "rest terms"]:
        rank = torch.arange(1, self.k - self.exact_k + 1, dtype=torch.float64)
        rank = rank / max(1, len(rank))
        terms = [rank**power for power in range(self.degree + 1)]
        return torch.stack([*terms, rank.sqrt()], dim=1)

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        num_coefficients = self.degree + 2 if self.k > self.exact_k else 0
        width = -(-self.k * id_bits(vocab_size) // 8)
        return {
            "ids": ArraySpec("uint8", (width,)),
            "values": ArraySpec("uint8", (2 * self.exact_k + 4 * num_coefficients,)),
        }

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        log_probs, ids = output.log_probs.flatten(0, 1).topk(self.k, dim=1)
        exact = log_probs[:, : self.exact_k].to(getattr(torch, self.exact_dtype))
        values = [exact.contiguous().view(torch.uint8)]
        if self.k > self.exact_k:
            curve = torch.linalg.pinv(self._basis) @ log_probs[:, self.exact_k :].double().T
            values.append(curve.T.float().contiguous().view(torch.uint8))
        packed = pack_bits(ids, id_bits(output.log_probs.shape[-1]))
        arrays = {"ids": packed, "values": torch.cat(values, dim=1)}
        return {name: array.unflatten(0, output.tokens.shape) for name, array in arrays.items()}

    def decode(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        keys: PositionKeys,
        resources: Arrays,
    ) -> KeyedPosterior:
        vocab_size = len(resources["unigram_log_probs"])
        ids = unpack_bits(arrays["ids"], id_bits(vocab_size), self.k)
        probs = self._log_probs(arrays["values"]).exp()
        probs = probs / probs.sum(1, keepdim=True).clamp(min=1.0)
        rest = (1 - probs.sum(1)).clamp(min=1e-6) / max(1, vocab_size - self.k)
        listed = ids == tokens[:, None]
        own = torch.where(listed.any(1), torch.where(listed, probs, 0.0).sum(1), rest)
        head = Entries(ids, probs, torch.ones_like(ids, dtype=torch.bool))
        even = torch.ones(vocab_size)
        return KeyedPosterior(keys, tokens, own.log(), HeadAndTail(head, rest, even))

    def _log_probs(self, values: UInt8[Tensor, "n w"]) -> Float[Tensor, "n k"]:
        split = 2 * self.exact_k
        exact = values[:, :split].contiguous().view(getattr(torch, self.exact_dtype)).float()
        if self.k == self.exact_k:
            return exact
        coefficients = values[:, split:].contiguous().view(torch.float32).double()
        fitted = (coefficients @ self._basis.T).float().clamp(max=0.0)
        return torch.cat([exact, fitted], dim=1)

    def prior(self, keys: PositionKeys, vocab_size: int) -> KeyedPrior:
        """The untruncated prior."""
        return KeyedPrior(keys, vocab_size)


DISTILLKIT_BUDGET = PeerCodec(k=50, exact_k=1, degree=1, exact_dtype="bfloat16")
DISTILLKIT_RECOMMENDED = PeerCodec(k=128, exact_k=16, degree=4, exact_dtype="bfloat16")
MEGATRON = PeerCodec(k=128, exact_k=128, degree=0, exact_dtype="float16")
