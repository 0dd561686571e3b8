"""What a student is made of: the settings a user chooses. Read without waiting for torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError
from shards.settings import check_bounds, flatten, read_toml, setting, to_mapping

PRESETS = Path(__file__).resolve().parent.parent / "presets" / "students"


def require(condition: bool, name: str, got: object, expected: str) -> None:
    """Refuse a setting of a student.

    Raises:
        UsageError: Where the condition does not hold.
    """
    if not condition:
        raise UsageError("bad student setting", where=f"model.{name}", got=got, expected=expected)


@dataclass(frozen=True)
class NoiseSettings:
    """How the noise of masked positions enters a student."""

    injection: Literal["replace", "add"] = setting(
        "replace", "Noise embedding in place of the mask embedding, or added to it."
    )
    transform: Literal["gumbel", "gaussian", "uniform"] = setting(
        "gumbel",
        "Marginal of the noise fed to softmax: the Gumbel draw itself, or the same draw transformed"
        " monotonically to a Gaussian or a uniform (the paper's ablations).",
    )
    prior_weight: float = setting(
        0.0, "w in softmax(xi + w log q), q the corpus unigram; 0 is the paper.", within="[0, inf)"
    )
    projection: Literal["own", "tied"] = setting(
        "own", "W of its own, or tied: the token embedding times a D x D matrix."
    )
    rank: int | None = setting(
        None,
        "r of a W of its own that is the product of V x r and r x D; none is V x D.",
        within="[1, inf)",
    )
    tau: float = setting(1.0, "Scale of xi in training (a sampler has its own).", within="(0, inf)")
    prior_share: float = setting(
        0.0,
        "Share of the masked positions that see prior noise in training, which knows nothing of"
        " their token, as a sampler's noise knows nothing of the tokens already drawn: so a student"
        " learns to weigh the noise against what it reads. 0 is the paper.",
        within="[0, 1)",
    )
    layers: tuple[int, ...] = setting(
        (),
        "After how many blocks masked positions attend to the vocabulary with the noise as bias"
        " (noise cross-attention): [1, 2] is behind the first and behind the second block.",
    )
    top_k: int = setting(
        0,
        "Ids of largest tau xi + w log q that this attention looks at; 0 is the whole vocabulary,"
        " which holds V numbers per masked position.",
        within="[0, inf)",
    )

    def __post_init__(self) -> None:
        check_bounds(self, "model.noise")
        own = self.rank is None or self.projection == "own"
        require(own, "noise.rank", self.rank, "none, or a projection of its own")
        used = self.top_k == 0 or bool(self.layers)
        require(used, "noise.top_k", self.top_k, "0, or at least 1 with noise.layers")


@dataclass(frozen=True)
class DiffusionSettings:
    """Times, masks and their weights in the loss."""

    schedule: Literal["loglinear", "square", "square_root", "log", "cosine"] = setting(
        "loglinear", "Masking probability as a function of time."
    )
    loss_weighting: Literal["schedule", "rate"] = setting(
        "schedule",
        "schedule weighs a masked token by p'(t) / p(t) (BD3-LM; 1/t for loglinear); rate is the"
        " older MDLM form with p = (1 - 1e-3) t.",
    )
    max_loss_weight: float | None = setting(
        None,
        "Cap of that weight: min(1/t, cap), so that 1 weighs every masked token alike. Training"
        " only: validation keeps the bound's weight. None is no cap.",
        within="(0, inf)",
    )
    fully_masked_share: float = setting(
        0.0,
        "Share of the rows (BD3-LM: blocks) of a batch that train at max_time, where few-step"
        " decoding begins.",
        within="[0, 1]",
    )
    min_time: float = setting(
        1e-3,
        "Lower clip of t; with search_schedule only where the search starts.",
        within="(0, 1]",
    )
    max_time: float = setting(1.0, "Upper clip of t.", within="(0, 1]")
    resample: bool = setting(
        False, "Draw blocks anew whose masked fraction leaves [min_time, max_time]."
    )
    search_schedule: bool = setting(
        False, "Choose the clips by the variance of the loss at every validation (var_min)."
    )
    time_conditioning: bool = setting(
        False, "Tell the backbone the noise level; otherwise it always sees 0."
    )

    def __post_init__(self) -> None:
        check_bounds(self, "model.diffusion")
        expected = f"at most max_time = {self.max_time}"
        require(self.min_time <= self.max_time, "diffusion.min_time", self.min_time, expected)

    @property
    def as_bound(self) -> DiffusionSettings:
        """The same under the bound's own weights and times: what validation measures."""
        return dataclasses.replace(self, max_loss_weight=None, fully_masked_share=0.0)


