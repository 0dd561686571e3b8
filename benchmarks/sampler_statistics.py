"""Chi-square tests of the samplers against exact distributions of a tiny model.

The goldens enumerate, in float64, what each sampler of the reference makes of a model of few
tokens and short rows. Here ours draw many samples of the same model with fixed seeds; cells with
an expectation below 5 are pooled. Beside each p-value stands the power: the smallest effect size w
(w^2 = sum (q - p)^2 / p; total variation is at most w / 2) that the test would reject at the
stated level with probability 0.99. tests/trainer/sampling runs it at 20,000 samples a case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from scipy import optimize, stats
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from benchmarks.goldens import predict
from shards.settings import derive_seed
from trainer.importing import our_parameters
from trainer.sampling.block import BlockSampler, SequentialSampler
from trainer.sampling.fill import AncestralSampler, Pass, Rows, Sampler
from trainer.sampling.orders import FirstHittingSampler, FixedCountSampler
from trainer.students.registry import STUDENTS, Student, StudentSettings

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
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    p_value = 0.0 if impossible else p_value
    effect = detectable_effect(freedom, num) if freedom else 1.0
    return ChiSquare(case, int(num), len(expected), statistic, p_value, effect)


def detectable_effect(freedom: int, num_samples: float, power: float = 0.99) -> float:
    """Smallest effect size w that is rejected at ``LEVEL`` with the given power."""
    critical = stats.chi2.isf(LEVEL, freedom)
    root = optimize.brentq(lambda shift: stats.ncx2.sf(critical, freedom, shift) - power, 1e-6, 10 * (critical + 10))
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

    def exact(self, case: str) -> Float[Tensor, "*row"]:
        """Probability of each row behind bos, one axis a position; index V means still masked."""
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
        sizes = {"vocab_size": config["mask_id"], "row_length": config["length"]}
        built = STUDENTS[name].config_class.build(settings, **sizes, bos_token_id=config["bos_id"])
        student = STUDENTS[name](built).eval()
        kind = "ar" if name == "ar" else "gumbel" if conditioned else "dit"
        prefix = f"weights.{kind}."
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


@dataclass(frozen=True)
class Case:
    """A golden case, such as ``mdlm.ancestral_T2.p0.8.noise_removal`` or ``ar.p1.0``.

    ``num_steps`` is 0 where there is no T; with ``noise_removal`` a greedy pass fills what is still
    masked after T steps.
    """

    model: str
    sampler: str
    num_steps: int
    nucleus_p: float
    noise_removal: bool

    @classmethod
    def parse(cls, name: str) -> Case:
        """From the golden's name."""
        words, _, rest = name.partition(".p")
        model, _, sampler = words.partition(".")
        kind, _, steps = sampler.partition("_T")
        nucleus_p = float(rest.removesuffix(".noise_removal"))
        return cls(model, kind or "sequential", int(steps or 0), nucleus_p, "noise_removal" in rest)

    def config(self, sizes: dict) -> Sampler:
        """Our sampler of the case.

        Raises:
            ValueError: Where no sampler of ours reveals as many tokens a pass.
        """
        common, row_length = {"nucleus_p": self.nucleus_p}, sizes["length"]
        if self.sampler == "sequential":
            return SequentialSampler(**common)
        common["tau"] = 1.0 if self.model.endswith("_gumbel") else None
        if self.model.startswith("bd3lm"):
            block_size = sizes["block_size_bd3"]
            per_pass = block_size // self.num_steps if self.num_steps else 1
            if per_pass == block_size > 1:
                return BlockSampler(nfe=row_length // block_size, final_argmax=False, **common)
            if per_pass != 1:
                raise ValueError(f"{self}: {per_pass} tokens a pass in blocks of {block_size}")
            return BlockSampler(inner="first_hitting", **common)
        if self.sampler == "first_hitting":
            return FirstHittingSampler(**common)
        if self.sampler == "fixed_k":
            # The golden counts position 0 too: k = floor(L / T) of L - 1 masked tokens.
            masked, per_pass = row_length - 1, row_length // self.num_steps
            nfe = -(-masked // per_pass)
            if -(-masked // nfe) != min(per_pass, masked):
                raise ValueError(f"{self}: {per_pass} of {masked} tokens a pass")
            return FixedCountSampler(nfe=nfe, **common)
        sampler = AncestralSampler if self.noise_removal else StepsAlone
        return sampler(nfe=self.num_steps, **common)


@dataclass(frozen=True, kw_only=True)
class StepsAlone(AncestralSampler):
    """T ancestral steps and nothing more: a token stays masked with probability p(1e-5) / p(1)."""

    def order(self, rows: Rows) -> Iterator[Pass]:
        """Without the passes of the final fill, which have a rule of their own."""
        return (part for part in super().order(rows) if part.rule is None)


def count_rows(tokens: Int[Tensor, "n l"], num_values: int) -> Int[Tensor, "*row"]:
    """How often each row occurs behind its first token, one axis of ``num_values`` a position."""
    num_free = tokens.shape[1] - 1
    place = num_values ** torch.arange(num_free - 1, -1, -1)
    index = (tokens[:, 1:] * place).sum(dim=1)
    return torch.bincount(index, minlength=num_values**num_free).view((num_values,) * num_free)


def count_samples(
    goldens: Goldens, model: str, sampler: Sampler, name: str, num_samples: int, exact: Tensor
) -> Int[Tensor, "*row"]:
    """How often each row of ``exact`` was drawn; masks are left where the sampler leaves them."""
    student, seed = goldens.student(model), derive_seed("sampler statistics", name)
    counts = torch.zeros(exact.shape, dtype=torch.int64)
    for first in range(0, num_samples, BATCH):
        ids = torch.arange(first, min(first + BATCH, num_samples))
        tokens, noise = goldens.rows(len(ids)), goldens.noise(model, len(ids))
        drawn = sampler.sample(student, tokens, ids, noise, seed).tokens
        counts += count_rows(drawn, exact.shape[0])
    return counts


def run_case(goldens: Goldens, case: str, num_samples: int, *, judged_by: str | None = None) -> ChiSquare:
    """Draw ``num_samples`` samples of a case and test them, against another case if told."""
    exact, parsed = goldens.exact(judged_by or case), Case.parse(case)
    sampler = parsed.config(goldens.info["config"])
    counts = count_samples(goldens, parsed.model, sampler, case, num_samples, exact)
    return chi_square(case, counts, exact)


def exact_one_step(goldens: Goldens, tau: float) -> Float[Tensor, "*row"]:
    """T = 1, all positions at once: the product of the marginals at this tau."""
    student, noise = goldens.student("mdlm_gumbel"), goldens.noise("mdlm_gumbel", 1)
    assert noise is not None
    condition = student.embed_noise(noise, tau)[None]
    with torch.no_grad():
        p = predict(student, goldens.rows(1), condition)[0, 1:].double().exp()
    return reduce(lambda rows, marginal: rows[..., None] * marginal, p)


def run_tau(goldens: Goldens, tau: float, num_samples: int, *, judged_by: float) -> ChiSquare:
    """One ancestral step at ``tau`` against the exact distribution at ``judged_by``."""
    sampler = AncestralSampler(nfe=1, tau=tau, final_argmax=False)
    exact = exact_one_step(goldens, judged_by)
    counts = count_samples(goldens, "mdlm_gumbel", sampler, "tau", num_samples, exact)
    return chi_square(f"mdlm_gumbel, T 1, tau {tau}, judged at {judged_by}", counts, exact)
