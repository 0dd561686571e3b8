"""Samples on disk: one JSON object per line, appended batch by batch, finished by a rename.

While a run is under way its lines stand in ``NAME.partial``; a torn last line (power cut, kill -9)
is dropped when the run resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from shards.atomic import fsync_path, open_itself, whole_lines, write_bytes_atomic
from shards.errors import GdistillError, UsageError
from shards.settings import flatten, to_mapping
from trainer.students.folder import ModelFolder
from trainer.students.registry import StudentConfig


class SampleFile:
    """A file of samples that a run fills.

    Args:
        path: Where the finished file stands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")

    def finished_indices(self) -> set[int]:
        """Indices of the samples that are safely written; repairs a torn last line.

        Raises:
            GdistillError: When a line in the middle is not a sample, or one of its own.
        """
        if self.path.is_file():
            return {record["index"] for record in self.read()}
        return {record["index"] for record in self._records(whole_lines(self.partial))}

    def read(self) -> list[dict[str, Any]]:
        """The samples of the finished file."""
        return self._records(self.path.read_bytes().splitlines())

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        records: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
                index = record["index"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _damaged(where, error) from error
            if type(index) is not int or index in records:
                raise _damaged(where, f"index {index!r}, no number or a second time")
            records[index] = record
        return list(records.values())

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add samples; they survive a power cut when this returns.

        Raises:
            GdistillError: When they cannot be written; a run begun again goes on from there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():  # a finished run that is asked for more samples
            os.replace(self.path, self.partial)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        try:
            with open(self.partial, "ab", opener=open_itself) as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise GdistillError(
                "samples cannot be written", where=self.partial, got=error.strerror
            ) from error

    def finish(self) -> None:
        """Sort the lines by index and give the file its name."""
        if self.path.is_file():
            return
        records = self._records(self.partial.read_bytes().splitlines())
        records.sort(key=lambda record: record["index"])
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_bytes_atomic(self.path, lines.encode())
        self.partial.unlink()
        fsync_path(self.path.parent)


def _damaged(where: str, got: object) -> GdistillError:
    remedy = "delete the file and sample again"
    return GdistillError("a sample line is damaged", where=where, got=got, remedy=remedy)


# What decides samples, so that one folder never mixes those of two runs.


def student_identity(loaded: ModelFolder) -> dict[str, Any]:
    """The weights, the time bounds among them, and what is made of them: JSON."""
    student = loaded.student
    config = student.config
    frozen = {} if config.frozen is None else {"backbone": config.frozen}
    return {
        **frozen,
        "weights_sha256": loaded.weights_sha256,
        "student": type(student).__name__.lower(),
        "student_config": to_mapping(student.settings),
        "row_length": config.row_length,
        "bos_id": config.bos_token_id,
        "eos_id": config.eos_token_id,
        "codec": config.codec,
    }


def files_of_same_run(settings_file: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What ``settings.json`` says of the files that earlier runs left; empty without one.

    Args:
        settings_file: Where it stands, if it does.
        identity: Of the run that wants to go on there.

    Raises:
        UsageError: When the files are of another identity, naming the first field that differs.
        GdistillError: When the file is damaged.
    """
    if not settings_file.is_file():
        return {}
    try:
        before = json.loads(settings_file.read_text(encoding="utf-8"))
        saved, files = flatten(before["identity"]), dict(before["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GdistillError("damaged settings", where=settings_file, got=error) from error
    ours = flatten(identity)
    for name in sorted(saved.keys() | ours.keys()):
        old, new = saved.get(name, "absent"), ours.get(name, "absent")
        if old != new:
            raise UsageError(
                "the folder holds samples of another run",
                where=f"{settings_file.parent}: {name}",
                got=new,
                expected=f"{old} as there",
                remedy="give another --out",
            )
    return files


# Rows to fill: what is given of each sample (a first token, a prompt, any positions).


@runtime_checkable
class Tokenizer(Protocol):
    """What is used of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class GivenRows:
    """Partly known rows; sample i fills row i modulo their number.

    Attributes:
        rows: Token ids of each row, the mask id where to fill.
        mask_id: The mask id.
        first_token_is_text: Whether position 0 belongs to the text (no bos stands there).
    """

    rows: tuple[tuple[int, ...], ...]
    mask_id: int
    first_token_is_text: bool = False

    def row(self, index: int) -> tuple[int, ...]:
        """What is given of sample ``index``."""
        return self.rows[index % len(self.rows)]

    def tokens(self, indices: Sequence[int], device: torch.device | str) -> Int[Tensor, "b l"]:
        """The rows of some samples, all of one length."""
        return torch.tensor([self.row(index) for index in indices], device=device)

    def filled_positions(self, index: int) -> list[int]:
        """Positions that the sampler fills."""
        return [place for place, token in enumerate(self.row(index)) if token == self.mask_id]


def unconditional(config: StudentConfig, length: int) -> GivenRows:
    """Only the first token is given: bos, or eos where the tokenizer has no bos.

    Raises:
        UsageError: When the model has neither.
    """
    first = config.first_token_id
    if first is None:
        raise UsageError(
            "the model has no bos and no eos token to begin with",
            where="--prompt",
            remedy="give a prompt",
        )
    return from_prompts([[]], [first], config, length)


def prompted(
    texts: Sequence[str], tokenizer: Tokenizer | None, config: StudentConfig, length: int
) -> GivenRows:
    """Prompts in front, behind the bos token where the model has one.

    Raises:
        UsageError: Without a tokenizer, or when a prompt leaves no position to fill.
    """
    ids = [encode(text, tokenizer, config, "--prompt") for text in texts]
    bos = [] if config.bos_token_id is None else [config.bos_token_id]
    return from_prompts(ids, bos, config, length)


def from_prompts(
    prompts: Sequence[Sequence[int]], bos: Sequence[int], config: StudentConfig, length: int
) -> GivenRows:
    """Rows of bos, prompt and masks."""
    mask_id, rows = config.vocab_size, []
    for number, prompt in enumerate(prompts):
        given = [*bos, *prompt]
        if not given:
            raise UsageError("an empty prompt and no bos token", where=f"prompt {number}")
        if len(given) >= length:
            raise UsageError(
                "the prompt is longer than the row",
                where=f"prompt {number}",
                got=f"{len(given)} tokens with bos",
                expected=f"at most {length - 1}, so that something is left to fill",
            )
        rows.append((*given, *[mask_id] * (length - len(given))))
    return GivenRows(tuple(rows), mask_id, not bos)


def encode(text: str, tokenizer: Tokenizer | None, config: StudentConfig, where: str) -> list[int]:
    """Token ids of a text.

    Raises:
        UsageError: Without a tokenizer, for an id outside the student's vocabulary, or when the
            text holds half a surrogate pair.
    """
    if tokenizer is None:
        raise UsageError("the model folder has no tokenizer", where=where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("not UTF-8 text", where=where, got=error.reason) from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if any(token >= config.vocab_size for token in ids):
        raise UsageError(
            "the tokenizer gives ids outside the student's vocabulary",
            where=where,
            got=max(ids),
            expected=f"below {config.vocab_size}",
        )
    return ids


def read_prompts(path: Path) -> list[str]:
    """One prompt per line; empty lines are left out.

    Raises:
        UsageError: For a missing or empty file, or one that is not UTF-8.
    """
    prompts = [line for line in _read_lines(path, "--prompt-file") if line.strip()]
    if not prompts:
        raise UsageError("no prompt in the file", where=path)
    return prompts


def read_infill(path: Path, tokenizer: Tokenizer | None, config: StudentConfig) -> GivenRows:
    """Rows with given and open positions from a .jsonl file, one object per line:

        {"tokens": [2, 17, null, 9]}                         null where to fill
        {"tokens": [2, 17, 5, 9], "masked": [2]}             or positions listed
        {"text": "once upon a time", "masked": [2, 3]}       tokenized; with bos at position 0

    Raises:
        UsageError: Naming the line and what is wrong with it.
    """
    rows = []
    for number, line in enumerate(_read_lines(path, "--infill"), start=1):
        if line.strip():
            rows.append(_parse_infill(line, f"{path}:{number}", tokenizer, config))
    if not rows:
        raise UsageError("no row in the file", where=path)
    return GivenRows(tuple(rows), config.vocab_size, config.bos_token_id is None)


def _read_lines(path: Path, option: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise UsageError(
            f"cannot read the {option} file", where=path, got=error.strerror
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8 text", where=path, got=error.reason) from error


def _parse_infill(
    line: str, where: str, tokenizer: Tokenizer | None, config: StudentConfig
) -> tuple[int, ...]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError("not JSON", where=where, got=error) from error
    expected = 'an object with "tokens" or "text"'
    if not isinstance(record, Mapping) or not record.keys() & {"tokens", "text"}:
        raise UsageError("not a row to fill", where=where, expected=expected)
    row = _row_of(record, where, tokenizer, config)
    for place in _masked(record, len(row), where):
        row[place] = config.vocab_size
    _check_infill(row, where, config)
    return tuple(row)


def _row_of(
    record: Mapping[str, Any], where: str, tokenizer: Tokenizer | None, config: StudentConfig
) -> list[int]:
    if "tokens" not in record:
        text = record["text"]
        if not isinstance(text, str):
            raise UsageError("text is no string", where=where, got=type(text).__name__)
        bos = [] if config.bos_token_id is None else [config.bos_token_id]
        return bos + encode(text, tokenizer, config, where)
    tokens = record["tokens"]
    if not isinstance(tokens, list):
        raise UsageError("tokens is no list", where=where, got=type(tokens).__name__)
    for place, token in enumerate(tokens):
        fine = token is None or (type(token) is int and 0 <= token < config.vocab_size)
        if not fine:
            expected = f"null or an id in 0..{config.vocab_size - 1}"
            raise UsageError(
                "bad token", where=f"{where}, position {place}", got=token, expected=expected
            )
    return [config.vocab_size if token is None else token for token in tokens]


def _masked(record: Mapping[str, Any], length: int, where: str) -> list[int]:
    places = record.get("masked", [])
    fine = isinstance(places, list) and all(type(p) is int and 0 <= p < length for p in places)
    if not fine:
        raise UsageError(
            "bad positions", where=where, got=places, expected=f"a list of 0..{length - 1}"
        )
    return places


def _check_infill(row: Sequence[int], where: str, config: StudentConfig) -> None:
    if not 2 <= len(row) <= config.row_length:
        raise UsageError(
            "a row of this length cannot be filled",
            where=where,
            got=f"{len(row)} tokens",
            expected=f"2..{config.row_length}",
        )
    if row[0] == config.vocab_size:
        raise UsageError("position 0 is always given", where=where, remedy="put bos there")
    if config.vocab_size not in row:
        raise UsageError("nothing to fill", where=where, remedy='name positions under "masked"')
