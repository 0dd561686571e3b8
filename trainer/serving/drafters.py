"""Students as drafters in vLLM: ``method: custom_class`` with :class:`StudentDrafter` as model.

A student is shown the noise that the engine will draw with (:class:`EngineKeys`), or, where it
takes none, its own distribution races under that noise. So a good student proposes the very token
that the engine takes, and the engine keeps it (:mod:`trainer.serving.plugin`).

All requests of a step are drafted for together. What is kept of a request while it lives: the
embeddings of its noise, a BD3-LM's keys and values of finished blocks, a drafter's of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.gumbel import KeyedPrior
from shards.noise.murmur3 import EngineKeys
from trainer.loading import load_student
from trainer.sampling.coupled import WholeRowDrafter, drafter_of
from trainer.sampling.own_backbone import DraftModel
from trainer.sampling.verifier import CausalReader, require_same_tokenizer
from trainer.serving.coupling import draw
from trainer.serving.plugin import Requests
from trainer.students.autoregressive import AR
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.drafter import Drafter
from trainer.students.folder import find_model, load_tokenizer
from trainer.students.mdlm import MDLM
from trainer.students.medusa import Medusa
from trainer.students.registry import Student

SETTING = "gdistill_drafter"
"""Name of the student's folder in the engine's ``--additional-config``."""


@dataclass(frozen=True)
class Prefix:
    """A request as far as it is written.

    Attributes:
        name: The request's, the same while it lives.
        tokens: Prompt and answer.
        seed: Of its noise.
        temperature: 0 is greedy.
        hidden: [D] what the target's output layer saw before the last token; None where the drafter
            does not ask for it.
    """

    name: str
    tokens: Sequence[int]
    seed: int
    temperature: float
    hidden: Float[Tensor, "d"] | None = None


def embeddings(student: Student, prefixes: list[Prefix], places: Int[Tensor, "b k"]) -> EmbeddedNoise:
    """Noise embeddings of places, each request's at its temperature."""
    rows = []
    for prefix, own in zip(prefixes, places, strict=True):
        keys = EngineKeys(torch.full_like(own, prefix.seed), own)
        noise = KeyedPrior(keys, student.config.vocab_size)
        rows.append(student.embed_noise(noise, prefix.temperature))
    return EmbeddedNoise.cat(rows).map(lambda part: part.unflatten(0, places.shape))


