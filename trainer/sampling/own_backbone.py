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

from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Any, ClassVar, Literal

import numpy as np
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
from trainer.sampling.ngrams import ORDER, ngrams_of
from trainer.sampling.noise import MOST_ELEMENTS, RowNoise, SampleKeys, position_chunks
from trainer.sampling.trees import Tree, TreeReader, flags
from trainer.sampling.verifier import CausalReader, Verifier
from trainer.students.backbone import BackboneStudent, attention_window
from trainer.students.registry import Drafter, Medusa, Student

EPSILON, DELTA = 0.1, 1.0


def own_verifier(student: Student, kind: type, label: str, words: str) -> Verifier:
    """The student's own backbone; a UsageError for a student that is not of the sampler's kind."""
    if not (isinstance(student, BackboneStudent) and isinstance(student, kind)):
        what, expected = f"the {label} sampler needs {words}", f"a {kind.__name__} student"
        got, remedy = type(student).__name__, "use --sampler coupled with --verifier"
        raise UsageError(what, where="sampler", got=got, expected=expected, remedy=remedy)
    backbone = student.language_model
    return Verifier(backbone.network, backbone.vocab_size, backbone.context_length)


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
        return own_verifier(student, Medusa, self.label, "heads on a backbone")

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
        place, size = self.sampler.ngrams, self.student.config.vocab_size
        self.drafter = CausalReader(self.model, size, len(self.active), self.student.device)
        self.rule = self.sampler.rule
        self.ngrams = ngrams_of(place, size) if place else None
        self.xi, self.weights, self.ready = torch.empty(0), torch.empty(0), 0

    def select(self, left: Int[Tensor, "k"]) -> None:
        """See :class:`VerifiedRows`."""
        super().select(left)
        self.drafter.select(left)
        self.origin, self.xi = self.origin[left], self.xi[left]
        self.weights = self.weights if self.ngrams is None else self.weights[left]

    def noise_ahead(self, first: Int[Tensor, "m"], count: int) -> None:
        """Draw tau xi of the next positions. A call costs more than a position, so that many are
        drawn at a time and kept for the passes to come.

        Sets ``xi`` [m, n, V], float64, and ``origin``, the position of its first column; ``ready``
        is how many positions every row has left. For counts, e^xi as ``weights``.
        """
        if count > self.ready:
            length, size = self.tokens.shape[1], self.student.config.vocab_size
            most = MOST_ELEMENTS[first.device.type] // (len(first) * size)
            self.ready = max(count, min(most, length - int(first.min()) + count))
            places = first[:, None] + torch.arange(self.ready, device=first.device)
            rows = self.active.repeat_interleave(self.ready)
            noise = self.noise.at(Places(rows, places.clamp_max(length - 1).flatten()))
            arrivals = noise.tile(0, size).to(first.device).view(len(first), self.ready, size)
            self.origin, self.xi = first, arrivals.double().log_().mul_(-self.sampler.tau)
            if self.ngrams is not None:
                self.weights = arrivals.reciprocal()

    def propose(self) -> Pass:
        """See :class:`VerifiedRows`; the first pass reads the given tokens and no drafts."""
        first, length = self.first[self.active], self.tokens.shape[1]
        ahead = int(self.sampler.max_lookahead or 0) if self.reader.num_passes else 0
        self.noise_ahead(first, ahead + 1)
        self.trees = [Tree(token) for token in self.tokens[self.active, first - 1].tolist()]
        # The last token is never drafted: the backbone's own comes as well.
        depths = [min(ahead, length - 1 - place) for place in first.tolist()]
        if any(depths):
            self.trees = self.grow(first, depths) if self.ngrams is None else self.count(first, depths)
        places = Places(self.active, first)
        return Pass(self.active, places, places)

    def predict(self, part: Pass) -> Float[Tensor, "m n1 d"]:
        """See :class:`Rows`: the backbone's hidden states behind all tokens of the trees."""
        reader, first = self.reader, part.places.positions
        with torch.autocast(self.tokens.device.type, enabled=False):
            if reader.num_passes:
                return reader.read_trees(self.trees, first)
            reader.keeps_hidden = True
            reader.next_logits(self.tokens[self.active], first, 1)
            assert reader.hidden is not None
            reader.positions = first[:, None] - 1
            return reader.hidden

    def kept(self, logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
        """Logits of tokens that the rule keeps; those of the others are -inf."""
        if not self.rule.truncates:
            return logits
        probabilities = self.rule.probabilities(logits.flatten(0, -2)).view_as(logits)
        return logits.masked_fill(probabilities == 0, -torch.inf)

    def grow(self, first: Int[Tensor, "m"], depths: list[int]) -> list[Tree]:
        """The ``tree`` most probable drafts of each row, searched along ``width`` paths.

        A child is less probable than its parent, so the search leaves a path that can bring no
        draft which would be among them, and a row whose paths are too improbable to go on.

        Args:
            first: [m] the rows' first positions that are not known.
            depths: How deep each tree may become.
        """
        sampler, trees = self.sampler, self.trees
        for tree, depth in zip(trees, depths, strict=True):
            tree.tips = tree.tips if depth else []
        logits = self.drafter.next_logits(self.tokens[self.active], first, 1)
        cache = self.drafter.cache
        assert cache is not None
        width, known = min(sampler.width, logits.shape[-1]), cache.get_seq_length()
        rows, column = torch.arange(len(trees), device=first.device), first - self.origin
        floor, slots = sampler.floor, [{0: 0} for _ in trees]
        for distance in range(max(depths)):
            self.num_drafts[self.active] += torch.tensor([bool(tree.tips) for tree in trees], device=first.device)
            if distance:
                logits = self.step(slots, first + (distance - 1), known)
            race = self.kept(logits)
            if sampler.draft == "gumbel":
                race = race + self.xi[rows, column + distance][:, None].float()
            found = (race / sampler.tau).log_softmax(dim=-1).topk(width)
            for tree, scores, tokens, depth in zip(trees, found[0].tolist(), found[1].tolist(), depths, strict=True):
                tree.grow(scores, tokens, width)
                is_open = sum(exp(tree.scores[tip]) for tip in tree.tips) >= sampler.min_reach
                tree.stop(sampler.tree, floor if is_open and distance + 1 < depth else inf)
            if not any(tree.tips for tree in trees):
                break
        cache.crop(known - cache.get_seq_length())
        return [tree.cut(sampler.tree, floor) for tree in trees]

    def count(self, first: Int[Tensor, "m"], depths: list[int]) -> list[Tree]:
        """The ``tree`` most probable drafts of each row by counts; arguments as of :meth:`grow`."""
        sampler, trees = self.sampler, []
        assert self.ngrams is not None
        for row, (tree, depth) in enumerate(zip(self.trees, depths, strict=True)):
            weights = np.ones((depth, 1), np.float32)
            if sampler.draft == "gumbel":
                column = int(first[row] - self.origin[row])
                weights = self.weights[row, column : column + depth].cpu().numpy()
            known = self.tokens[self.active[row], max(0, int(first[row]) - ORDER) : first[row]].tolist()
            trees.append(
                self.ngrams.grow(tree, known, weights, sampler.tau, sampler.tree, sampler.width, sampler.floor)
            )
        return trees

    def step(self, slots: list[dict[int, int]], places: Int[Tensor, "m"], known: int) -> Float[Tensor, "m tips v"]:
        """The drafter's logits behind the trees' tips.

        Args:
            slots: Where behind the known tokens the drafter's cache has each number that it has
                read; those of the tips are added.
            places: [m] the tips' positions.
            known: Slots of known tokens.
        """
        cache, model, tokens, behind = self.drafter.cache, self.model, [], []
        assert cache is not None
        count, read = max(len(tree.tips) for tree in self.trees), cache.get_seq_length() - known
        for tree, slot in zip(self.trees, slots, strict=True):
            slot |= {tip: read + number for number, tip in enumerate(tree.tips)}
            missing = count - len(tree.tips)
            tokens.append([tree.tokens[tip] for tip in tree.tips] + [0] * missing)
            lines = ([slot[number] for number in tree.lines[tip][1:]] for tip in tree.tips)
            behind.append(flags(lines, read + count) + [[False] * (read + count)] * missing)
        seen = self.drafter.known()[:, None].expand(-1, count, -1)
        seen = torch.cat((seen, torch.tensor(behind, device=places.device)), dim=-1)
        rows = model.embed(torch.tensor(tokens, device=places.device))
        return model.head(model.run(rows, places[:, None].expand(-1, count), seen, cache))

    def accept(self, states: Float[Tensor, "m n1 d"], part: Pass) -> tuple[Places, Tensor]:
        """The backbone's own draws along the trees, up to and with the first that leaves each."""
        first, device, size = part.places.positions, part.places.positions.device, states.shape[1]
        rows = torch.arange(len(first), device=device).repeat_interleave(size)
        columns = (self.reader.positions + 1 - self.origin[:, None]).flatten()
        states, drawn = states.flatten(0, 1), list[int]()
        # All drafts at once: the output layer is read once, and the host waits once.
        for chunk in position_chunks(len(states), self.student.config.vocab_size, device):
            with torch.autocast(device.type, enabled=False):
                logits = self.student.language_model.logits(states[chunk]).float()
            race = self.kept(logits).double() + self.xi[rows[chunk], columns[chunk]]
            drawn += race.argmax(dim=-1).tolist()
        paths, own = [], []
        for row, tree in enumerate(self.trees):
            path, draws = [0], drawn[row * size : (row + 1) * size]
            while (number := tree.numbers.get((path[-1], draws[path[-1]]))) is not None:
                path.append(number)
            paths.append(path)
            own.append([draws[number] for number in path])
        if self.reader.num_read:
            self.reader.follow(paths)
        counts = torch.tensor([*map(len, own)], device=device)
        self.ready -= max(map(len, own))
        self.rounds.append((self.active, torch.tensor([tree.depth for tree in self.trees], device=device), counts))
        self.first[self.active] += counts
        found = [(row, depth, token) for row, tokens in enumerate(own) for depth, token in enumerate(tokens)]
        row, depth, token = torch.tensor(found, device=device).unbind(1)
        return Places(self.active[row], first[row] + depth), token

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
        ngrams: Folder of a store, best of rows that the backbone wrote: the drafts come from counts
            of its rows and the drafter takes no step. That is faster beside a small backbone.

    Further settings as in :class:`VerifiedSampler`; ``draft`` left to itself is ``gumbel``, the
    tree that the noise makes most probable; ``greedy`` looks at the drafter's logits alone. Of a
    tree ``drafted`` counts whether it reaches a distance, and ``agreed`` is ``accepted``.
    """

    max_lookahead: int | None = None
    tree: int = 16
    width: int = 6
    min_reach: float = setting(0.0, within="[0, 1]")
    ngrams: str = ""

    label: ClassVar[str] = "drafter"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tree", "width"):
            if (got := getattr(self, name)) < 1:
                raise UsageError("a count below 1", where=name, got=got)

    @property
    def floor(self) -> float:
        """Log-probability that a draft must exceed."""
        return log(self.min_reach / self.tree) if self.min_reach else -inf

    def load(self, student: Student) -> Verifier:
        """See :class:`VerifiedSampler`."""
        return own_verifier(student, Drafter, self.label, "layers beside a backbone")

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`VerifiedSampler`; also rows longer than the backbone's attention window:
        the masks of trees know no window.
        """
        super().check(student, tokens)
        if self.ngrams:
            ngrams_of(self.ngrams, student.config.vocab_size)
        window = attention_window(student.language_model.files.text_config)  # type: ignore[union-attr]
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
