"""What all students share: their config on disk, the loss record, the noise embedding, the Hugging Face side."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from shards.codec.protocol import Codec, make_codec
from shards.errors import UsageError, did_you_mean
from shards.noise.embedding import Noise
from shards.settings import from_mapping, to_mapping
from shards.store.manifest import Manifest
from trainer.objective.batch import Batch, Places, StoredRowNoise
from trainer.objective.distillation import Distillation
from trainer.students.conditioning import EmbeddedNoise, GumbelConditioner
from trainer.students.configuration import GONE, StudentSettings, grouped, require
from trainer.students.decoder import DecoderBackbone
from trainer.students.dit import DiT, Level, States, Tokens
from trainer.students.noise_attention import layer_scores

OURS = tuple(field.name for field in dataclasses.fields(StudentSettings))
UNREAD: dict[str, tuple[bool, ...]] = {"use_cache": (True, False), "return_dict": (True,)}
UNREAD |= {"output_attentions": (False,), "output_hidden_states": (False,)}
"""Arguments of Hugging Face's callers that change nothing at these values (or None)."""


class StudentConfig(PretrainedConfig):
    """Hugging Face config of a student: :class:`StudentSettings`, and the data's shape.

    ``vocab_size`` is V, the teacher's vocabulary *without* the mask: the mask id is ``vocab_size``,
    and embedding and output layer have ``vocab_size + 1`` rows.

    Attributes:
        row_length: Tokens per row L.
        codec: ``{"name": ..., "parameters": {...}}`` of the store whose noise the student has
            learnt to read; None for the untruncated prior.
        frozen: Name, hash and sizes of the backbone that the student stands on, if it does.

    Raises:
        UsageError: For a key that neither a student nor transformers knows, or a bad value.
    """

    # transformers builds __init__ (and its **kwargs) itself, which jaxtyping's wrapper cannot bind.
    __no_type_check__ = True
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "row_length",
    }
    of_transformers: ClassVar[frozenset[str]] = frozenset(
        {*PretrainedConfig().to_dict(), "torch_dtype", "name_or_path", "attn_implementation"}
        | {"_commit_hash", "_attn_implementation_autoset", "num_labels", "auto_map", "use_cache"}
        | {"experts_implementation", "pad_token_id", "tie_word_embeddings"}
    )
    vocab_size: int = 50257
    row_length: int = 1024
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    codec: dict[str, Any] | None = None
    frozen: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for standard, ours in self.attribute_map.items():
            if standard in kwargs:
                value = kwargs.pop(standard)
                setattr(self, ours, value)
                kwargs.setdefault(ours, value)
        kwargs.pop("row_length", None)
        values = {name: v for name, v in grouped(kwargs).items() if name not in GONE}
        if values.get("kd", {}).get("kind") == "through_time":
            values["kd"]["kind"] = "none"  # how an older version taught it, not what it is
        known = {*OURS, *self.of_transformers, "mask_id"}
        for name in values.keys() - known:
            hint = did_you_mean(name, known, "it was written by another version, or changed")
            raise UsageError("unknown config key", where=f"config.json: {name}", remedy=hint)
        settings = from_mapping(StudentSettings, {n: v for n, v in values.items() if n in OURS})
        for name, value in to_mapping(settings).items():
            setattr(self, name, value)
        super().__post_init__(**{n: v for n, v in values.items() if n not in OURS})
        # Not mask_token_id: transformers would warn that it lies past the vocabulary, as it should.
        self.mask_id = self.vocab_size
        require(self.vocab_size >= 2, "vocab_size", self.vocab_size, "at least 2")
        require(self.row_length >= 2, "row_length", self.row_length, "at least 2")
        require(
            settings.noise.top_k <= self.vocab_size, "noise.top_k", settings.noise.top_k, f"at most V = {self.mask_id}"
        )
        expected = f"a divisor of row_length = {self.row_length}"
        require(self.row_length % self.tokens_per_block == 0, "block_size", settings.block_size, expected)

    @classmethod
    def build(cls, settings: StudentSettings, **data: int | None) -> StudentConfig:
        """The config of these settings over data: ``vocab_size``, ``row_length`` and so on."""
        return cls(**data, **to_mapping(settings))

    @property
    def settings(self) -> StudentSettings:
        """The user's part of the config, typed and validated."""
        return from_mapping(StudentSettings, {name: getattr(self, name) for name in OURS})

    @property
    def first_token_id(self) -> int | None:
        """Begins an unconditional sample: bos, or eos where there is no bos."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    def require_first_token(self) -> int:
        """``first_token_id``, or a UsageError."""
        if (first := self.first_token_id) is None:
            what, remedy = "the model has no bos and no eos token to begin with", "give a prompt"
            raise UsageError(what, where="first token", remedy=remedy)
        return first

    @property
    def tokens_per_block(self) -> int:
        """Block size in tokens; the whole row when none is set."""
        return getattr(self, "block_size", None) or self.row_length


@dataclass(frozen=True)
class LossOutput:
    """One batch's loss.

    Attributes:
        loss: Scalar to differentiate: weighted NLL of the masked tokens over B * L.
        token_nlls: [B, L] weighted NLL of each token in nats, detached; 0 where not masked.
        num_tokens: Tokens that count in validation (position 0 of a diffusion row does not).
        num_masked: Rows that met the output head.
        num_blocks: Blocks per row, nb.
    """

    loss: Float[Tensor, ""]
    token_nlls: Float[Tensor, "b l"]
    num_tokens: int
    num_masked: int
    num_blocks: int

    @property
    def nll_sum(self) -> Float[Tensor, ""]:
        """Nats; over ``num_tokens`` it bounds the NLL per token (validation)."""
        return self.token_nlls.sum()

    @property
    def row_nlls(self) -> Float[Tensor, "b"]:
        """Nats of each row: names the row behind a NaN."""
        return self.token_nlls.sum(dim=1)

    @property
    def block_nlls(self) -> Float[Tensor, "b blocks"]:
        """Mean over each block's tokens."""
        return self.token_nlls.unflatten(1, (self.num_blocks, -1)).mean(dim=-1)


