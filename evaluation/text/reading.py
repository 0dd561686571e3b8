"""A causal language model that reads text it did not write: loading, windows, memory, perplexity.

A text longer than the context is read in windows that start every ``stride`` tokens; the first
scores all its positions, a later one only those that no earlier window scored. Position 0 has no
prediction, and tokens that stand between texts (end of text, and the start token of judges that
have one of their own) do not count as targets. Texts that go through the judge side by side are
filled up behind their ends, where a causal model does not look.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from evaluation.score import PerSample, Score
from shards.atomic import append_line, canonical_json, whole_lines
from shards.console import progress_bar
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import (
    BatchSize,
    allow_tf32,
    in_batches,
    largest_batch,
    require_indexable,
    resolve_device,
)
from shards.language_model.loading import find_pretrained, find_tokenizer, load_causal_model

DEFAULT_MAX_TOKENS = 1024
"""Tokens of a text that are read: the length of the paper's samples."""
UNLIMITED_CONTEXT = 1024
"""Window over texts for models that set no limit (Mamba, Bloom): that of the published numbers."""
TEXTS_ON_GPU = 64
"""Texts that go through a judge at once on a GPU; fewer where they do not fit."""


@dataclass(frozen=True)
class JudgeModel:
    """Scores text it did not write.

    Attributes:
        name: Hub id, or the name of a local folder.
        model: The network, in float32 and evaluation mode.
        tokenizer: Its tokenizer.
        context_length: Longest input, in tokens.
        document_start_id: The token that stands in front of a text.
        border_ids: Tokens that stand between texts; their predictions do not count.
        weights_sha256: Hash of the weights, so that two judges of one name are told apart.
        products: How its float32 matrix products run: ``float32``, or ``TF32`` on a GPU.
        size: Texts that it reads at once: one on a CPU, whose results are reproduced bit for bit.
    """

    name: str
    model: Any
    tokenizer: Any
    context_length: int
    document_start_id: int
    border_ids: tuple[int, ...]
    weights_sha256: str = ""
    products: str = "float32"
    size: BatchSize = field(default_factory=lambda: BatchSize(1))

    @property
    def identity(self) -> dict[str, str]:
        """What a number must carry of its judge."""
        return {"judge": self.name, "judge_sha256": self.weights_sha256}

    def longest_first(self, lengths: Sequence[int], work: Callable[[list[int]], None]) -> None:
        """Do ``work`` on the indices of all texts, as many at a time as fit; GdistillError if one does not."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        in_batches(lambda part: work(order[part]), len(order), self.size)


def load_judge(name: str, device: str = "cpu") -> JudgeModel:
    """Load a judge by hub id or from a local folder, in float32.

    Args:
        name: Hub id or local folder.
        device: ``auto`` or a torch device.

    Raises:
        UsageError: When there is no such model or device, or the model is not causal.
        GdistillError: When its weights are damaged or incomplete, or its tokenizer has no border.
    """
    place = resolve_device(device)
    files = find_pretrained(name, role="judge")
    tokenizer = find_tokenizer(files.folder, "judge")
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    borders = tuple(sorted({token for token in (bos, eos) if token is not None}))
    if not borders:
        what, got = "the judge's tokenizer has no token between texts", "neither bos nor eos"
        expected = "a token to stand in front of a text"
        remedy = "give a judge whose tokenizer_config.json names one"
        raise GdistillError(what, where=name, got=got, expected=expected, remedy=remedy)
    return JudgeModel(
        name=files.name,
        model=load_causal_model(files, "float32", place).network,
        tokenizer=tokenizer,
        context_length=files.context_length or UNLIMITED_CONTEXT,
        document_start_id=eos if bos is None else bos,
        border_ids=borders,
        weights_sha256=files.weights_sha256,
        products=allow_tf32(place),
    )


# What a judge has read, kept for this user: an interrupted evaluation goes on from there.
#
# One line per text, found by the text's own hash, in a file named by everything else that decides
# the numbers (the judge's weights and the windows). A torn last line is dropped. A reading is
# believed, so none is looked for where somebody else may have written it: beside the samples,
# above all.


def readings_folder(directory: Path) -> Path:
    """Where this user keeps what a judge reads for the results in ``directory``."""
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    return user_cache() / "gdistill" / "judged" / name


def user_cache() -> Path:
    """The folder for what a user's programs may make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


