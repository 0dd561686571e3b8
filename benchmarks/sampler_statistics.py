"""Chi-square tests of the samplers against exact distributions of a tiny model.

The goldens enumerate, in float64, what each sampler of the reference makes of a model of five
tokens and rows of four. Here ours draw many samples of the same model with fixed seeds; cells with
an expectation below 5 are pooled. Beside each p-value stands the power: the smallest effect size w
(w^2 = sum (q - p)^2 / p; total variation is at most w / 2) that the test would reject at the
stated level with probability 0.99.

python -m benchmarks.sampler_statistics [--golden DIR] [--num 200000] [--out DIR]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from scipy import optimize, stats
from torch import Tensor

from shards.noise import DenseNoise
from shards.seeding import derive_seed
from trainer.import_checkpoint import our_parameters
from trainer.sampling.ancestral import AncestralConfig
from trainer.sampling.draws import SampleKeys
from trainer.sampling.first_hitting import FirstHittingConfig, FixedCountConfig
from trainer.sampling.reveal import inference, reveal
from trainer.sampling.whole_row import NoiseUse, WholeRow
from trainer.students import STUDENTS, Student, StudentSettings

LEVEL = 1e-4
"""Significance of one case: about 1 false alarm in 250 runs of the whole table, were seeds free."""
MIN_EXPECTATION = 5.0
BATCH = 20_000


@dataclass(frozen=True)
class ChiSquare:
    """The outcome of one test."""

    case: str
    num_samples: int
    num_cells: int
    statistic: float
    p_value: float
    detectable_effect: float

    @property
    def passed(self) -> bool:
        """Not rejected at ``LEVEL``."""
        return self.p_value > LEVEL


def chi_square(case: str, counts: Tensor, expected_probs: Tensor) -> ChiSquare:
    """Pearson's test with small cells pooled; a sample in an impossible cell fails it outright."""
    counts_, probs = counts.flatten().double().numpy(), expected_probs.flatten().double().numpy()
    num = counts_.sum()
    probs = probs / probs.sum()
    small = num * probs < MIN_EXPECTATION
    observed = np.append(counts_[~small], counts_[small].sum())
    expected = num * np.append(probs[~small], probs[small].sum())
    impossible = bool((counts_[probs <= 0] > 0).any())
    if expected[-1] < MIN_EXPECTATION:  # the pool itself is small: join it to the smallest cell
        smallest = int(expected[:-1].argmin())
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    p_value = 0.0 if impossible else 1.0
    if freedom and not impossible:
        p_value = float(stats.chi2.sf(statistic, freedom))
    effect = detectable_effect(freedom, num) if freedom else float("inf")
    return ChiSquare(case, int(num), len(expected), statistic, p_value, effect)


def detectable_effect(freedom: int, num_samples: float, power: float = 0.99) -> float:
    """Smallest effect size w that is rejected at ``LEVEL`` with the given power."""
    critical = stats.chi2.isf(LEVEL, freedom)

    def excess(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, freedom, noncentrality)) - power

    root = optimize.brentq(excess, 1e-6, 10 * (critical + 10))
    return float(np.sqrt(root / num_samples))


@dataclass(frozen=True)
class Goldens:
    """The exact distributions, the tiny models behind them and the fixed noise."""

    tensors: dict[str, Tensor]
    info: dict

    @classmethod
    def read(cls, folder: Path) -> Goldens:
        """Load samplers.safetensors and samplers.json."""
        info = json.loads((folder / "samplers.json").read_text())
        return cls(load_file(folder / "samplers.safetensors"), info)

    def exact(self, case: str) -> Float[Tensor, "v v v"]:
        """Probability of each row behind bos; index V means still masked."""
        return self.tensors[f"{case}.exact"]

    def student(self, model: str) -> Student:
        """The student of a case family: mdlm, mdlm_gumbel, bd3lm or bd3lm_gumbel."""
        config = self.info["config"]
        conditioned = model.endswith("_gumbel")
        name = model.removesuffix("_gumbel")
        settings = StudentSettings(
            hidden_size=config["hidden_size"],
            num_layers=config["n_blocks"],
            num_heads=config["n_heads"],
            condition_size=config["cond_dim"],
            dropout=0.0,
            conditioning="gumbel" if conditioned else "none",
            block_size=config["block_size_bd3"] if name == "bd3lm" else None,
        )
        student_class = STUDENTS[name]
        student = student_class(
            student_class.config_class.build(
                settings,
                vocab_size=config["mask_id"],
                row_length=config["length"],
                bos_token_id=config["bos_id"],
            )
        ).eval()
        prefix = "weights.gumbel." if conditioned else "weights.dit."
        weights = {k.removeprefix(prefix): v for k, v in self.tensors.items() if prefix in k}
        missing, unexpected = student.load_state_dict(our_parameters(weights), strict=False)
        assert set(missing) <= {"time_bounds"} and not unexpected, (missing, unexpected)
        return student

    def rows(self, num: int) -> Int[Tensor, "b l"]:
        """Rows to fill: bos and masks."""
        config = self.info["config"]
        tokens = torch.full((num, config["length"]), config["mask_id"])
        tokens[:, 0] = config["bos_id"]
        return tokens

    def noise(self, model: str, num: int) -> DenseNoise | None:
        """The same noise vectors for every sample; vector i belongs to position i + 1."""
        if not model.endswith("_gumbel"):
            return None
        arrivals = torch.exp(-self.tensors["gumbel_fixed"])
        padded = torch.nn.functional.pad(arrivals, (0, 0, 1, 0), value=1.0)
        return DenseNoise(padded.expand(num, -1, -1).flatten(0, 1))


