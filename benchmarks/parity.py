"""Parity with the authors' numbers: one line per golden and quantity, the largest difference.

python -m benchmarks.parity [--golden DIR] [--out benchmarks/results/parity.json]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.goldens import (
    Comparison,
    Golden,
    absolute,
    batch_of,
    condition_of,
    corruption_of,
    denoise,
    mismatches,
    posterior_of,
    predict,
    relative,
    relative_to_largest,
    row_noise,
    student_of,
    substituted_log_probs,
)
from benchmarks.measure import machine
from shards.atomic import write_json_atomic
from trainer.importing import our_parameters
from trainer.objective.batch import Places
from trainer.objective.corruption import SCHEDULES, masking_sigma, rate_noise, stratified_times, total_noise
from trainer.students.bd3lm import training_mask
from trainer.students.dit import Rotary, sigma_features
from trainer.students.fused_head import weighted_nll
from trainer.students.registry import AR, BD3LM, Student
from trainer.training.checkpoint import ExponentialMovingAverage, clip_gradients, make_optimizer
from trainer.training.settings import OptimizationConfig

DRAWS = ("teacher_logits", "x0", "zeta", "zeta0")
Entry = tuple[str, float, float]


def diffusion_case(folder: Path, name: str) -> list[Comparison]:
    """A training pass: noise, corruption, logits, log-probs, losses, gradients."""
    golden = Golden.read(folder, name)
    student, batch = student_of(golden, folder), batch_of(golden)
    counted = golden["attention_mask"].bool()
    corruption = corruption_of(golden, student.settings)
    entries: list[Entry] = []
    if "teacher_logits" in golden.tensors:
        xi = posterior_of(*(golden[key] for key in DRAWS))
        entries.append(("gumbel", absolute(xi, golden["gumbel"]), 1e-5))
    width = golden["xt"].shape[1]
    times = corruption.t.repeat_interleave(width // corruption.t.shape[1], dim=1)
    noised = golden["x0"].masked_fill(corruption.mask, golden.info["config"]["mask_id"])
    scale = golden["loss_scale"].expand(-1, width)
    entries += [
        ("t", relative(times, golden["t"].expand(-1, width)), 1e-6),
        ("xt", mismatches(noised, golden["xt"]), 0.0),
        ("loss_scale", relative(-corruption.weight, scale), 1e-6),
        ("sigma", relative(corruption.sigma, golden["sigma"][:, 0]), 1e-6),
    ]
    condition, rows = None, corruption.mask
    if batch.noise is not None:
        noise = student.embed_noise(batch.noise.at(rows))
        condition = noise.laid_out(rows.nonzero(as_tuple=True), rows.shape)
    with torch.no_grad():
        logits = denoise(student, golden["xt"], golden["x0"], condition, golden["sigma_in"])
    log_probs = substituted_log_probs(logits, golden["xt"], student.mask_id)
    share = counted.float().mean()  # the authors' padded tokens; rows of a store have none
    weighted = replace(corruption, weight=corruption.weight * counted / share)
    output = student.corrupted_loss(batch, weighted)
    output.loss.backward()
    token_nlls = output.token_nlls * share
    evaluation = token_nlls.sum() / counted[:, 1:].sum()
    entries += [
        ("raw_logits", absolute(logits, golden["raw_logits"]), 5e-5),
        ("log_probs", absolute(log_probs, golden["log_probs"]), 5e-5),
        ("token_loss", relative(token_nlls, golden["nlls"]), 1e-5),
        ("loss_train", relative(output.loss.detach(), golden["loss_train"]), 1e-5),
        ("loss_eval", relative(evaluation, golden["loss_eval"]), 1e-5),
        *gradient_comparisons(golden, student),
    ]
    return [Comparison(name, *entry) for entry in entries]


def gradient_comparisons(golden: Golden, student: Student) -> list[Entry]:
    """Worst gradient and gradient norm over all parameters."""
    ours = {name: p.grad for name, p in student.named_parameters()}
    worst: dict[str, float] = {}
    for key, want in golden.tensors.items():
        kind, dot, name = key.partition(".")
        if not dot or kind not in ("grad", "grad_norm"):
            continue
        layout = want.expand(1, 1) if kind == "grad_norm" and want.numel() == 1 else want
        own, target = next(iter(our_parameters({name: layout}).items()))
        got, gap = ours[own], float("nan")
        if got is not None:
            pair = (got, target) if kind == "grad" else (got.norm().reshape(1), want)
            gap = relative_to_largest(*pair)
        worst[kind] = gap if gap != gap else max(worst.get(kind, 0.0), gap)
    return [(kind, value, 1e-4) for kind, value in worst.items()]


DIFFUSION_CASES = (
    "mdlm", "mdlm_timecond", "mdlm_lossscale", "mdlm_gumbel", "mdlm_gumbel_add",
    "bd3lm_block4", "bd3lm_block8", "bd3lm_block4_clip", "bd3lm_block8_clip_half",
    "bd3lm_block1_nll", "bd3lm_gumbel_block4", "bd3lm_gumbel_block8", "bd3lm_gumbel_block8_add",
)  # fmt: skip
SAMPLING_CASES = (
    "bd3lm_block4_sample", "bd3lm_block8_sample",
    "bd3lm_gumbel_block4_sample", "bd3lm_gumbel_block8_sample",
)  # fmt: skip


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
        embeddings, _ = student.inject(student.backbone.vocab_embed(tokens), Places.of(mask), embedded)
        level = student.backbone.embed_sigma(golden["sigma_in"])
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
        log_probs = predict(student, tokens, condition)
        own = None if condition is None else condition[:, -size:]
        finished, block = tokens[:, :-size], tokens[:, -size:]
        masked, cache = block == student.mask_id, student.start_cache(tokens.shape[0])
        block_log_probs = student.predict_after(finished, block, masked, own, cache)
    pairs = {
        "raw_logits": (logits, golden["raw_logits"]),
        "log_probs": (log_probs, golden["log_probs"]),
        "block_log_probs (cache)": (block_log_probs, golden["block_log_probs"][masked]),
    }
    return [Comparison(name, key, absolute(*pair), 5e-5) for key, pair in pairs.items()]


def autoregressive_case(folder: Path) -> list[Comparison]:
    """The causal baseline: logits, losses, gradients, and its cache against the whole pass."""
    golden = Golden.read(folder, "ar")
    student = student_of(golden, folder)
    assert isinstance(student, AR)
    tokens = golden["x0"]
    logits = student(tokens[:, :-1]).logits
    counted = golden["attention_mask"][:, 1:].float()
    head, hidden = student.backbone.output_layer, student._hidden(tokens[:, :-1])
    features = head.features(hidden, None).flatten(0, 1)
    shares, targets = (counted / counted.sum()).flatten(), tokens[:, 1:].flatten()
    loss, nlls = weighted_nll(features, head.linear, targets, shares, student.mask_id)
    loss.backward()
    cache = student.start_cache(tokens.shape[0])
    steps = [student.predict_next(tokens[:, i : i + 1], cache) for i in range(tokens.shape[1] - 1)]
    entries = [
        ("raw_logits", absolute(logits, golden["raw_logits"]), 5e-5),
        ("log_probs (cache)", absolute(torch.stack(steps, 1), golden["log_probs"]), 5e-5),
        ("nlls", relative(nlls.view_as(counted) * counted, golden["nlls"]), 1e-5),
        ("loss_train", relative(loss.detach(), golden["loss_train"]), 1e-5),
        *gradient_comparisons(golden, student),
    ]
    return [Comparison("ar", *entry) for entry in entries]


def operations_case(folder: Path) -> list[Comparison]:
    """Schedules, stratified times, attention masks, sinusoidal and rotary features."""
    golden, entries = Golden.read(folder, "ops"), []
    t = golden["noise.t"]
    made = {
        "loglinear.total_noise": total_noise(t),
        "loglinear.rate_noise": rate_noise(t),
        "sigma_from_p": masking_sigma(golden["noise.loglinear.p"]),
    }
    for name, schedule in SCHEDULES.items():
        made[f"{name}.p"] = schedule.masking_probability(t)
        made[f"{name}.loss_scale"] = -schedule.loss_weight(t)
    for name, got in made.items():
        entries.append((f"schedule.{name}", relative(got, golden[f"noise.{name}"]), 1e-6))
    for name, config in golden.info["sample_t"].items():
        batch, bounds = config["batch"], (config["eps_min"], config["eps_max"])
        t = stratified_times(golden[f"{name}.u"], torch.arange(batch), batch, *bounds)
        want = golden[f"{name}.t"]
        t = t.repeat_interleave(config["block_size"] if want.shape != t.shape else 1, dim=1)
        entries.append((f"times.{name}", relative(t, want), 1e-6))
    for key in golden.tensors:
        if key.startswith("mask.n"):
            length, block = map(int, key.removeprefix("mask.n").split("_block"))
            got = training_mask(length, block, torch.device("cpu"))
            entries.append((key, mismatches(got, golden[key].bool()), 0.0))
    cosines = golden["rotary.cos"]
    rotary = Rotary.of(torch.arange(cosines.shape[0]), cosines.shape[1])
    features = {"rotary.cos": rotary.cos, "rotary.sin": rotary.sin}
    features["timestep.freq256"] = sigma_features(golden["timestep.sigma"])
    entries += [(key, absolute(got, golden[key]), 1e-6) for key, got in features.items()]
    return [Comparison("ops", *entry) for entry in entries]


def training_case(folder: Path) -> list[Comparison]:
    """Three AdamW steps of BD3-LM + Gumbel: losses, norms before clipping, weights, EMA."""
    golden = Golden.read(folder, "train_steps_bd3lm_gumbel")
    named = {kind: _named(golden, kind) for kind in ("init", "final", "ema")}
    student = student_of(golden, folder, named["init"]).train()
    rule = golden.info["optimiser"]
    rates = {"learning_rate": rule["lr"], "weight_decay": rule["weight_decay"]}
    rates |= dict(zip(("beta1", "beta2"), rule["betas"], strict=True))
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(**rates))
    average = ExponentialMovingAverage(student, rule["ema_decay"])
    entries: list[Entry] = []
    for step in range(rule["steps"]):
        given = _step_golden(golden, step)
        corruption = corruption_of(given, student.settings)
        output = student.corrupted_loss(batch_of(given), corruption)
        optimizer.zero_grad()
        output.loss.backward()
        norm = clip_gradients(student.parameters(), rule["grad_clip_norm"])
        optimizer.step()
        average.update()
        for name, got in (("loss", output.loss.detach()), ("grad_norm", norm)):
            entries.append((f"step {step} {name}", relative(got, given[name]), 1e-5))
    ours = dict(student.named_parameters())
    for kind, got in (("final", ours), ("ema", average.shadows)):
        wanted = our_parameters(named[kind])
        worst = max(absolute(got[name], wanted[name]) for name in wanted)
        entries.append((f"{kind} parameters", worst, 1e-4))
    return [Comparison(golden.name, *entry) for entry in entries]


def _named(golden: Golden, kind: str) -> dict[str, Tensor]:
    prefix = f"{kind}."
    return {k.removeprefix(prefix): v for k, v in golden.tensors.items() if k.startswith(prefix)}


def _step_golden(golden: Golden, step: int) -> Golden:
    """One step's draws in the form of a training golden."""
    tensors = _named(golden, f"step{step}")
    tensors["gumbel"] = posterior_of(*(tensors[name] for name in DRAWS))
    return Golden(golden.name, tensors, {**golden.info, "sampling_eps": [1e-3, 1.0]})


def all_comparisons(folder: Path) -> list[Comparison]:
    """Every golden of the students."""
    found = [diffusion_case(folder, name) for name in DIFFUSION_CASES]
    found += [sampling_case(folder, name) for name in SAMPLING_CASES]
    found += [case(folder) for case in (n_minus_2_case, autoregressive_case, training_case)]
    return [entry for part in [*found, operations_case(folder)] for entry in part]


def main(
    golden: Annotated[Path, typer.Option(help="Folder of the goldens.")] = Path("../shared/golden"),
    out: Annotated[Path, typer.Option(help="The JSON.")] = Path("benchmarks/results/parity.json"),
) -> None:
    """Compare everything, print the table, write the JSON; exit 1 when anything is off."""
    rows = all_comparisons(golden)
    for row in rows:
        shown = f"{row.golden:<26}{row.quantity:<28}{row.difference:>12.2e}"
        print(f"{shown}  (tolerance {row.tolerance:.0e}) {'ok' if row.passed else 'OFF'}")
    found = [{**vars(row), "passed": row.passed} for row in rows]
    write_json_atomic(out, {"machine": machine(torch.device("cpu")), "comparisons": found})
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    typer.run(main)
