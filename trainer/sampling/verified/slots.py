"""What the samplers share whose student drafts for the backbone that it stands on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from shards.errors import UsageError
from trainer.sampling.noise import NoiseUse
from trainer.sampling.sampler import check_tokens
from trainer.sampling.token_rule import position_chunks
from trainer.sampling.verified.coupled import Drafter as Drafting
from trainer.sampling.verified.coupled import VerifiedRows, VerifiedSampler, check_open_end
from trainer.sampling.verified.verifier import CausalReader, Verifier, hash_of_weights
from trainer.students.backbone import BackboneStudent
from trainer.students.drafter.layout import EMPTY, SlotLayout, states_at
from trainer.students.drafter.signals import token_uniforms
from trainer.students.drafter.student import ADAPTER
from trainer.students.registry import Drafter, Student


@dataclass(frozen=True, kw_only=True)
class OwnBackboneSampler(VerifiedSampler):
    """Base of the samplers that need no model beside the student.

    Attributes:
        max_lookahead: Most tokens proposed at a time; None is as many as the student proposes.
    """

    max_lookahead: int | None = None  # type: ignore[assignment]

    student_class: ClassVar[type[BackboneStudent]]
    student_in_words: ClassVar[str]

    def settled(self, student: Student) -> OwnBackboneSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        able = self.require(student)
        most = able.settings.backbone.num_proposed
        ahead = most if self.max_lookahead is None else min(self.max_lookahead, most)
        return replace(self, draft=self.draft or self.best_draft(able), max_lookahead=ahead)

    def best_draft(self, student: BackboneStudent) -> Literal["map", "race"]:
        """What ``draft`` is when it is left to the student."""
        return "map" if student.sees_own_noise else "race"

    def load(self, student: Student) -> Verifier:
        """The student's own backbone."""
        backbone = self.require(student).language_model
        return OwnVerifier(backbone.network, backbone.vocab_size, backbone.context_length)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> Student:
        """See :class:`Sampler`; rows may be as long as the backbone reads."""
        verifier = self.load(student)
        check_tokens(student, tokens)
        self.stop.check(student, tokens)
        check_open_end(student, tokens)
        verifier.require_context(tokens.shape[1])
        self.require_reach(self.require(student), tokens.shape[1])
        return student

    def require_reach(self, student: BackboneStudent, row_length: int) -> None:
        """Refuse rows that the student cannot propose tokens in."""

    def require(self, student: Student) -> BackboneStudent:
        """The student, if it is of the sampler's kind.

        Raises:
            UsageError: If not.
        """
        if not isinstance(student, self.student_class):
            raise UsageError(
                f"the {self.label} sampler needs {self.student_in_words}",
                where="sampler",
                got=type(student).__name__,
                expected=f"a {self.student_class.__name__} student",
                remedy="use --sampler coupled with --verifier",
            )
        return student


class OwnVerifier(Verifier):
    """The student's backbone, known by its weights without the adapters beside them."""

    @cached_property
    def weights_sha256(self) -> str:
        """See :class:`Verifier`."""
        return hash_of_weights(
            {
                name.replace(".base_layer.", "."): value
                for name, value in self.model.state_dict().items()
                if f".{ADAPTER}." not in name
            }
        )


# The drafter's backbone reading tokens and slots of rows of different lengths in one call.
#
# Tokens are read as :class:`CausalReader` reads them, each once, and slots behind them; what the
# slots leave in the cache is forgotten at once, so the cache holds the backbone's own keys and
# values and nothing else, whether a call had slots or not.