def parse_case(case: str) -> tuple[str, str, float, bool]:
    """``mdlm.ancestral_T2.p0.8.noise_removal`` -> model, sampler, nucleus p, noise removal."""
    model, sampler, rest = case.split(".", 2)
    return model, sampler, float(rest.removesuffix(".noise_removal")[1:]), "noise_removal" in rest


def draw_whole_rows(goldens: Goldens, case: str, sample_ids: Tensor, seed: int) -> Tensor:
    """Samples of an MDLM case: [N, L], with masks left where the golden leaves them."""
    model, sampler, nucleus_p, noise_removal = parse_case(case)
    student, num = goldens.student(model), len(sample_ids)
    tokens, noise = goldens.rows(num), goldens.noise(model, num)
    tau = 1.0 if noise is not None else None
    if sampler == "first_hitting":
        config = FirstHittingConfig(nucleus_p=nucleus_p, tau=tau)
        return config.sample(student, tokens, sample_ids, noise, seed).tokens
    nfe = int(sampler.rpartition("_T")[2])
    if sampler.startswith("fixed_k"):
        # The golden counts position 0 too: k = floor(4 / T) of 3 masked tokens.
        config = FixedCountConfig(nucleus_p=nucleus_p, tau=tau, nfe=-(-3 // (4 // nfe)))
        return config.sample(student, tokens, sample_ids, noise, seed).tokens
    config = AncestralConfig(nfe=nfe, nucleus_p=nucleus_p, tau=tau)
    if noise_removal:
        return config.sample(student, tokens, sample_ids, noise, seed).tokens
    return _without_final_fill(config, student, tokens, sample_ids, noise, seed)


def _without_final_fill(config, student, tokens, sample_ids, noise, seed) -> Tensor:
    """T ancestral steps and nothing more: a token stays masked with probability 1e-5."""
    keys = SampleKeys(seed, sample_ids)
    use = NoiseUse(noise, config.tau).checked(student, tokens.numel())
    with inference(student):
        predict = WholeRow(student, tokens, use, config.times)
        drawn, _ = config.steps(student, predict.masked, keys)
        return reveal(predict, tokens, drawn, config.rule, keys)[0]


def count_rows(tokens: Int[Tensor, "n l"], num_values: int) -> Int[Tensor, "v v v"]:
    """How often each row occurs behind its first token."""
    place = torch.tensor([num_values**2, num_values, 1])
    index = (tokens[:, 1:] * place).sum(dim=1)
    return torch.bincount(index, minlength=num_values**3).view((num_values,) * 3)


def run_case(
    goldens: Goldens, case: str, num_samples: int, *, judged_by: str | None = None
) -> ChiSquare:
    """Draw ``num_samples`` samples of a case and test them, against another case if told."""
    exact = goldens.exact(judged_by or case)
    seed = derive_seed("sampler statistics", case)
    counts = torch.zeros(exact.shape, dtype=torch.int64)
    for first in range(0, num_samples, BATCH):
        ids = torch.arange(first, min(first + BATCH, num_samples))
        counts += count_rows(draw_whole_rows(goldens, case, ids, seed), exact.shape[0])
    return chi_square(case, counts, exact)
