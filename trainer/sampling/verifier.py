"""A causal language model reading rows of different lengths together.

The cache is right-aligned: the last known token of every row lies in the last slot, and the empty
slots in front of shorter rows are hidden by the attention mask. That is transformers' left padding.
A pass reads the same number of tokens in every row; a row with fewer new ones reads its last known
ones again. So no slot between two tokens of a row is empty, and a sliding window, which
transformers measures in slots, sees the tokens that it sees in a row alone::

    slots       0 1 2 3 4 | 5 6 7            keep 4 and 7 tokens      0 1 2 3 4 5 6
    row 0       . . . a b | c d x    ->                               . . . a b c d
    row 1       a b c d e | f g x                                     a b c d e f g
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shards.errors import UsageError
from shards.language_model.forward import DtypeName
from shards.language_model.loading import find_pretrained, find_tokenizer, load_causal_model
from trainer.students.folder import is_model, load_tokenizer
from trainer.students.registry import Student


class CausalReader:
    """Next-token logits of B growing rows.

    Args:
        model: A causal language model of transformers; one without a key/value cache reads every
            row from its beginning each time.
        vocab_size: V, the logits that belong to tokens.
        num_rows: B.
        device: Of the model.

    Attributes:
        num_passes: Forward passes made.
        lengths: [B] tokens of each row whose keys and values are kept.
        keeps_hidden: Whether ``hidden`` is wanted.
        hidden: [B, n, D] of the last pass: what the output layer saw in each column of its logits.
    """

    def __init__(self, model: Any, vocab_size: int, num_rows: int, device: torch.device | str) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_passes = 0
        self.keeps_hidden = False
        self.hidden: Tensor | None = None
        accepted = inspect.signature(model.forward).parameters
        self.accepted = accepted.keys() & {"position_ids", "logits_to_keep"}
        self.cache = DynamicCache() if "past_key_values" in accepted else None

    @torch.no_grad()
    def next_logits(self, tokens: Int[Tensor, "b l"], stops: Int[Tensor, "b"], num_last: int) -> Float[Tensor, "b n v"]:
        """Logits of the token behind each of the last ``num_last`` tokens of every row, float32.

        The last column is about position ``stops[b]`` of row b. All rows have that many tokens to
        look back on, or what stands in front of them is without meaning.

        Args:
            tokens: The rows from their beginning; every token before ``stops`` is known. Those
                within ``lengths`` must be the tokens that were read.
            stops: [B] tokens to read, at least one more than ``lengths``.
            num_last: Columns of the result.
        """
        self.num_passes += 1
        if self.cache is None:
            return self._read_from_the_start(tokens, stops, num_last)
        places, is_new, width = self.align(stops)
        new = places.shape[1]
        options = {"position_ids": places, "logits_to_keep": num_last}
        logits, hidden = self._run(
            input_ids=tokens.gather(1, places),
            attention_mask=torch.cat((self.known(), is_new), dim=1).long(),
            past_key_values=self.cache,
            use_cache=True,
            **{name: options[name] for name in self.accepted},
        )
        if not _holds(self.cache, width + new):  # a recurrent model, or one with a cache of its own
            self.cache = None
            self.lengths.zero_()
            return self._read_from_the_start(tokens, stops, num_last)
        self.fit(stops, width + new)
        self.hidden = None if hidden is None else hidden[:, -num_last:]
        return logits[:, -num_last:, : self.vocab_size].float()

    def _run(self, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Logits, and what the output layer saw where that is wanted."""
        if not self.keeps_hidden:
            return self.model(**inputs).logits, None
        seen: list[Tensor] = []
        layer = self.model.get_output_embeddings()
        handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            return self.model(**inputs).logits, seen[0]
        finally:
            handle.remove()

    def _read_from_the_start(self, tokens: Tensor, stops: Tensor, num_last: int) -> Float[Tensor, "b n v"]:
        """What stands behind a row's tokens is read too, and seen by none of them."""
        longest = int(stops.max())
        rows = tokens[:, :longest].clamp(max=self.vocab_size - 1)
        logits, hidden = self._run(input_ids=rows)
        places = stops[:, None] - num_last + torch.arange(num_last, device=tokens.device)
        everyone = torch.arange(len(rows), device=tokens.device)[:, None]
        index = everyone, places.clamp_min(0)
        self.hidden = None if hidden is None else hidden[index]
        return logits[index][..., : self.vocab_size].float()

    def known(self) -> Bool[Tensor, "b width"]:
        """Which slots in use hold a token."""
        width = int(self.lengths.max())
        slots = torch.arange(width, device=self.lengths.device)
        return slots >= width - self.lengths[:, None]

    def align(self, stops: Int[Tensor, "b"]) -> tuple[Int[Tensor, "b new"], Bool[Tensor, "b new"], int]:
        """Before a pass that reads up to ``stops``: places to read, which of them hold a token (a
        row may be shorter than the pass), and slots in use behind which they go.
        """
        new = int((stops - self.lengths).max())
        self.keep((stops - new).clamp_min(0))
        places = stops[:, None] - new + torch.arange(new, device=stops.device)
        return places.clamp_min(0), places >= 0, int(self.lengths.max())

    def fit(self, lengths: Int[Tensor, "b"], width: int) -> None:
        """After a pass of ``width`` slots: give up those that are empty in all rows."""
        slots = torch.arange(width - int(lengths.max()), width, device=lengths.device)
        self._take(slots.expand(len(lengths), -1), width)
        self.lengths = lengths.clone()

    def keep(self, lengths: Int[Tensor, "b"]) -> None:
        """Forget the tokens of each row behind its first ``lengths[b]`` ones."""
        if self.cache is None or torch.equal(lengths, self.lengths):
            return
        width = int(self.lengths.max())
        lost = self.lengths - lengths
        slots = torch.arange(-int(lengths.max()), 0, device=lengths.device)
        self._take(slots - lost[:, None] + width, width)
        self.lengths = lengths

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """Go on with some of the rows; slots that are empty in all of them are given up."""
        before, self.lengths = int(self.lengths.max()), self.lengths[rows]
        if self.cache is not None and len(rows):
            self.cache.batch_select_indices(rows)
            slots = torch.arange(before - int(self.lengths.max()), before, device=rows.device)
            self._take(slots.expand(len(rows), -1), before)

    def _take(self, source: Int[Tensor, "b width"], before: int) -> None:
        """Slots of the cache from other slots; negative sources stand for empty slots."""
        assert self.cache is not None
        width = source.shape[1]
        if bool((source == torch.arange(width, device=source.device)).all()):
            self.cache.crop(width - before)
            return
        index = source.clamp_min(0)[:, None, :, None]
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                memory = getattr(layer, name)
                wide = index.expand(-1, memory.shape[1], -1, memory.shape[-1])
                setattr(layer, name, memory.gather(2, wide))


