"""What a student is made of: the settings a user chooses. Read without waiting for torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError, did_you_mean
from shards.settings import check_bounds, flatten, read_toml, setting, to_mapping

PRESETS = Path(__file__).resolve().parent.parent / "presets" / "students"


def require(condition: bool, name: str, got: object, expected: str) -> None:
    """A :class:`UsageError` about a setting of a student where the condition does not hold."""
    if not condition:
        raise UsageError("bad student setting", where=f"model.{name}", got=got, expected=expected)


@dataclass(frozen=True)
class NoiseSettings:
    """How the noise of masked positions enters a student.

    ``layers`` say after how many blocks masked positions attend to the vocabulary with the noise as
    bias (noise cross-attention): [1, 2] is behind the first and behind the second block.

    With a ``prior_share`` a student learns to weigh the noise against what it reads: a sampler's
    noise knows nothing of the tokens already drawn.
    """

    injection: Literal["replace", "add"] = setting(
        "replace", "Noise embedding in place of the mask embedding, or added to it."
    )
    transform: Literal["gumbel", "gaussian", "uniform"] = setting(
        "gumbel", "Marginal of the noise fed to softmax (the paper's ablations transform the draw)."
    )
    prior_weight: float = setting(
        0.0, "w in softmax(xi + w log q), q the corpus unigram; 0 is the paper.", within="[0, inf)"
    )
    projection: Literal["own", "tied"] = setting(
        "own", "W of its own, or tied: the token embedding times a D x D matrix."
    )
    rank: int | None = setting(None, "r where W is V x r times r x D.", within="[1, inf)")
    tau: float = setting(1.0, "Scale of xi in training (a sampler has its own).", within="(0, inf)")
    prior_share: float = setting(0.0, "Share of positions under prior noise.", within="[0, 1)")
    layers: tuple[int, ...] = setting(
        (), "Blocks behind which masked positions attend to the vocabulary, noise as bias."
    )
    top_k: int = setting(0, "Largest entries that these look at; 0 is all V.", within="[0, inf)")

    def __post_init__(self) -> None:
        check_bounds(self, "model.noise")
        own = self.rank is None or self.projection == "own"
        require(own, "noise.rank", self.rank, "none, or a projection of its own")
        used = self.top_k == 0 or bool(self.layers)
        require(used, "noise.top_k", self.top_k, "0, or at least 1 with noise.layers")


@dataclass(frozen=True)
class DiffusionSettings:
    """Times, masks and their weights in the loss.

    A masked token weighs p'(t) / p(t) (``schedule``, as in BD3-LM; 1/t for loglinear), or as in the
    older MDLM with p = (1 - 1e-3) t (``rate``). Validation keeps these weights whatever the cap.
    """

    schedule: Literal["loglinear", "square", "square_root", "log", "cosine"] = setting(
        "loglinear", "Masking probability as a function of time."
    )
    loss_weighting: Literal["schedule", "rate"] = setting(
        "schedule", "Weight of a masked token: p'(t) / p(t), or the older MDLM's."
    )
    max_loss_weight: float | None = setting(
        None, "Cap of that weight in training; 1 weighs every masked token alike.", within="(0, inf)"
    )
    fully_masked_share: float = setting(0.0, "Share of blocks at max_time.", within="[0, 1]")
    min_time: float = setting(1e-3, "Lower clip of t, where a search starts.", within="(0, 1]")
    max_time: float = setting(1.0, "Upper clip of t.", within="(0, 1]")
    resample: bool = setting(False, "Draw blocks anew whose masked fraction leaves the clips.")
    search_schedule: bool = setting(False, "Choose the clips by the loss's variance (var_min).")
    time_conditioning: bool = setting(False, "Tell the backbone the noise level, and not 0.")

    def __post_init__(self) -> None:
        check_bounds(self, "model.diffusion")
        expected = f"at most max_time = {self.max_time}"
        require(self.min_time <= self.max_time, "diffusion.min_time", self.min_time, expected)


@dataclass(frozen=True)
class DistillationSettings:
    """Knowledge distillation beside the noise, or without it.

    ``token`` adds the KL from the teacher's stored probabilities at the predicted positions,
    ``sequence`` demands a store whose rows the teacher wrote.
    """

    kind: Literal["none", "token", "sequence"] = setting(
        "none", "token: the KL from the teacher's probabilities; sequence: the teacher's own rows."
    )
    weight: float = setting(1.0, "Share of the KL in the loss; token only.", within="(0, 1]")
    temperature: float = setting(1.0, "T of the KL, which is scaled by T^2; token only.", within="(0, inf)")

    def __post_init__(self) -> None:
        check_bounds(self, "model.kd")


@dataclass(frozen=True)
class BackboneSettings:
    """The frozen language model that Medusa heads or a drafter stand on, and what is on it.

    A proposal may see the noise of its own token too (``seen``, the paper), or only that of the
    tokens before it (``hidden``): then its own noise is added when it decodes. A head's output
    layer is the backbone's, and what it learns beside that: nothing, a product, or a whole matrix.
    """

    location: str | None = setting(None, "Folder or hub id: the teacher of the shards.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Precision of its weights.")
    num_proposed: int = setting(3, "K, tokens that heads propose at once, or a drafter ahead.", within="[1, inf)")
    own_noise: Literal["hidden", "seen"] = setting("hidden", "Whether a proposal sees the noise of its own token.")
    head_output: Literal["shared", "low_rank", "full"] = setting(
        "shared", "What a Medusa head learns of its output layer."
    )
    head_rank: int = setting(64, "Rank of a low_rank head_output.", within="[1, inf)")

    def __post_init__(self) -> None:
        check_bounds(self, "model.backbone")


@dataclass(frozen=True)
class StudentSettings:
    """Architecture and objective of a student; everything but the vocabulary and the row length.

    Draws of dropout are keyed by step and process and follow the micro-batches, so with it runs of
    different world sizes differ in these draws. With ``predicts_next`` a state predicts the token
    after its own, as in a language model (DiffuLLaMA's shift); noise then lies one to the left too.
    ``--init-from`` a language model fills in ``language_model``. On a backbone the widths are those
    of what is trained beside it.
    """

    hidden_size: int = setting(768, "Width D.", within="[1, inf)")
    num_layers: int = setting(12, "Transformer blocks.", within="[1, inf)")
    num_heads: int = setting(12, "Attention heads, of even width.", within="[1, inf)")
    condition_size: int = setting(128, "Width of the vector behind adaLN.", within="[1, inf)")
    mlp_ratio: int = setting(4, "Hidden width of the MLP over hidden_size.", within="[1, inf)")
    dropout: float = setting(0.1, "Residual dropout probability.", within="[0, 1)")
    attention: Literal["auto", "sdpa", "flex"] = setting(
        "auto", "FlexAttention or SDPA for block masks; auto takes flex on CUDA."
    )
    embedding_init_std: float | None = setting(
        None, "Normal initial token embedding; none is kaiming-uniform.", within="(0, inf)"
    )
    conditioning: Literal["none", "gumbel"] = setting(
        "none", "Whether masked positions see Gumbel noise; a drafter's never do."
    )
    block_size: int | None = setting(None, "Tokens per block; none is the row.", within="[1, inf)")
    language_model: dict[str, Any] | None = setting(
        None, "Configuration of transformers' model whose layers stand in place of a DiT's."
    )
    predicts_next: bool = setting(False, "Whether a state predicts the token after its own.")
    noise: NoiseSettings = setting(factory=NoiseSettings)
    diffusion: DiffusionSettings = setting(factory=DiffusionSettings)
    kd: DistillationSettings = setting(factory=DistillationSettings)
    backbone: BackboneSettings = setting(factory=BackboneSettings)

    def __post_init__(self) -> None:
        check_bounds(self, "model")
        decoder, noise, width = self.language_model is not None, self.noise, self.hidden_size
        kind = (self.conditioning, noise.transform)
        heads = decoder or width % (2 * self.num_heads) == 0
        require(heads, "hidden_size", width, f"a multiple of {2 * self.num_heads}")
        wide = self.attention != "flex" or width >= 16 * self.num_heads
        require(wide, "attention", self.attention, "sdpa for heads narrower than 16")
        require((noise.rank or 1) <= width, "noise.rank", noise.rank, f"at most hidden_size = {width}")
        inside = all(1 <= depth <= self.num_layers for depth in noise.layers)
        require(inside, "noise.layers", noise.layers, f"depths in 1..{self.num_layers}")
        readable = not noise.layers or kind == ("gumbel", "gumbel")
        require(readable, "noise.layers", kind, "Gumbel noise as conditioning")
        timed = self.diffusion.time_conditioning and decoder
        require(not timed, "diffusion.time_conditioning", True, "false: a decoder knows no time")
        require(not self.predicts_next or decoder, "predicts_next", True, "false for a DiT")
        added = self.conditioning == "none" or noise.injection == "add" or not self.predicts_next
        require(added, "noise.injection", noise.injection, "add where predicts_next")


def unread_settings(reads: tuple[str, ...]) -> set[str]:
    """Dotted names of the settings that a student does not read, and refuses.

    ``reads`` are groups (``noise``) and single settings (``noise.transform``) that it reads beside
    its widths and ``conditioning``.
    """
    single = {"block_size", "language_model", "predicts_next"}
    names = {name for name in flatten(to_mapping(StudentSettings())) if "." in name}
    return {n for n in names | single if not {n, n.split(".")[0]} & set(reads)}


FLAT_BEFORE = {
    **{name: f"noise.{name}" for name in ("injection", "prior_weight")},
    **{f"noise_{name}": f"noise.{name}" for name in ("transform", "projection", "rank", "tau")},
    "prior_noise_share": "noise.prior_share",
    "noise_readings": "noise.layers",
    "reading_candidates": "noise.top_k",
    "noise_schedule": "diffusion.schedule",
    **{f.name: f"diffusion.{f.name}" for f in dataclasses.fields(DiffusionSettings)[1:]},
    "kd": "kd.kind",
    "kd_weight": "kd.weight",
    "kd_temperature": "kd.temperature",
    "backbone": "backbone.location",
    "backbone_dtype": "backbone.dtype",
    **{f.name: f"backbone.{f.name}" for f in dataclasses.fields(BackboneSettings)[2:]},
}
"""What settings were called before they lay in groups, in folders and checkpoints of that time."""
GONE = {"noise_init": "random", "time_beta": 1.0, "kd_time_step": 1 / 32, "kd_num_steps": 2, "lora_rank": 16}
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
    if backbone := found.get("backbone"):
        gone = ("lora_rank", "num_starts")
        found["backbone"] = {name: v for name, v in backbone.items() if name not in gone}
    return found


def read_named(folder: Path, name: str, what: str, where: str) -> dict[str, Any]:
    """The TOML file of that name in a folder; a UsageError that says ``what`` and the known names for another."""
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise UsageError(what, where=where, got=name, remedy=did_you_mean(name, known, f"known: {known}"))
    return read_toml(folder / f"{name}.toml")


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a named student preset (``tiny``, ``small``, ``medium``, ``maze``)."""
    return read_named(PRESETS, name, "unknown student preset", "architecture")
