"""The samplers whose student drafts for the language model that it stands on.

**Medusa.** One pass of the backbone reads the tokens proposed last and says at each of them what it
would have taken; what agrees stays, with the backbone's own token behind it, and the hidden state
in front of that token is what the heads propose from next. Three rules say what agrees:

- ``coupled``: the draft is argmax(l + tau xi), with the noise that the heads were shown. The output
  is the backbone's own sequential decode of that noise (:mod:`~trainer.sampling.coupled`).
- ``greedy``: the draft is argmax l. The output is the backbone's own greedy continuation.
- ``typical``: p(draft) > min(epsilon, delta exp(-H(p))), p the backbone at temperature tau (Cai et
  al., arXiv 2401.10774, section 2.3.1). Fast, and no sample of the backbone.

**Drafter.** With the noise known, softmax(l / tau + xi) of a drafter's logits says how probable it
is that each token wins the race of its position: near 1 where the race is decided, split where it
is close. Drafts so form a *tree*: the most probable paths, grown step by step (EAGLE-2's search,
Li et al., arXiv 2406.16858), more of them where the race is open. One pass of the backbone reads
the tree; from the row's last token the backbone's own draws, argmax(l + tau xi), are walked along
its branches until one leaves it. That token is right as well. Any tree gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from shards.errors import UsageError
from shards.settings import setting
from trainer.objective.batch import Places
from trainer.sampling.coupled import VerifiedRows, VerifiedSampler
from trainer.sampling.fill import Pass
from trainer.sampling.noise import MOST_ELEMENTS, RowNoise, SampleKeys
from trainer.sampling.verifier import CausalReader, Verifier
from trainer.students.backbone import BackboneStudent
from trainer.students.drafter import attention_mask
from trainer.students.registry import Drafter, Medusa, Student

EPSILON, DELTA = 0.1, 1.0


def own_verifier(student: BackboneStudent) -> Verifier:
    """The student's own backbone."""
    backbone = student.language_model
    return Verifier(backbone.network, backbone.vocab_size, backbone.context_length)