@dataclass(frozen=True)
class DistillationSettings:
    """Knowledge distillation beside the noise, or without it."""

    kind: Literal["none", "token", "sequence"] = setting(
        "none",
        "token adds the KL from the teacher's stored probabilities at the predicted positions,"
        " sequence demands a store whose rows the teacher wrote.",
    )
    weight: float = setting(
        1.0,
        "Share of the KL in the loss, the rest is the tokens' NLL; token only.",
        within="(0, 1]",
    )
    temperature: float = setting(
        1.0,
        "T of both distributions in the KL, which is scaled by T^2; token only.",
        within="(0, inf)",
    )

    def __post_init__(self) -> None:
        check_bounds(self, "model.kd")


@dataclass(frozen=True)
class BackboneSettings:
    """The frozen language model that Medusa heads or a drafter stand on, and what is on it."""

    location: str | None = setting(
        None,
        "Folder or hub id: the teacher of the shards. The student's own widths are then those of"
        " what is trained beside it.",
    )
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Precision of its weights.")
    num_proposed: int = setting(
        3, "K, tokens that heads propose at once, or steps of a drafter.", within="[1, inf)"
    )
    own_noise: Literal["hidden", "seen"] = setting(
        "hidden",
        "Whether a proposal sees the noise of its own token too (the paper), or only that of the"
        " tokens before it; then its own noise is added when it decodes.",
    )
    head_output: Literal["shared", "low_rank", "full"] = setting(
        "shared",
        "What a Medusa head learns of its output layer beside the backbone's own, which all heads"
        " share: nothing, a product of rank head_rank, or a whole matrix.",
    )
    head_rank: int = setting(64, "See head_output.", within="[1, inf)")
    num_starts: int = setting(
        32, "Starting points of a row that a drafter learns from at a time.", within="[1, inf)"
    )

    def __post_init__(self) -> None:
        check_bounds(self, "model.backbone")


@dataclass(frozen=True)
class StudentSettings:
    """Architecture and objective of a student; everything but the vocabulary and the row length."""

    hidden_size: int = setting(768, "Width D.", within="[1, inf)")
    num_layers: int = setting(12, "Transformer blocks.", within="[1, inf)")
    num_heads: int = setting(
        12, "Attention heads; must divide hidden_size into even head widths.", within="[1, inf)"
    )
    condition_size: int = setting(
        128, "Width of the noise-level vector behind adaLN.", within="[1, inf)"
    )
    mlp_ratio: int = setting(4, "Hidden width of the MLP over hidden_size.", within="[1, inf)")
    dropout: float = setting(
        0.1,
        "Residual dropout probability. Its draws are keyed by step and process and follow the"
        " micro-batches, so with it runs of different world sizes differ in these draws.",
        within="[0, 1)",
    )
    attention: Literal["auto", "sdpa", "flex"] = setting(
        "auto", "FlexAttention or SDPA for block masks; auto takes flex on CUDA."
    )
    embedding_init_std: float | None = setting(
        None,
        "Normal initialisation of the token embedding; none is kaiming-uniform.",
        within="(0, inf)",
    )
    conditioning: Literal["none", "gumbel"] = setting(
        "none", "Whether masked positions see Gumbel noise; a drafter's never do."
    )
    block_size: int | None = setting(
        None, "Tokens per block of a block-diffusion student; none is the row.", within="[1, inf)"
    )
    language_model: dict[str, Any] | None = setting(
        None,
        "Configuration of the model of transformers whose layers, of these widths, the student has"
        " in place of a DiT; --init-from such a model fills it in.",
    )
    predicts_next: bool = setting(
        False,
        "Whether a state predicts the token after its own, as in a language model (DiffuLLaMA's"
        " shift); noise then lies one to the left too.",
    )
    noise: NoiseSettings = setting(factory=NoiseSettings)
    diffusion: DiffusionSettings = setting(factory=DiffusionSettings)
    kd: DistillationSettings = setting(factory=DistillationSettings)
    backbone: BackboneSettings = setting(factory=BackboneSettings)

    def __post_init__(self) -> None:
        check_bounds(self, "model")
        decoder, noise = self.language_model is not None, self.noise
        heads = decoder or self.hidden_size % (2 * self.num_heads) == 0
        require(heads, "hidden_size", self.hidden_size, f"a multiple of {2 * self.num_heads}")
        wide = self.attention != "flex" or self.hidden_size >= 16 * self.num_heads
        require(wide, "attention", self.attention, "sdpa for heads narrower than 16")
        narrow = (noise.rank or 1) <= self.hidden_size
        require(narrow, "noise.rank", noise.rank, f"at most hidden_size = {self.hidden_size}")
        inside = all(1 <= depth <= self.num_layers for depth in noise.layers)
        require(inside, "noise.layers", noise.layers, f"depths in 1..{self.num_layers}")
        kind = (self.conditioning, noise.transform)
        readable = not noise.layers or kind == ("gumbel", "gumbel")
        require(readable, "noise.layers", kind, "Gumbel noise as conditioning")
        timed = self.diffusion.time_conditioning and decoder
        require(not timed, "diffusion.time_conditioning", True, "false: a decoder knows no time")
        require(not self.predicts_next or decoder, "predicts_next", True, "false for a DiT")
        added = self.conditioning == "none" or noise.injection == "add" or not self.predicts_next
        require(added, "noise.injection", noise.injection, "add where predicts_next")


