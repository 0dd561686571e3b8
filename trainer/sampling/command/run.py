"""One run of ``gdistill-sample``: what decides its samples, batches, resume, files."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shards.base import (
    Bar,
    UsageError,
    canonical_json,
    code_version,
    exclusive,
    progress_bar,
    to_mapping,
    write_json_atomic,
)
from shards.language_model import largest_batch
from trainer.sampling import Sampler
from trainer.sampling.command.file import SampleFile
from trainer.sampling.command.given_rows import GivenRows
from trainer.sampling.command.identity import files_of_same_run, student_identity
from trainer.sampling.rules import SampleResult, noise_of_rows
from trainer.students import ModelFolder

SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class SampleRun:
    """Everything that a run needs.

    Attributes:
        loaded: The student.
        sampler_name: Registry name of the sampler.
        samplers: One sampler per file.
        files: Names of the files, one per sampler.
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
            sampler.pop("nfe")  # each file of a curve has its own
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
            started = time.perf_counter()
            result = self.draw(sampler, batch)
            seconds = (time.perf_counter() - started) / len(batch)
            file.append(
                {**self._record(result, slot, index), **common, "seconds": round(seconds, 6)}
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


def with_nfe(name: str, sampler: Sampler, nfe: int) -> Sampler:
    """The sampler with another budget of forward passes.

    Raises:
        UsageError: When its NFE is not a setting.
    """
    if not any(field.name == "nfe" for field in dataclasses.fields(sampler)):  # type: ignore[arg-type]
        raise UsageError(
            f"the {name} sampler takes no NFE",
            where="--nfe",
            got=nfe,
            remedy="its NFE follows from the number of tokens to fill",
        )
    return dataclasses.replace(sampler, nfe=nfe)  # type: ignore[type-var]