def before_float32(value: float) -> float:
    """The number of at most six significant digits that a float32 came from."""
    return float(f"{value:.6g}")


class Student(PreTrainedModel, ABC):
    """Base of the students; subclasses say what they predict and what they minimise."""

    config: StudentConfig
    config_class: type[StudentConfig] = StudentConfig  # type: ignore[assignment]
    time_bounds: Tensor
    base_model_prefix = "student"
    uses_sigma = takes_noise = True
    default_sampler = "ancestral"
    reads: ClassVar[tuple[str, ...]] = ()
    """Settings and groups of them beside the widths; see :func:`unread_settings`."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__(config)
        settings = self.settings = config.settings
        self._build(config)
        self.conditioner = self._make_conditioner()
        bounds = torch.tensor([settings.diffusion.min_time, settings.diffusion.max_time])
        self.register_buffer("time_bounds", bounds)
        # What the buffer said at that version of it: reading it makes the host wait for a GPU.
        self._clips: tuple[Tensor, int, tuple[float, float]] | None = None
        self.post_init()

    def _build(self, config: StudentConfig) -> None:
        """Make the modules that are trained, the noise embedding aside."""
        if self.settings.language_model is None:
            self.backbone: Any = DiT(self.settings, config.vocab_size, uses_sigma=self.uses_sigma)
        else:
            self.backbone = DecoderBackbone(self.settings, config.vocab_size)

    def _make_conditioner(self) -> GumbelConditioner | None:
        if (kind := self.settings.conditioning) == "none":
            return None
        require(self.takes_noise, "conditioning", kind, "none: this student takes no noise")
        return GumbelConditioner(self.config.vocab_size, self.settings.hidden_size, self.settings.noise)

    @classmethod
    def configure(cls, settings: StudentSettings, manifest: Manifest) -> StudentConfig:
        """The config of a student with these settings for that store."""
        ends = {"bos_token_id": manifest.bos_id, "eos_token_id": manifest.eos_id}
        return cls.config_class.build(settings, vocab_size=manifest.vocab_size, row_length=manifest.row_length, **ends)

    @classmethod
    def make(cls, settings: StudentSettings, manifest: Manifest) -> Student:
        """The student at step 0, with initial weights drawn from torch's global generator."""
        return cls(cls.configure(settings, manifest))

    def complete(self, directory: Path, backbone: str | None = None) -> None:
        """Bring in what a model folder only names: its language model, here or at ``backbone`` (else UsageError)."""
        if backbone is not None:
            remedy = "leave --backbone out"
            raise UsageError("the student stands on no backbone", got=backbone, remedy=remedy)

    def published(self, directory: Path) -> dict[str, Any]:
        """Fields of the config that read otherwise in the model folder ``directory``."""
        return {}

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    @property
    def clips(self) -> tuple[float, float]:
        """Clips of t, as they were before float32 rounded them: 1e-3 is open, 1.00000005e-3 not."""
        bounds = self.time_bounds
        if self._clips is None or self._clips[0] is not bounds or self._clips[1] != bounds._version:
            minimum, maximum = (before_float32(bound) for bound in bounds.tolist())
            self._clips = bounds, bounds._version, (minimum, maximum)
        return self._clips[2]

    @property
    def sharded_blocks(self) -> Iterable[nn.Module]:
        """Parts that FSDP gathers one at a time."""
        return self.backbone.blocks

    @property
    def mask_id(self) -> int:
        """Id of the mask: V, one past the teacher's vocabulary."""
        return self.config.vocab_size

    @property
    def is_conditioned(self) -> bool:
        """Whether masked positions take Gumbel noise."""
        return self.conditioner is not None

    @property
    def reads_codec(self) -> bool:
        """Whether training reads the codec's arrays: for noise, or the teacher's probabilities."""
        return self.is_conditioned or self.settings.kd.kind == "token"

    @property
    def codec(self) -> Codec | None:
        """Truncates the noise of sampling; None where the student takes it whole. UsageError for an unknown one."""
        codec = self.config.codec
        if codec is None:
            return None
        if not isinstance(codec, dict) or codec.keys() != {"name", "parameters"}:
            expected = "an object with name and parameters"
            raise UsageError("bad codec", where="config.json: codec", got=codec, expected=expected)
        return make_codec(codec["name"], **codec["parameters"])

    @abstractmethod
    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """The training loss of a batch; see the subclass."""

    def _distillation(self, batch: Batch, places: Places) -> Distillation | None:
        """The teacher at the places that are predicted; None where the student does not train on it, or now."""
        kd = self.settings.kd
        if kd.kind != "token" or not self.training:
            return None
        assert isinstance(batch.noise, StoredRowNoise)  # ``reads_codec`` asks for it
        return Distillation(batch.noise.distribution(places), kd.weight, kd.temperature)

    def embed_noise(self, noise: Noise, tau: float = 1.0) -> EmbeddedNoise:
        """What the student reads of n noise vectors; a UsageError where it takes none, or another vocabulary's."""
        if self.conditioner is None:
            raise UsageError("this student takes no noise", where="conditioning", got="none")
        settings, table = self.settings.noise, None
        if settings.projection == "tied":
            table = self.backbone.vocab_embed.embedding[: self.config.vocab_size]
        embedding = self.conditioner(noise, tau, table)
        if not settings.layers:
            return EmbeddedNoise(embedding)
        unigram = self.conditioner.unigram_log_probs
        prior = 0.0 if unigram is None else settings.prior_weight * unigram
        return EmbeddedNoise(embedding, *layer_scores(noise, tau, prior, settings.top_k))

    @property
    def adds_noise(self) -> bool:
        """Whether noise embeddings are added to the mask's, and do not replace it."""
        return self.settings.noise.injection == "add"

    def _project(self, hidden: States, level: Level) -> Float[Tensor, "b l v1"]:
        head = self.backbone.output_layer
        return head(head.features(hidden, level))

    def generate(self, *args: Any, **kwargs: Any) -> Tokens:
        """Rows of tokens: :func:`trainer.loading.generate` of this student."""
        # The samplers stand above the students, so they are looked up when they are called.
        return import_module("trainer.loading").generate(self, *args, **kwargs)

    def _refuse_unread(self, attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
        """What Hugging Face's callers may pass and ``forward`` would otherwise ignore."""
        if attention_mask is not None and not bool(attention_mask.all()):
            remedy = "pass rows of one length"
            raise UsageError("padding is not read", where="attention_mask", remedy=remedy)
        for name, value in options.items():
            if value is not None and not any(value is known for known in UNREAD.get(name, ())):
                remedy = "train with student.loss(batch)" if name == "labels" else "leave it out"
                raise UsageError("the student does not read this", where=name, remedy=remedy)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the subclass."""
