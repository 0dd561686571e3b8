"""Parity with the authors' numbers: one line per golden and quantity, the largest difference.

python -m benchmarks.parity [--golden DIR] [--out benchmarks/results/parity.json]
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shards.noise import DenseNoise, Noise
from trainer.batch import Batch
from trainer.diffusion import (
    Corruption,
    corruption_from_uniforms,
    stratified_times,
    substituted_log_probs,
)
from trainer.import_checkpoint import our_parameters
from trainer.schedules import SCHEDULES, noise_level, rate_noise, total_noise
from trainer.students import AR, BD3LM, STUDENTS, Student, StudentSettings
from trainer.students.attention import Rotary, training_mask
from trainer.students.dit import noise_level_features


@dataclass(frozen=True)
class Golden:
    """One case: its tensors and its description."""

    name: str
    tensors: dict[str, Tensor]
    info: dict

    @classmethod
    def read(cls, folder: Path, name: str) -> Golden:
        """Load NAME.safetensors and NAME.json."""
        info = json.loads((folder / f"{name}.json").read_text())
        return cls(name, load_file(folder / f"{name}.safetensors"), info)

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]


@dataclass(frozen=True)
class Comparison:
    """The largest difference of one quantity, in the unit its tolerance is stated in."""

    golden: str
    quantity: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Within tolerance; a NaN never is."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class ArrivalRows:
    """Row noise held in memory: [B, L, V] arrival times."""

    arrivals: Tensor

    def at(self, mask: Tensor) -> Noise:
        """Noise of the masked positions."""
        return DenseNoise(self.arrivals[mask])


def row_noise(gumbel: Tensor, length: int) -> ArrivalRows:
    """xi [B, n-1 or n-2, V] -> arrivals [B, L, V]; vector i belongs to position i + 1."""
    arrivals = torch.exp(-gumbel)
    padded = torch.full((gumbel.shape[0], length, gumbel.shape[2]), torch.inf)
    padded[:, 1 : 1 + gumbel.shape[1]] = arrivals
    return ArrivalRows(padded)


def settings_of(config: dict) -> StudentSettings:
    """Our settings for a golden's config."""
    return StudentSettings(
        hidden_size=config["hidden_size"],
        num_layers=config["n_blocks"],
        num_heads=config["n_heads"],
        condition_size=config["cond_dim"],
        mlp_ratio=config["mlp_ratio"],
        dropout=config["dropout"],
        conditioning="gumbel" if "gumbel" in config["model_family"] else "none",
        injection=config["gumbel_inject_mode"],
        block_size=config["block_size"],
        loss_weighting="rate" if config["mdlm_loss_scale"] else "schedule",
        time_conditioning=config["time_conditioning"],
        resample=config["resample"],
    )


def student_of(golden: Golden, folder: Path, weights: dict[str, Tensor] | None = None) -> Student:
    """The student of a golden with its weights."""
    config = golden.info["config"]
    student_class = STUDENTS[config["model_family"].removesuffix("_gumbel")]
    student_config = student_class.config_class.build(
        settings_of(config),
        vocab_size=config["vocab_size_with_mask"] - 1,
        row_length=config["length"],
        bos_token_id=config["bos_id"],
        eos_token_id=config["eos_id"],
    )
    student = student_class(student_config).eval()
    if weights is None:
        weights = load_file(folder / golden.info["weights"])
    parameters = our_parameters(weights)
    missing, unexpected = student.load_state_dict(parameters, strict=False)
    if unexpected or set(missing) - {"time_bounds"}:
        raise ValueError(f"{golden.name}: missing {missing}, unexpected {unexpected}")
    return student


def batch_of(golden: Golden) -> Batch:
    """The golden's rows and noise as one global batch."""
    tokens = golden["x0"]
    rows = torch.arange(tokens.shape[0])
    noise = None
    if "gumbel" in golden.tensors:
        noise = row_noise(golden["gumbel"], tokens.shape[1])
    return Batch(
        tokens=tokens,
        token_log_probs=torch.zeros(tokens.shape),
        row_ids=rows,
        slots=rows,
        global_batch_size=tokens.shape[0],
        step=0,
        epoch=0,
        seed=0,
        noise=noise,
    )


