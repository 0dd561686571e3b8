"""Files that somebody else may have written, read and checked line by line.

Samples (``samples*.jsonl`` with the ``settings.json`` that the sampler left), texts to compare them
with, and rows of real text as token ids. A fault is named with file and line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from evaluation.score import range_text
from shards.errors import GdistillError, UsageError, visible
from shards.store.manifest import MANIFEST_FILE
from shards.store.store import ShardStore

MAX_LINE_BYTES = 2**26
"""64 MiB: a row of a million tokens has a tenth. Of a sparse file no terabyte is read."""
MAX_FILE_BYTES = 2**30
"""Of a file that is one object."""
WHOLE_NUMBER_DIGITS = 19
"""Numbers of fewer digits are below 2^63."""


class Record(NamedTuple):
    """One object and the line it stands in, counted from 1."""

    line: int
    values: dict[str, Any]


def read_records(file: Path, kind: str) -> list[Record]:
    """The objects of all lines that are not blank, in the file's order.

    Only a line feed ends a line: ``str.splitlines`` would also cut at a raw U+2028 in a text.

    Args:
        file: A .jsonl file.
        kind: What a line holds (``sample``), for messages.

    Raises:
        UsageError: When the file cannot be read or holds no object.
        GdistillError: For a line that is no object, naming file and line.
    """
    try:
        with open_regular(file) as stream:
            lines = enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1)
            records = [Record(number, _parse(line, f"{file}:{number}", kind)) for number, line in lines if line.strip()]
    except OSError as error:
        what, remedy = f"cannot read the {kind} file", "check the path"
        got, expected = error.strerror, "a .jsonl file"
        raise UsageError(what, where=file, got=got, expected=expected, remedy=remedy) from error
    if not records:
        raise UsageError(f"no {kind} in the file", where=file, got="an empty file")
    return records


def _parse(line: bytes, where: str, kind: str) -> dict[str, Any]:
    """The object in one line; ``where`` is its ``FILE:LINE``."""
    problem, got, cause = "", "", None
    if len(line) > MAX_LINE_BYTES:
        problem, got = "is too long", f"more than {MAX_LINE_BYTES} bytes"
    else:
        try:
            value = parse_json(line)
            if isinstance(value, dict):
                return value
            problem, got = "is no JSON object", type(value).__name__
        except UnicodeDecodeError as error:
            got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            problem, cause = "is not UTF-8", error
        except ValueError as error:
            problem, got, cause = "is not JSON", str(error), error
    remedy = "write one JSON object a line, in UTF-8"
    raise GdistillError(f"the {kind} line {problem}", where=where, got=got, remedy=remedy) from cause


def open_regular(file: Path) -> IO[bytes]:
    """A file to read; no pipe or device, which could be read for ever.

    Raises:
        OSError: When there is none.
    """
    if file.exists() and not file.is_file():
        raise OSError(0, "no regular file")
    return open(file, "rb")


def parse_json(content: bytes) -> Any:
    """The value of a JSON text, if every other reader would find the same in it.

    Raises:
        ValueError: For what is no JSON or not UTF-8, NaN, a number beyond float64 or 64 bits, a
            name twice in one object, half a character, or more nesting than Python reads.
    """
    text = content.decode("utf-8")
    long_numbers = re.search(f"[0-9]{{{WHOLE_NUMBER_DIGITS}}}", text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole if long_numbers else None,
        )
    except RecursionError as error:
        raise ValueError("values nested too deeply") from error
    if re.search(r"\\u[dD][89a-fA-F]", text):
        json.dumps(value, ensure_ascii=False).encode()  # \ud800 is half a character: ValueError
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {short(twice)} stands twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]}, beyond float64")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]}..., beyond 64 bits")
    return int(digits)


def short(value: object) -> str:
    """The value as JSON, cut to a length that fits a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Rows of real text as token ids: a split of a store, or of a token dataset before extraction.


TOKENS_FILE = "tokens.json"


@dataclass(frozen=True)
class DataRows:
    """Rows of one split.

    Attributes:
        rows: Token ids.
        name: Which rows these are, for people.
        fingerprint: Identifies the token dataset they come from.
        vocab_size: V, entries of the tokenizer.
        bos_id: Token at the start of a row of the ``bos`` conventions; None without one.
        counted: Of conversations in a store: the assistant's tokens; None where all count.
        tokenizer_sha256: Of the tokenizer that wrote them, where it is known.
    """

    rows: Int[np.ndarray, "n l"]
    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None = None
    counted: Bool[np.ndarray, "n l"] | None = None
    tokenizer_sha256: str | None = None