def unread_settings(reads: tuple[str, ...]) -> set[str]:
    """Dotted names of the settings that a student does not read, and refuses.

    Args:
        reads: What it reads: groups (``noise``) and single settings (``noise.transform``). Every
            student reads its widths and ``conditioning``.
    """
    groups = {"noise", "diffusion", "kd", "backbone"}
    single = {"block_size", "language_model", "predicts_next"}
    names = {n for n in flatten(to_mapping(StudentSettings())) if n.split(".")[0] in groups}
    return {n for n in names | single if not {n, n.split(".")[0]} & set(reads)}


def _names(settings: type[Any], first: int) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)[first:]]


FLAT_BEFORE = {
    **{name: f"noise.{name}" for name in ("injection", "prior_weight")},
    **{f"noise_{name}": f"noise.{name}" for name in ("transform", "projection", "rank", "tau")},
    "prior_noise_share": "noise.prior_share",
    "noise_readings": "noise.layers",
    "reading_candidates": "noise.top_k",
    "noise_schedule": "diffusion.schedule",
    **{name: f"diffusion.{name}" for name in _names(DiffusionSettings, 1)},
    "kd": "kd.kind",
    "kd_weight": "kd.weight",
    "kd_temperature": "kd.temperature",
    "backbone": "backbone.location",
    "backbone_dtype": "backbone.dtype",
    **{name: f"backbone.{name}" for name in _names(BackboneSettings, 2)},
}
"""What settings were called before they lay in groups, in folders and checkpoints of that time."""
GONE = {
    "noise_init": "random",
    "time_beta": 1.0,
    "kd_time_step": 1 / 32,
    "kd_num_steps": 2,
    "lora_rank": 16,
}
"""Settings that are no more, and the values at which they did nothing."""


def grouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as this version names them, from a file that it or an older one has written.

    What is no more stays where it did something, for the caller to refuse or to leave.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        group, _, inner = FLAT_BEFORE.get(name, "").partition(".")
        if group and not isinstance(value, Mapping):
            found.setdefault(group, {})[inner] = value
        elif name not in GONE or value != GONE[name]:
            found[name] = value
    if "lora_rank" in (backbone := found.get("backbone", {})):
        found["backbone"] = {name: v for name, v in backbone.items() if name != "lora_rank"}
    return found


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a named preset (``tiny``, ``small``, ``medium``, ``maze``), as a mapping.

    Raises:
        UsageError: For an unknown name, listing the known ones.
    """
    known = sorted(path.stem for path in PRESETS.glob("*.toml"))
    if name not in known:
        raise UsageError("unknown student preset", where=name, expected=f"one of {known}")
    return read_toml(PRESETS / f"{name}.toml")
