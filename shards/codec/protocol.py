"""Codecs: what a store keeps of the teacher per token, and the noise that it becomes again.

full        xi, every entry, in half precision        one frozen draw       2 V bytes per token
quantized   xi, every entry, in 8 or 4 bits           one frozen draw       V or V / 2
topk        the k largest xi, the weight of the rest  one frozen draw       3 k; cut at sampling too
seeded      where xi differs from the generator's     one frozen draw       ~60 at eps = 0.01
posterior   the teacher's distribution, its head      fresh at every visit  ~110 (the default)
hidden      the teacher's last hidden state           fresh at every visit  its width

In come ``TeacherOutput`` records (or stored arrays), out go arrays [B, T, ...] (or ``Noise``). A
codec is one frozen dataclass, a file each, found by name: ``CODECS`` below, or an entry point.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.errors import UsageError, did_you_mean
from shards.noise.embedding import Noise
from shards.noise.gumbel import KeyedPosterior, KeyedPrior, Probabilities
from shards.noise.philox import PositionKeys
from shards.settings import from_mapping


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store: numpy dtype name and the shape behind [N rows, L positions]."""

    dtype: str
    trailing_shape: tuple[int, ...] = ()


Arrays = Mapping[str, Tensor]
Tokens = Int[Tensor, "n"]
"""The observed tokens of n positions, int64."""
LogProbs = Float[Tensor, "n"]
"""Their exact log-probabilities, nats, float32."""


@dataclass(frozen=True)
class TeacherOutput:
    """What the teacher says of B rows: for each of T = L - 1 scored tokens (positions 1..L-1).

    Attributes:
        log_probs: [B, T, V] float32, nats, normalised; [:, i] is the distribution of the token at
            position i + 1.
        tokens: [B, T] int64, the tokens scored (row[:, 1:]).
        rows: [B] int64, row index in the split: keys the counter-based generator.
        hidden: [B, T, D] last hidden state fed to the LM head, when the codec asks for it.
    """

    log_probs: Float[Tensor, "b t v"]
    tokens: Int[Tensor, "b t"]
    rows: Int[Tensor, "b"]
    hidden: Float[Tensor, "b t d"] | None = None

    @property
    def token_log_probs(self) -> Float[Tensor, "b t"]:
        """Log p of each token, nats."""
        return self.log_probs.gather(-1, self.tokens[..., None]).squeeze(-1)


@runtime_checkable
class Codec(Protocol):
    """A frozen dataclass that turns teacher output into stored arrays and back into noise.

    Subclass it (or :class:`~shards.codec.protocol.FreshDraws`) and run
    ``shards.testing.check_codec`` on it. ``resources`` are arrays kept once per store
    (``unigram_log_probs`` [V], an LM head), given to both directions.
    """

    name: ClassVar[str]
    is_fresh: ClassVar[bool] = False
    """True: every visit draws anew from the posterior; False: one frozen draw is stored."""
    needs_hidden: ClassVar[bool] = False
    resource_names: ClassVar[tuple[str, ...]] = ("unigram_log_probs",)

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        """The codec's own arrays (``tokens`` and ``token_log_probs`` belong to the store)."""
        ...

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        """Arrays of shape [B, T, *trailing] on the device of ``output``.

        A codec that stores a draw makes it with the keys (seed, row, position), draw 0; one that
        does not makes no use of ``seed``.
        """
        ...

    def decode(self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, keys: PositionKeys, resources: Arrays) -> Noise:
        """Noise of n positions from their arrays ([n, *trailing]).

        ``keys`` choose the draw; for a codec that stores one they must have the seed of ``encode``.
        """
        ...

    def cut(self, arrays: Arrays) -> Arrays:
        """The arrays of some rows, on the host, without slots that none of them uses."""
        return arrays

    def check_ids(self, arrays: Mapping[str, np.ndarray], vocab_size: int) -> str:
        """What is wrong with the ids in stored arrays [rows, L, *trailing]; empty if nothing is.

        A store may come from anywhere: ids of V and more must not get as far as :meth:`decode`.
        """
        return ""

    def distribution(self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, resources: Arrays) -> Probabilities:
        """The teacher's distribution at n positions as stored: targets for KD.

        It is normalised. p_x is exact but for ``hidden``, which rounds the logits.

        Raises:
            UsageError: Where one draw of the noise is stored and the distribution is not.
        """
        what = "the codec stores a draw of the noise, not the teacher's distribution"
        remedy = "extract with the codec posterior or hidden"
        raise UsageError(what, where=f"codec {self.name}", remedy=remedy)

    def prior(self, keys: PositionKeys, vocab_size: int) -> KeyedPrior:
        """Noise to sample with: cut off as :meth:`decode` cuts off what the student trains on."""
        return KeyedPrior(keys, vocab_size)