class SlotReader(CausalReader):
    """Next-token logits of B growing rows, and logits of slots behind them.

    Args:
        student: Gives backbone, adapters and slots.
        num_rows: B.
    """

    def __init__(self, student: Drafter, num_rows: int) -> None:
        backbone = student.language_model
        super().__init__(backbone.network, backbone.vocab_size, num_rows, student.device)
        self.student, self.cache = student, DynamicCache()

    @torch.no_grad()
    def read(
        self,
        tokens: Int[Tensor, "b l"],
        stops: Int[Tensor, "b"],
        num_last: int,
        starts: Int[Tensor, "b p"],
        noise_table: Float[Tensor, "b l e"] | None,
    ) -> tuple[Float[Tensor, "b n v"], Float[Tensor, "b p k v"]]:
        """Logits behind the last tokens, as :meth:`next_logits`, and those of the slots.

        Args:
            tokens: The rows from their beginning; every token before ``stops`` is known.
            stops: [B] tokens to read, at least one more than ``lengths``.
            num_last: n, columns of the first result.
            starts: Starting points of slots, each at most ``stops``; p may be 0.
            noise_table: Noise embeddings by row position; None without noise.
        """
        self.num_passes += 1
        student, cache = self.student, self.cache
        assert cache is not None
        layout = SlotLayout(starts, student.num_slots, tokens.shape[1])
        new = int((stops - self.lengths).max())
        self.keep((stops - new).clamp_min(0))
        width = int(self.lengths.max())
        places = stops[:, None] - new + torch.arange(new, device=tokens.device)
        is_new = places >= 0
        cached = torch.arange(-width, 0, device=tokens.device) + self.lengths[:, None]
        known = torch.cat((cached.clamp_min(EMPTY), torch.where(is_new, places, EMPTY)), dim=1)
        num_slots = layout.places.shape[1]
        hidden = self._states(tokens, places.clamp_min(0), layout, known, noise_table)
        if num_slots:
            cache.crop(-num_slots)
        self._fit(stops, width + new)
        proposed = student.logits(hidden[:, new:])
        shape = (len(tokens), starts.shape[1], student.num_slots, proposed.shape[-1])
        return student.logits(hidden[:, new - num_last : new]), proposed.view(shape)

    def _states(
        self,
        tokens: Int[Tensor, "b l"],
        places: Int[Tensor, "b m"],
        layout: SlotLayout,
        known: Int[Tensor, "b w"],
        noise_table: Float[Tensor, "b l e"] | None,
    ) -> Float[Tensor, "b m_and_n d"]:
        """Last hidden states of the tokens at ``places`` and of the slots behind them."""
        student, network = self.student, self.model
        inputs = network.get_input_embeddings()(tokens.gather(1, places))
        slots = student.slot_inputs(tokens, layout, noise_table)
        waits = len(student.readings) > 0 and slots.shape[1] > 0  # for what the tokens' call says
        here = replace(layout, starts=layout.starts[:, :0]) if waits else layout
        entered = slots[:, : here.places.shape[1], : inputs.shape[2]].to(inputs.dtype)
        with student.adapters.on_last(entered.shape[1]):
            hidden = network.base_model(
                inputs_embeds=torch.cat((inputs, entered), dim=1),
                position_ids=torch.cat((places, here.positions), dim=1),
                attention_mask=student.attention_mask(here, known, places.shape[1]),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        if not waits:
            return hidden
        columns = layout.starts - 1 - places[:, -1:] + places.shape[1] - 1
        last = states_at(hidden, columns)
        states = student.read_slots(self.cache, layout, slots, known, last)
        return torch.cat((hidden, states), dim=1)


# The drafter's decoding: one language model proposes on slots and verifies what it proposed.
#
# Tokens are read without adapters, so what they say is the backbone's own verdict (see
# :mod:`~trainer.sampling.verified.coupled`), and their keys and values serve the slots as they are.
# A round either takes one call or two::
#
#     one    tokens of the last draft, and slots behind each of them, as many as the call may
#     accept:
#            K tokens and K K slots give a + 1 tokens, a of K - 1 drafts accepted
#     two    the last token and its K slots; then the draft. 2 K + 1 positions give a + 2 tokens
#
# So a token costs 1 / (a + 1) calls against 2 / (a + 2). One call is better, by up to two times,
# where a call takes as long as the weights take to be read (few rows on a GPU), and worse by about
# K / 2 times where arithmetic decides (a CPU, many rows). The first slot of a point proposes what
# the backbone says in the same call; it is there to carry that token's noise.


@dataclass(frozen=True, kw_only=True)
class DrafterSampler(OwnBackboneSampler):
    """The backbone's own samples, proposed on its slots.

    Attributes:
        calls_per_round: 1 reads slots behind every token that may be accepted; 2 reads them when
            it is known which were.

    Further settings as in :class:`OwnBackboneSampler`; ``draft`` left to itself is ``map`` where a
    slot is told its own noise, else ``race``.
    """

    calls_per_round: Literal[1, 2] = 1

    label: ClassVar[str] = "drafter"
    student_class: ClassVar[type[BackboneStudent]] = Drafter
    student_in_words: ClassVar[str] = "slots of a backbone"

    def require_reach(self, student: BackboneStudent, row_length: int) -> None:
        """Refuse rows longer than the backbone's attention window: slots and tokens share one mask.

        Raises:
            UsageError: Naming the window.
        """
        window = attention_window(student.language_model.files.text_config)
        if window is not None and window < row_length:
            raise UsageError(
                "the rows are longer than the backbone's attention window",
                where="length",
                got=f"{row_length} tokens",
                expected=f"at most {window}",
                remedy="give a smaller --length; medusa and coupled have no such limit",
            )

    @property
    def rows(self) -> type[VerifiedRows]:
        """See :class:`VerifiedSampler`."""
        return SlotRows


class SlotProposals:
    """What the last call's slots propose.

    Args:
        condition: Noise embeddings of the positions to fill, by position; None without noise.

    Attributes:
        logits: [m, K - 1, V] of the tokens from each row's first open position on; None where the
            last call had no slots.
    """

    def __init__(self, condition: Float[Tensor, "b l e"] | None) -> None:
        self.condition = condition
        self.logits: Tensor | None = None

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`~trainer.sampling.verified.coupled.Drafter`."""
        return first if self.logits is None else first + self.logits.shape[1]

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """Up to a constant a position; see the protocol."""
        assert self.logits is not None
        rows, places = where.nonzero(as_tuple=True)
        first = where.int().argmax(dim=1)
        return self.logits[rows, places - first[rows]]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See the protocol."""
        self.condition = None if self.condition is None else self.condition[rows]
        self.logits = None if self.logits is None else self.logits[rows]


class SlotRows(VerifiedRows):
    """Rows that one model proposes and verifies."""

    config: DrafterSampler
    student: Drafter
    drafter: SlotProposals
    reader: SlotReader
    slots: Float[Tensor, "m points k v"] | None = None

    def _reader(self, verifier: Verifier) -> SlotReader:
        return SlotReader(self.student, len(self.active))

    def _drafter(self, use: NoiseUse) -> Drafting:
        return SlotProposals(use.embed(self.student, self.filled[self.active], self.active))

    def _verifier_logits(
        self, drafted: Int[Tensor, "m l"], stops: Int[Tensor, "m"], width: int
    ) -> Float[Tensor, "m width v"]:
        """See :class:`VerifiedRows`; slots behind each token that this call may accept."""
        first = self.first[self.active]
        self.verifier_nfe[self.active] += 1
        points = torch.arange(width, device=first.device)
        if self.config.max_lookahead == 0 or self._only_verifies:
            points = points[:0]
        starts = torch.minimum(first[:, None] + points, stops[:, None])
        self.nfe[self.active] += len(points) > 0
        with torch.autocast(drafted.device.type, enabled=False):
            read = self.reader.read(drafted, stops, width, starts, self.drafter.condition)
        logits, slots = read
        self.slots = slots if len(points) else None
        return logits

    @property
    def _only_verifies(self) -> bool:
        """Whether this is the second call of a round."""
        return self.config.calls_per_round == 2 and self.drafter.logits is not None

    def _draft(self, first: Int[Tensor, "m"], stops: Int[Tensor, "m"]) -> Int[Tensor, "m l"]:
        """See :class:`VerifiedRows`; proposing took no pass of its own."""
        before = self.nfe.clone()
        tokens = super()._draft(first, stops)
        self.nfe = before
        return tokens

    def _race(
        self, logits: Float[Tensor, "n v"], rows: Int[Tensor, "n"], places: Int[Tensor, "n"]
    ) -> Int[Tensor, "n"]:
        """See :class:`VerifiedRows`; F^-1(u) where the noise is one uniform per token."""
        if self.student.settings.conditioning != "uniform":
            return super()._race(logits, rows, places)
        index = (rows * self.tokens.shape[1] + places).to(self.xi.device)
        parts = [
            inverse_cdf(
                logits[chunk], token_uniforms(self.xi.select(index[chunk])), self.config.tau
            )
            for chunk in position_chunks(len(logits), logits.shape[1], logits.device)
        ]
        return torch.cat(parts)

    def _tell_drafter(self, taken: Bool[Tensor, "m width"]) -> None:
        """See :class:`VerifiedRows`; the slots behind the last accepted draft propose next."""
        if self.slots is None:
            self.drafter.logits = None
        else:
            point = taken.sum(dim=1) - 1
            everyone = torch.arange(len(point), device=point.device)
            self.drafter.logits = self.slots[everyone, point, 1:]


def attention_window(config: Any) -> int | None:
    """Tokens that a layer of a language model sees at most; None where all see the whole row."""
    is_local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo
    names = ("sliding_window", "attention_chunk_size", *(["window_size"] if is_local else []))
    found = [getattr(config, name, None) for name in names]
    return min((window for window in found if isinstance(window, int)), default=None)


def inverse_cdf(
    logits: Float[Tensor, "n v"], uniforms: Float[Tensor, "n"], tau: float
) -> Int[Tensor, "n"]:
    """F^-1(u) by id at temperature tau, in float64: the first id with F > u."""
    cumulative = (logits.double() / tau).softmax(dim=-1).cumsum(dim=-1)
    found = torch.searchsorted(cumulative, uniforms.to(logits.device)[:, None], right=True)
    return found[:, 0].clamp(max=logits.shape[-1] - 1)