def read_data_rows(place: Path, split: str = "validation", max_rows: int | None = None) -> DataRows:
    """The first rows of a split.

    Args:
        place: A store, a folder ``tokens`` of stage 1, or a run folder that holds either.
        split: Its name.
        max_rows: At most so many rows; all unless given.

    Raises:
        UsageError: When there are no such data, no such split, or no row in it.
        GdistillError: When the data are damaged.
    """
    for folder in (place, place / "store", place / "tokens"):
        if (folder / MANIFEST_FILE).is_file():
            store = ShardStore.open(folder)
            facts = store.manifest
            num_rows = _num_rows(folder, split, dict(facts.splits), max_rows)
            names = ["tokens", *({"counted"} & facts.arrays.keys())]
            found = store.split(split, names).read_rows(0, num_rows)
            counted = found["counted"].astype(bool) if "counted" in found else None
            digest = facts.tokenizer.get("sha256")
            of = str(facts.tokens.get("fingerprint", "")), facts.vocab_size, facts.bos_id, counted, digest
            return _data_rows(folder, split, found["tokens"], *of)
        if (folder / TOKENS_FILE).is_file():
            from pipeline.tokens.dataset import TokenDataset  # waits for transformers

            dataset = TokenDataset.open(folder)
            counts = {name: dataset.num_rows(name) for name in dataset.splits}
            num_rows = _num_rows(folder, split, counts, max_rows)
            rows = dataset.read_rows(split, 0, num_rows)
            digest = (dataset.record["tokenizer"] or {}).get("sha256")
            facts = dataset.fingerprint, dataset.vocab_size, dataset.bos_id, None, digest
            return _data_rows(folder.parent, split, rows, *facts)
    got, remedy = f"neither {MANIFEST_FILE} nor {TOKENS_FILE}", "check the path"
    expected = "a store or a folder tokens/ of gdistill-extract"
    raise UsageError("no data there", where=place, got=got, expected=expected, remedy=remedy)


def _data_rows(place: Path, split: str, rows: np.ndarray, *facts: Any) -> DataRows:
    name = place.resolve().name
    name = f"{split} split of {name}, {len(rows)} rows of {rows.shape[1]} tokens"
    return DataRows(rows.astype(np.int64), name, *facts)


def _num_rows(place: Path, split: str, counts: dict[str, int], max_rows: int | None) -> int:
    if split not in counts:
        raise UsageError("no such split", where=place, got=split, expected=" or ".join(counts))
    if counts[split] == 0:
        what = "the split is empty: there is nothing to measure"
        remedy = "extract with --set corpus.validation_fraction=0.05, or name another split"
        raise UsageError(what, where=f"{place}, {split}", got="0 rows", remedy=remedy)
    return counts[split] if max_rows is None else min(counts[split], max_rows)


def read_references(file: Path) -> list[str]:
    """The ``text`` of every line, in the file's order; other fields are not looked at.

    Raises:
        UsageError: When the file cannot be read or is empty.
        GdistillError: For a line without a text, naming file and line.
    """
    records = read_records(file, "reference")
    for line, values in records:
        text = values.get("text")
        if not isinstance(text, str):
            what, remedy = "a reference has no text", "leave the line out, or give it a text"
            where, expected = f"{file}:{line}", '{"text": "..."}'
            got = "null or no such field" if text is None else short(text)
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    return [values["text"] for _, values in records]


# Samples on disk: ``samples*.jsonl`` and ``settings.json`` as the sampler leaves them.


@dataclass(frozen=True)
class Verification:
    """What a verifying sampler counted for one sample.

    Attributes:
        accepted: By distance, drafted tokens that the verifier accepted.
        reached: By distance, drafted tokens before which all were accepted.
        passes: Forward passes of the verifier.
    """

    accepted: list[int]
    reached: list[int]
    passes: int

    @classmethod
    def of(cls, values: dict[str, Any]) -> Verification | None:
        """From a line of the file; None where no verifier was at work."""
        accepted, reached, passes = (values.get(n) for n in ("accepted", "reached", "verifier_nfe"))
        counts = (
            isinstance(accepted, list)
            and isinstance(reached, list)
            and len(accepted) == len(reached)
            and all(_is_count(count) for count in (*accepted, *reached, passes))
        )
        return cls(accepted, reached, passes) if counts else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class SampleSet:
    """The samples of one file, sorted by sample index.

    Attributes:
        name: The file's path below the folder that was given, without suffix.
        tokens: Token ids of each sample, without special treatment.
        texts: Decoded text of each sample; None where the student had no tokenizer.
        indices: Sample index: with ``seed`` it names the noise the sample was drawn with.
        nfe: Forward passes made for each sample; None where the file does not say.
        lines: The line of the file that holds each sample, counted from 1.
        seed: Seed of the run.
        sampler: The sampler's settings for this file, its name among them; empty where the file
            does not say.
        settings: Everything else the sampler wrote down.
        source: The jsonl file.
        verifications: What a verifier accepted of each sample; None unless all of them say.
        processor_seconds_mean: Processor time per sample; None unless all of them say.
    """

    name: str
    tokens: list[list[int]]
    texts: list[str | None]
    indices: list[int]
    nfe: list[int | None]
    lines: list[int]
    seed: int
    sampler: dict[str, Any]
    settings: dict[str, Any]
    source: Path
    verifications: list[Verification] | None = None
    processor_seconds_mean: float | None = None

    @property
    def nfe_mean(self) -> float | None:
        """Mean forward passes, the verifier's where one reads all drafts; None unless every sample says its own."""
        return _mean(self.nfe if self.verifications is None else [found.passes for found in self.verifications])

    def setting(self, *names: str) -> Any:
        """A value inside the settings, of which nothing is sure; None where it is not there."""
        found: Any = self.settings
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def require_texts(self) -> list[str]:
        """The texts, for scores that read text.

        Raises:
            GdistillError: For the first sample without a text, naming file and line.
        """
        if None in self.texts:
            where = f"{self.source}:{self.lines[self.texts.index(None)]}"
            remedy = "sample with a tokenizer in the model folder, or leave out --judge and --maze"
            what, got = "a sample has no text", "null or no such field"
            expected = '{"tokens": [...], "text": "..."}'
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
        return self.texts  # type: ignore[return-value]


