"""The Hugging Face config of a student, which its settings fill."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import PretrainedConfig

from shards.errors import UsageError, did_you_mean
from shards.settings import from_mapping, to_mapping
from trainer.students.configuration import GONE, StudentSettings, grouped, require


class StudentConfig(PretrainedConfig):
    """Hugging Face config of a student: :class:`StudentSettings`, and the data's shape.

    ``vocab_size`` is V, the teacher's vocabulary *without* the mask: the mask id is ``vocab_size``,
    and embedding and output layer have ``vocab_size + 1`` rows.

    Attributes:
        vocab_size: Teacher vocabulary V.
        row_length: Tokens per row L.
        bos_token_id: First token of a sample; None when rows do not begin with one.
        eos_token_id: End of a document; None when the tokenizer has none.
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
        ours = {field.name for field in dataclasses.fields(StudentSettings)}
        known = ours | self.of_transformers | {"mask_id"}
        for name in values.keys() - known:
            hint = did_you_mean(name, known, "it was written by another version, or changed")
            raise UsageError("unknown config key", where=f"config.json: {name}", remedy=hint)
        settings = from_mapping(StudentSettings, {n: v for n, v in values.items() if n in ours})
        for name, value in to_mapping(settings).items():
            setattr(self, name, value)
        super().__post_init__(**{n: v for n, v in values.items() if n not in ours})
        # Not mask_token_id: transformers would warn that it lies past the vocabulary, as it should.
        self.mask_id = self.vocab_size
        require(self.vocab_size >= 2, "vocab_size", self.vocab_size, "at least 2")
        require(self.row_length >= 2, "row_length", self.row_length, "at least 2")
        count, size = settings.noise.top_k, self.vocab_size
        require(count <= size, "noise.top_k", count, f"at most V = {size}")
        block, expected = settings.block_size, f"a divisor of row_length = {self.row_length}"
        require(not self.row_length % (block or self.row_length), "block_size", block, expected)

    @classmethod
    def build(cls, settings: StudentSettings, **data: int | None) -> StudentConfig:
        """The config of these settings over data: ``vocab_size``, ``row_length`` and so on."""
        return cls(**data, **to_mapping(settings))

    @property
    def settings(self) -> StudentSettings:
        """The user's part of the config, typed and validated."""
        fields = dataclasses.fields(StudentSettings)
        return from_mapping(StudentSettings, {f.name: getattr(self, f.name) for f in fields})

    @property
    def first_token_id(self) -> int | None:
        """Begins an unconditional sample: bos, or eos where the tokenizer has no bos."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def tokens_per_block(self) -> int:
        """Block size in tokens; the whole row when none is set."""
        return getattr(self, "block_size", None) or self.row_length