def race(
    log_probs: Float[Tensor, "n v"], prefixes: list[Prefix], rows: Int[Tensor, "n"], places: Int[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """argmax(log q / T + g) with the noise of each place; greedy requests get argmax log q."""
    seeds = torch.tensor([prefix.seed for prefix in prefixes], dtype=torch.int64)[rows]
    heat = torch.tensor([prefix.temperature for prefix in prefixes])[rows]
    is_greedy = heat == 0
    scaled = log_probs / torch.where(is_greedy, 1.0, heat)[:, None]
    return draw(scaled, seeds, places - 1, is_greedy=is_greedy)


class Reading:
    """What has read the requests of the last step goes on with those that are still there."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reader: Any = None

    def continued(self, chosen: list[Prefix], begin: Callable[[list[Prefix]], Any]) -> Any:
        """The reader of these requests, in their order; ``begin`` makes one anew when others came."""
        names, before = [prefix.name for prefix in chosen], self.names
        if self.reader is None or not {*names} <= {*before}:
            self.reader = begin(chosen)
        elif names != before:
            self.reader.select(torch.tensor([before.index(name) for name in names]))
        self.names = names
        return self.reader


def table(prefixes: list[Prefix], width: int, filler: int) -> tuple[Int[Tensor, "b width"], Int[Tensor, "b"]]:
    """The prefixes as rows of one width, and their lengths."""
    tokens = torch.full((len(prefixes), width), filler)
    for row, prefix in zip(tokens, prefixes, strict=True):
        row[: len(prefix.tokens)] = torch.as_tensor(prefix.tokens)
    return tokens, torch.tensor([len(prefix.tokens) for prefix in prefixes])


class RowDrafts:
    """An MDLM or BD3-LM, which reads rows of a fixed length; behind their end it drafts nothing."""

    def __init__(self, student: MDLM) -> None:
        self.student, self.reading = student, Reading()
        self.conditions: dict[str, EmbeddedNoise] = {}

    def draft(self, prefixes: list[Prefix], most: int) -> list[list[int]]:
        """Up to ``most`` tokens behind each prefix."""
        length = self.student.config.row_length
        fitting = [i for i, prefix in enumerate(prefixes) if len(prefix.tokens) < length]
        drafts: list[list[int]] = [[] for _ in prefixes]
        if not fitting:
            return drafts
        chosen = [prefixes[i] for i in fitting]
        tokens, first = table(chosen, length, self.student.mask_id)
        inner: WholeRowDrafter = self.reading.continued(chosen, self._begin)
        stops = torch.minimum(inner.reach(first), first + most).clamp_max(length)
        columns = torch.arange(length)
        where = (columns >= first[:, None]) & (columns < stops[:, None])
        log_probs = inner.log_probs(tokens, where)
        rows, places = where.nonzero(as_tuple=True)
        if self.student.is_conditioned:
            found = log_probs.argmax(dim=-1)
        else:
            found = race(log_probs, chosen, rows, places)
        for row, token in zip(rows.tolist(), found.tolist(), strict=True):
            drafts[fitting[row]].append(token)
        return drafts

    def _begin(self, chosen: list[Prefix]) -> WholeRowDrafter:
        if not self.student.is_conditioned:
            return drafter_of(self.student, None, len(chosen))
        length, kept = self.student.config.row_length, {}
        for prefix in chosen:  # noise embeddings of the places to fill: a request's are computed once
            if (known := self.conditions.get(prefix.name)) is None:
                places = torch.arange(len(prefix.tokens), length)[None]
                known = embeddings(self.student, [prefix], places)
                known = known.laid_out((torch.zeros_like(places), places), (1, length))
            kept[prefix.name] = known
        self.conditions = kept
        return drafter_of(self.student, EmbeddedNoise.cat([*kept.values()]), len(chosen))


class NextTokenDrafts:
    """A drafter or an autoregressive student: one pass per token, of what it has not read yet."""

    def __init__(self, student: AR | Drafter) -> None:
        self.student, self.reading = student, Reading()
        if isinstance(student, AR):
            self.model: Any = student
            self.row_length: int | None = student.config.row_length
        else:
            self.model, self.row_length = DraftModel(student), student.language_model.context_length

    def draft(self, prefixes: list[Prefix], most: int) -> list[list[int]]:
        """See :class:`RowDrafts`."""
        drafts: list[list[int]] = [[] for _ in prefixes]
        lengths = [len(prefix.tokens) for prefix in prefixes]
        limit = self.row_length or max(lengths) + most
        fitting = [i for i, length in enumerate(lengths) if length <= limit]
        if not fitting:
            return drafts
        chosen, longest = [prefixes[i] for i in fitting], max(lengths[i] for i in fitting)
        tokens, known = table(chosen, longest + most, 0)
        reader, everyone = self.reading.continued(chosen, self._begin), torch.arange(len(chosen))
        reader.keep(torch.minimum(reader.lengths, known - 1))  # so that there is one to read
        for step in range(min(most, limit + 1 - int(known.min()))):
            places = known + step  # a row that is full is read again, for nothing
            logits = reader.next_logits(tokens, places.clamp_max(limit), 1)[:, 0]
            found = race(logits, chosen, everyone, places)
            tokens[everyone, places] = found
            for i, token, place in zip(fitting, found.tolist(), places.tolist(), strict=True):
                drafts[i] += [token] if place <= limit else []
        reader.keep(known)  # of the drafts nobody knows yet which are right
        return drafts

    def _begin(self, chosen: list[Prefix]) -> CausalReader:
        return CausalReader(self.model, self.student.config.vocab_size, len(chosen), self.student.device)


class HeadDrafts:
    """Medusa heads on the target's own hidden states."""

    def __init__(self, student: Medusa) -> None:
        self.student = student

    def draft(self, prefixes: list[Prefix], most: int) -> list[list[int]]:
        """See :class:`RowDrafts`."""
        hidden = torch.stack([prefix.hidden for prefix in prefixes if prefix.hidden is not None])
        count = min(most, self.student.settings.backbone.num_proposed)
        first = torch.tensor([len(prefix.tokens) for prefix in prefixes])
        embedded = None
        if self.student.is_conditioned:
            window = torch.arange(-1, self.student.settings.backbone.num_proposed)
            embedded = embeddings(self.student, prefixes, first[:, None] + window).embedding
        log_probs = self.student.propose(hidden.float(), embedded)[:, :count]
        if self.student.sees_own_noise:
            return log_probs.argmax(dim=-1).tolist()
        rows = torch.arange(len(prefixes)).repeat_interleave(count)
        places = (first[:, None] + torch.arange(count)).flatten()
        return race(log_probs.flatten(0, 1), prefixes, rows, places).view(-1, count).tolist()


Drafts = RowDrafts | NextTokenDrafts | HeadDrafts


def drafts_of(student: Student) -> Drafts:
    """The student's way of drafting."""
    if isinstance(student, MDLM):
        return RowDrafts(student)
    if isinstance(student, AR | Drafter):
        return NextTokenDrafts(student)
    assert isinstance(student, Medusa)
    return HeadDrafts(student)


class StudentDrafter:
    """What vLLM loads: ``--speculative-config '{"method": "custom_class", "model":
    "trainer.serving.drafters.StudentDrafter", "num_speculative_tokens": 4}' --additional-config
    '{"gdistill_drafter": "RUN/model"}'``.

    Args:
        vllm_config: The engine's settings.

    Raises:
        UsageError: When there is no student, or it has other tokens than the target.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = vllm_config.additional_config
        place = settings.get(SETTING) if isinstance(settings, dict) else None
        if place is None:
            what, expected = "no student to draft with", f'{{"{SETTING}": "RUN/model"}}'
            raise UsageError(what, where="--additional-config", got=settings, expected=expected)
        self.most: int = vllm_config.speculative_config.num_speculative_tokens
        model = vllm_config.model_config
        self.student = load_student(place)
        size, most = self.student.config.vocab_size, model.get_vocab_size()
        if size > most:
            raise UsageError("the student has more tokens than the target", where=place, got=size, expected=most)
        require_same_tokenizer(model.model, load_tokenizer(find_model(Path(place))))
        self.drafts = drafts_of(self.student)
        self.needs_hidden = isinstance(self.student, Medusa)
        self.requests: Requests | None = None
        self.hidden: Tensor | None = None
        self.counts: list[int] | None = None

    def load_model(self, target: Any) -> None:
        """The student is there; the engine asks every drafter."""

    def look(self, requests: Requests, hidden: Tensor, drafts: Any) -> None:
        """What the plugin tells before each proposal.

        Args:
            requests: Of this step.
            hidden: [n, D] of the rows of logits, request by request.
            drafts: The engine's record of the drafts that were verified; None for none.
        """
        self.requests, self.hidden = requests, hidden
        self.counts = None if drafts is None else drafts.num_draft_tokens

    @torch.no_grad()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of each request; none for one that is still reading its prompt.

        Args:
            sampled_token_ids: What each request got in this step.
            num_tokens_no_spec: [b] tokens that it has now.
            token_ids_cpu: [b, L] which.
            slot_mappings: Not looked at.

        Raises:
            UsageError: Without the plugin, which tells seeds and temperatures.
        """
        requests = self.requests
        if requests is None:
            raise UsageError("this drafter needs the plugin", remedy="set VLLM_PLUGINS=gdistill")
        counts = self.counts or [0] * len(sampled_token_ids)
        ends = np.cumsum([count + 1 for count in counts])
        prefixes: dict[int, Prefix] = {}
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, drawn in enumerate(sampled_token_ids):
            if not drawn:
                continue
            last = int(ends[row]) - counts[row] - 1 + len(drawn) - 1
            hidden = self.hidden[last] if self.needs_hidden and self.hidden is not None else None
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()
            noise = int(requests.seeds[row]), float(requests.temperatures[row])
            prefixes[row] = Prefix(requests.ids[row], tokens, *noise, hidden)
        if prefixes:
            found = self.drafts.draft([*prefixes.values()], self.most)
            for row, tokens in zip(prefixes, found, strict=True):
                drafts[row] = tokens
        return drafts