class FreshDraws(Codec):
    """A codec that stores the distribution: noise is drawn anew at every visit, by the keys."""

    is_fresh: ClassVar[bool] = True

    @abstractmethod
    def distribution(self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, resources: Arrays) -> Probabilities:
        """The teacher's distribution as stored (for distillation losses too)."""

    def decode(
        self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, keys: PositionKeys, resources: Arrays
    ) -> KeyedPosterior:
        """Posterior noise of n positions (Algorithm 1), drawn by ``keys``."""
        distribution = self.distribution(arrays, tokens, log_p, resources)
        return KeyedPosterior(keys, tokens, log_p, distribution)


PART_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Temporaries should stay in a core's cache, and should fill a GPU."""


def encode_in_parts(output: TeacherOutput, encode: Callable[[slice], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Encode some of the B x T positions at a time, so that temporaries stay small; arrays [B, T, ...]."""
    device = output.log_probs.device.type
    step = max(1, PART_ELEMENTS.get(device, 1 << 20) // output.log_probs.shape[-1])
    starts, shape = range(0, output.tokens.numel(), step), output.tokens.shape
    parts = [encode(slice(first, first + step)) for first in starts]
    return {n: torch.cat([part[n] for part in parts]).unflatten(0, shape) for n in parts[0]}


def position_keys(output: TeacherOutput, seed: int, draw: int = 0) -> PositionKeys:
    """Keys of the B x T scored positions in row-major order; T counts from position 1."""
    num_rows, num_tokens = output.tokens.shape
    positions = torch.arange(1, num_tokens + 1, device=output.tokens.device)
    rows = output.rows.to(output.tokens.device)
    return PositionKeys(seed, rows.repeat_interleave(num_tokens), positions.repeat(num_rows), draw)


ENTRY_POINTS = "gdistill.codecs"
CODECS = {
    kind.lower(): EntryPoint(kind.lower(), f"shards.codec.{kind.lower()}:{kind}Codec", ENTRY_POINTS)
    for kind in ("Full", "Quantized", "TopK", "Seeded", "Posterior", "Hidden")
}


def make_codec(name: str, /, **parameters: Any) -> Codec:
    """The codec of that name: one of ours, or PACKAGE/NAME, as an installed package registers it::

        [project.entry-points."gdistill.codecs"]
        "acme-codecs/path" = "acme_codecs.path:PathCodec"

    Raises:
        UsageError: For an unknown name or parameter (naming the nearest known one), or a bad value.
    """
    known = CODECS if name in CODECS else {**CODECS, **{p.name: p for p in entry_points(group=ENTRY_POINTS)}}
    if name not in known:
        package, slash, _ = name.partition("/")
        if slash:
            what = "the codec is of a package that is not installed, or offers it no more"
            raise UsageError(what, got=name, remedy=f"pip install {package}")
        hint = did_you_mean(name, known, f"known codecs: {sorted(known)}")
        raise UsageError("unknown codec", got=name, remedy=hint)
    return from_mapping(known[name].load(), parameters, where=f"codec {name}")


def codec_parameters(codec: Codec) -> dict[str, Any]:
    """JSON-ready parameters from which ``make_codec(name, **parameters)`` rebuilds the codec."""
    return dataclasses.asdict(codec)  # type: ignore[call-overload]
