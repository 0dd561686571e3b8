"""The samplers whose student drafts for the language model that it stands on.

**Medusa.** One pass of the backbone reads the tokens proposed last and says at each of them what it
would have taken; what agrees stays, with the backbone's own token behind it, and the hidden state
in front of that token is what the heads propose from next. Three rules say what agrees:

- ``coupled``: the draft is argmax(l + tau xi), with the noise that the heads were shown. The output
  is the backbone's own sequential decode of that noise (:mod:`~trainer.sampling.coupled`).
- ``greedy``: the draft is argmax l. The output is the backbone's own greedy continuation.
- ``typical``: p(draft) > min(epsilon, delta exp(-H(p))), p the backbone at temperature tau (Cai et
  al., arXiv 2401.10774, section 2.3.1). Fast, and no sample of the backbone.

**Drafter.** Tokens are read without adapters, so what they say is the backbone's own verdict, and
their keys and values serve the slots as they are. A round takes one call or two::

    one    tokens of the last draft, and slots behind each of them, as many as the call may accept:
           K tokens and K K slots give a + 1 tokens, a of K - 1 drafts accepted
    two    the last token and its K slots; then the draft. 2 K + 1 positions give a + 2 tokens

So a token costs 1 / (a + 1) calls against 2 / (a + 2). One call is better, by up to two times,
where a call takes as long as the weights take to be read (few rows on a GPU), and worse by about
K / 2 times where arithmetic decides (a CPU, many rows). The first slot of a point proposes what the
backbone says in the same call; it is there to carry that token's noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from shards.errors import UsageError
from shards.noise.kinds import Noise
from trainer.sampling.coupled import VerifiedRows, VerifiedSampler
from trainer.sampling.fill import Pass
from trainer.sampling.noise import RowNoise, SampleKeys, check_positive
from trainer.sampling.verifier import CausalReader, Verifier, hash_of_weights
from trainer.students.backbone import BackboneStudent
from trainer.students.drafter.layout import EMPTY, SlotLayout, states_at
from trainer.students.drafter.student import ADAPTER, token_uniforms
from trainer.students.registry import Drafter, Medusa, Student

EPSILON, DELTA = 0.1, 1.0


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


def own_verifier(student: BackboneStudent) -> OwnVerifier:
    """The student's own backbone."""
    backbone = student.language_model
    return OwnVerifier(backbone.network, backbone.vocab_size, backbone.context_length)


def wrong_student(label: str, words: str, student: Student, kind: type) -> UsageError:
    """For a student that is not of the sampler's kind."""
    return UsageError(
        f"the {label} sampler needs {words}",
        where="sampler",
        got=type(student).__name__,
        expected=f"a {kind.__name__} student",
        remedy="use --sampler coupled with --verifier",
    )


