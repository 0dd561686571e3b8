"""``gdistill-sample``: from what a user asks for to files of samples.

Every mistake is found before the first forward pass. Samples are one JSON object per line, appended
batch by batch to ``NAME.partial``; the finished file gets its name by a rename. A torn last line
(power cut, kill -9) is dropped when the run resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shards.atomic import (
    canonical_json,
    exclusive,
    fsync_path,
    open_itself,
    whole_lines,
    write_bytes_atomic,
    write_json_atomic,
)
from shards.console import Bar, progress_bar, stderr
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import allow_tf32, largest_batch, resolve_device
from shards.language_model.loading import find_pretrained, looks_local
from shards.noise.philox import use_noise_kernel
from shards.settings import code_version, flatten, merge, nested, parse_override, to_mapping
from trainer.sampling.fill import Sampler, SampleResult
from trainer.sampling.noise import noise_of_rows
from trainer.sampling.registry import SAMPLERS, make_sampler
from trainer.students.folder import ModelFolder, open_model
from trainer.students.registry import Student

SETTINGS_FILE = "settings.json"


def open_student(place: str, device: str, backbone: str | None) -> ModelFolder:
    """A student from a model folder, the output of a training run, or the hub, on ``auto``, ``cuda:N``, ..."""
    on = resolve_device(device)
    if obstacle := use_noise_kernel("auto", on):
        stderr.print(f"noise kernel: eager on {on}; {obstacle}", markup=False)
    if not (Path(place).exists() or looks_local(place)):
        place = str(find_pretrained(place, role="student").folder)
    return open_model(Path(place), on, backbone)


def rows_to_fill(
    loaded: ModelFolder, length: int | None, prompt: str | None, prompt_file: Path | None, infill: Path | None
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the rows, the mask id where to fill; sample i fills row i modulo their number.

    Without prompt and infill only the first token is given.
    """
    config = loaded.student.config
    length = config.row_length if length is None else length
    if length < 2:
        raise UsageError("nothing to fill", where="--length", got=length, expected="at least 2")
    if (prompt, prompt_file, infill) == (None, None, None):
        return ((config.require_first_token(), *[config.vocab_size] * (length - 1)),)
    from trainer.sampling.given import prompted, read_infill, read_prompts

    if infill is not None:
        return read_infill(infill, loaded.tokenizer, config)
    texts = [prompt or ""] if prompt_file is None else read_prompts(prompt_file)
    return prompted(texts, loaded.tokenizer, config, length)


def sampler_variants(
    student: Student,
    name: str | None,
    options: Mapping[str, Any],
    overrides: Sequence[str],
    sweep: str | None,
    budgets: Sequence[Mapping[str, int]],
) -> Iterator[tuple[str, dict[str, Sampler]]]:
    """(folder below ``--out``, a sampler by the name of its file) for each value of the sweep.

    Args:
        name: Of the sampler; the student's own where it is None.
        options: Its settings by dotted name, as are ``overrides``, ``key=value``.
        sweep: ``key=value,value,...``.
        budgets: Of each file, ``{"nfe": 8}`` say; an empty one leaves the sampler's own.
    """
    name, settings = name or student.default_sampler, {}
    for path, value in ((key.split("."), value) for key, value in options.items()):
        settings = merge(settings, nested(path, value))
    for text in overrides:
        settings = merge(settings, nested(*parse_override(text)))
    variants: dict[str, dict[str, Any]] = {"": {}}
    if sweep is not None:
        key, _, listed = sweep.partition("=")
        key, *values = (word.strip() for word in (key, *listed.split(",")))
        if not (key and all(values)):
            expected = "a setting and its values, nucleus_p=0.7,0.8,0.9"
            raise UsageError("bad sweep", where="--sweep", got=sweep, expected=expected)
        if len(set(map(str.lower, values))) < len(values):
            raise UsageError("a value is named twice", where="--sweep", got=sweep)
        if key in flatten(settings) or key in budgets[0]:
            raise UsageError("named beside the sweep", where=f"--sweep {key}", got={**settings, **budgets[0]})
        variants = {text: nested(*parse_override(text)) for text in (f"{key}={value}" for value in values)}
    for folder, change in variants.items():
        samplers = {}
        for budget in budgets:
            words = (f"-{key.replace('_', '-')}{count}" for key, count in budget.items() if len(budgets) > 1)
            sampler = make_sampler(name, **merge(settings, {**change, **budget}))
            samplers[f"samples{''.join(words)}.jsonl"] = sampler.settled(student)
        yield folder, samplers


