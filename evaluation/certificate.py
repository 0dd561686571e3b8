"""By how much each token wins argmax(l + tau xi): one clean pass of the teacher per row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import typer
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evaluation.samples import find_sample_files, read_records, read_samples, short
from evaluation.text.reading import side_by_side
from shards.atomic import canonical_json, require_writable, write_json_atomic
from shards.codec.protocol import Codec, make_codec
from shards.console import progress_bar
from shards.errors import GdistillError, UsageError, visible
from shards.language_model.forward import DtypeName, resolve_device
from shards.noise.embedding import Noise
from trainer.sampling.coupled import gumbel_scores, require_whole_noise
from trainer.sampling.noise import STEPS_PER_ATTEMPT, NucleusRule, TokenRule, sampling_noise, truncate_to_nucleus
from trainer.sampling.verifier import Verifier, load_verifier
from trainer.students.configuration import grouped

ROWS_AT_A_TIME = 32
TIE_ROUNDINGS = {torch.float32: 64, torch.bfloat16: 6}
"""A margin is a tie within this many roundings (eps of the weights' precision) of the largest
logit: two ways to compute one pass (with a cache and without, alone or in a batch) differ by a few.
In bfloat16 a rounding is what 65,536 are in float32, so there are as few as will do: of 21,760
tokens drawn with a cache from four small models a clean pass preferred another one 109 times, by at
most 1.5 roundings."""
MOST_LISTED = 20
MOST_MARGIN = 1e6
"""Nats of a token that is alone in the nucleus, and, negative, of one that the teacher cut off."""


def clean_logits(model: Any, rows: Sequence[list[int]], vocab_size: int) -> Iterator[tuple[int, Float[Tensor, "l v"]]]:
    """(Number of a row, float32 logits of the token behind each of its positions), one pass each.

    Rows of like length go together; what stands behind a row's end is seen by none of it.
    """
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    device = next(model.parameters()).device
    with progress_bar("certify", len(rows), unit="text") as bar:
        for first in range(0, len(order), ROWS_AT_A_TIME):
            group = order[first : first + ROWS_AT_A_TIME]
            ids = side_by_side([rows[n] for n in group], 0)
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


def decide(
    scores: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, "n"],
    rule: TokenRule,
    within: Float[Tensor, "n"],
    slack: float,
) -> tuple[Float[Tensor, "n"], Int[Tensor, "n"], Bool[Tensor, "n"]]:
    """Margin of each token among those that are kept, the best other one, and where rounding decides.

    Args:
        scores: What each token must be the argmax of.
        logits: By these ``rule`` keeps tokens.
        tokens: Those that stand there.
        rule: Top-k and nucleus.
        within: A margin of at most so much is a tie.
        slack: How far rounding may move the cut: it may have cut a token off, or let one in.
    """

    def among_kept(slack: float) -> tuple[Float[Tensor, "n"], Int[Tensor, "n"]]:
        allowed = scores.masked_fill(~kept(logits, rule, slack), -torch.inf)
        best, winners = allowed.scatter(1, tokens[:, None], -torch.inf).max(dim=1)
        return allowed.gather(1, tokens[:, None])[:, 0] - best, winners

    margins, winners = among_kept(0.0)
    is_tie = margins.abs() <= within
    for other in (slack, -slack) if rule.truncates else ():
        is_tie |= (margins <= within) & (among_kept(other)[0] >= -within)
    return margins, winners, is_tie


@dataclass(frozen=True)
class Position:
    """A token that is not the clear winner.

    Attributes:
        index: The sample's.
        position: In its row.
        token: What stands there.
        winner: The best of the other tokens.
        margin: Score of the token minus that of ``winner``, nats.
    """

    index: int
    position: int
    token: int
    winner: int
    margin: float


@dataclass
class Certificate:
    """What was found.

    Attributes:
        num_positions: Filled positions looked at.
        num_agreeing: Where the token wins; ties that it wins are among them.
        smallest_margin: Of those, nats; infinite when there is none.
        mismatches: Where another token wins by more than rounding can explain.
        num_mismatches: Their number; ``mismatches`` lists the first.
        ties: Where rounding decides.
        dtype: Precision of the teacher.
        tie_roundings: Within how many of its roundings a margin is a tie.
    """

    num_positions: int = 0
    num_agreeing: int = 0
    smallest_margin: float = float("inf")
    mismatches: list[Position] = field(default_factory=list)
    num_mismatches: int = 0
    ties: list[Position] = field(default_factory=list)
    dtype: str = "float32"
    tie_roundings: int = TIE_ROUNDINGS[torch.float32]

    @property
    def agreement(self) -> float:
        """Share of positions where the token wins."""
        return self.num_agreeing / max(1, self.num_positions)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "agreement": self.agreement}


def certify_file(drawn: DrawnFile, teacher: Verifier) -> Certificate:
    """Compare every filled token of a file with the teacher's own.

    Raises:
        UsageError: When the teacher cannot read the rows or is not the one that verified them, or
            the samples' noise was cut off.
    """
    ours = teacher.weights_sha256
    if drawn.verifier_sha256 not in (None, ours):
        what = "these samples were verified by another model"
        expected = f"weights {str(drawn.verifier_sha256)[:12]}"
        raise UsageError(what, where="--teacher", got=f"weights {ours[:12]}", expected=expected)
    require_whole_noise(drawn.noise(drawn.rows[0]).select(slice(0, 1)))
    teacher.require_context(max(len(row.tokens) for row in drawn.rows))
    dtype = next(teacher.model.parameters()).dtype
    found = Certificate(dtype=str(dtype).removeprefix("torch."), tie_roundings=TIE_ROUNDINGS[dtype])
    rows = [row for row in drawn.rows if row.filled]
    for number, logits in clean_logits(teacher.model, [row.tokens for row in rows], teacher.vocab_size):
        row = rows[number]
        places = torch.tensor(row.filled)
        tokens = torch.tensor(row.tokens)[places].to(logits.device)
        here = logits[(places - 1).to(logits.device)]
        scores = gumbel_scores(here, drawn.noise(row).select(places), drawn.tau)
        within = found.tie_roundings * torch.finfo(dtype).eps * here.abs().amax(dim=-1).clamp_min(1.0)
        slack = float(within.max()) / drawn.tau
        margins, winners, is_tie = decide(scores, here, tokens, drawn.rule, within, slack)
        margins = margins.clamp(-MOST_MARGIN, MOST_MARGIN)  # outside of what is kept, or alone in it
        agreeing = margins[margins > 0]
        found.num_positions += len(places)
        found.num_agreeing += len(agreeing)
        found.smallest_margin = min([found.smallest_margin, *agreeing.tolist()])
        for slot in (margins <= within).nonzero()[:, 0].tolist():
            numbers = (int(part[slot]) for part in (places, tokens, winners))
            position = Position(row.index, *numbers, margin=float(margins[slot]))
            if bool(is_tie[slot]):
                found.ties.append(position)
                continue
            found.num_mismatches += 1
            if len(found.mismatches) < MOST_LISTED:
                found.mismatches.append(position)
    return found


# Samples with everything that names their noise: read, checked, refused where it cannot be had.


MOST_TAU = 1e6
"""Beyond it no logit counts, and float32 ends."""

VERIFIED = ("coupled", "medusa", "drafter")
"""Samplers whose tokens a teacher verifies; the first one's in float32, the others' in the
precision of the backbone that their student stands on."""


@dataclass(frozen=True)
class DrawnRow:
    """One sample.

    Attributes:
        index: Its index in the run.
        tokens: Its tokens.
        filled: Positions that the sampler filled.
        attempt: How often it had been drawn before.
    """

    index: int
    tokens: list[int]
    filled: list[int]
    attempt: int


@dataclass(frozen=True)
class DrawnFile:
    """One file of samples.

    Attributes:
        source: The file.
        rows: Its samples.
        seed: The user's seed.
        tau: Scale of the noise.
        vocab_size: V.
        codec: What the student's noise was cut off by; None for none.
        sampler: The sampler's name.
        rule: What the teacher kept, at temperature tau: its top-k and nucleus.
        is_verified: Whether every token was verified to be the teacher's for its noise.
        verifier_sha256: Of the model that verified the samples, where one did.
        dtype: Precision of that model's weights, and so of its logits.
        given_is_checked: Whether the tokens that the file calls given are those of the run's
            settings; False where the file has fewer samples than the run had given rows.
    """

    source: Path
    rows: list[DrawnRow]
    seed: int
    tau: float
    vocab_size: int
    codec: Codec | None
    sampler: str
    rule: TokenRule
    is_verified: bool
    verifier_sha256: str | None
    dtype: DtypeName
    given_is_checked: bool

    def noise(self, row: DrawnRow) -> Noise:
        """xi of the sample's positions, from position 0."""
        ids, draw = torch.tensor([row.index]), row.attempt * STEPS_PER_ATTEMPT
        length = len(row.tokens)
        return sampling_noise(self.seed, ids, length, self.vocab_size, codec=self.codec, draw=draw)


def read_drawn(file: Path) -> DrawnFile:
    """A file of ``gdistill-sample`` with its ``settings.json``.

    Raises:
        UsageError: When the file does not hold its seed or settings, or its noise cannot be found
            again.
        GdistillError: For a damaged line or settings file.
    """
    samples = read_samples(file)
    records = [record.values for record in read_records(file, "sample")]
    settings, sampler = samples.settings, samples.sampler
    if not settings:
        remedy = "give the folder that gdistill-sample wrote"
        where = file.with_name("settings.json")
        raise UsageError("no settings beside the samples", where=where, remedy=remedy)
    if any(record.get("seed") is None for record in records):
        remedy = "sample again with gdistill-sample, which writes it down"
        raise UsageError("the samples have no recorded seed", where=file, remedy=remedy)

    def checked(name: str, value: Any, is_fine: bool, expected: str) -> Any:
        """A value of the settings, or what is wrong with it."""
        if not is_fine:
            what, remedy = "damaged settings", "restore the file that gdistill-sample wrote"
            where, got = f"{file.with_name('settings.json')}, {name}", short(value)
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
        return value

    def one_of(name: str, value: Any, known: Sequence[str]) -> Any:
        return checked(name, value, value in known, " or ".join(known))

    identity, config = (
        checked(name, settings.get(name), isinstance(settings.get(name), dict), "an object")
        for name in ("identity", "student_config")
    )
    kind, acceptance = sampler.get("sampler"), sampler.get("acceptance", "coupled")
    verified = kind in VERIFIED and acceptance == "coupled"
    obstacles = {
        f"drawn with acceptance={acceptance}": kind in VERIFIED and not verified,
        "decided by one uniform per token, which is no Gumbel noise": config.get("conditioning") == "uniform",
        "drawn by a student without noise": config.get("conditioning") == "none" and not verified,
        "redraw_noise: other noise at every step": bool(sampler.get("redraw_noise")),
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            what = "no noise that decided these samples can be found again"
            expected = "samples of coupled, drafter, medusa with acceptance=coupled, or held noise"
            raise UsageError(what, where=file, got=obstacle, expected=expected)
    size = settings.get("vocab_size")
    is_size = type(size) is int and 2 <= size < 2**31
    size = checked("vocab_size", size, is_size, "a whole number >= 2")
    verifier = identity.get("verifier_sha256") if verified else None
    checked("verifier_sha256", verifier, isinstance(verifier, str | None), "a hash")
    rows = [_row(values, f"{file}, line {n}", size) for n, values in enumerate(records, 1)]
    if not any(row.filled for row in rows):
        what = "no position was filled, so there is nothing to certify"
        got = f"{len(rows)} rows that are given from end to end"
        raise UsageError(what, where=file, got=got, remedy="give samples that were filled")
    tau = 1.0 if sampler.get("tau") is None else sampler["tau"]
    is_scale = isinstance(tau, float | int) and 0 < tau <= MOST_TAU
    checked("tau", tau, is_scale, f"above 0, at most {MOST_TAU:g}")
    rule = TokenRule(temperature=float(tau))
    if verified:  # a student's own truncation says nothing of the teacher
        p, k = sampler.get("nucleus_p", 1.0), sampler.get("top_k")
        checked("nucleus_p", p, isinstance(p, float | int) and 0 < p <= 1, "in (0, 1]")
        checked("top_k", k, k is None or (type(k) is int and k >= 1), "a whole number >= 1")
        nucleus = sampler.get("nucleus_rule", "strict")
        one_of("nucleus_rule", nucleus, get_args(NucleusRule))
        rule = TokenRule("categorical", float(p), nucleus, float(tau), k)
    dtype = grouped(config).get("backbone", {}).get("dtype") if kind in VERIFIED[1:] else None
    dtype = one_of("backbone.dtype", dtype or "float32", get_args(DtypeName))
    codec = identity.get("codec")
    if codec is not None:
        is_codec = isinstance(codec, dict) and isinstance(codec.get("parameters"), dict)
        checked("codec", codec, is_codec, '{"name": ..., "parameters": {...}}')
        codec = make_codec(str(codec.get("name")), **codec["parameters"])
    is_checked = _given_is_checked(file, rows, size, identity)
    return DrawnFile(
        *(file, rows, samples.seed, float(tau), size, codec, str(kind), rule), *(verified, verifier, dtype, is_checked)
    )


def _given_is_checked(file: Path, rows: Sequence[DrawnRow], mask_id: int, identity: Mapping[str, Any]) -> bool:
    """Whether what the rows call given is what the run was given, by its hash.

    Without this a file could call any token given, and no token of it would be looked at.

    Raises:
        GdistillError: For given tokens in a run that had none.
    """
    expected = identity.get("given_rows_sha256")

    def as_given(row: DrawnRow, filled: Iterable[int]) -> list[int]:
        open_places = set(filled)
        return [mask_id if i in open_places else t for i, t in enumerate(row.tokens)]

    def is_expected(given: list[list[int]]) -> bool:
        return hashlib.sha256(canonical_json(given)).hexdigest() == expected

    for row in rows:
        num_given = len(row.tokens) - len(row.filled)
        if num_given > 1 and is_expected([as_given(row, range(1, len(row.tokens)))]):
            what, got = ("a sample calls tokens given in a run without a prompt", f"{num_given} given")
            wanted = "the first one alone, by given_rows_sha256 in settings.json"
            where, remedy = f"{file}: sample {row.index}", "the file was altered: sample again"
            raise GdistillError(what, where=where, got=got, expected=wanted, remedy=remedy)
    ordered = sorted(rows, key=lambda row: row.index)
    if [row.index for row in ordered] != list(range(len(ordered))):
        return False
    given = [as_given(row, row.filled) for row in ordered]
    periods = [n for n in range(1, len(given) + 1) if n == len(given) or given[n] == given[0]]
    return any(is_expected(given[:n]) and all(r == given[i % n] for i, r in enumerate(given)) for n in periods)


def _row(values: Mapping[str, Any], where: str, vocab_size: int) -> DrawnRow:
    tokens, index, attempt = values["tokens"], values.get("index"), values.get("attempt", 0)
    filled, given = values.get("filled"), values.get("num_given", 1)
    if type(given) is int and filled is None:
        filled = list(range(max(1, given), len(tokens)))
    fine = (
        all(type(value) is int and 0 <= value < 2**31 for value in (index, given, attempt))
        and isinstance(filled, list)
        and all(type(place) is int and 0 <= place < len(tokens) for place in filled)
        and all(token < vocab_size for token in tokens)
        and bool(tokens)
    )
    if not fine:
        what, got = "not a line of gdistill-sample", short({**values, "text": None})
        expected = f"index, tokens below {vocab_size}, and which of them were filled"
        remedy = "sample again, or give the file that the sampler wrote"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    return DrawnRow(index, tokens, sorted({*filled} - {0}), attempt)  # type: ignore[misc,arg-type]


def certify_samples(samples: Path, teacher: str, out: Path | None, device: str) -> None:
    """``gdistill-eval certify`` of samples on disk; see the options of the command.

    Raises:
        UsageError: For samples that cannot be certified, or by this teacher.
        GdistillError: When a verified sample is not the teacher's, or a file is damaged.
    """
    files = [read_drawn(file) for file in find_sample_files(samples)]
    folder = samples if samples.is_dir() else samples.parent
    place, found, broken = resolve_device(device), {}, []
    for drawn in files:
        model = load_verifier(teacher, drawn.vocab_size, place, drawn.dtype)
        result = certify_file(drawn, model)
        found[visible(drawn.source.relative_to(folder).as_posix())] = {
            "sampler": drawn.sampler,
            "tau": drawn.tau,
            "given_is_checked": drawn.given_is_checked,
            **result.to_json(),
        }
        typer.echo(
            f"{visible(str(drawn.source))}: {result.num_agreeing} of {result.num_positions} "
            f"tokens are argmax(l + {drawn.tau:g} xi) ({result.agreement:.2%}); smallest margin "
            f"{result.smallest_margin:.2g} nats; {len(result.ties)} ties within {result.dtype} "
            f"rounding, {result.num_mismatches} mismatches"
            + ("" if drawn.given_is_checked else "; which tokens were given is the file's own word")
        )
        if drawn.is_verified and result.num_mismatches:
            broken.append((drawn.source, result.mismatches[0]))
    require_writable(out or folder)
    write_json_atomic((out or folder) / "certificate.json", found)
    for file, first in broken:
        what, got = "a verified sample is not the teacher's", f"token {first.token}"
        where = f"{file}: sample {first.index}, position {first.position}"
        expected = f"token {first.winner}, better by {-first.margin:.3g} nats"
        remedy = "the file was altered, or the teacher is another one"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