class MedusaRows(VerifiedRows):
    """Rows that heads draft and their backbone verifies, in one pass per round.

    Attributes:
        hidden: [m, D] behind the last token but one of each row; None before the first pass.
    """

    student: Medusa
    hidden: Float[Tensor, "m d"] | None = None

    def make_reader(self, verifier: Verifier) -> CausalReader:
        """See :class:`VerifiedRows`."""
        reader = super().make_reader(verifier)
        reader.keeps_hidden = True
        return reader

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`VerifiedRows`; nothing before the backbone has read a token."""
        return first if self.hidden is None else first + self.student.settings.backbone.num_proposed

    def draft(self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]) -> Float[Tensor, "n v"]:
        """See :class:`VerifiedRows`."""
        assert self.hidden is not None
        rows, places = where.nonzero(as_tuple=True)
        first = where.int().argmax(dim=1)  # of a row without places it is not used
        embedded = None
        if self.condition is not None:
            window = torch.arange(
                self.student.settings.backbone.num_proposed + 1, device=first.device
            )
            index = (first.clamp_min(1) - 1)[:, None] + window
            padded = pad(self.condition, (0, 0, 0, len(window) - 1))
            embedded = padded[torch.arange(len(tokens), device=first.device)[:, None], index]
        return self.student.propose(self.hidden, embedded)[rows, places - first[rows]]

    def learn(self, taken: Bool[Tensor, "m width"]) -> None:
        """See :class:`VerifiedRows`; the heads go on from where the last taken token was read."""
        hidden = self.reader.hidden
        assert hidden is not None
        last = torch.where(taken, torch.arange(taken.shape[1], device=taken.device), -1).amax(dim=1)
        self.hidden = hidden[torch.arange(len(last), device=last.device), last]

    def select(self, left: Int[Tensor, "k"]) -> None:
        """See :class:`VerifiedRows`."""
        super().select(left)
        self.hidden = None if self.hidden is None else self.hidden[left]


@dataclass(frozen=True, kw_only=True)
class MedusaSampler(VerifiedSampler):
    """The backbone's tokens, several per pass, proposed by the heads on it.

    Attributes:
        max_lookahead: Most tokens proposed at a time; None is as many as the student proposes.
        acceptance: Which proposals stay: ``coupled``, ``greedy`` or ``typical``.
        epsilon: Of typical acceptance.
        delta: Of typical acceptance.

    Further settings as in :class:`VerifiedSampler`; ``draft`` left to itself is ``gumbel`` under
    ``coupled`` acceptance for heads that have not seen their token's own noise, else ``greedy``.
    """

    max_lookahead: int | None = None
    acceptance: Literal["coupled", "greedy", "typical"] = "coupled"
    epsilon: float = EPSILON
    delta: float = DELTA

    label: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(epsilon=self.epsilon, delta=self.delta)
        left_out = {
            "epsilon, delta": self.acceptance != "typical"
            and (self.epsilon, self.delta) != (EPSILON, DELTA),
            "nucleus_p, top_k": self.acceptance != "coupled" and self.rule.truncates,
            "tau": self.acceptance == "greedy" and self.tau != 1,
        }
        for where, is_set in left_out.items():
            if is_set:
                got, remedy = f"with acceptance={self.acceptance}", "leave it out"
                raise UsageError("a setting without effect", where=where, got=got, remedy=remedy)

    @property
    def seen_tau(self) -> float:
        """Greedy decoding is the limit of small noise: no token is preferred by it."""
        return 0.0 if self.acceptance == "greedy" else self.tau

    def load(self, student: Student) -> Verifier:
        """See :class:`VerifiedSampler`."""
        if not isinstance(student, Medusa):
            raise wrong_student("medusa", "heads on a backbone", student, Medusa)
        return own_verifier(student)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`VerifiedSampler`; rows may be as long as the backbone reads."""
        self.load(student)
        super().check(student, tokens)

    def settled(self, student: Student) -> MedusaSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        return _settled(self, student, self.acceptance != "coupled")

    def start(
        self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys
    ) -> MedusaRows:
        """See :class:`Sampler`."""
        return MedusaRows(self, student, tokens, noise, keys)

    def decide(
        self, rows: VerifiedRows, logits: Float[Tensor, "n v"], part: Pass
    ) -> Int[Tensor, "n"]:
        """See :class:`VerifiedSampler`."""
        if self.acceptance == "greedy":
            return logits.argmax(dim=-1)
        return super().decide(rows, logits, part)

    def stays(
        self, logits: Float[Tensor, "n v"], drafts: Int[Tensor, "n"]
    ) -> Bool[Tensor, "n"] | None:
        """See :class:`VerifiedSampler`."""
        if self.acceptance != "typical":
            return None
        size = logits.shape[-1]  # behind the last draft stands the mask
        drafted = drafts.clamp(max=size - 1)
        return is_typical(logits / self.tau, drafted, self.epsilon, self.delta) & (drafts < size)


def _settled(sampler: Any, student: Any, is_greedy: bool) -> Any:
    most = student.settings.backbone.num_proposed
    ahead = most if sampler.max_lookahead is None else min(sampler.max_lookahead, most)
    best = "greedy" if is_greedy or student.sees_own_noise else "gumbel"
    draft = (sampler.draft or best) if ahead else None  # with nothing ahead there is no draft
    return replace(sampler, draft=draft, max_lookahead=ahead)


def is_typical(
    logits: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"], epsilon: float, delta: float
) -> Bool[Tensor, "*n"]:
    """p(token) > min(epsilon, delta exp(-H(p))): unlikely only where the model is certain."""
    log_probs = logits.float().log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).nansum(dim=-1)
    least = (delta * torch.exp(-entropy)).clamp_max(epsilon)
    return log_probs.gather(-1, tokens[..., None])[..., 0].exp() > least


