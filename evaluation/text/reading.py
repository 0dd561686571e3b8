"""A causal language model that reads text it did not write: loading, windows, memory, perplexity.

A text longer than the context is read in windows that start every ``stride`` tokens; the first
scores all its positions, a later one only those that no earlier window scored. Position 0 has no
prediction, and tokens that stand between texts (end of text, and the start token of judges that
have one of their own) do not count as targets. Texts that go through the judge side by side are
filled up behind their ends, where a causal model does not look.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
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
from shards.language_model.forward import BatchSize, allow_tf32, in_batches, largest_batch, memory_bytes, resolve_device
from shards.language_model.loading import find_pretrained, find_tokenizer, load_causal_model
from trainer.sampling.noise import TokenRule, truncate_to_nucleus

ROWS_AT_A_TIME = 32
DEFAULT_MAX_TOKENS = 1024
"""Tokens of a text that are read: the length of the paper's samples."""
UNLIMITED_CONTEXT = 1024
"""Window over texts for models that set no limit (Mamba, Bloom): that of the published numbers."""


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
        room: How much of texts it reads at once.
    """

    name: str
    model: Any
    tokenizer: Any
    context_length: int
    document_start_id: int
    border_ids: tuple[int, ...]
    weights_sha256: str = ""
    products: str = "float32"
    room: Room = field(default_factory=lambda: Room(1, sys.maxsize))

    @property
    def identity(self) -> dict[str, str]:
        """What a number must carry of its judge."""
        return {"judge": self.name, "judge_sha256": self.weights_sha256}


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
    model = load_causal_model(files, "float32", place).network
    weight_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    return JudgeModel(
        name=files.name,
        model=model,
        tokenizer=tokenizer,
        context_length=files.context_length or UNLIMITED_CONTEXT,
        document_start_id=eos if bos is None else bos,
        border_ids=borders,
        weights_sha256=files.weights_sha256,
        products=allow_tf32(place),
        room=Room.on(place, files.num_logits, files.hidden_size, weight_bytes),
    )


# A text cut into the judge's tokens, each with the judge's surprise: what a report colours.


Piece = tuple[str, float | None]
"""Characters, and nats of the token they end in; None where nothing was scored."""


def surprise_pieces(judge: JudgeModel, text: str, reading: JudgedText) -> list[Piece]:
    """The text in pieces that join to it again, the part behind the judge's limit last.

    Args:
        judge: Whose tokens they are; without a fast tokenizer the text stays whole.
        text: The text.
        reading: What the judge made of it.
    """
    spans = token_spans(judge, text, reading)
    rest = spans[-1][1] if spans else 0
    pieces = [(text[start:end], value) for start, end, value in spans]
    return [piece for piece in [*pieces, (text[rest:], None)] if piece[0]]


def token_spans(judge: JudgeModel, text: str, reading: JudgedText) -> list[tuple[int, int, float | None]]:
    """(start, end, nats) of each token of the judge; nats are None where it does not count.

    Characters between two tokens (spaces that a tokenizer skips) belong to the later one, so spans
    follow each other; of the tokens that write one character together all but the first are empty.
    Nothing for a judge without a fast tokenizer, which does not say where its tokens end.
    """
    if not judge.tokenizer.is_fast:
        return []
    encoded = judge.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans, start = [], 0
    read = zip(encoded["offset_mapping"], reading.nll_nats, reading.counted, strict=False)
    for (_, end), nats, counted in read:
        spans.append((start, max(start, end), nats if counted else None))
        start = max(start, end)
    return spans


# How much goes through a judge at once, by the memory of its device.
#
# On a GPU as many texts as fit, side by side; what did not fit is remembered. On a CPU, whose
# results are reproduced bit for bit, one text at a time.


MEMORY_SHARE = 0.5
"""Of what the weights leave."""
FLOATS_PER_LOGIT, FLOATS_PER_UNIT = 3, 32
"""Float32 values alive at once for each logit (their log-softmax, a copy) and for each unit of the
hidden state (a block's activations)."""


@dataclass
class Room:
    """What a judge reads at once.

    Attributes:
        side_by_side: Most tokens of several texts, filled up to one length; less for good where
            memory runs out. One text always goes, whatever its length.
        with_logits: Most tokens whose logits are held at once; longer windows are read in parts.
    """

    side_by_side: int
    with_logits: int

    @classmethod
    def on(cls, device: torch.device, num_logits: int, hidden_size: int, weight_bytes: int) -> Room:
        """The room on a device; the same on every machine with the same device."""
        token_bytes = 4 * (FLOATS_PER_LOGIT * num_logits + FLOATS_PER_UNIT * hidden_size)
        free = max(0, memory_bytes(device) - weight_bytes)
        tokens = max(1, int(MEMORY_SHARE * free) // token_bytes)
        tokens = min(tokens, largest_batch(num_logits, device))
        return cls(tokens if device.type == "cuda" else 1, tokens)

    def fill(self, lengths: Sequence[int], context: int, work: Callable[[list[int]], None]) -> None:
        """Do ``work`` on every text, longest first, as many at a time as there is room for.

        Args:
            lengths: Tokens of each text.
            context: Tokens of the longest window.
            work: Given the texts' indices, longest first; done again with half of them where
                memory runs out.

        Raises:
            GdistillError: If a single text does not fit.
        """
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        while order:
            width = max(1, min(lengths[order[0]], context))
            group = order[: max(1, self.side_by_side // width)]
            order = order[len(group) :]
            size = BatchSize(len(group))

            in_batches(lambda part, members=group: work(members[part]), len(group), size)
            if size.rows < len(group):
                self.side_by_side = size.rows * width


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

    @cached_property
    def nll_sum_nats(self) -> float:
        """Over the tokens that count, in float64."""
        return float(np.array(self.nll_nats)[list(self.counted)].sum())


class JudgeMemory:
    """Texts that were read, in memory and, if a folder is given, on disk.

    Args:
        folder: Where the file stands; None keeps nothing.
        identity: What decides the numbers besides the text: names the file.
    """

    def __init__(self, folder: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        self._texts: dict[str, JudgedText] = {}
        self._file = None
        if folder is not None:
            name = hashlib.sha256(canonical_json(identity or {})).hexdigest()[:16]
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


def window_starts(length: int, context: int, stride: int) -> list[tuple[int, int]]:
    """(start, first scored position) of each window over ``length`` tokens.

    Raises:
        ValueError: Unless 0 < stride <= context.
    """
    if not 0 < stride <= context:
        raise ValueError(f"need 0 < stride <= context, got stride {stride}, context {context}")
    windows = [(0, 0)]
    while windows[-1][0] + context < length:
        start = windows[-1][0] + stride
        windows.append((start, start + context - stride))
    return windows


@torch.no_grad()
def token_nll_nats(
    model: Any, ids: Int[Tensor, "b l"], context: int, stride: int, most_tokens: int = sys.maxsize
) -> Float[Tensor, "b l"]:
    """Negative log-likelihood in nats of every token under ``model``; 0 at position 0.

    Args:
        model: A causal language model of transformers, in float32.
        ids: Token ids.
        context: Window length in tokens.
        stride: Distance between window starts in tokens.
        most_tokens: Tokens whose logits may be held at once.

    Raises:
        GdistillError: For a longer window, if the model cannot give some of its logits alone.
    """
    result = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for start, first in window_starts(ids.shape[1], context, stride):
        window = ids[:, start : start + context]
        first = max(first, 1)
        nll = _window_nll(model, window, max(1, most_tokens // len(ids)))
        result[:, first : start + window.shape[1]] = nll[:, first - start - 1 :]
    return result


def _window_nll(model: Any, window: Int[Tensor, "b t"], most: int) -> Float[Tensor, "b t-1"]:
    """Of all tokens but the first; where the logits are too many, ``most`` positions at a time,
    each time with the whole pass behind them."""
    if window.shape[1] <= most:
        return _nll(model(input_ids=window, use_cache=False).logits[:, :-1], window[:, 1:])
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        what = "a text is too long for a judge that gives all logits or none"
        where, remedy = type(model).__name__, f"cut texts with --max-tokens {most}"
        got = f"{window.shape[1]} tokens"
        expected = f"at most {most}, whose logits can be held at once"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    parts = []
    for part in torch.arange(window.shape[1] - 1, device=window.device).split(most):
        logits = model(input_ids=window, use_cache=False, logits_to_keep=part).logits
        parts.append(_nll(logits, window[:, 1:][:, part]))
    return torch.cat(parts, dim=1)


def _nll(logits: Float[Tensor, "b n v"], targets: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    return cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


def counted_positions(ids: Int[Tensor, "b l"], border_ids: Sequence[int]) -> Bool[Tensor, "b l"]:
    """True where a token counts: not the first of its row, none of those between texts."""
    counted = ~torch.isin(ids, torch.tensor([*border_ids], dtype=ids.dtype, device=ids.device))
    counted[:, 0] = False
    return counted


def reading_limits(judge: JudgeModel, stride: int | None, max_tokens: int | None) -> ReadingLimits:
    """Half the judge's context as stride and its context as longest text, unless given.

    Raises:
        UsageError: When no text could be read that way.
    """
    context = judge.context_length
    if stride is None:
        stride = max(1, context // 2)
    if not 1 <= stride <= context:
        what = "the windows would leave tokens out" if stride > context else "no such stride"
        expected = f"1..{context}, the context of {judge.name}"
        remedy = "leave it out for half the context"
        raise UsageError(what, where="--stride", got=stride, expected=expected, remedy=remedy)
    if max_tokens is not None and max_tokens < 2:
        what, where = "nothing would be scored", "--max-tokens"
        expected = "at least 2: the token in front of a text counts"
        remedy = "leave it out to read texts whole, up to the context"
        raise UsageError(what, where=where, got=max_tokens, expected=expected, remedy=remedy)
    return ReadingLimits(context, stride, context if max_tokens is None else max_tokens)


def read_texts(
    judge: JudgeModel, texts: Sequence[str], limits: ReadingLimits, memory: JudgeMemory | None = None
) -> list[JudgedText]:
    """What the judge makes of each text, after retokenizing it with the judge's own tokenizer.

    Args:
        judge: The model and its tokenizer.
        texts: Decoded samples.
        limits: From :func:`reading_limits`.
        memory: Texts that this judge has read before with these limits, to be asked and added to.

    Raises:
        GdistillError: When the judge gives a likelihood that is no number.
    """
    memory = JudgeMemory() if memory is None else memory
    new = [text for text in dict.fromkeys(texts) if text not in memory]
    # verbose=False: the tokenizer would warn of a text longer than the context; windows read it.
    words: dict[str, bool] = {"add_special_tokens": False, "verbose": False}
    encoded = [[judge.document_start_id, *judge.tokenizer.encode(text, **words)][: limits.max_tokens] for text in new]
    if not new:
        return [memory[text] for text in texts]
    with progress_bar("perplexity", sum(map(len, encoded))) as bar:

        def read(members: list[int]) -> None:
            rows = [encoded[index] for index in members]
            for index, reading in zip(members, _read(judge, rows, limits), strict=True):
                memory.add(new[index], reading)
                bar.advance(len(encoded[index]))

        judge.room.fill([len(ids) for ids in encoded], limits.context_tokens, read)
    return [memory[text] for text in texts]


def _read(judge: JudgeModel, rows: list[list[int]], limits: ReadingLimits) -> list[JudgedText]:
    """Texts side by side; a row that is shorter is filled up behind its end."""
    ids = side_by_side(rows, judge.document_start_id)
    counted = counted_positions(ids, judge.border_ids)
    nll = torch.zeros(ids.shape)
    if counted.any():
        on_device = ids.to(judge.model.device)
        windows = (limits.context_tokens, limits.stride_tokens)
        nll = token_nll_nats(judge.model, on_device, *windows, judge.room.with_logits).cpu()
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


def clean_logits(model: Any, rows: Sequence[list[int]], vocab_size: int) -> Iterator[tuple[int, Float[Tensor, "l v"]]]:
    """(Number of a row, float32 logits of the token behind each of its positions), one pass each.

    Rows of like length go together; what stands behind a row's end is seen by none of it.
    """
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    device = next(model.parameters()).device
    with progress_bar("certify", len(rows)) as bar:
        for first in range(0, len(order), ROWS_AT_A_TIME):
            group = order[first : first + ROWS_AT_A_TIME]
            longest = len(rows[group[-1]])
            ids = torch.tensor([rows[n] + [0] * (longest - len(rows[n])) for n in group])
            with torch.no_grad():
                logits = model(input_ids=ids.to(device)).logits[..., :vocab_size].float()
            yield from zip(group, logits, strict=True)
            bar.advance(len(group))


def kept(logits: Float[Tensor, "n v"], rule: TokenRule, slack: float = 0.0) -> Bool[Tensor, "n v"]:
    """Tokens that the teacher's top-k and nucleus keep.

    Args:
        logits: The teacher's.
        rule: With its temperature.
        slack: Tokens within it of a cut, in nats or in probability, stay too; negative: go too.
    """
    if not rule.truncates:
        return torch.ones_like(logits, dtype=torch.bool)
    probs = (logits.double() / rule.temperature).softmax(dim=-1)
    best = probs == probs.amax(dim=-1, keepdim=True)
    if rule.top_k is not None and rule.top_k < logits.shape[-1]:
        least = probs.topk(rule.top_k, dim=-1).values[..., -1:] * math.exp(-slack)
        probs = torch.where((probs >= least) | best, probs, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    if rule.nucleus_p < 1:
        p = max(rule.nucleus_p + slack, 1e-9)
        probs = truncate_to_nucleus(probs, p, rule.nucleus_rule)
    return (probs > 0) | best


def token_margins(
    scores: Float[Tensor, "n v"], tokens: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Int[Tensor, "n"]]:
    """Score of each token minus the best other score, and whose that is."""
    own = scores.gather(1, tokens[:, None])
    others = scores.scatter(1, tokens[:, None], -torch.inf)
    best, winners = others.max(dim=1)
    return own[:, 0] - best, winners


def side_by_side(rows: Sequence[Sequence[int]], filler: int) -> Int[Tensor, "b l"]:
    """Rows of token ids, filled up to the longest."""
    ids = torch.full((len(rows), max(map(len, rows))), filler)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids


def generative_perplexity(
    judge: JudgeModel,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    max_tokens: int | None = None,
    indices: Sequence[int] | None = None,
    memory: JudgeMemory | None = None,
    where: object = "",
) -> Score:
    """How likely a judge finds texts.

    Two aggregates circulate and differ: ``corpus`` is exp(sum nll / sum tokens) over all texts, the
    authors' number and the value here; the mean of each text's perplexity stands in the details.

    Args:
        judge: The model and its tokenizer.
        texts: Decoded samples; one without a token that counts is left out, and counted in the
            details.
        stride: Distance between windows in tokens; half the context unless given.
        max_tokens: Texts are truncated to this many tokens, the one in front included; the
            context unless given.
        indices: Sample indices; 0, 1, ... unless given.
        memory: See :func:`read_texts`.
        where: Where the texts come from, for messages.

    Raises:
        UsageError: For a stride or limit of no use.
        GdistillError: When no text has a token that counts, or the judge gives no finite number.
    """
    limits = reading_limits(judge, stride, max_tokens)
    readings = read_texts(judge, texts, limits, memory)
    named = zip(indices or range(len(texts)), readings, strict=True)
    scored = [(index, reading) for index, reading in named if any(reading.counted)]
    if not scored:
        got = f"{len(texts)} texts without a token besides end-of-text"
        remedy = "look at the samples' text fields"
        raise GdistillError("no sample has a token to score", where=where, got=got, remedy=remedy)
    per_sample = PerSample(
        indices=tuple(index for index, _ in scored),
        numerators=tuple(reading.nll_sum_nats for _, reading in scored),
        denominators=tuple(float(sum(reading.counted)) for _, reading in scored),
        is_exponential=True,
    )
    settings = {
        **judge.identity,
        **asdict(limits),
        "precision": "fp32",
        "borders": "not counted",
        "aggregate": "corpus",
    }
    score = summarise(per_sample, len(texts) - len(scored), settings)
    return replace(score, details={**score.details, "products": judge.products})


def summarise(per_sample: PerSample, num_empty: int, settings: dict[str, Any]) -> Score:
    """Both aggregates of texts' likelihoods, and the interval of the corpus aggregate.

    Args:
        per_sample: Nats and tokens of each text.
        num_empty: Texts that were left out.
        settings: What the number depends on.
    """
    sums, counts = np.array(per_sample.numerators), np.array(per_sample.denominators)
    each = np.exp(sums / counts)
    cautions = (f"{num_empty} texts without a token to score are left out",) if num_empty else ()
    details = {
        "per_sample_mean": float(each.mean()),
        "per_sample_median": float(np.median(each)),
        "nll_nats_per_token": float(sums.sum() / counts.sum()),
        "num_tokens": int(counts.sum()),
        "num_empty": num_empty,
    }
    return Score.of("generative_perplexity", per_sample, settings=settings, details=details, cautions=cautions)


@dataclass(frozen=True)
class Judging:
    """A judge with how it reads and what it has read.

    Attributes:
        judge: The model and its tokenizer.
        limits: Windows and longest text.
        memory: Texts that it has read before.
    """

    judge: JudgeModel
    limits: ReadingLimits
    memory: JudgeMemory

    @classmethod
    def load(
        cls,
        name: str,
        device: str | None = None,
        kept: Path | None = None,
        max_tokens: int | None = None,
        stride: int | None = None,
    ) -> Judging:
        """Load a judge, and refuse limits that it cannot read by before the first text is scored.

        Args:
            name: Hub id or folder.
            device: None for ``auto``.
            kept: Folder for what it reads, so that an interrupted evaluation resumes.
            max_tokens: Texts are truncated to this many tokens; None for 1024 and, unless a stride
                is given, at most the context.
            stride: Tokens between windows; None for half the context.

        Raises:
            UsageError: For a judge, device or limit that cannot be used.
        """
        judge = load_judge(name, device or "auto")
        if max_tokens is None:
            within = judge.context_length if stride is None else DEFAULT_MAX_TOKENS
            max_tokens = min(DEFAULT_MAX_TOKENS, within)
        limits = reading_limits(judge, stride, max_tokens)
        return cls(judge, limits, JudgeMemory(kept, {**judge.identity, **asdict(limits)}))

    def perplexity(self, texts: Sequence[str], **further: Any) -> Score:
        """Generative perplexity of texts."""
        limits = {"stride": self.limits.stride_tokens, "max_tokens": self.limits.max_tokens}
        return generative_perplexity(self.judge, texts, **limits, memory=self.memory, **further)

    def pieces(self, text: str) -> list[Piece]:
        """A text that was read, in tokens with their surprise."""
        return surprise_pieces(self.judge, text, self.memory[text])
