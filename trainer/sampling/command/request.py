"""From what a user asks for to a run: every mistake is found before the first forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shards.base import UsageError, flatten, merge, nested, parse_override, stderr
from shards.language_model import allow_tf32, find_pretrained, looks_local
from shards.noise import use_noise_kernel
from trainer.sampling import SAMPLERS, make_sampler, sampler_class
from trainer.sampling.command.given_rows import (
    GivenRows,
    prompted,
    read_infill,
    read_prompts,
    unconditional,
)
from trainer.sampling.command.run import SampleRun, with_nfe
from trainer.students import ModelFolder, open_model

DEFAULT_NUM = 64
PRECISIONS = ("fp32", "bf16")
STOP_OPTIONS = "--stop-at-eos, --min-entropy"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``gdistill-sample``.

    Attributes:
        checkpoint: Model folder, the output of a training run, or a hub id.
        out: Folder for the samples.
        num: Samples; None is 64, or one per prompt or infill row.
        budgets: NFE of each file; empty leaves the sampler's own.
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
        if self.precision not in PRECISIONS:
            raise UsageError(
                "unknown precision", where=self.precision, expected=f"one of {PRECISIONS}"
            )
        given = {
            "--prompt": self.prompt,
            "--prompt-file": self.prompt_file,
            "--infill": self.infill,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise UsageError("these exclude each other", where=", ".join(named))
        if self.infill is not None and self.length is not None:
            raise UsageError(
                "these exclude each other",
                where="--infill, --length",
                remedy="leave --length out: a row to infill has its own",
            )

    def resolve(self) -> list[SampleRun]:
        """Load the student and settle everything else: one run, or one per value of the sweep.

        Raises:
            UsageError: For any part of the request that cannot be met.
        """
        device = self._device()
        if obstacle := use_noise_kernel("auto", device):
            stderr.print(f"noise kernel: eager on {device}; {obstacle}", markup=False)
        loaded = open_model(find_checkpoint(self.checkpoint), device, self.backbone)
        name = loaded.student.default_sampler if self.sampler is None else self.sampler
        name = name.replace("-", "_")
        settings = self._sampler_settings(name)
        given = self._given(loaded)
        runs = [
            self._run(loaded, name, merge(settings, change), given, self.out / folder)
            for folder, change in self._variants(settings)
        ]
        for run in runs:
            check_given(run)
            run.samplers[0].check_tokenizer(loaded.tokenizer)
        return [dataclasses.replace(run, products=_products(run, device)) for run in runs]

    def _sampler_settings(self, name: str) -> dict[str, Any]:
        """Options and overrides as one mapping."""
        taken = {field.name for field in dataclasses.fields(sampler_class(name))}  # type: ignore[arg-type]
        for key, value in self.settings.items():
            if key not in taken:
                having = [other for other in SAMPLERS if _takes(other, key)]
                raise UsageError(
                    f"the {name} sampler takes no {key}",
                    where=STOP_OPTIONS if key == "stop" else f"--{key.replace('_', '-')}",
                    got=value,
                    remedy=f"leave it out, or take --sampler {' or '.join(having)}",
                )
        settings = dict(self.settings)
        for text in self.overrides:
            settings = merge(settings, nested(*parse_override(text)))
        return settings

    def _variants(self, settings: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """(folder below ``out``, change of the settings) of each run."""
        if self.sweep is None:
            return [("", {})]
        key, values = parse_sweep(self.sweep)
        if key in flatten(settings):
            raise UsageError("named beside the sweep", where=f"--sweep {key}", got=settings)
        if key == "nfe" and self.budgets:
            raise UsageError("these exclude each other", where="--sweep nfe, --nfe")
        return [(f"{key}={text}", nested(*parse_override(f"{key}={text}"))) for text in values]

    def _run(
        self,
        loaded: ModelFolder,
        name: str,
        settings: Mapping[str, Any],
        given: GivenRows,
        out: Path,
    ) -> SampleRun:
        sampler = make_sampler(name, **settings).settled(loaded.student)
        budgets = [with_nfe(name, sampler, nfe) for nfe in self.budgets] or [sampler]
        files = [f"samples-nfe{nfe}.jsonl" for nfe in self.budgets]
        return SampleRun(
            loaded=loaded,
            sampler_name=name,
            samplers=tuple(budgets),
            files=tuple(files) if len(files) > 1 else ("samples.jsonl",),
            given=given,
            seed=self.seed,
            num_samples=self.num or self._default_num(given),
            batch_size=self.batch_size,
            precision=self.precision,
            out=out,
        )

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
        if self.infill is not None:
            return read_infill(self.infill, tokenizer, config)
        if self.prompt is not None:
            return prompted([self.prompt], tokenizer, config, length)
        if self.prompt_file is not None:
            return prompted(read_prompts(self.prompt_file), tokenizer, config, length)
        return unconditional(config, length)

    def _default_num(self, given: GivenRows) -> int:
        many = self.infill is not None or self.prompt_file is not None
        return len(given.rows) if many else DEFAULT_NUM


def _products(run: SampleRun, device: torch.device) -> str:
    """How float32 products run: lossless decoding compares two passes, which TF32 would part."""
    if run.precision != "fp32" or run.samplers[0].verifier_sha256(run.loaded.student) is not None:
        return "float32"
    products = allow_tf32(device)
    if products == "TF32":
        stderr.print("float32 products run as TF32; NVIDIA_TF32_OVERRIDE=0 turns that off")
    return products


def find_checkpoint(name: str) -> Path:
    """A folder as it is; anything else is asked of the hub's cache, and of the hub.

    Raises:
        UsageError: When neither has such a model.
    """
    if Path(name).exists() or looks_local(name):
        return Path(name)
    return find_pretrained(name, role="student").folder


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
    return any(field.name == key for field in dataclasses.fields(SAMPLERS[name]))  # type: ignore[arg-type]


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
                raise error if index == 0 else _of_row(index, error) from error


def _of_row(index: int, error: UsageError) -> UsageError:
    """The same mistake with the row that makes it, where those before it do not."""
    where = f"row {index} (the first is 0): {error.where}"
    return UsageError(
        error.what, where=where, got=error.got, expected=error.expected, remedy=error.remedy
    )