class SlotReader(CausalReader):
    """Next-token logits of B growing rows, and logits of slots behind them.

    Tokens are read as :class:`CausalReader` reads them; what the slots leave in the cache is
    forgotten at once, so the cache holds the backbone's own keys and values and nothing else.

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
        student, cache = self.student, self.cache
        assert cache is not None
        layout = SlotLayout(starts, student.num_slots, tokens.shape[1])
        places, is_new, width = self.align(stops)
        new, num_slots = places.shape[1], layout.places.shape[1]
        cached = torch.arange(-width, 0, device=tokens.device) + self.lengths[:, None]
        known = torch.cat((cached.clamp_min(EMPTY), torch.where(is_new, places, EMPTY)), dim=1)
        hidden = self._states(tokens, places, layout, known, noise_table)
        if num_slots:
            cache.crop(-num_slots)
        self.fit(stops, width + new)
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
        states = student.read_slots(self.cache, layout, slots, known, states_at(hidden, columns))
        return torch.cat((hidden, states), dim=1)


class SlotRows(VerifiedRows):
    """Rows that one model proposes and verifies.

    Attributes:
        logits: [m, K - 1, V] of the tokens from each row's first open position on, as the last
            call's slots propose them; None where it had no slots.
    """

    student: Drafter
    sampler: DrafterSampler
    reader: SlotReader
    logits: Float[Tensor, "m k v"] | None = None
    slots: Float[Tensor, "m points k v"] | None = None

    def make_reader(self, verifier: Verifier) -> SlotReader:
        """See :class:`VerifiedRows`."""
        return SlotReader(self.student, len(self.active))

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`VerifiedRows`."""
        return first if self.logits is None else first + self.logits.shape[1]

    def draft(self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]) -> Float[Tensor, "n v"]:
        """See :class:`VerifiedRows`."""
        assert self.logits is not None
        rows, places = where.nonzero(as_tuple=True)
        return self.logits[rows, places - where.int().argmax(dim=1)[rows]]

    def propose(self) -> Pass:
        """See :class:`VerifiedRows`; to propose took no pass of its own."""
        before = self.num_drafts.clone()
        part = super().propose()
        self.num_drafts = before
        return part

    def read(self) -> Float[Tensor, "m width v"]:
        """See :class:`VerifiedRows`; slots behind each token that this call may accept."""
        first, width = self.first[self.active], self.places.shape[1]
        points = torch.arange(width, device=first.device)
        only_verifies = self.sampler.calls_per_round == 2 and self.logits is not None
        if self.sampler.max_lookahead == 0 or only_verifies:
            points = points[:0]
        starts = torch.minimum(first[:, None] + points, self.stops[:, None])
        self.num_drafts[self.active] += len(points) > 0
        logits, slots = self.reader.read(self.drafted, self.stops, width, starts, self.condition)
        self.slots = slots if len(points) else None
        return logits

    def winners(self, logits: Float[Tensor, "n v"], noise: Noise) -> Int[Tensor, "n"]:
        """See :class:`VerifiedRows`; F^-1(u) where the noise is one uniform per token."""
        if self.student.settings.conditioning != "uniform":
            return super().winners(logits, noise)
        return inverse_cdf(self.sampler.rule.probabilities(logits), token_uniforms(noise))

    def learn(self, taken: Bool[Tensor, "m width"]) -> None:
        """See :class:`VerifiedRows`; the slots behind the last accepted draft propose next."""
        self.logits = None
        if self.slots is not None:
            point = taken.sum(dim=1) - 1
            self.logits = self.slots[torch.arange(len(point), device=point.device), point, 1:]

    def select(self, left: Int[Tensor, "k"]) -> None:
        """See :class:`VerifiedRows`."""
        super().select(left)
        self.logits = None if self.logits is None else self.logits[left]


def inverse_cdf(probs: Float[Tensor, "n v"], uniforms: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
    """F^-1(u) by id, in the precision of float64 probabilities: the first id with F > u."""
    found = torch.searchsorted(probs.cumsum(dim=-1), uniforms.to(probs.device)[:, None], right=True)
    return found[:, 0].clamp(max=probs.shape[-1] - 1)


@dataclass(frozen=True, kw_only=True)
class DrafterSampler(VerifiedSampler):
    """The backbone's own samples, proposed on its slots.

    Attributes:
        max_lookahead: Most tokens proposed at a time; None is as many as the student proposes.
        calls_per_round: 1 reads slots behind every token that may be accepted; 2 reads them when
            it is known which were.

    Further settings as in :class:`VerifiedSampler`; ``draft`` left to itself is ``greedy`` where a
    slot sees its own noise, else ``gumbel``.
    """

    max_lookahead: int | None = None
    calls_per_round: Literal[1, 2] = 1

    label: ClassVar[str] = "drafter"

    def load(self, student: Student) -> Verifier:
        """See :class:`VerifiedSampler`."""
        if not isinstance(student, Drafter):
            raise wrong_student("drafter", "slots of a backbone", student, Drafter)
        return own_verifier(student)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`VerifiedSampler`; also rows longer than the backbone's attention window:
        slots and tokens share one mask, which knows no window.
        """
        self.load(student)
        super().check(student, tokens)
        config = student.language_model.files.text_config  # type: ignore[union-attr]
        window = attention_window(config)
        if window is not None and window < tokens.shape[1]:
            raise UsageError(
                "the rows are longer than the backbone's attention window",
                where="length",
                got=f"{tokens.shape[1]} tokens",
                expected=f"at most {window}",
                remedy="give a smaller --length; medusa and coupled have no such limit",
            )

    def settled(self, student: Student) -> DrafterSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        return _settled(self, student, False)

    def start(
        self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys
    ) -> SlotRows:
        """See :class:`Sampler`."""
        return SlotRows(self, student, tokens, noise, keys)


def attention_window(config: Any) -> int | None:
    """Tokens that a layer of a language model sees at most; None where all see the whole row."""
    is_local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo
    names = ("sliding_window", "attention_chunk_size", *(["window_size"] if is_local else []))
    found = [getattr(config, name, None) for name in names]
    return min((window for window in found if isinstance(window, int)), default=None)
