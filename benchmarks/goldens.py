"""Reading the authors' numbers: cases, students with their weights, batches, differences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.dense_noise import DenseNoise, given_posterior
from shards.noise.embedding import Noise
from trainer.importing import our_parameters
from trainer.objective.batch import Batch, OfRows, Places
from trainer.objective.corruption import MASK_LOGIT_OFFSET, Corruption, corruption_from_uniforms, masked_log_probs
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.configuration import DiffusionSettings, NoiseSettings
from trainer.students.registry import STUDENTS, Student, StudentSettings


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
class ArrivalRows(OfRows):
    """Row noise held in memory: [B, L, V] arrival times."""

    arrivals: Tensor

    def at(self, where: Tensor | Places) -> Noise:
        """Noise of the masked positions."""
        return DenseNoise(Places.of(where).read(self.arrivals))


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
        block_size=config["block_size"],
        noise=NoiseSettings(injection=config["gumbel_inject_mode"]),
        diffusion=DiffusionSettings(
            loss_weighting="rate" if config["mdlm_loss_scale"] else "schedule",
            time_conditioning=config["time_conditioning"],
            resample=config["resample"],
        ),
    )


def student_of(golden: Golden, folder: Path, weights: dict[str, Tensor] | None = None) -> Student:
    """The student of a golden with its weights."""
    config = golden.info["config"]
    student_class = STUDENTS[config["model_family"].removesuffix("_gumbel")]
    sizes = {"vocab_size": config["vocab_size_with_mask"] - 1, "row_length": config["length"]}
    sizes |= {"bos_token_id": config["bos_id"], "eos_token_id": config["eos_id"]}
    student = student_class(student_class.config_class.build(settings_of(config), **sizes)).eval()
    parameters = our_parameters(weights or load_file(folder / golden.info["weights"]))
    missing, unexpected = student.load_state_dict(parameters, strict=False)
    if unexpected or set(missing) - {"time_bounds"}:
        raise ValueError(f"{golden.name}: missing {missing}, unexpected {unexpected}")
    return student


def batch_of(golden: Golden) -> Batch:
    """The golden's rows and noise as one global batch."""
    tokens, gumbel = golden["x0"], golden.tensors.get("gumbel")
    rows = torch.arange(tokens.shape[0])
    noise = None if gumbel is None else row_noise(gumbel, tokens.shape[1])
    return Batch(tokens, torch.zeros(tokens.shape), rows, rows, len(rows), 0, 0, noise)


def corruption_of(golden: Golden, settings: StudentSettings) -> Corruption:
    """Our corruption from the golden's uniforms."""

    def uniforms(round_number: int) -> Tensor:
        return golden["u_mask"] if round_number == 0 else golden["u_resample"][round_number - 1]

    bounds, rows = tuple(golden.info["sampling_eps"]), torch.arange(golden["x0"].shape[0])
    sizes = (rows, len(rows), settings.diffusion)
    return corruption_from_uniforms(golden["u_t"], uniforms, *sizes, bounds)


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


def condition_of(student: Student, gumbel: Tensor, tokens: Tensor) -> EmbeddedNoise:
    """[B, L, D] noise embeddings of every position; position 0 has none and stays 0."""
    filled = torch.zeros(tokens.shape, dtype=torch.bool)
    filled[:, 1 : 1 + gumbel.shape[1]] = True
    noise = student.embed_noise(row_noise(gumbel, tokens.shape[1]).at(filled))
    return noise.laid_out(filled.nonzero(as_tuple=True), tokens.shape)


def posterior_of(logits: Tensor, tokens: Tensor, zeta: Tensor, zeta_0: Tensor) -> Tensor:
    """xi [B, n-1, V] from the golden's draws (rows flattened over batch, then position)."""
    log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1).flatten(0, 1)
    others, first = (-zeta).exp().view(log_probs.shape), (-zeta_0).exp().flatten()
    noise = given_posterior(log_probs, tokens[:, 1:].flatten(), others, first)
    return noise.gumbels().unflatten(0, (tokens.shape[0], -1))


def substituted_log_probs(
    logits: Float[Tensor, "*s v1"], tokens: Int[Tensor, "*s"], mask_id: int
) -> Float[Tensor, "*s v1"]:
    """SUBS: the mask gets -1e6, log-softmax in float32, unmasked positions become one-hot."""
    log_probs = masked_log_probs(logits, mask_id)
    index = torch.arange(logits.shape[-1], device=logits.device)
    carried = torch.where(index == tokens[..., None], 0.0, MASK_LOGIT_OFFSET)
    return torch.where((tokens == mask_id)[..., None], log_probs, carried)


def predict(
    student: Any, tokens: Tensor, noise: EmbeddedNoise | None = None, sigma: Tensor | None = None
) -> Float[Tensor, "b l v1"]:
    """An MDLM's log-probabilities of x_0 (SUBS): one-hot where a token is known, the mask never."""
    logits = student._project(*student.sampling_states(tokens, noise, sigma))
    return substituted_log_probs(logits, tokens, student.mask_id)


def denoise(
    student: Any, noised: Tensor, clean: Tensor, noise: EmbeddedNoise | None = None, sigma: Tensor | None = None
) -> Float[Tensor, "b l v1"]:
    """Raw logits of an MDLM's training pass at every position; ``clean`` matters to block models."""
    embeddings, layer_noise = student.embed(noised, noise)
    level = student._level(sigma)
    return student._project(student.contextualize(embeddings, clean, level, layer_noise), level)