class SampleFile:
    """A file of samples that a run fills; ``path`` is where the finished file stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")

    def read(self) -> list[dict[str, Any]]:
        """The samples that are safely written; a torn last line of an unfinished file is cut off."""
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else whole_lines(self.partial)
        records: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                if type(index := record["index"]) is not int or index in records:
                    raise ValueError(f"index {index!r}, no number or a second time")
                records[index] = record
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                where, remedy = f"{self.path}:{number}", "delete the file and sample again"
                raise GdistillError("a sample line is damaged", where=where, got=error, remedy=remedy) from error
        return list(records.values())

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add samples; they survive a power cut when this returns."""
        if self.path.is_file():  # a finished run that is asked for more samples
            os.replace(self.path, self.partial)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        with open(self.partial, "ab", opener=open_itself) as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Sort the lines by index and give the file its name."""
        if self.path.is_file():
            return
        records = sorted(self.read(), key=lambda record: record["index"])
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_bytes_atomic(self.path, lines.encode())
        self.partial.unlink()
        fsync_path(self.path.parent)


@dataclass(frozen=True, kw_only=True)
class SampleRun:
    """Everything that a run needs.

    Attributes:
        samplers: By the name of the file that each fills.
        rows: From :func:`rows_to_fill`.
        skips_first: Whether the first token is no text, but the bos that begins a row.
        seed: Names all randomness, with the sample index.
        num_samples: Samples per file.
        batch_size: Samples per forward pass; no sample depends on it.
        precision: ``fp32``, or ``bf16`` for autocast.
    """

    loaded: ModelFolder
    samplers: Mapping[str, Sampler]
    rows: tuple[tuple[int, ...], ...]
    skips_first: bool
    seed: int
    num_samples: int
    batch_size: int
    precision: str
    out: Path

    def check(self) -> None:
        """Refuse (UsageError) a row that one of the samplers cannot fill, or another tokenizer's verifier."""
        student = self.loaded.student
        for sampler in self.samplers.values():
            for index in range(min(self.num_samples, len(self.rows))):
                try:
                    sampler.check(student, torch.tensor([self.rows[index]], device=student.device))
                except UsageError as error:
                    if not index:
                        raise
                    # Name the row that makes the mistake, where those before it do not.
                    where = f"row {index} (the first is 0): {error.where}"
                    raise UsageError(**{**vars(error), "where": where}) from error
        self.first.check_tokenizer(self.loaded.tokenizer)

    @property
    def first(self) -> Sampler:
        """The sampler of the first file; the others differ in their budget alone."""
        return next(iter(self.samplers.values()))

    @property
    def files(self) -> list[SampleFile]:
        return [SampleFile(self.out / name) for name in self.samplers]

    def identity(self) -> dict[str, Any]:
        """What decides the samples, as JSON; two runs of one identity give the same samples."""
        student, config = self.loaded.student, self.loaded.student.config
        own, *others = map(described, self.samplers.values())
        shared = {name: value for name, value in own.items() if all(other[name] == value for other in others)}
        rows = hashlib.sha256(canonical_json([list(row) for row in self.rows])).hexdigest()
        return {
            **({} if config.frozen is None else {"backbone": config.frozen}),
            "weights_sha256": self.loaded.weights_sha256,
            "student": type(student).__name__.lower(),
            "student_config": to_mapping(student.settings),
            "row_length": config.row_length,
            "bos_id": config.bos_token_id,
            "eos_id": config.eos_token_id,
            "codec": config.codec,
            "verifier_sha256": self.first.verifier_sha256(student),
            "sampler": shared,
            "seed": self.seed,
            "given_rows_sha256": rows,
            "precision": self.precision,
            "kind": "curve" if len(self.samplers) > 1 else "single",
        }

    def settings(self, products: str) -> dict[str, Any]:
        """Content of ``settings.json``."""
        identity = self.identity()
        shared = ("student", "student_config", "bos_id", "eos_id", "seed", "precision")
        return {
            "identity": identity,
            "config_sha256": hashlib.sha256(canonical_json(identity)).hexdigest(),
            "checkpoint": published_name(self.loaded.directory),
            **{name: identity[name] for name in shared},
            "vocab_size": self.loaded.student.config.vocab_size,
            "mask_id": self.loaded.student.mask_id,
            "row_length": len(self.rows[0]),
            "store": dict(self.loaded.store),
            "files": {name: described(sampler) for name, sampler in self.samplers.items()},
            "num_samples": self.num_samples,
            "products": products,
            "code_version": code_version(),
            "torch": torch.__version__,
        }

    def run(self, products: str = "float32") -> list[Path]:
        """Draw what is missing; the finished files. ``products`` is how float32 products run, for the record.

        Raises:
            UsageError: When the folder cannot be written, or is of another run or held by one.
        """
        settings = self.settings(products)
        try:
            with exclusive(self.out):
                return self._draw_missing(settings)
        except OSError as error:
            where, got = error.filename or self.out, error.strerror
            raise UsageError("cannot write there", where=where, got=got) from error

    def _draw_missing(self, settings: dict[str, Any]) -> list[Path]:
        settings_file, files = self.out / SETTINGS_FILE, self.files
        before = files_of_same_run(settings_file, settings["identity"])
        settings["files"] = before | settings["files"]
        missing = [self._missing(file) for file in files]
        write_json_atomic(settings_file, settings)
        left = sum(len(self._filled(index)) for indices in missing for index in indices)
        total = len(files) * sum(len(self._filled(index)) for index in range(self.num_samples))
        with progress_bar("sample", total, done=total - left) as bar:
            for sampler, file, indices in zip(self.samplers.values(), files, missing, strict=True):
                self._fill(sampler, file, indices, settings["config_sha256"], bar)
                file.finish()
        return [file.path for file in files]

    def _missing(self, file: SampleFile) -> list[int]:
        finished = {record["index"] for record in file.read()}
        if (needed := max(finished, default=-1) + 1) > self.num_samples:
            what, got = "the file holds more samples than asked for", f"--num {self.num_samples}"
            raise UsageError(what, where=file.path, got=got, expected=f"at least {needed}")
        return [index for index in range(self.num_samples) if index not in finished]

    def _fill(self, sampler: Sampler, file: SampleFile, indices: list[int], digest: str, bar: Bar) -> None:
        settings = described(sampler)
        common = {"seed": self.seed, "settings": settings, "config_sha256": digest}
        for batch in self._batches(indices):
            started, worked = time.perf_counter(), time.process_time()
            result = self.draw(sampler, batch)
            taken = time.perf_counter() - started, time.process_time() - worked
            for name, seconds in zip(("seconds", "processor_seconds"), taken, strict=True):
                common[name] = round(seconds / len(batch), 6)
            file.append(self._record(result, *place) | common for place in enumerate(batch))
            bar.advance(sum(len(self._filled(index)) for index in batch))
            passes = result.details["verifier_nfe"] if "reached" in result.details else result.nfe
            bar.note(f"{settings['sampler']}, {passes.float().mean():.1f} NFE")

    def _batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Samples of one row length, as many at a time as are asked for and a GPU's kernels can index."""
        columns, device = self.loaded.student.config.vocab_size + 1, self.loaded.student.device
        lengths = {index: len(self._row(index)) for index in indices}
        for length in sorted(set(lengths.values())):
            members = [index for index in indices if lengths[index] == length]
            size = min(self.batch_size, largest_batch(length * columns, device))
            yield from (members[at : at + size] for at in range(0, len(members), size))

    def _row(self, index: int) -> tuple[int, ...]:
        return self.rows[index % len(self.rows)]

    def _filled(self, index: int) -> list[int]:
        """Positions that the sampler fills."""
        mask_id = self.loaded.student.mask_id
        return [place for place, token in enumerate(self._row(index)) if token == mask_id]

    def draw(self, sampler: Sampler, indices: Sequence[int]) -> SampleResult:
        """The samples of some indices."""
        student = self.loaded.student
        tokens = torch.tensor([self._row(index) for index in indices], device=student.device)
        ids = torch.tensor(indices, device=student.device)
        enabled = self.precision == "bf16"
        with torch.autocast(student.device.type, torch.bfloat16, enabled=enabled):
            noise = noise_of_rows(student, self.seed, ids, tokens.shape[1])
            return sampler.sample(student, tokens, ids, noise, self.seed)

    def _record(self, result: SampleResult, slot: int, index: int) -> dict[str, Any]:
        tokens, text = result.tokens[slot, : int(result.lengths[slot])].tolist(), None
        if (tokenizer := self.loaded.tokenizer) is not None:
            text = tokenizer.decode(tokens[self.skips_first :], skip_special_tokens=False)
        filled = self._filled(index)
        num_given = len(self._row(index)) - len(filled)
        record: dict[str, Any] = {"index": index, "tokens": tokens, "text": text, "nfe": int(result.nfe[slot])}
        if filled[0] != num_given:  # not simply the row's end
            record["filled"] = filled
        record["num_given"] = num_given
        return record | {name: values[slot].tolist() for name, values in result.details.items()}

    def num_flagged(self) -> int:
        """Samples that stayed below the least entropy in every try."""
        return sum(record.get("low_entropy") is True for file in self.files for record in file.read())


