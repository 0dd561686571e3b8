"""JSON from files that somebody else may have written: one object a line, or one a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Int

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
            records = [
                Record(number, _parse(line, f"{file}:{number}", kind))
                for number, line in enumerate(_lines(stream), start=1)
                if line.strip()
            ]
    except OSError as error:
        raise UsageError(
            f"cannot read the {kind} file",
            where=file,
            got=error.strerror,
            expected="a .jsonl file",
            remedy="check the path",
        ) from error
    if not records:
        raise UsageError(f"no {kind} in the file", where=file, got="an empty file")
    return records


def open_regular(file: Path) -> IO[bytes]:
    """A file to read; no pipe or device, which could be read for ever.

    Raises:
        OSError: When there is none.
    """
    if file.exists() and not file.is_file():
        raise OSError(0, "no regular file")
    return open(file, "rb")


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE_BYTES + 1):
        yield line


def read_object(file: Path) -> dict[str, Any]:
    """The one JSON object of a file.

    Raises:
        OSError: When it cannot be read.
        ValueError: When it is something else.
    """
    with open_regular(file) as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}, no JSON object")
    return value


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


def _parse(line: bytes, where: str, kind: str) -> dict[str, Any]:
    """The object in one line; ``where`` is its ``FILE:LINE``."""
    remedy = "write one JSON object a line, in UTF-8"
    if len(line) > MAX_LINE_BYTES:
        got = f"more than {MAX_LINE_BYTES} bytes"
        raise GdistillError(f"a {kind} line is too long", where=where, got=got, remedy=remedy)
    try:
        value = parse_json(line)
    except UnicodeDecodeError as error:
        got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise GdistillError(
            f"a {kind} line is not UTF-8", where=where, got=got, remedy=remedy
        ) from error
    except ValueError as error:
        raise GdistillError(
            f"a {kind} line is not JSON", where=where, got=error, remedy=remedy
        ) from error
    if not isinstance(value, dict):
        raise GdistillError(
            f"a {kind} line is no JSON object", where=where, got=type(value).__name__, remedy=remedy
        )
    return value


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
        tokenizer: What the data remember of it; None where nothing.
        bos_id: Token at the start of a row of the ``bos`` conventions; None without one.
        eos_id: End of text; None without one.
    """

    rows: Int[np.ndarray, "n l"]
    name: str
    fingerprint: str
    vocab_size: int
    tokenizer: Any = None
    bos_id: int | None = None
    eos_id: int | None = None


def read_data_rows(place: Path, split: str = "validation", max_rows: int | None = None) -> DataRows:
    """The first rows of a split.

    Args:
        place: A store, a folder ``tokens`` of stage 1, or a run folder that holds either.
        split: Its name.
        max_rows: At most so many rows; all unless told.

    Raises:
        UsageError: When there are no such data, no such split, or no row in it.
        GdistillError: When the data are damaged.
    """
    for candidate in (place, place / "store", place / "tokens"):
        if (candidate / MANIFEST_FILE).is_file():
            return _of_store(candidate, split, max_rows)
        if (candidate / TOKENS_FILE).is_file():
            return _of_tokens(candidate, split, max_rows)
    raise UsageError(
        "no data there",
        where=place,
        got=f"neither {MANIFEST_FILE} nor {TOKENS_FILE}",
        expected="a store or a folder tokens/ of gdistill-extract",
        remedy="check the path",
    )


def _of_store(place: Path, split: str, max_rows: int | None) -> DataRows:
    store = ShardStore.open(place)
    manifest = store.manifest
    num_rows = _num_rows(place, split, dict(manifest.splits), max_rows)
    rows = store.split(split, ["tokens"]).read_rows(0, num_rows)["tokens"]
    return DataRows(
        rows.astype(np.int64),
        _told(place, split, rows),
        str(manifest.tokens.get("fingerprint", "")),
        manifest.vocab_size,
        manifest.tokenizer,
        manifest.bos_id,
        manifest.eos_id,
    )