def _holds(cache: DynamicCache, num_slots: int) -> bool:
    """Whether a cache keeps every slot as it was written."""
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    return bool(cache.layers) and plain and cache.get_seq_length() == num_slots


def lay_out_for_few_rows(model: nn.Module) -> None:
    """On a CPU, keep the float32 matrices of linear layers column by column; nothing else changes.

    A product of eight rows with a matrix then takes 0.7 of the time, with an output layer's of
    4,096 tokens 0.4, and one of a single row 0.75 (MKL, AVX-512). An output layer that is the
    embedding as well gets a copy: tokens are read row by row.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.is_contiguous():
            weight = layer.weight.detach()
            if (weight.device.type, weight.dtype) == ("cpu", torch.float32):
                layer.weight = nn.Parameter(weight.t().contiguous().t(), layer.weight.requires_grad)


class Verifier:
    """A causal language model over the student's tokens.

    Args:
        model: Of transformers (or our autoregressive student); its first V logits belong to the
            student's V tokens.
        vocab_size: V.
        context_length: Longest row it reads, in tokens; None without a limit.
    """

    def __init__(self, model: Any, vocab_size: int, context_length: int | None = None) -> None:
        self.model, self.vocab_size = model.eval(), vocab_size
        self.context_length = context_length
        lay_out_for_few_rows(self.model)

    def reader(self, num_rows: int, device: torch.device) -> CausalReader:
        """Reads rows that grow."""
        return CausalReader(self.model, self.vocab_size, num_rows, device)

    def require_context(self, row_length: int) -> None:
        """Refuse rows that the verifier cannot read.

        Raises:
            UsageError: With the longest that it can.
        """
        if self.context_length is not None and self.context_length < row_length:
            what, got = "the verifier reads shorter rows", self.context_length
            remedy = "give a --length that it can read, or another verifier"
            raise UsageError(what, where="verifier", got=got, expected=row_length, remedy=remedy)

    @functools.cached_property
    def weights_sha256(self) -> str:
        """sha256 over names, shapes, types and bytes of all weights, by name, whatever files they
        lie in.
        """
        total = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            total.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            total.update(value.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        return total.hexdigest()


def _place(path: str) -> str:
    """The ``model/`` folder when ``path`` is the output of a training run, else ``path``."""
    inner = Path(path, "model")
    return str(inner) if is_model(inner) else path


@functools.lru_cache(maxsize=2)
def load_verifier(path: str, vocab_size: int, device: torch.device, dtype: DtypeName = "float32") -> Verifier:
    """Read a verifier from a folder, or from the hub's local cache by its id.

    Raises:
        UsageError: When there is none, it looks ahead, or it does not fit the student.
        GdistillError: When its weights are damaged or incomplete.
    """
    files = find_pretrained(_place(path), role="verifier", local_files_only=True)
    if files.num_logits < vocab_size:
        what, got = "the verifier knows fewer tokens than the student", files.num_logits
        expected, remedy = f"at least {vocab_size}", "take a model with the student's tokenizer"
        raise UsageError(what, where="verifier", got=got, expected=expected, remedy=remedy)
    loaded = load_causal_model(files, dtype, device, vocab_size=vocab_size)
    return Verifier(loaded.network, vocab_size, files.context_length)


def require_same_tokenizer(path: str, tokenizer: Any) -> None:
    """Refuse a verifier that gives its ids to other words than the student.

    A student without a tokenizer has only ids, whose number the verifier checks.

    Raises:
        UsageError: Naming the first word whose id differs, or when the verifier has no tokenizer.
    """
    if tokenizer is None:
        return
    place = _place(path)
    is_folder = Path(place).is_dir()
    theirs = load_tokenizer(Path(place)) if is_folder else find_tokenizer(place, "verifier")
    if theirs is None:
        raise UsageError(
            "the verifier has no tokenizer to compare with the student's",
            where=path,
            remedy="save the tokenizer it was trained with beside it",
        )
    ours, other = tokenizer.get_vocab(), theirs.get_vocab()
    differing = sorted(word for word in ours.keys() | other if ours.get(word) != other.get(word))
    if differing:
        word = differing[0]
        what = "the verifier has another tokenizer than the student"
        got, expected = f"{word!r} is {other.get(word, 'absent')}", ours.get(word, "absent")
        remedy = "take a verifier trained with the student's tokenizer"
        raise UsageError(what, where=path, got=got, expected=expected, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class SecondModel:
    """Mixed into the samplers whose verifier is a model of its own.

    Attributes:
        verifier: Folder or hub id of a causal language model with the student's tokenizer. It
            computes in float32, whatever the student's precision.
    """

    verifier: str = ""

    label: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if not self.verifier:
            raise UsageError(
                f"{self.label} needs a verifier",
                where=f"--sampler {self.label}",
                remedy="--verifier FOLDER: the teacher, or any causal language model of the same tokenizer",
            )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """See :class:`~trainer.sampling.fill.Sampler`."""
        require_same_tokenizer(self.verifier, tokenizer)

    def load(self, student: Student) -> Verifier:
        """The verifier on the student's device; loaded once."""
        return load_verifier(self.verifier, student.config.vocab_size, student.device)

    def verifier_sha256(self, student: Student) -> str:
        """See :class:`~trainer.sampling.fill.Sampler`."""
        return self.load(student).weights_sha256
