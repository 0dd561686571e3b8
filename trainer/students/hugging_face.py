"""The Hugging Face config of a student, which its settings fill."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from shards.errors import UsageError
from shards.settings import from_mapping, to_mapping
from trainer.students.configuration import StudentSettings


class StudentConfig(PretrainedConfig):
    """Hugging Face config of a student: :class:`StudentSettings`, flat, and the data's shape.

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
    """

    # transformers builds __init__ (and its **kwargs) itself, which jaxtyping's wrapper cannot bind.
    __no_type_check__ = True
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "row_length",
    }
    vocab_size: int = 50257
    row_length: int = 1024
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    codec: dict[str, Any] | None = None
    frozen: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for field in dataclasses.fields(StudentSettings):
            setattr(self, field.name, kwargs.pop(field.name, field.default))
        for standard, ours in self.attribute_map.items():
            if standard in kwargs:
                setattr(self, ours, kwargs.pop(standard))
        super().__post_init__(**kwargs)
        # Not mask_token_id: transformers would warn that it lies past the vocabulary, as it should.
        self.mask_id = self.vocab_size
        self._check(self.settings)

    @classmethod
    def build(
        cls,
        settings: StudentSettings,
        *,
        vocab_size: int,
        row_length: int,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> StudentConfig:
        """The config of a student with these settings over this vocabulary and row length."""
        return cls(
            vocab_size=vocab_size,
            row_length=row_length,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **to_mapping(settings),
        )

    @property
    def settings(self) -> StudentSettings:
        """The user's part of the config, typed and validated."""
        names = [field.name for field in dataclasses.fields(StudentSettings)]
        return from_mapping(StudentSettings, {name: getattr(self, name) for name in names})

    @property
    def first_token_id(self) -> int | None:
        """Begins an unconditional sample: bos, or eos where the tokenizer has no bos."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def tokens_per_block(self) -> int:
        """Block size in tokens; the whole row when none is set."""
        return getattr(self, "block_size", None) or self.row_length

    def _check(self, settings: StudentSettings) -> None:
        bounds = (
            ("vocab_size", self.vocab_size, self.vocab_size >= 2, "at least 2"),
            ("row_length", self.row_length, self.row_length >= 2, "at least 2"),
            (
                "reading_candidates",
                settings.reading_candidates,
                settings.reading_candidates <= self.vocab_size,
                f"at most V = {self.vocab_size}",
            ),
            (
                "block_size",
                settings.block_size,
                self.row_length % (settings.block_size or self.row_length) == 0,
                f"a divisor of row_length = {self.row_length}",
            ),
        )
        for name, got, is_right, expected in bounds:
            if not is_right:
                raise UsageError("bad student setting", where=name, got=got, expected=expected)