def _mean(values: list[Any]) -> float | None:
    return None if None in values else sum(values) / len(values)


def named_folder(text: str) -> tuple[str, Path]:
    """``FOLDER`` or ``NAME=FOLDER``: the name, the folder's own unless given, and the folder."""
    name, separator, rest = text.partition("=")
    if not separator or Path(text).exists():  # a folder may have = in its name, as a sweep's do
        name, rest = "", text
    return name or Path(rest).resolve().name, Path(rest)


def find_sample_files(path: Path) -> list[Path]:
    """The jsonl files at ``path`` (a file or a folder), by name with numbers in their order.

    Raises:
        UsageError: When there is nothing to score.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError("no samples", where=path, got="no such file or folder")

    def natural(file: Path) -> list[tuple[int, str]]:
        """Sorts ``nfe8`` before ``nfe16``, so that a table of budgets reads as a curve."""
        parts = re.split(r"([0-9]+)", str(file))
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    if files := sorted(path.rglob("*.jsonl"), key=natural):
        return files
    got, remedy = "no .jsonl file", "write some with gdistill-sample"
    if unfinished := next(path.rglob("*.jsonl.partial"), None):
        got = f"only an unfinished file, {unfinished.name}"
        remedy = "run the same gdistill-sample command again to finish it"
    raise UsageError("no samples", where=path, got=got, remedy=remedy)


def read_samples(file: Path, folder: Path | None = None) -> SampleSet:
    """Read one jsonl file and the ``settings.json`` beside it.

    Args:
        file: The samples.
        folder: The folder they were found in, which their name leaves out; the file's own unless
            given.

    Raises:
        UsageError: When the file cannot be read or is empty.
        GdistillError: For a line that is not a sample, or one drawn by another run than the first,
            naming file and line.
    """
    records = [_checked(record, file) for record in read_records(file, "sample")]
    settings = _read_settings(file.with_name("settings.json"))
    _require_one_run(records, settings, file)
    records.sort(key=lambda record: record.values["index"])
    values = [record.values for record in records]

    def column(name: str) -> list[Any]:
        return [value[name] for value in values]

    verifications = column("verification")
    widths = {None if one is None else len(one.reached) for one in verifications}
    return SampleSet(
        name=visible(file.relative_to(folder or file.parent).with_suffix("").as_posix()),
        tokens=column("tokens"),
        texts=column("text"),
        indices=column("index"),
        nfe=column("nfe"),
        lines=[record.line for record in records],
        seed=next((seed for seed in column("seed") if seed is not None), 0),
        sampler=values[0]["settings"],
        settings=settings,
        source=file,
        verifications=None if None in widths or len(widths) > 1 else verifications,
        processor_seconds_mean=_mean(column("processor_seconds")),
    )


def _is_count(value: object, end: int = 2**63) -> bool:
    """True for an int in 0..end - 1; JSON's true and false are no numbers."""
    return type(value) is int and 0 <= value < end


FIELDS = {
    "text": (lambda value: isinstance(value, str), "a string or null"),
    "config_sha256": (lambda value: isinstance(value, str), "a string or null"),
    "settings": (lambda value: isinstance(value, dict), "an object, the sampler's settings"),
    "index": (_is_count, "a whole number >= 0"),
    "nfe": (_is_count, "a whole number >= 0"),
    "seed": (_is_count, "a whole number >= 0"),
    "processor_seconds": (lambda value: type(value) in (int, float) and value >= 0, "seconds, a number >= 0"),
}
"""Fields that a line may leave out: what they must be, in code and in words."""