@dataclass(frozen=True)
class JudgedText:
    """A text in the judge's tokens; the token in front of it is left out.

    Attributes:
        ids: The judge's token ids.
        nll_nats: -log p of each, given what stands before it.
        counted: Whether it counts; what stands between texts does not.
    """

    ids: tuple[int, ...]
    nll_nats: tuple[float, ...]
    counted: tuple[bool, ...]


class JudgeMemory:
    """Texts that were read, in memory and, if a folder is given, on disk.

    Args:
        folder: Where the file stands; None keeps nothing.
        identity: What decides the numbers besides the text: names the file.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        self._texts: dict[str, JudgedText] = {}
        self._file = None
        if folder is not None:
            name = hashlib.sha256(canonical_json(identity)).hexdigest()[:16]
            self._file = folder / f"{name}.judged"
            self._texts = _read_file(self._file)

    def __contains__(self, text: str) -> bool:
        return _key(text) in self._texts

    def __getitem__(self, text: str) -> JudgedText:
        return self._texts[_key(text)]

    def add(self, text: str, reading: JudgedText) -> None:
        """Remember a reading; it survives this process when this returns.

        Raises:
            GdistillError: When it cannot be written.
        """
        self._texts[_key(text)] = reading
        if self._file is None:
            return
        # The shortest decimal that is the same float32: what is read back is what was computed.
        nll = [float(str(np.float32(value))) for value in reading.nll_nats]
        record = [_key(text), reading.ids, nll, "".join("01"[flag] for flag in reading.counted)]
        try:
            append_line(self._file, json.dumps(record, separators=(",", ":")))
        except OSError as error:
            what, got = "cannot keep what the judge has read", error.strerror
            remedy = "set XDG_CACHE_HOME to a folder of your own"
            raise GdistillError(what, where=self._file, got=got, remedy=remedy) from error


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_file(file: Path) -> dict[str, JudgedText]:
    """The whole lines of the file; a torn one, and what an editor made of one, is read again."""
    found = {}
    for line in whole_lines(file):
        try:
            key, ids, nll, flags = json.loads(line)
            with np.errstate(over="ignore"):
                nats = np.asarray(nll, dtype=np.float32).astype(float).tolist()
            counted = tuple(flag == "1" for flag in flags)
            reading = JudgedText(tuple(map(int, ids)), tuple(nats), counted)
            if len(ids) == len(nll) == len(flags) and np.isfinite(reading.nll_nats).all():
                found[key] = reading
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
    return found


# One reading: windows over token ids.


def window_starts(length: int, context: int, stride: int) -> list[tuple[int, int]]:
    """(start, first scored position) of each window over ``length`` tokens; 0 < stride <= context."""
    windows = [(0, 0)]
    while windows[-1][0] + context < length:
        start = windows[-1][0] + stride
        windows.append((start, start + context - stride))
    return windows


@torch.no_grad()
def token_nll_nats(model: Any, ids: Int[Tensor, "b l"], context: int, stride: int) -> Float[Tensor, "b l"]:
    """Negative log-likelihood in nats of every token under ``model``; 0 at position 0.

    Args:
        model: A causal language model of transformers, in float32.
        ids: Token ids.
        context: Window length in tokens.
        stride: Distance between window starts in tokens.
    """
    result = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for start, first in window_starts(ids.shape[1], context, stride):
        window, first = ids[:, start : start + context], max(first, 1)
        logits = model(input_ids=window, use_cache=False).logits[:, :-1].float()
        nll = cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")
        result[:, first : start + window.shape[1]] = nll[:, first - start - 1 :]
    return result


def counted_positions(ids: Int[Tensor, "b l"], border_ids: Sequence[int]) -> Bool[Tensor, "b l"]:
    """True where a token counts: not the first of its row, none of those between texts."""
    counted = ~torch.isin(ids, torch.tensor([*border_ids], dtype=ids.dtype, device=ids.device))
    counted[:, 0] = False
    return counted


def side_by_side(rows: Sequence[Sequence[int]], filler: int) -> Int[Tensor, "b l"]:
    """Rows of token ids, filled up to the longest."""
    ids = torch.full((len(rows), max(map(len, rows))), filler)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids


Piece = tuple[str, float | None]
"""Characters, and nats of the token they end in; None where nothing was scored."""


@dataclass(frozen=True)
class ReadingLimits:
    """How a judge reads texts.

    Attributes:
        context_tokens: Longest window.
        stride_tokens: Distance between window starts.
        max_tokens: Texts are truncated to this many tokens, the one in front included.
    """

    context_tokens: int
    stride_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Judging:
    """A judge with how it reads and what it has read.

    Attributes:
        judge: The model and its tokenizer.
        limits: Windows and longest text.
        memory: Texts that it has read before.
        kept: Folder for what it reads; None keeps nothing.
    """

    judge: JudgeModel
    limits: ReadingLimits
    memory: JudgeMemory
    kept: Path | None = None

    @classmethod
    def of(
        cls, judge: JudgeModel, kept: Path | None = None, max_tokens: int | None = None, stride: int | None = None
    ) -> Judging:
        """Refuse limits that a judge cannot read by before the first text is scored.

        Args:
            judge: The model and its tokenizer.
            kept: Folder for what it reads, so that an interrupted evaluation resumes.
            max_tokens: Texts are truncated to this many tokens; None for 1024 and, unless a stride
                is given, at most the context.
            stride: Tokens between windows; None for half the context.

        Raises:
            UsageError: When no text could be read that way.
        """
        context = judge.context_length
        if max_tokens is None:
            max_tokens = DEFAULT_MAX_TOKENS if stride is not None else min(DEFAULT_MAX_TOKENS, context)
        if stride is None:
            stride = max(1, context // 2)
        if not 1 <= stride <= context:
            what = "the windows would leave tokens out" if stride > context else "no such stride"
            expected = f"1..{context}, the context of {judge.name}"
            remedy = "leave it out for half the context"
            raise UsageError(what, where="--stride", got=stride, expected=expected, remedy=remedy)
        if max_tokens < 2:
            what, where = "nothing would be scored", "--max-tokens"
            expected = "at least 2: the token in front of a text counts"
            remedy = "leave it out to read texts whole, up to the context"
            raise UsageError(what, where=where, got=max_tokens, expected=expected, remedy=remedy)
        limits = ReadingLimits(context, stride, max_tokens)
        decides = {**judge.identity, "products": judge.products, **asdict(limits)}
        return cls(judge, limits, JudgeMemory(kept, decides), kept)

    @classmethod
    def load(cls, name: str, device: str | None = None, **further: Any) -> Judging:
        """A judge by hub id or folder, on ``auto`` unless a device is given; see :meth:`of`.

        Raises:
            UsageError: For a judge, device or limit that cannot be used.
        """
        found = cls.of(load_judge(name, device or "auto"), **further)
        window = min(found.limits.context_tokens, found.limits.max_tokens)
        logits = found.judge.model.get_output_embeddings().weight.shape[0]
        place = found.judge.model.device
        require_indexable(window * logits, place, "cut texts with --max-tokens")
        if place.type == "cuda":
            found.judge.size.rows = min(TEXTS_ON_GPU, largest_batch(window * logits, place))
        return found

    def read(self, texts: Sequence[str]) -> list[JudgedText]:
        """What the judge makes of each text, after retokenizing it with the judge's own tokenizer.

        Raises:
            GdistillError: When the judge gives a likelihood that is no number.
        """
        judge, limits, memory = self.judge, self.limits, self.memory
        new = [text for text in dict.fromkeys(texts) if text not in memory]
        # verbose=False: the tokenizer would warn of a text longer than the context; windows read it.
        encode = partial(judge.tokenizer.encode, add_special_tokens=False, verbose=False)
        encoded = [[judge.document_start_id, *encode(text)][: limits.max_tokens] for text in new]
        if new:
            with progress_bar("perplexity", sum(map(len, encoded))) as bar:

                def work(members: list[int]) -> None:
                    rows = [encoded[index] for index in members]
                    for index, reading in zip(members, self._read(rows), strict=True):
                        memory.add(new[index], reading)
                        bar.advance(len(encoded[index]))

                judge.longest_first([len(ids) for ids in encoded], work)
        return [memory[text] for text in texts]

    def _read(self, rows: list[list[int]]) -> list[JudgedText]:
        """Texts side by side; a row that is shorter is filled up behind its end."""
        judge, limits = self.judge, self.limits
        ids = side_by_side(rows, judge.document_start_id)
        counted = counted_positions(ids, judge.border_ids)
        nll = torch.zeros(ids.shape)
        if counted.any():
            on_device = ids.to(judge.model.device)
            nll = token_nll_nats(judge.model, on_device, limits.context_tokens, limits.stride_tokens).cpu()
            nll[~counted.any(dim=1)] = 0.0  # as of a text that is not read at all
        found = []
        for row, nats, flags in zip(rows, nll, counted, strict=True):
            own = slice(1, len(row))
            if not nats[own].isfinite().all():
                what = "the judge gives a likelihood that is no number"
                got = f"{int((~nats[own].isfinite()).sum())} of {len(row)} tokens of a text"
                expected, remedy = "finite weights and logits", "check the judge's weights"
                raise GdistillError(what, where=judge.name, got=got, expected=expected, remedy=remedy)
            found.append(JudgedText(tuple(row[own]), tuple(nats[own].tolist()), tuple(flags[own].tolist())))
        return found

    def perplexity(self, texts: Sequence[str], indices: Sequence[int] | None = None, where: object = "") -> Score:
        """How likely the judge finds texts.

        Two aggregates circulate and differ: ``corpus`` is exp(sum nll / sum tokens) over all texts,
        the authors' number and the value here; the mean of each text's perplexity stands in the
        details.

        Args:
            texts: Decoded samples; one without a token that counts is left out, and counted in the
                details.
            indices: Sample indices; 0, 1, ... unless given.
            where: Where the texts come from, for messages.

        Raises:
            GdistillError: When no text has a token that counts, or the judge gives no finite number.
        """
        named = zip(indices or range(len(texts)), self.read(texts), strict=True)
        scored = [(index, reading) for index, reading in named if any(reading.counted)]
        num_empty = len(texts) - len(scored)
        if not scored:
            got = f"{len(texts)} texts without a token besides end-of-text"
            remedy = "look at the samples' text fields"
            raise GdistillError("no sample has a token to score", where=where, got=got, remedy=remedy)
        per_sample = PerSample(
            indices=tuple(index for index, _ in scored),
            numerators=tuple(float(np.array(one.nll_nats)[list(one.counted)].sum()) for _, one in scored),
            denominators=tuple(float(sum(reading.counted)) for _, reading in scored),
            is_exponential=True,
        )
        sums, counts = np.array(per_sample.numerators), np.array(per_sample.denominators)
        each = np.exp(sums / counts)
        fixed = {"precision": "fp32", "borders": "not counted", "aggregate": "corpus"}
        return Score.of(
            "generative_perplexity",
            per_sample,
            settings={**self.judge.identity, **asdict(self.limits), **fixed},
            details={
                "per_sample_mean": float(each.mean()),
                "per_sample_median": float(np.median(each)),
                "nll_nats_per_token": float(sums.sum() / counts.sum()),
                "num_tokens": int(counts.sum()),
                "num_empty": num_empty,
                "products": self.judge.products,
            },
            cautions=(f"{num_empty} texts without a token to score are left out",) if num_empty else (),
        )

    def spans(self, text: str) -> list[tuple[int, int, float | None]]:
        """(start, end, nats) of each token of a text that was read; nats are None where it does not count.

        Characters between two tokens (spaces that a tokenizer skips) belong to the later one, so
        spans follow each other; of the tokens that write one character together all but the first
        are empty. Nothing for a judge without a fast tokenizer, which does not say where its tokens
        end.
        """
        if not self.judge.tokenizer.is_fast:
            return []
        encoded = self.judge.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        reading, spans, start = self.memory[text], [], 0
        read = zip(encoded["offset_mapping"], reading.nll_nats, reading.counted, strict=False)
        for (_, end), nats, counted in read:
            spans.append((start, max(start, end), nats if counted else None))
            start = max(start, end)
        return spans

    def pieces(self, text: str) -> list[Piece]:
        """A text that was read in pieces that join to it again, the part behind the limit last."""
        spans = self.spans(text)
        rest = spans[-1][1] if spans else 0
        pieces = [(text[start:end], value) for start, end, value in spans]
        return [piece for piece in [*pieces, (text[rest:], None)] if piece[0]]