def choose_products(run: SampleRun) -> str:
    """Let float32 matrix products run as TF32, where the device has it and the sampler bears it.

    Lossless decoding compares two passes, which TF32 would part.
    """
    if run.precision != "fp32" or run.first.verifier_sha256(run.loaded.student) is not None:
        return "float32"
    products = allow_tf32(run.loaded.student.device)
    if products == "TF32":
        stderr.print("float32 products run as TF32; NVIDIA_TF32_OVERRIDE=0 turns that off")
    return products


def described(sampler: Sampler) -> dict[str, Any]:
    """Name and settings of a sampler as JSON, other models by name."""
    of = {target.partition(":")[2]: name for name, target in SAMPLERS.items()}
    settings = {"sampler": of[type(sampler).__name__], **to_mapping(sampler)}
    for name in ("verifier", "ngrams"):
        if settings.get(name):
            settings[name] = published_name(settings[name])
    return settings


def published_name(place: str | Path) -> str:
    """The last two parts of a folder's path (samples are shown to others); a hub id as it is."""
    folder = Path(place)
    return "/".join(folder.resolve().parts[-2:]) if folder.exists() else str(place)


def files_of_same_run(settings_file: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What ``settings.json`` says of the files that earlier runs left; a UsageError where their identity differs."""
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
            what, where = "the folder holds samples of another run", f"{settings_file.parent}: {name}"
            raise UsageError(what, where=where, got=new, expected=f"{old} as there", remedy="give another --out")
    return files