def wrong_student(label: str, words: str, student: Student, kind: type) -> UsageError:
    """For a student that is not of the sampler's kind."""
    what, expected = f"the {label} sampler needs {words}", f"a {kind.__name__} student"
    got, remedy = type(student).__name__, "use --sampler coupled with --verifier"
    return UsageError(what, where="sampler", got=got, expected=expected, remedy=remedy)


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
            window = torch.arange(self.student.settings.backbone.num_proposed + 1, device=first.device)
            index = (first.clamp_min(1) - 1)[:, None] + window
            padded = pad(self.condition.embedding, (0, 0, 0, len(window) - 1))
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
    epsilon: float = setting(EPSILON, within="(0, inf)")
    delta: float = setting(DELTA, within="(0, inf)")

    label: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        super().__post_init__()
        left_out = {
            "epsilon, delta": self.acceptance != "typical" and (self.epsilon, self.delta) != (EPSILON, DELTA),
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

    def settled(self, student: Student) -> MedusaSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        return _settled(self, student, self.acceptance != "coupled")

    def start(self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> MedusaRows:
        """See :class:`Sampler`."""
        return MedusaRows(self, student, tokens, noise, keys)

    def decide(self, rows: VerifiedRows, logits: Float[Tensor, "n v"], part: Pass) -> Int[Tensor, "n"]:
        """See :class:`VerifiedSampler`."""
        if self.acceptance == "greedy":
            return logits.argmax(dim=-1)
        return super().decide(rows, logits, part)

    def stays(self, logits: Float[Tensor, "n v"], drafts: Int[Tensor, "n"]) -> Bool[Tensor, "n"] | None:
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


class DraftModel:
    """The drafter as a causal language model that a :class:`CausalReader` reads.

    Args:
        student: The drafter.
    """

    def __init__(self, student: Drafter) -> None:
        self.embed, self.run, self.head = student.embed, student.runner(), student.logits

    def forward(
        self,
        input_ids: Int[Tensor, "b n"],
        attention_mask: Int[Tensor, "b k"],
        past_key_values: DynamicCache,
        position_ids: Int[Tensor, "b n"],
        logits_to_keep: int,
        use_cache: bool,
    ) -> CausalLMOutput:
        """As of transformers' models; of the mask's columns the last n are the tokens'."""
        (_, new), total = input_ids.shape, attention_mask.shape[1]
        causal = torch.ones(new, total, dtype=torch.bool, device=input_ids.device).tril(total - new)
        seen = attention_mask.bool()[:, None] & causal
        output = self.run(self.embed(input_ids), position_ids, seen, past_key_values)
        return CausalLMOutput(logits=self.head(output[:, -logits_to_keep:]))

    __call__ = forward


class TreeReader(CausalReader):
    """Next-token logits of B growing rows, and of trees of drafts behind them.

    Attributes:
        num_read: Tokens of a tree of which nobody has said yet what is kept.
    """

    num_read = 0

    @torch.no_grad()
    def read_tree(self, tree: Tree, first: Int[Tensor, "b"], most: int) -> Float[Tensor, "b n v"]:
        """Logits behind a tree's tokens, the first of which is each row's last known one.

        Args:
            tree: Of depths that are counted from that token.
            first: [B] the position behind it.
            most: Length of a finished row; what lies deeper is read at its end and not used.
        """
        self.num_passes += 1
        self.num_read = tree.tokens.shape[1]
        known = self.known()[:, None].expand(-1, self.num_read, -1)
        seen = torch.cat((known, tree.behind), dim=-1)
        logits, _ = self._run(
            input_ids=tree.tokens,
            position_ids=(first[:, None] - 1 + tree.depths).clamp_max(most - 1),
            attention_mask=attention_mask(self.model, seen),
            past_key_values=self.cache,
            use_cache=True,
        )
        return logits[..., : self.vocab_size].float()

    def follow(self, path: Int[Tensor, "b k"], counts: Int[Tensor, "b"]) -> None:
        """Of the tree that was read last, keep the first ``counts[b]`` tokens of a path."""
        lengths, width = self.lengths + counts, int(self.lengths.max())
        place = torch.arange(-int(lengths.max()), 0, device=path.device) + lengths[:, None]
        ahead = (place - self.lengths[:, None]).clamp(0, path.shape[1] - 1)
        old = place + (width - self.lengths)[:, None]
        source = torch.where(place < self.lengths[:, None], old, width + path.gather(1, ahead))
        self._take(torch.where(place < 0, -1, source), width + self.num_read)
        self.lengths, self.num_read = lengths, 0


@dataclass(frozen=True)
class Tree:
    """Drafts of m rows; number 0 is the row's last known token, n the most drafts.

    Attributes:
        tokens: [m, n + 1], a draft behind the one that it follows.
        behind: [m, n + 1, n + 1] whether token i has token j in its past, itself included.
    """

    tokens: Int[Tensor, "m n1"]
    behind: Bool[Tensor, "m n1 n1"]

    @cached_property
    def depths(self) -> Int[Tensor, "m n1"]:
        """Tokens between each and number 0, itself included."""
        return self.behind.sum(dim=-1) - 1

    def walk(
        self, draw: Callable[[Tensor, int], Tensor], most: Int[Tensor, "m"]
    ) -> tuple[Int[Tensor, "m k"], Int[Tensor, "m k"], Int[Tensor, "m"]]:
        """The way of each row's own tokens from number 0: numbers, what follows each, their count.

        Args:
            draw: What follows the numbers [m] of the tree that it is asked for, and their depth.
            most: Drafts that may be met.
        """
        everyone = torch.arange(len(most), device=most.device)
        now, counts, path, own = torch.zeros_like(most), torch.ones_like(most), [], []
        while True:
            depth = len(path)
            path.append(now)
            own.append(draw(now, depth))
            met = self.behind[everyone, :, now] & (self.tokens == own[-1][:, None])
            met &= (self.depths == depth + 1) & (counts == depth + 1)[:, None]
            met &= (depth < most)[:, None]
            going = met.any(dim=1)
            if not bool(going.any()):
                return torch.stack(path, dim=1), torch.stack(own, dim=1), counts
            now, counts = torch.where(going, met.int().argmax(dim=1), now), counts + going


class TreeRows(VerifiedRows):
    """Rows for which a drafter grows trees that its backbone reads."""

    student: Drafter
    sampler: DrafterSampler
    reader: TreeReader

    def make_reader(self, verifier: Verifier) -> TreeReader:
        """See :class:`VerifiedRows`."""
        return TreeReader(verifier.model, verifier.vocab_size, len(self.active), self.student.device)

    def start(self) -> None:
        """See :class:`Rows`."""
        super().start()
        self.model = DraftModel(self.student)
        sizes = self.student.config.vocab_size, len(self.active), self.student.device
        self.drafter = CausalReader(self.model, *sizes)
        self.rule = self.sampler.rule
        self.xi, self.ready = torch.empty(0), 0

    def select(self, left: Int[Tensor, "k"]) -> None:
        """See :class:`VerifiedRows`."""
        super().select(left)
        self.drafter.select(left)
        self.origin, self.xi = self.origin[left], self.xi[left]

    def noise_ahead(self, first: Int[Tensor, "m"], count: int) -> None:
        """Draw tau xi of the next positions. A call costs more than a position, so that many are
        drawn at a time and kept for the passes to come.

        Sets ``xi`` [m, n, V], float64, and ``origin``, the position of its first column; ``ready``
        is how many positions every row has left.
        """
        if count > self.ready:
            length, size = self.tokens.shape[1], self.student.config.vocab_size
            most = MOST_ELEMENTS[first.device.type] // (len(first) * size)
            self.ready = max(count, min(most, length - int(first.min()) + count))
            places = first[:, None] + torch.arange(self.ready, device=first.device)
            rows = self.active.repeat_interleave(self.ready)
            noise = self.noise.at(rows, places.clamp_max(length - 1).flatten())
            xi = noise.tile(0, size).to(first.device).double().log_().mul_(-self.sampler.tau)
            self.origin, self.xi = first, xi.view(len(first), self.ready, size)

    def propose(self) -> Pass:
        """See :class:`VerifiedRows`; the first pass reads the given tokens and no drafts."""
        first, length = self.first[self.active], self.tokens.shape[1]
        ahead = int(self.sampler.max_lookahead or 0) if self.reader.num_passes else 0
        # The last token is never drafted: the backbone's own comes as well.
        self.stops = (first + ahead).clamp_max(length - 1)
        self.noise_ahead(first, ahead + 1)
        last = self.tokens[self.active].gather(1, first[:, None] - 1)
        self.tree = Tree(last, torch.ones_like(last, dtype=torch.bool)[..., None])
        if bool((self.stops > first).any()):
            self.num_drafts[self.active] += self.stops > first
            self.tree = self.grow(last, first)
        places = Places(self.active, first)
        return Pass(self.active, places, places)

    def predict(self, part: Pass) -> Float[Tensor, "m n1 v"]:
        """See :class:`Rows`: the backbone's logits behind all tokens of the trees."""
        first = self.first[self.active]
        with torch.autocast(self.tokens.device.type, enabled=False):
            if not self.reader.num_passes:
                return self.reader.next_logits(self.tokens[self.active], first, 1)
            return self.reader.read_tree(self.tree, first, self.tokens.shape[1])

    def kept(self, logits: Float[Tensor, "m s v"]) -> Float[Tensor, "m s v"]:
        """Logits of tokens that the rule keeps; those of the others are -inf."""
        if not self.rule.truncates:
            return logits
        probabilities = self.rule.probabilities(logits.flatten(0, 1)).view_as(logits)
        return logits.masked_fill(probabilities == 0, -torch.inf)

    def grow(self, last: Int[Tensor, "m 1"], first: Int[Tensor, "m"]) -> Tree:
        """The ``tree`` most probable drafts, searched along ``width`` paths.

        A child is less probable than its parent, so the search ends where no path can bring a draft
        that would be among them; also, row by row, where its paths are too improbable to go on.
        """
        sampler, model = self.sampler, self.model
        logits = self.drafter.next_logits(self.tokens[self.active], first, 1)
        cache, known = self.drafter.cache, self.drafter.known()[:, None]
        assert cache is not None
        score = torch.zeros_like(last, dtype=torch.float32)
        steps = int(sampler.max_lookahead or 0)
        width = min(sampler.width, self.student.config.vocab_size)
        everyone = torch.arange(len(last), device=last.device)[:, None]
        behind = everyone.new_zeros(len(last), 1, 1 + steps * width, dtype=torch.bool)
        behind[..., 0] = True
        tokens, scores, pasts, used = [last], list[Tensor](), [behind], 1
        numbers = torch.arange(width, device=last.device)
        ahead = torch.arange(steps, device=last.device)
        places = (first[:, None] - 1 + ahead).clamp_max(self.tokens.shape[1] - 1)
        for distance in range(steps):
            if distance:
                seen = torch.cat((known.expand(-1, width, -1), pasts[-1][..., 1:used]), dim=-1)
                at = places[:, distance, None].expand(-1, width)
                logits = model.head(model.run(model.embed(tokens[-1]), at, seen, cache))
            race = self.kept(logits)
            if sampler.draft == "gumbel":
                column = (first - self.origin + distance)[:, None]
                race = race + self.xi[everyone, column].float()
            best, ids = (race / sampler.tau).log_softmax(dim=-1).topk(width)
            score, at = (score[..., None] + best).flatten(1).topk(width)
            parent = (at // width)[..., None]
            tokens.append(ids.flatten(1).gather(1, at))
            scores.append(score)
            behind = pasts[-1].gather(1, parent.expand(-1, -1, behind.shape[-1]))
            behind[:, numbers, used + numbers] = True
            pasts.append(behind)
            used += width
            if sampler.min_reach:  # what a row drops here depends on no other row
                reach = score.exp().sum(dim=1, keepdim=True)
                score = score.masked_fill(reach < sampler.min_reach, -torch.inf)
                if bool((score[:, 0] == -torch.inf).all()):
                    break
            if sampler.tree < used and distance + 1 < steps:
                least = torch.cat(scores, dim=1).topk(sampler.tree).values[:, -1]
                if bool((least >= score[:, 0]).all()):
                    break
        cache.crop(known.shape[-1] - cache.get_seq_length())
        # A parent is at least as probable as its children and stands before them.
        every, order = torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True)
        is_worth_it = every[:, : sampler.tree].exp() >= sampler.min_reach / sampler.tree
        size = int(is_worth_it.sum(dim=1).max()) if sampler.min_reach else sampler.tree
        kept, found = order[:, :size].sort(dim=1)
        kept, is_draft = pad(kept + 1, (1, 0)), is_worth_it.gather(1, found)
        square = torch.cat(pasts, dim=1).gather(1, kept[..., None].expand(-1, -1, behind.shape[-1]))
        square = square.gather(2, kept[:, None].expand(-1, kept.shape[1], -1))
        if sampler.min_reach:  # the other rows' drafts are behind nothing
            square &= pad(is_draft, (1, 0), value=True)[..., None]
        return Tree(torch.cat(tokens, dim=1).gather(1, kept), square)

    def accept(self, logits: Float[Tensor, "m n1 v"], part: Pass) -> tuple[Places, Tensor]:
        """The backbone's own draws along the tree, up to and with the first that leaves it."""
        first, tree = self.first[self.active], self.tree
        everyone = torch.arange(len(first), device=first.device)

        def draw(numbers: Tensor, depth: int) -> Tensor:
            own = self.kept(logits[everyone, numbers][:, None])[:, 0].double()
            return (own + self.xi[everyone, first - self.origin + depth]).argmax(dim=-1)

        path, own, counts = tree.walk(draw, self.stops - first)
        if self.reader.num_read:
            self.reader.follow(path, counts)
        self.ready -= path.shape[1]
        deepest = torch.minimum(tree.depths.amax(dim=1), self.stops - first)
        self.rounds.append((self.active, deepest, counts))
        self.first[self.active] += counts
        taken = torch.arange(path.shape[1], device=first.device) < counts[:, None]
        row, column = taken.nonzero(as_tuple=True)
        return Places(self.active[row], first[row] + column), own[taken]

    def finish(self) -> None:
        """See :class:`VerifiedRows`; a draft that is reached and agrees is accepted."""
        for rows, deepest, taken in self.rounds:
            distance = torch.arange(self.counts["drafted"].shape[1], device=rows.device)
            drafted, accepted = distance < deepest[:, None], distance < taken[:, None] - 1
            reached = drafted & (distance < taken[:, None])
            for name, what in zip(self.counts, (drafted, accepted, reached, accepted), strict=True):
                self.counts[name][rows] += what
        self.rounds.clear()
        super().finish()


@dataclass(frozen=True, kw_only=True)
class DrafterSampler(VerifiedSampler):
    """The backbone's own samples, several per pass, drafted in trees.

    Attributes:
        max_lookahead: Most steps of the drafter at a time; None is as many as it was trained on.
        tree: Most drafts that a pass of the backbone reads.
        width: Paths that the search follows; 1 is a chain.
        min_reach: The drafter takes another step where one of these paths is right with at least
            this probability, and a draft is read where it is with a ``tree``-th of it; 0 always.

    Further settings as in :class:`VerifiedSampler`; ``draft`` left to itself is ``gumbel``, the
    tree that the noise makes most probable; ``greedy`` looks at the drafter's logits alone. Of a
    tree ``drafted`` counts whether it reaches a distance, and ``agreed`` is ``accepted``.
    """

    max_lookahead: int | None = None
    tree: int = 16
    width: int = 6
    min_reach: float = setting(0.0, within="[0, 1]")

    label: ClassVar[str] = "drafter"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tree", "width"):
            if (got := getattr(self, name)) < 1:
                raise UsageError("a count below 1", where=name, got=got)

    def load(self, student: Student) -> Verifier:
        """See :class:`VerifiedSampler`."""
        if not isinstance(student, Drafter):
            raise wrong_student("drafter", "a layer beside a backbone", student, Drafter)
        return own_verifier(student)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`VerifiedSampler`; also rows longer than the backbone's attention window:
        the masks of trees know no window.
        """
        super().check(student, tokens)
        config = student.language_model.files.text_config  # type: ignore[union-attr]
        window = attention_window(config)
        if window is not None and window < tokens.shape[1]:
            what = "the rows are longer than the backbone's attention window"
            got, expected = f"{tokens.shape[1]} tokens", f"at most {window}"
            remedy = "give a smaller --length; medusa and coupled have no such limit"
            raise UsageError(what, where="length", got=got, expected=expected, remedy=remedy)

    def settled(self, student: Student) -> DrafterSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        return _settled(self, student, False)

    def start(self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> TreeRows:
        """See :class:`Sampler`."""
        return TreeRows(self, student, tokens, noise, keys)


def attention_window(config: Any) -> int | None:
    """Tokens that a layer of a language model sees at most; None where all see the whole row."""
    is_local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo
    names = ("sliding_window", "attention_chunk_size", *(["window_size"] if is_local else []))
    found = [getattr(config, name, None) for name in names]
    return min((window for window in found if isinstance(window, int)), default=None)