def corruption_of(golden: Golden, settings: StudentSettings) -> Corruption:
    """Our corruption from the golden's uniforms."""

    def uniforms(round_number: int) -> Tensor:
        return golden["u_mask"] if round_number == 0 else golden["u_resample"][round_number - 1]

    low, high = golden.info["sampling_eps"]
    rows = torch.arange(golden["x0"].shape[0])
    return corruption_from_uniforms(golden["u_t"], uniforms, rows, len(rows), settings, (low, high))


def absolute(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; entries at -1e6 only have to be very negative in both."""
    if got.shape != want.shape:
        return float("nan")
    floor = (want <= -9e5) & (got <= -9e5)
    gap = (got.detach().double() - want.double()).masked_fill(floor, 0.0)
    return float(gap.abs().max())


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the wanted entry; exact zeros must be met exactly."""
    gap = (got.double() - want.double()).abs()
    return float((gap / want.double().abs().clamp_min(1e-30)).max())


def relative_to_largest(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest entry of the tensor."""
    return absolute(got, want) / max(float(want.abs().max()), 1e-30)


def mismatches(got: Tensor, want: Tensor) -> float:
    """Number of differing entries."""
    return float((got != want).sum())


def diffusion_case(folder: Path, name: str) -> list[Comparison]:
    """A training pass: corruption, logits, log-probs, losses, gradients."""
    golden = Golden.read(folder, name)
    student = student_of(golden, folder)
    batch = batch_of(golden)
    counted = golden["attention_mask"].bool()
    corruption = replace(corruption_of(golden, student.settings), counted=counted)
    found = [
        _corruption_comparisons(golden, corruption),
        _prediction_comparisons(golden, student, batch, corruption),
        _loss_comparisons(golden, student, batch, corruption),
        gradient_comparisons(golden, student),
    ]
    return [Comparison(name, *entry) for part in found for entry in part]


Entry = tuple[str, float, float]


def _corruption_comparisons(golden: Golden, corruption: Corruption) -> list[Entry]:
    block = golden["xt"].shape[1] // corruption.t.shape[1]
    times = corruption.t.repeat_interleave(block, dim=1)
    noised = golden["x0"].masked_fill(corruption.mask, golden.info["config"]["mask_id"])
    width = golden["xt"].shape[1]
    return [
        ("t", relative(times, golden["t"].expand(-1, width)), 1e-6),
        ("xt", mismatches(noised, golden["xt"]), 0.0),
        ("loss_scale", relative(-corruption.weight, golden["loss_scale"].expand(-1, width)), 1e-6),
        ("sigma", relative(corruption.sigma, golden["sigma"][:, 0]), 1e-6),
    ]


def _prediction_comparisons(
    golden: Golden, student: Student, batch: Batch, corruption: Corruption
) -> list[Entry]:
    condition = None
    if batch.noise is not None:
        rows = corruption.mask
        embedded = student.embed_noise(batch.noise.at(rows))
        condition = torch.zeros(*rows.shape, embedded.shape[-1]).index_put(
            rows.nonzero(as_tuple=True), embedded
        )
    with torch.no_grad():
        logits = student.denoise(golden["xt"], golden["x0"], condition, golden["sigma_in"])
    log_probs = substituted_log_probs(logits, golden["xt"], student.mask_id)
    return [
        ("raw_logits", absolute(logits, golden["raw_logits"]), 5e-5),
        ("log_probs", absolute(log_probs, golden["log_probs"]), 5e-5),
    ]


def _loss_comparisons(
    golden: Golden, student: Student, batch: Batch, corruption: Corruption
) -> list[Entry]:
    output = student.corrupted_loss(batch, corruption)
    output.loss.backward()
    evaluation = output.nll_sum / output.num_tokens
    return [
        ("token_loss", relative(output.token_nlls, golden["nlls"]), 1e-5),
        ("loss_train", relative(output.loss.detach(), golden["loss_train"]), 1e-5),
        ("loss_eval", relative(evaluation, golden["loss_eval"]), 1e-5),
    ]


def gradient_comparisons(golden: Golden, student: Student) -> list[Entry]:
    """Worst gradient and gradient norm over all parameters."""
    ours = {name: p.grad for name, p in student.named_parameters()}
    worst = {"grad": -1.0, "grad_norm": -1.0}
    for kind in worst:
        stored = {
            k.removeprefix(f"{kind}."): v
            for k, v in golden.tensors.items()
            if k.startswith(f"{kind}.")
        }
        for name, want in stored.items():
            layout = want if kind == "grad" else want.expand(1, 1) if want.numel() == 1 else want
            key, target = next(iter(our_parameters({name: layout}).items()))
            got = ours[key]
            if got is None:
                worst[kind] = float("nan")
                continue
            if kind == "grad_norm":
                got, target = got.norm().reshape(1), want
            worst[kind] = max(worst[kind], relative_to_largest(got, target))
    return [(kind, value, 1e-4) for kind, value in worst.items() if value != -1.0]


DIFFUSION_CASES = (
    "mdlm",
    "mdlm_timecond",
    "mdlm_lossscale",
    "mdlm_gumbel",
    "mdlm_gumbel_add",
    "bd3lm_block4",
    "bd3lm_block8",
    "bd3lm_block4_clip",
    "bd3lm_block8_clip_half",
    "bd3lm_block1_nll",
    "bd3lm_gumbel_block4",
    "bd3lm_gumbel_block8",
    "bd3lm_gumbel_block8_add",
)
SAMPLING_CASES = (
    "bd3lm_block4_sample",
    "bd3lm_block8_sample",
    "bd3lm_gumbel_block4_sample",
    "bd3lm_gumbel_block8_sample",
)


def condition_of(student: Student, gumbel: Tensor, tokens: Tensor) -> Tensor:
    """[B, L, D] noise embeddings of every position; position 0 has none and stays 0."""
    everywhere = torch.ones(tokens.shape, dtype=torch.bool)
    everywhere[:, 1 : 1 + gumbel.shape[1]] = False
    filled = ~everywhere
    embedded = student.embed_noise(row_noise(gumbel, tokens.shape[1]).at(filled))
    blank = torch.zeros(*tokens.shape, embedded.shape[-1])
    return blank.index_put(filled.nonzero(as_tuple=True), embedded)


def n_minus_2_case(folder: Path) -> list[Comparison]:
    """Noise for positions 1..n-2 only: the last position, even if masked, keeps its embedding."""
    golden = Golden.read(folder, "mdlm_gumbel_n_minus_2")
    student = student_of(golden, folder)
    tokens, gumbel = golden["xt"], golden["gumbel"]
    covered = torch.zeros(tokens.shape, dtype=torch.bool)
    covered[:, 1 : 1 + gumbel.shape[1]] = True
    mask = (tokens == student.mask_id) & covered
    with torch.no_grad():
        embedded = student.embed_noise(row_noise(gumbel, tokens.shape[1]).at(mask))
        embeddings = student.inject(student.backbone.vocab_embed(tokens), mask, embedded)
        level = student.backbone.noise_level(golden["sigma_in"])
        hidden = student.contextualize(embeddings, tokens, level)
        head = student.backbone.output_layer
        logits = head(head.features(hidden, level))
    gap = absolute(logits, golden["raw_logits"])
    return [Comparison(golden.name, "raw_logits", gap, 5e-5)]


def sampling_case(folder: Path, name: str) -> list[Comparison]:
    """A clean prefix and one partly masked block: whole pass, and through the cache."""
    golden = Golden.read(folder, name)
    student = student_of(golden, folder)
    assert isinstance(student, BD3LM)
    tokens, size = golden["x"], student.block_size
    with torch.no_grad():
        condition = None
        if "gumbel" in golden.tensors:
            condition = condition_of(student, golden["gumbel"], tokens)
        logits = student(tokens, condition).logits
        log_probs = student.predict(tokens, condition)
        cache = student.start_cache(tokens.shape[0])
        for start in range(0, tokens.shape[1] - size, size):
            student.extend_cache(tokens[:, start : start + size], cache)
        own = None if condition is None else condition[:, -size:]
        block = student.predict_block(tokens[:, -size:], own, cache)
    entries = [
        ("raw_logits", absolute(logits, golden["raw_logits"]), 5e-5),
        ("log_probs", absolute(log_probs, golden["log_probs"]), 5e-5),
        ("block_log_probs (cache)", absolute(block, golden["block_log_probs"]), 5e-5),
    ]
    return [Comparison(name, *entry) for entry in entries]


def autoregressive_case(folder: Path) -> list[Comparison]:
    """The causal baseline: logits, losses, gradients, and its cache against the whole pass."""
    golden = Golden.read(folder, "ar")
    student = student_of(golden, folder)
    assert isinstance(student, AR)
    tokens = golden["x0"]
    logits = student(tokens[:, :-1]).logits
    output = student.loss(batch_of(golden), counted=golden["attention_mask"].bool())
    output.loss.backward()
    cache = student.start_cache(tokens.shape[0])
    steps = [student.predict_next(tokens[:, i : i + 1], cache) for i in range(tokens.shape[1] - 1)]
    entries = [
        ("raw_logits", absolute(logits, golden["raw_logits"]), 5e-5),
        ("log_probs (cache)", absolute(torch.stack(steps, 1), golden["log_probs"]), 5e-5),
        ("nlls", relative(output.token_nlls[:, 1:], golden["nlls"]), 1e-5),
        ("loss_train", relative(output.loss.detach(), golden["loss_train"]), 1e-5),
        *gradient_comparisons(golden, student),
    ]
    return [Comparison("ar", *entry) for entry in entries]


def operations_case(folder: Path) -> list[Comparison]:
    """Schedules, stratified times, attention masks, sinusoidal and rotary features."""
    golden = Golden.read(folder, "ops")
    entries = [*_schedule_entries(golden), *_time_entries(golden), *_feature_entries(golden)]
    return [Comparison("ops", *entry) for entry in entries]


def _schedule_entries(golden: Golden) -> list[Entry]:
    t, entries = golden["noise.t"], []
    for name, schedule in SCHEDULES.items():
        p, weight = schedule.masking_probability(t), schedule.loss_weight(t)
        stored = f"noise.{name}"
        entries.append((f"schedule.{name}.p", relative(p, golden[f"{stored}.p"]), 1e-6))
        gap = relative(-weight, golden[f"{stored}.loss_scale"])
        entries.append((f"schedule.{name}.loss_scale", gap, 1e-6))
    for name, got in (
        ("loglinear.total_noise", total_noise(t)),
        ("loglinear.rate_noise", rate_noise(t)),
        ("sigma_from_p", noise_level(golden["noise.loglinear.p"])),
    ):
        entries.append((f"schedule.{name}", relative(got, golden[f"noise.{name}"]), 1e-6))
    return entries


def _time_entries(golden: Golden) -> list[Entry]:
    entries = []
    for name, config in golden.info["sample_t"].items():
        batch, block = config["batch"], config["block_size"]
        bounds = config["eps_min"], config["eps_max"]
        t = stratified_times(golden[f"{name}.u"], torch.arange(batch), batch, *bounds)
        want = golden[f"{name}.t"]
        t = t.repeat_interleave(block if want.shape != t.shape else 1, dim=1)
        entries.append((f"times.{name}", relative(t, want), 1e-6))
    return entries


def _feature_entries(golden: Golden) -> list[Entry]:
    entries = []
    for key in golden.tensors:
        if key.startswith("mask.n"):
            length, block = (int(part) for part in key.removeprefix("mask.n").split("_block"))
            got = training_mask(length, block, torch.device("cpu"))
            entries.append((key, mismatches(got, golden[key].bool()), 0.0))
    cosines = golden["rotary.cos"]
    rotary = Rotary.of(torch.arange(cosines.shape[0]), cosines.shape[1])
    features = noise_level_features(golden["timestep.sigma"])
    return [
        *entries,
        ("rotary.cos", absolute(rotary.cos, cosines), 1e-6),
        ("rotary.sin", absolute(rotary.sin, golden["rotary.sin"]), 1e-6),
        ("timestep.freq256", absolute(features, golden["timestep.freq256"]), 1e-6),
    ]
