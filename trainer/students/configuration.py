"""What a student is made of: the settings a user chooses. Read without waiting for torch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError
from shards.settings import read_toml

MEDUSA_SETTINGS = ("head_output", "head_rank")
"""Settings of Medusa heads alone."""
DRAFTER_SETTINGS = ("lora_rank", "num_starts")
"""Settings of the drafter alone."""
BACKBONE_SETTINGS = (
    "backbone",
    "backbone_dtype",
    "num_proposed",
    "own_noise",
    *MEDUSA_SETTINGS,
    *DRAFTER_SETTINGS,
)
"""Settings of the students that stand on a frozen language model, refused by all others."""
DIFFUSION_SETTINGS = (
    "injection",
    "noise_init",
    "prior_noise_share",
    "noise_readings",
    "reading_candidates",
    "block_size",
    "noise_schedule",
    "loss_weighting",
    "max_loss_weight",
    "time_beta",
    "fully_masked_share",
    "kd",
    "noise_projection",
    "noise_rank",
    "noise_tau",
    "min_time",
    "max_time",
    "resample",
    "search_schedule",
    "time_conditioning",
    "embedding_init_std",
    "language_model",
    "predicts_next",
)
"""Settings of the diffusion students, refused by those that stand on a language model."""
PRESETS = Path(__file__).resolve().parent.parent / "presets" / "students"


@dataclasses.dataclass(frozen=True)
class StudentSettings:
    """Architecture and objective of a student; everything but the vocabulary and the row length.

    Attributes:
        hidden_size: Width D.
        num_layers: Transformer blocks.
        num_heads: Attention heads; must divide ``hidden_size`` into even head widths.
        condition_size: Width of the noise-level vector behind adaLN.
        mlp_ratio: Hidden width of the MLP over ``hidden_size``.
        dropout: Residual dropout probability. Its draws are keyed by step and process and follow
            the micro-batches, so with it runs of different world sizes differ in these draws.
        conditioning: Whether masked positions see Gumbel noise; a drafter may see one uniform per
            token instead.
        injection: Noise embedding in place of the mask embedding, or added to it.
        noise_transform: Marginal of the noise fed to softmax: the Gumbel draw itself, or the same
            draw transformed monotonically to a Gaussian or a uniform (the paper's ablations).
        prior_weight: w in softmax(xi + w log q), q the corpus unigram; 0 is the paper.
        noise_projection: W of its own, or ``tied``: the token embedding times a D x D matrix.
        noise_rank: r of a W of its own that is the product of V x r and r x D; None is V x D.
        noise_init: Where the matrices begin that bring noise in: ``random`` as the authors', or
            ``zero``, so that a student begins as one without noise and learns to read by and by.
        noise_tau: Scale of xi in training (a sampler has its own).
        prior_noise_share: Share of the masked positions that see prior noise in training, which
            knows nothing of their token, as a sampler's noise knows nothing of the tokens already
            drawn: so a student learns to weigh the noise against what it reads. 0 is the paper.
        noise_readings: After how many blocks masked positions read the noise again, by attention
            over the vocabulary: (1, 2) is behind the first and behind the second block. Slots of a
            drafter wait there instead, read which token the one before them takes, and go through
            the backbone's layers above: (3, 3) runs those above the third twice.
        reading_candidates: K, the ids of largest tau xi + w log q that these readings look at; 0
            is the whole vocabulary, which holds V numbers per masked position.
        block_size: Tokens per block of a block-diffusion student; None is the whole row.
        noise_schedule: Masking probability as a function of time.
        loss_weighting: ``schedule`` weighs a masked token by p'(t) / p(t) (BD3-LM; 1/t for
            loglinear); ``rate`` is the older MDLM form with p = (1 - 1e-3) t.
        max_loss_weight: Cap of that weight: min(1/t, cap), so that 1 weighs every masked token
            alike. Training only: validation keeps the bound's weight. None is no cap.
        time_beta: a of t ~ Beta(a, 1) between the clips; 1 is uniform, 2 prefers masked rows.
        fully_masked_share: Share of the rows (BD3-LM: blocks) of a batch that train at
            ``max_time``, where few-step decoding begins.
        kd: Knowledge distillation: ``token`` adds the KL from the teacher's stored probabilities
            at the predicted positions, ``sequence`` demands a store whose rows the teacher wrote,
            ``through_time`` learns in one pass what the model of ``--init-from`` says in several.
        kd_weight: Share of the KL in the loss, the rest is the tokens' NLL; ``token`` only.
        kd_temperature: T of both distributions in the KL, which is scaled by T^2; ``token`` only.
        kd_time_step: dt of a step of the earlier model, 1 / NFE as a sampler takes it;
            ``through_time`` only.
        kd_num_steps: Steps of the earlier model that become one; ``through_time`` only.
        min_time: Lower clip of t; with ``search_schedule`` only where the search starts.
        max_time: Upper clip of t.
        resample: Draw blocks anew whose masked fraction leaves [min_time, max_time].
        search_schedule: Choose the clips by the variance of the loss at every validation (var_min).
        time_conditioning: Tell the backbone the noise level; otherwise it always sees 0.
        embedding_init_std: Normal initialisation of the token embedding; None is kaiming-uniform.
        attention: FlexAttention or SDPA for block masks; ``auto`` takes flex on CUDA.
        language_model: Configuration of the model of transformers whose layers, of these widths,
            the student has in place of a DiT; ``--init-from`` such a model fills it in.
        predicts_next: Whether a state predicts the token after its own, as in a language model
            (DiffuLLaMA's shift); noise then lies one to the left too.
        backbone: Folder or hub id of the frozen language model that the student stands on: the
            teacher of its shards. The widths above are then those of what is trained beside it.
        backbone_dtype: Precision of the backbone's weights.
        num_proposed: K, tokens that a student on a backbone proposes in one pass.
        head_output: What a Medusa head learns of its output layer beside the backbone's own, which
            all heads share: nothing, a product of rank ``head_rank``, or a whole matrix.
        head_rank: See ``head_output``.
        own_noise: Whether a proposal is told the noise of its own token too (the paper), or only
            that of the tokens before it; then its own noise is added when it decodes.
        lora_rank: Rank of a drafter's adapters.
        num_starts: Starting points of a row that a drafter learns from at a time.
    """

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    condition_size: int = 128
    mlp_ratio: int = 4
    dropout: float = 0.1
    conditioning: Literal["none", "gumbel", "uniform"] = "none"
    injection: Literal["replace", "add"] = "replace"
    noise_transform: Literal["gumbel", "gaussian", "uniform"] = "gumbel"
    prior_weight: float = 0.0
    noise_projection: Literal["own", "tied"] = "own"
    noise_rank: int | None = None
    noise_init: Literal["random", "zero"] = "random"
    noise_tau: float = 1.0
    prior_noise_share: float = 0.0
    noise_readings: tuple[int, ...] = ()
    reading_candidates: int = 0
    block_size: int | None = None
    noise_schedule: Literal["loglinear", "square", "square_root", "log", "cosine"] = "loglinear"
    loss_weighting: Literal["schedule", "rate"] = "schedule"
    max_loss_weight: float | None = None
    time_beta: float = 1.0
    fully_masked_share: float = 0.0
    kd: Literal["none", "token", "sequence", "through_time"] = "none"
    kd_weight: float = 1.0
    kd_temperature: float = 1.0
    kd_time_step: float = 1 / 32
    kd_num_steps: int = 2
    min_time: float = 1e-3
    max_time: float = 1.0
    resample: bool = False
    search_schedule: bool = False
    time_conditioning: bool = False
    embedding_init_std: float | None = None
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    language_model: dict[str, Any] | None = None
    predicts_next: bool = False
    backbone: str | None = None
    backbone_dtype: Literal["float32", "bfloat16"] = "float32"
    num_proposed: int = 3
    head_output: Literal["shared", "low_rank", "full"] = "shared"
    head_rank: int = 64
    own_noise: Literal["hidden", "seen"] = "hidden"
    lora_rank: int = 16
    num_starts: int = 32

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "condition_size", "mlp_ratio")
        for name in (*sizes, "num_proposed", "head_rank", "lora_rank", "num_starts"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        heads = self.language_model is not None or self.hidden_size % (2 * self.num_heads) == 0
        _require(heads, "hidden_size", self.hidden_size, f"a multiple of {2 * self.num_heads}")
        _require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        _require(self.prior_weight >= 0, "prior_weight", self.prior_weight, "0 or more")
        rank = self.noise_rank
        narrow = rank is None or (1 <= rank <= self.hidden_size and self.noise_projection == "own")
        expected = f"1..{self.hidden_size}, of a projection of its own"
        _require(narrow, "noise_rank", rank, expected)
        _require(0 < self.noise_tau < math.inf, "noise_tau", self.noise_tau, "positive and finite")
        prior = self.prior_noise_share
        _require(0 <= prior < 1, "prior_noise_share", prior, "in [0, 1)")
        readings = self.noise_readings
        deepest = math.inf if self.backbone else self.num_layers
        readable = all(1 <= depth <= deepest for depth in readings)
        _require(readable, "noise_readings", readings, f"depths in 1..{deepest}")
        kind = (self.conditioning, self.noise_transform)
        readable = not readings or kind == ("gumbel", "gumbel")
        _require(readable, "noise_readings", kind, "Gumbel noise as conditioning")
        count = self.reading_candidates
        used = count == 0 or (count > 0 and bool(readings))
        _require(used, "reading_candidates", count, "0, or at least 1 with noise_readings")
        block_ok = self.block_size is None or self.block_size >= 1
        _require(block_ok, "block_size", self.block_size, "at least 1")
        times = 0 < self.min_time <= self.max_time <= 1
        _require(times, "min_time", self.min_time, f"in (0, max_time = {self.max_time}] within 1")
        cap = self.max_loss_weight
        _require(cap is None or 0 < cap < math.inf, "max_loss_weight", cap, "positive and finite")
        _require(0 < self.time_beta < math.inf, "time_beta", self.time_beta, "positive and finite")
        share = self.fully_masked_share
        _require(0 <= share <= 1, "fully_masked_share", share, "in [0, 1]")
        timed = self.time_conditioning and self.language_model is not None
        _require(not timed, "time_conditioning", True, "false: a language model knows no time")
        shifted, taken = self.predicts_next, self.language_model is not None
        _require(not shifted or taken, "predicts_next", True, "false for a DiT")
        added = self.conditioning == "none" or self.injection == "add"
        _require(not shifted or added, "injection", "replace", "add where predicts_next")
        wide = self.attention != "flex" or self.hidden_size >= 16 * self.num_heads
        _require(wide, "attention", self.attention, "sdpa for heads narrower than 16")
        _require(0 < self.kd_weight <= 1, "kd_weight", self.kd_weight, "in (0, 1]")
        hot = 0 < self.kd_temperature < math.inf
        _require(hot, "kd_temperature", self.kd_temperature, "positive and finite")
        step = self.kd_time_step
        _require(0 < step < 1, "kd_time_step", step, "in (0, 1)")
        _require(self.kd_num_steps >= 2, "kd_num_steps", self.kd_num_steps, "at least 2")
        std = self.embedding_init_std
        _require(std is None or std > 0, "embedding_init_std", std, "positive")

    @property
    def as_bound(self) -> StudentSettings:
        """The same student under the bound's own weights and times: what validation measures."""
        return dataclasses.replace(
            self, max_loss_weight=None, time_beta=1.0, fully_masked_share=0.0
        )


def _require(condition: bool, name: str, got: object, expected: str) -> None:
    if not condition:
        raise UsageError("bad student setting", where=name, got=got, expected=expected)


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a named preset (``tiny``, ``small``, ``medium``, ``maze``), as a mapping.

    Raises:
        UsageError: For an unknown name, listing the known ones.
    """
    known = sorted(path.stem for path in PRESETS.glob("*.toml"))
    if name not in known:
        raise UsageError("unknown student preset", where=name, expected=f"one of {known}")
    return read_toml(PRESETS / f"{name}.toml")