def _checked(record: Record, file: Path) -> Record:
    """The record with every field that is read, of its type; the index is the line's by default."""
    where, values = f"{file}:{record.line}", record.values
    tokens = values.get("tokens")
    if not (isinstance(tokens, list) and all(_is_count(token, 2**31) for token in tokens)):
        got = "no such field" if tokens is None else short(tokens)
        expected = '{"index": int, "tokens": [int in 0..2^31 - 1, ...], "text": str}'
        what, remedy = "a sample has no token ids", "write it as gdistill-sample does"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    fields: dict[str, Any] = {"tokens": tokens, "verification": Verification.of(values)}
    for name, (is_fine, expected) in FIELDS.items():
        fields[name] = values.get(name)
        if fields[name] is not None and not is_fine(fields[name]):
            what, got = f"a sample's {name} is of the wrong kind", short(fields[name])
            remedy = "write it as gdistill-sample does, or leave it out"
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    fields["index"] = record.line - 1 if fields["index"] is None else fields["index"]
    fields["settings"] = fields["settings"] or {}
    return Record(record.line, fields)


def _require_one_run(records: list[Record], settings: dict[str, Any], file: Path) -> None:
    """Refuse a file that several runs, or a run with another vocabulary, were mixed into.

    A score of a mixture describes neither.
    """
    vocab_size = settings.get("vocab_size")
    first: dict[str, Any] = {}
    indices: set[int] = set()
    for line, values in records:
        for name in ("seed", "settings", "config_sha256"):
            if values[name] is not None and values[name] != first.setdefault(name, values[name]):
                raise _mixed(f"{file}:{line}, {name}", values[name], first[name], "as above it")
        if values["index"] in indices:
            raise _mixed(f"{file}:{line}, index", values["index"], "one sample an index", "")
        indices.add(values["index"])
        if type(vocab_size) is int and max(values["tokens"], default=0) > vocab_size:
            what = "the samples are of another tokenizer than settings.json says"
            got, expected = f"token {max(values['tokens'])}", f"at most {vocab_size}"
            where, remedy = f"{file}:{line}", "restore the settings.json that the sampler wrote"
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    digest = settings.get("config_sha256")
    if digest is not None and first.get("config_sha256", digest) != digest:
        where = f"{file.with_name('settings.json')}, config_sha256"
        raise _mixed(where, digest, first["config_sha256"], "as in the samples")


def _mixed(where: object, got: object, expected: object, of: str) -> GdistillError:
    return GdistillError(
        "samples of different runs are mixed",
        where=where,
        got=short(got),
        expected=f"{short(expected)} {of}".strip(),
        remedy="give each run a folder of its own",
    )


def _read_settings(file: Path) -> dict[str, Any]:
    """The sampler's record; empty where there is none."""
    if not file.exists() and not file.is_symlink():
        return {}
    try:
        with open_regular(file) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        value = parse_json(content)
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__}, no JSON object")
        return value
    except (OSError, ValueError) as error:
        what, expected = "the settings beside the samples cannot be read", "a JSON object"
        where = f"{file}:{getattr(error, 'lineno', 1)}"
        got = getattr(error, "strerror", None) or error
        remedy = "restore the file, or remove it to score without it"
        raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy) from error


SAMPLER_FIELDS = (
    "sampler", "inner", "decision", "temperature", "tau", "nucleus_p", "nucleus_rule", "top_k", "confidence",
    "order_temperature", "passes_per_block", "max_lookahead", "mixture_weight", "acceptance", "tree",
)  # fmt: skip
"""Sampler settings that decide a score, in the order of the table."""


def drawn_with(samples: SampleSet) -> dict[str, Any]:
    """Student, sampler and its settings, precision, seed and code version of a file of samples.

    What neither the file nor the ``settings.json`` beside it says is left out.
    """
    part = samples.setting
    student, conditioning = part("student"), part("student_config", "conditioning")
    if isinstance(conditioning, str) and conditioning != "none":
        student = f"{student} + {conditioning}"
    fingerprint = part("store", "tokens", "fingerprint")
    known = {
        "student": student if isinstance(student, str) else None,
        "weights_sha256": part("identity", "weights_sha256"),
        **{name: samples.sampler.get(name) for name in SAMPLER_FIELDS},
        "nfe": samples.sampler.get("nfe") or samples.nfe_mean,
        "precision": part("precision"),
        "seed": samples.seed,
        "tokens": range_text(map(len, samples.tokens)),
        "data": fingerprint if isinstance(fingerprint, str) else None,
        "code_version": part("code_version"),
    }
    return {name: value for name, value in known.items() if value is not None}
