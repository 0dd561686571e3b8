"""Samples on disk: ``samples*.jsonl`` and ``settings.json`` as the sampler leaves them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.samples.json_lines import Record, read_object, read_records, short
from shards.base import GdistillError, UsageError, visible


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