def _of_tokens(place: Path, split: str, max_rows: int | None) -> DataRows:
    file = place / TOKENS_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        parts = {
            name: [dict(part) for part in value["parts"]]
            for name, value in record["splits"].items()
        }
        counts = {
            name: sum(int(part["num_rows"]) for part in value) for name, value in parts.items()
        }
        num_rows = _num_rows(place, split, counts, max_rows)
        files = [place / split / Path(part["name"]).name for part in parts[split]]
        rows = _read_parts(files, record["row_length"], num_rows)
        return DataRows(
            rows,
            _told(place.parent, split, rows),
            record["fingerprint"],
            record["vocab_size"],
            record["tokenizer"],
            record["bos_id"],
            record["eos_id"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GdistillError(
            "damaged token dataset", where=file, got=error, remedy="run stage 1 again"
        ) from error


def _read_parts(files: list[Path], row_length: int, num_rows: int) -> Int[np.ndarray, "n l"]:
    blocks, missing = [], num_rows
    for file in files:
        if missing == 0:
            break
        column = pq.read_table(file, columns=["input_ids"])["input_ids"].combine_chunks()
        block = np.asarray(column.flatten()).reshape(-1, row_length)[:missing]
        blocks.append(block.astype(np.int64))
        missing -= len(block)
    if missing:
        raise ValueError(f"{missing} rows fewer than tokens.json tells of")
    return np.concatenate(blocks)


def _told(place: Path, split: str, rows: np.ndarray) -> str:
    return f"{split} split of {place.resolve().name}, {len(rows)} rows of {rows.shape[1]} tokens"


def _num_rows(place: Path, split: str, counts: dict[str, int], max_rows: int | None) -> int:
    if split not in counts:
        raise UsageError("no such split", where=place, got=split, expected=" or ".join(counts))
    if counts[split] == 0:
        raise UsageError(
            "the split is empty: there is nothing to measure",
            where=f"{place}, {split}",
            got="0 rows",
            remedy="extract with --set corpus.validation_fraction=0.05, or name another split",
        )
    return counts[split] if max_rows is None else min(counts[split], max_rows)


# How samples were drawn, as far as their files tell: what must stand beside every score.


SAMPLER_FIELDS = (
    "sampler", "decision", "temperature", "tau", "nucleus_p", "nucleus_rule", "block_size", "cache",
)  # fmt: skip
"""Sampler settings that decide a score, in the order of the table."""


def drawn_with(samples: SampleSet) -> dict[str, Any]:
    """Student, sampler and its settings, precision, seed and code version of a file of samples.

    What neither the file nor the ``settings.json`` beside it tells is left out.
    """
    settings = samples.settings
    identity = settings.get("identity")
    identity = identity if isinstance(identity, Mapping) else {}
    known = {
        "student": _student(settings),
        "weights_sha256": identity.get("weights_sha256"),
        **{name: samples.sampler.get(name) for name in SAMPLER_FIELDS},
        "nfe": samples.sampler.get("nfe") or samples.nfe_mean,
        "precision": settings.get("precision"),
        "seed": samples.seed,
        "tokens": range_text(map(len, samples.tokens)),
        "data": _fingerprint(settings.get("store")),
        "code_version": settings.get("code_version"),
    }
    return {name: value for name, value in known.items() if value is not None}


def _student(settings: Mapping[str, Any]) -> str | None:
    name, config = settings.get("student"), settings.get("student_config")
    conditioning = config.get("conditioning") if isinstance(config, Mapping) else None
    if isinstance(conditioning, str) and conditioning != "none":
        return f"{name} + {conditioning}"
    return name if isinstance(name, str) else None


def _fingerprint(store: object) -> str | None:
    """Of the token dataset that the student was trained on."""
    tokens = store.get("tokens") if isinstance(store, Mapping) else None
    value = tokens.get("fingerprint") if isinstance(tokens, Mapping) else None
    return value if isinstance(value, str) else None


# Reference texts: a .jsonl file with a ``text`` field, as any corpus export has it.


def read_references(file: Path) -> list[str]:
    """The texts of the file, in its order; other fields are not looked at.

    Raises:
        UsageError: When the file cannot be read or is empty.
        GdistillError: For a line without a text, naming file and line.
    """
    return [
        _text(values.get("text"), f"{file}:{line}")
        for line, values in read_records(file, "reference")
    ]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise GdistillError(
            "a reference has no text",
            where=where,
            got="null or no such field" if value is None else short(value),
            expected='{"text": "..."}',
            remedy="leave the line out, or give it a text",
        )
    return value


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
        nfe: Forward passes made for each sample; None where the file does not tell.
        lines: The line of the file that holds each sample, counted from 1.
        seed: Seed of the run.
        sampler: The sampler's settings for this file, its name among them; empty where the file
            does not tell.
        settings: Everything else the sampler wrote down.
        source: The jsonl file.
        verifications: What a verifier accepted of each sample; None unless all of them tell.
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

    @property
    def nfe_mean(self) -> float | None:
        """Mean number of forward passes; None unless every sample tells its own."""
        known = [nfe for nfe in self.nfe if nfe is not None]
        return sum(known) / len(known) if len(known) == len(self.nfe) else None

    def require_texts(self) -> list[str]:
        """The texts, for scores that read text.

        Raises:
            GdistillError: For the first sample without a text, naming file and line.
        """
        return [
            _require_text(text, f"{self.source}:{line}")
            for text, line in zip(self.texts, self.lines, strict=True)
        ]


def named_folder(text: str) -> tuple[str, Path]:
    """``FOLDER`` or ``NAME=FOLDER``: the name, the folder's own unless told, and the folder."""
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
    files = sorted(path.rglob("*.jsonl"), key=_natural_key)
    if not files:
        unfinished = next(path.rglob("*.jsonl.partial"), None)
        raise UsageError(
            "no samples",
            where=path,
            got=f"only an unfinished file, {unfinished.name}" if unfinished else "no .jsonl file",
            remedy="run the same gdistill-sample command again to finish it"
            if unfinished
            else "write some with gdistill-sample",
        )
    return files


def _natural_key(path: Path) -> list[tuple[int, str]]:
    """Sorts ``nfe8`` before ``nfe16``, so that a table of budgets reads as a curve."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def read_samples(file: Path, folder: Path | None = None) -> SampleSet:
    """Read one jsonl file and the ``settings.json`` beside it.

    Args:
        file: The samples.
        folder: The folder they were found in, which their name leaves out; the file's own unless
            told.

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
    return SampleSet(
        name=visible(file.relative_to(folder or file.parent).with_suffix("").as_posix()),
        tokens=[record["tokens"] for record in values],
        texts=[record["text"] for record in values],
        indices=[record["index"] for record in values],
        nfe=[record["nfe"] for record in values],
        lines=[record.line for record in records],
        seed=next((value["seed"] for value in values if value["seed"] is not None), 0),
        sampler=values[0]["settings"],
        settings=settings,
        source=file,
        verifications=_all_or_none([record["verification"] for record in values]),
    )


def _all_or_none(found: list[Verification | None]) -> list[Verification] | None:
    known = [one for one in found if one is not None]
    widths = {len(one.reached) for one in known}
    return known if len(known) == len(found) and len(widths) == 1 else None


def _checked(record: Record, file: Path) -> Record:
    """The record with every field that is read, of its type; the index is the line's by default."""
    where = f"{file}:{record.line}"
    values = record.values
    tokens, text = values.get("tokens"), values.get("text")
    if not isinstance(tokens, list) or not all(_is_count(token, 2**31) for token in tokens):
        raise GdistillError(
            "a sample has no token ids",
            where=where,
            got="no such field" if tokens is None else short(tokens),
            expected='{"index": int, "tokens": [int in 0..2^31 - 1, ...], "text": str}',
            remedy="give the folder that gdistill-sample wrote",
        )
    if text is not None and not isinstance(text, str):
        raise _wrong("text", text, where, "a string or null")
    defaults = {"index": record.line - 1, "nfe": None, "seed": None}
    sampler, digest = values.get("settings", {}), values.get("config_sha256")
    if digest is not None and not isinstance(digest, str):
        raise _wrong("config_sha256", digest, where, "a string or null")
    if not isinstance(sampler, dict):
        raise _wrong("settings", sampler, where, "an object, the sampler's settings")
    fields: dict[str, Any] = {"tokens": tokens, "text": text}
    fields |= {"settings": sampler, "config_sha256": digest}
    fields["verification"] = Verification.of(values)
    for name, default in defaults.items():
        value = values.get(name)
        if value is not None and not _is_count(value):
            raise _wrong(name, value, where, "a whole number >= 0")
        fields[name] = default if value is None else value
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
            raise GdistillError(
                "the samples are of another tokenizer than settings.json tells of",
                where=f"{file}:{line}",
                got=f"token {max(values['tokens'])}",
                expected=f"at most {vocab_size}",
                remedy="restore the settings.json that the sampler wrote",
            )
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


def _is_count(value: object, end: int = 2**63) -> bool:
    """True for an int in 0..end - 1; JSON's true and false are no numbers."""
    return type(value) is int and 0 <= value < end


def _wrong(name: str, value: object, where: str, expected: str) -> GdistillError:
    return GdistillError(
        f"a sample's {name} is of the wrong kind",
        where=where,
        got=short(value),
        expected=expected,
        remedy="write it as gdistill-sample does, or leave it out",
    )


def _require_text(text: str | None, where: str) -> str:
    if text is None:
        raise GdistillError(
            "a sample has no text",
            where=where,
            got="null or no such field",
            expected='{"tokens": [...], "text": "..."}',
            remedy="sample from a model folder that holds its tokenizer, or score without "
            "--judge and --maze",
        )
    return text


def _read_settings(file: Path) -> dict[str, Any]:
    """The sampler's record; empty where there is none."""
    if not file.exists() and not file.is_symlink():
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise GdistillError(
            "the settings beside the samples cannot be read",
            where=f"{file}:{getattr(error, 'lineno', 1)}",
            got=getattr(error, "strerror", None) or error,
            expected="a JSON object",
            remedy="restore the file, or remove it to score without it",
        ) from error
