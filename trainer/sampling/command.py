"""``gdistill-sample``: from what a user asks for to files of samples.

Every mistake is found before the first forward pass. Samples are one JSON object per line, appended
batch by batch to ``NAME.partial``; the finished file gets its name by a rename. A torn last line
(power cut, kill -9) is dropped when the run resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from shards.language_model.forward import allow_tf32, largest_batch
from shards.language_model.loading import find_pretrained, looks_local
from shards.noise.philox import use_noise_kernel
from shards.provenance import code_version
from shards.settings import flatten, merge, nested, parse_override, to_mapping
from trainer.sampling.fill import Sampler, SampleResult
from trainer.sampling.given import (
    GivenRows,
    prompted,
    read_infill,
    read_prompts,
    unconditional,
)
from trainer.sampling.noise import noise_of_rows
from trainer.sampling.registry import SAMPLERS, make_sampler, sampler_class
from trainer.students.folder import ModelFolder, open_model

DEFAULT_NUM = 64
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``gdistill-sample``.

    Attributes:
        checkpoint: Model folder, the output of a training run, or a hub id.
        out: Folder for the samples.
        num: Samples; None is 64, or one per prompt or infill row.
        budgets: Forward passes of each file; empty leaves the sampler's own.
        counted: What a budget counts: ``nfe`` or ``passes_per_block``.
        sampler: Registry name; None takes the one that suits the student.
        settings: Sampler settings by name.
        overrides: Further sampler settings, ``key=value``.
        sweep: ``key=value,value,...``: a folder of samples below ``out`` for each value.
        seed: Sampling seed.
        batch_size: Samples per forward pass.
        length: Tokens per sample; None is the student's row length.
        prompt: Text that every sample begins with.
        prompt_file: File of prompts.
        infill: File of rows with open positions.
        precision: ``fp32`` or ``bf16``.
        device: ``auto`` or a torch device.
        backbone: Where the language model is that the student stands on, if not where it says.
    """

    checkpoint: str
    out: Path
    num: int | None = None
    budgets: tuple[int, ...] = ()
    counted: str = "nfe"
    sampler: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    sweep: str | None = None
    seed: int = 0
    batch_size: int = 32
    length: int | None = None
    prompt: str | None = None
    prompt_file: Path | None = None
    infill: Path | None = None
    precision: str = "fp32"
    device: str = "auto"
    backbone: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("--num", self.num), ("--batch-size", self.batch_size)):
            if value is not None and value < 1:
                raise UsageError("a count below 1", where=name, got=value, expected="at least 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError("bad seed", where="--seed", got=self.seed, expected="0..2^63 - 1")
        if self.precision not in ("fp32", "bf16"):
            raise UsageError("unknown precision", where=self.precision, expected="fp32 or bf16")
        rows = ("prompt", "prompt_file", "infill")
        for names in (rows, ("infill", "length")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                where = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                remedy = "a row to infill has its own length" if "length" in names else ""
                raise UsageError("these exclude each other", where=where, remedy=remedy)

    def resolve(self) -> list[SampleRun]:
        """Load the student and settle everything else: one run, or one per value of the sweep.

        Raises:
            UsageError: For any part of the request that cannot be met.
        """
        device = self._device()
        if obstacle := use_noise_kernel("auto", device):
            stderr.print(f"noise kernel: eager on {device}; {obstacle}", markup=False)
        local = Path(self.checkpoint).exists() or looks_local(self.checkpoint)
        place = (
            self.checkpoint if local else find_pretrained(self.checkpoint, role="student").folder
        )
        loaded = open_model(Path(place), device, self.backbone)
        name = loaded.student.default_sampler if self.sampler is None else self.sampler
        name = name.replace("-", "_")
        settings, given = self._sampler_settings(name), self._given(loaded)
        runs = []
        for folder, change in self._variants(settings):
            sampler = make_sampler(name, **merge(settings, change)).settled(loaded.student)
            samplers = [self._with_budget(name, sampler, budget) for budget in self.budgets]
            word = self.counted.replace("_", "-")
            files = [f"samples-{word}{budget}.jsonl" for budget in self.budgets]
            run = SampleRun(
                loaded=loaded,
                sampler_name=name,
                samplers=tuple(samplers) or (sampler,),
                files=tuple(files) if len(files) > 1 else ("samples.jsonl",),
                counted=self.counted,
                given=given,
                seed=self.seed,
                num_samples=self.num or self._default_num(given),
                batch_size=self.batch_size,
                precision=self.precision,
                out=self.out / folder,
            )
            check_given(run)
            run.samplers[0].check_tokenizer(loaded.tokenizer)
            runs.append(run)
        products = "float32"
        # Lossless decoding compares two passes, which TF32 would part.
        if self.precision == "fp32" and runs[0].samplers[0].verifier_sha256(loaded.student) is None:
            products = allow_tf32(device)
            if products == "TF32":
                stderr.print("float32 products run as TF32; NVIDIA_TF32_OVERRIDE=0 turns that off")
        return [dataclasses.replace(run, products=products) for run in runs]

    def _sampler_settings(self, name: str) -> dict[str, Any]:
        """Options and overrides as one mapping."""
        for key, value in self.settings.items():
            if not _takes(name, key):
                having = [other for other in SAMPLERS if _takes(other, key)]
                raise UsageError(
                    f"the {name} sampler takes no {key}",
                    where=f"--{key.replace('_', '-')}",
                    got=value,
                    remedy=f"leave it out, or take --sampler {' or '.join(having)}",
                )
        settings = dict(self.settings)
        for text in self.overrides:
            settings = merge(settings, nested(*parse_override(text)))
        return settings

    def _with_budget(self, name: str, sampler: Sampler, budget: int) -> Sampler:
        """The sampler with so many forward passes."""
        if not _takes(name, self.counted):
            other = self.counted == "passes_per_block" and _takes(name, "nfe")
            raise UsageError(
                f"the {name} sampler takes no {'NFE' if self.counted == 'nfe' else self.counted}",
                where=f"--{self.counted.replace('_', '-')}",
                got=budget,
                remedy="--nfe counts the passes of a sequence"
                if other
                else "its NFE follows from the number of tokens to fill",
            )
        return dataclasses.replace(sampler, **{self.counted: budget})

    def _variants(self, settings: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """(folder below ``out``, change of the settings) of each run."""
        if self.sweep is None:
            return [("", {})]
        key, values = parse_sweep(self.sweep)
        if key in flatten(settings):
            raise UsageError("named beside the sweep", where=f"--sweep {key}", got=settings)
        if key == self.counted and self.budgets:
            raise UsageError("these exclude each other", where=f"--sweep {key}, --{key}")
        return [(f"{key}={text}", nested(*parse_override(f"{key}={text}"))) for text in values]

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device).item()  # the meta device holds no values
        except (RuntimeError, AssertionError, ImportError) as error:
            raise UsageError("no such device", where="--device", got=self.device) from error
        return device

    def _given(self, loaded: ModelFolder) -> GivenRows:
        config, tokenizer = loaded.student.config, loaded.tokenizer
        length = config.row_length if self.length is None else self.length
        if length < 2:
            raise UsageError("nothing to fill", where="--length", got=length, expected="at least 2")
        if (self.infill, self.prompt, self.prompt_file) == (None, None, None):
            return unconditional(config, length)
        if self.infill is not None:
            return read_infill(self.infill, tokenizer, config)
        if self.prompt is not None:
            return prompted([self.prompt], tokenizer, config, length)
        assert self.prompt_file is not None
        return prompted(read_prompts(self.prompt_file), tokenizer, config, length)

    def _default_num(self, given: GivenRows) -> int:
        many = self.infill is not None or self.prompt_file is not None
        return len(given.rows) if many else DEFAULT_NUM


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """``nucleus_p=0.7,0.8`` as the setting and its values.

    Raises:
        UsageError: For anything else, or a value that is named twice.
    """
    key, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not key.strip() or not all(values):
        expected = "a setting and its values, nucleus_p=0.7,0.8,0.9"
        raise UsageError("bad sweep", where="--sweep", got=text, expected=expected)
    if len(set(map(str.lower, values))) < len(values):
        raise UsageError("a value is named twice", where="--sweep", got=text)
    return key.strip(), values


def _takes(name: str, key: str) -> bool:
    return any(field.name == key for field in dataclasses.fields(sampler_class(name)))


def check_given(run: SampleRun) -> None:
    """Ask every sampler about every row that is to be filled.

    Raises:
        UsageError: For the first row that cannot be filled.
    """
    student = run.loaded.student
    for sampler in run.samplers:
        for index in range(min(run.num_samples, len(run.given.rows))):
            try:
                sampler.check(student, run.given.tokens([index], student.device))
            except UsageError as error:
                if not index:
                    raise
                # Name the row that makes the mistake, where those before it do not.
                where = f"row {index} (the first is 0): {error.where}"
                raise UsageError(
                    error.what,
                    where=where,
                    got=error.got,
                    expected=error.expected,
                    remedy=error.remedy,
                ) from error


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


@dataclass(frozen=True)
class SampleRun:
    """Everything that a run needs.

    Attributes:
        loaded: The student.
        sampler_name: Registry name of the sampler.
        samplers: One sampler per file.
        files: Names of the files, one per sampler.
        counted: The setting that differs from file to file.
        given: What is given of each sample.
        seed: Names all randomness, with the sample index.
        num_samples: Samples per file.
        batch_size: Samples per forward pass; no sample depends on it.
        precision: ``fp32``, or ``bf16`` for autocast.
        out: Folder of the files.
        products: How float32 matrix products run: ``float32``, or ``TF32`` on a GPU.
    """

    loaded: ModelFolder
    sampler_name: str
    samplers: tuple[Sampler, ...]
    files: tuple[str, ...]
    counted: str
    given: GivenRows
    seed: int
    num_samples: int
    batch_size: int
    precision: str
    out: Path
    products: str = "float32"

    def identity(self) -> dict[str, Any]:
        """What decides the samples, as JSON; two runs of one identity give the same samples."""
        first = self.samplers[0]
        sampler = self._described(first)
        if len(self.samplers) > 1:
            sampler.pop(self.counted)  # each file of a curve has its own
        rows = hashlib.sha256(canonical_json([list(row) for row in self.given.rows])).hexdigest()
        return {
            **student_identity(self.loaded),
            "verifier_sha256": first.verifier_sha256(self.loaded.student),
            "sampler": sampler,
            "seed": self.seed,
            "given_rows_sha256": rows,
            "precision": self.precision,
            "kind": "curve" if len(self.samplers) > 1 else "single",
        }

    def settings(self) -> dict[str, Any]:
        """Content of ``settings.json``."""
        identity = self.identity()
        student = self.loaded.student
        return {
            "identity": identity,
            "config_sha256": hashlib.sha256(canonical_json(identity)).hexdigest(),
            "checkpoint": published_name(self.loaded.directory),
            "student": type(student).__name__.lower(),
            "student_config": to_mapping(student.settings),
            "vocab_size": student.config.vocab_size,
            "mask_id": student.mask_id,
            "bos_id": student.config.bos_token_id,
            "eos_id": student.config.eos_token_id,
            "row_length": len(self.given.rows[0]),
            "store": dict(self.loaded.store),
            "files": {
                name: self._described(sampler)
                for name, sampler in zip(self.files, self.samplers, strict=True)
            },
            "seed": self.seed,
            "num_samples": self.num_samples,
            "precision": self.precision,
            "products": self.products,
            "code_version": code_version(),
            "torch": torch.__version__,
        }

    def _described(self, sampler: Sampler) -> dict[str, Any]:
        """All settings of a sampler, other models by name."""
        settings = {"sampler": self.sampler_name, **to_mapping(sampler)}
        if "verifier" in settings:
            settings["verifier"] = published_name(settings["verifier"])
        return settings

    def run(self) -> list[Path]:
        """Draw what is missing; the finished files.

        Raises:
            UsageError: When the folder holds samples of another run, is being filled by another
                process, or cannot be made.
        """
        settings = self.settings()
        try:
            with exclusive(self.out):
                return self._draw_missing(settings)
        except OSError as error:
            where, got = error.filename or self.out, error.strerror
            raise UsageError("cannot write there", where=where, got=got) from error

    def _draw_missing(self, settings: dict[str, Any]) -> list[Path]:
        before = files_of_same_run(self.out / SETTINGS_FILE, settings["identity"])
        settings["files"] = {**before, **settings["files"]}
        files = [SampleFile(self.out / name) for name in self.files]
        missing = [self._missing(file) for file in files]
        write_json_atomic(self.out / SETTINGS_FILE, settings)
        num_new = [sum(len(self.given.filled_positions(i)) for i in indices) for indices in missing]
        total = len(files) * sum(
            len(self.given.filled_positions(i)) for i in range(self.num_samples)
        )
        with progress_bar("sample", total, done=total - sum(num_new)) as bar:
            for sampler, file, indices in zip(self.samplers, files, missing, strict=True):
                self._fill(sampler, file, indices, settings["config_sha256"], bar)
                file.finish()
        return [file.path for file in files]

    @property
    def verification(self) -> list[str]:
        """What a verified run was like, a line per file; nothing for other samplers."""
        lines = []
        for path in (self.out / name for name in self.files):
            records = SampleFile(path).read()
            if "reached" in records[0]:
                lines.append(f"{path.name}: {verified_line(records)}")
        return lines

    @property
    def num_flagged(self) -> int:
        """Samples that were kept although their entropy stayed too low."""
        files = [SampleFile(self.out / name) for name in self.files]
        return sum(record.get("low_entropy") is True for file in files for record in file.read())

    def _missing(self, file: SampleFile) -> list[int]:
        finished = file.finished_indices()
        needed = max(finished, default=-1) + 1
        if needed > self.num_samples:
            raise UsageError(
                "the file holds more samples than asked for",
                where=file.path,
                got=f"--num {self.num_samples}",
                expected=f"at least {needed}",
            )
        return [index for index in range(self.num_samples) if index not in finished]

    def _fill(
        self, sampler: Sampler, file: SampleFile, indices: list[int], digest: str, bar: Bar
    ) -> None:
        settings = self._described(sampler)
        common = {"seed": self.seed, "settings": settings, "config_sha256": digest}
        for batch in self._batches(indices):
            started, worked = time.perf_counter(), time.process_time()
            result = self.draw(sampler, batch)
            took = {
                "seconds": round((time.perf_counter() - started) / len(batch), 6),
                "processor_seconds": round((time.process_time() - worked) / len(batch), 6),
            }
            file.append(
                {**self._record(result, slot, index), **common, **took}
                for slot, index in enumerate(batch)
            )
            bar.advance(sum(len(self.given.filled_positions(index)) for index in batch))
            bar.note(f"{self.sampler_name}, {result.nfe.float().mean():.1f} NFE")

    def _batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Samples of one row length, ``batch_size`` at a time; fewer where a GPU's kernels could
        not index their log-probabilities.
        """
        columns, device = self.loaded.student.config.vocab_size + 1, self.loaded.student.device
        by_length = sorted(indices, key=lambda index: (len(self.given.row(index)), index))
        for length, group in itertools.groupby(by_length, key=lambda i: len(self.given.row(i))):
            members = list(group)
            size = min(self.batch_size, largest_batch(length * columns, device))
            for first in range(0, len(members), size):
                yield members[first : first + size]

    def draw(self, sampler: Sampler, indices: Sequence[int]) -> SampleResult:
        """The samples of some indices."""
        student = self.loaded.student
        tokens = self.given.tokens(indices, student.device)
        ids = torch.tensor(indices, device=student.device)
        kind = student.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.precision == "bf16"):
            noise = noise_of_rows(student, self.seed, ids, tokens.shape[1])
            return sampler.sample(student, tokens, ids, noise, self.seed)

    def _record(self, result: SampleResult, slot: int, index: int) -> dict[str, Any]:
        tokens = result.tokens[slot, : int(result.lengths[slot])].tolist()
        filled = self.given.filled_positions(index)
        record: dict[str, Any] = {"index": index, "tokens": tokens, "text": self._text(tokens)}
        record["nfe"] = int(result.nfe[slot])
        if filled[0] != len(self.given.row(index)) - len(filled):  # not simply the row's end
            record["filled"] = filled
        record["num_given"] = len(self.given.row(index)) - len(filled)
        for name, values in result.details.items():
            record[name] = values[slot].tolist()
        return record

    def _text(self, tokens: list[int]) -> str | None:
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            return None
        text = tokens if self.given.first_token_is_text else tokens[1:]
        return tokenizer.decode(text, skip_special_tokens=False)


def verified_line(records: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per pass of the verifier, and the draft's agreement by distance, as one line."""
    passes = sum(record["verifier_nfe"] for record in records)
    own = sum(record["nfe"] for record in records)
    accepted = sum(sum(record["accepted"]) for record in records)
    shares = []
    for distance in range(len(records[0]["drafted"])):
        drafted = sum(record["drafted"][distance] for record in records)
        agreed = sum(record["agreed"][distance] for record in records)
        shares.append(f"{agreed / drafted:.2f}" if drafted else "-")
    # Each pass of the verifier gives what it accepts and one token of its own.
    return (
        f"{(accepted + passes) / passes:.2f} tokens per pass of the verifier ({passes} passes, "
        f"{own} of the student); agreement by distance {' '.join(shares)}"
    )


def published_name(place: str | Path) -> str:
    """The last two parts of a folder's path, which tell it from its neighbours; a hub id as it is.

    Samples are shown to others, whom the paths of this machine do not concern.
    """
    folder = Path(place)
    return "/".join(folder.resolve().parts[-2:]) if folder.exists() else str(place)
