"""A causal language model with its tokenizer, loaded for scoring."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer

from evaluation.text.room import Room
from shards.base import GdistillError, UsageError, first_line
from shards.language_model import (
    PretrainedFiles,
    allow_tf32,
    find_pretrained,
    load_causal_model,
    resolve_device,
)

UNLIMITED_CONTEXT = 1024
"""Window over texts for models that set no limit (Mamba, Bloom): that of the published numbers."""


@dataclass(frozen=True)
class JudgeModel:
    """Scores text it did not write.

    Attributes:
        name: Hub id, or the name of a local folder.
        model: The network, in float32 and evaluation mode.
        tokenizer: Its tokenizer.
        context_length: Longest input, in tokens.
        document_start_id: The token that stands in front of a text.
        border_ids: Tokens that stand between texts; their predictions do not count.
        weights_sha256: Hash of the weights, so that two judges of one name are told apart.
        products: How its float32 matrix products run: ``float32``, or ``TF32`` on a GPU.
        room: How much of texts it reads at once.
    """

    name: str
    model: Any
    tokenizer: Any
    context_length: int
    document_start_id: int
    border_ids: tuple[int, ...]
    weights_sha256: str = ""
    products: str = "float32"
    room: Room = field(default_factory=lambda: Room(1, sys.maxsize))

    @property
    def identity(self) -> dict[str, str]:
        """What a number must carry of its judge."""
        return {"judge": self.name, "judge_sha256": self.weights_sha256}


def load_judge(name: str, device: str = "cpu") -> JudgeModel:
    """Load a judge by hub id or from a local folder, in float32.

    Args:
        name: Hub id or local folder.
        device: ``auto`` or a torch device.

    Raises:
        UsageError: When there is no such model or device, or the model is not causal.
        GdistillError: When its weights are damaged or incomplete, or its tokenizer has no border.
    """
    place = resolve_device(device)
    files = find_pretrained(name, role="judge")
    tokenizer = _load_tokenizer(files)
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    borders = tuple(sorted({token for token in (bos, eos) if token is not None}))
    if not borders:
        raise GdistillError(
            "the judge's tokenizer has no token between texts",
            where=name,
            got="neither bos nor eos",
            expected="a token to stand in front of a text",
            remedy="give a judge whose tokenizer_config.json names one",
        )
    model = load_causal_model(files, "float32", place).network
    weight_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    return JudgeModel(
        name=files.name,
        model=model,
        tokenizer=tokenizer,
        context_length=files.context_length or UNLIMITED_CONTEXT,
        document_start_id=eos if bos is None else bos,
        border_ids=borders,
        weights_sha256=files.weights_sha256,
        products=allow_tf32(place),
        room=Room.on(place, files.num_logits, files.hidden_size, weight_bytes),
    )


def _load_tokenizer(files: PretrainedFiles) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            files.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers lets errors of many libraries through
        raise UsageError(
            "cannot load the judge's tokenizer",
            where=files.folder,
            got=first_line(error),
            expected="the files that save_pretrained writes",
            remedy="copy the tokenizer's files into the folder",
        ) from error
