"""A causal language model with its tokenizer, loaded for scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from shards.base import GdistillError, UsageError
from shards.language_model import (
    PretrainedFiles,
    find_pretrained,
    first_line,
    load_causal_model,
    resolve_device,
)

UNLIMITED_CONTEXT_TOKENS = 1024
"""Window of a judge that reads texts of any length (Mamba, Bloom): GPT-2's, so that figures of
judges compare."""


@dataclass(frozen=True)
class JudgeModel:
    """Scores text it did not write.

    Attributes:
        name: Hub id or local folder.
        model: The network, in float32 and evaluation mode.
        tokenizer: Its tokenizer.
        context_length: Longest window, in tokens.
        eos_id: The token whose predictions do not count.
        document_start_id: The token that stands in front of a text.
    """

    name: str
    model: Any
    tokenizer: Any
    context_length: int
    eos_id: int
    document_start_id: int


def load_judge(name: str, device: str = "cpu", trust_remote_code: bool = False) -> JudgeModel:
    """Load a judge by hub id or from a local folder, in float32.

    Args:
        name: Hub id or local folder.
        device: ``auto`` or a torch device.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        UsageError: When it is no causal language model, looks ahead, or the device cannot be used.
        GdistillError: When its weights are damaged or incomplete, or it has no end-of-text token.
    """
    place = resolve_device(device)
    files = find_pretrained(name, trust_remote_code=trust_remote_code, role="judge")
    tokenizer = _tokenizer(name, files)
    eos = tokenizer.eos_token_id
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else eos
    if eos is None:
        raise GdistillError("the judge's tokenizer has no end-of-text token", where=name)
    model = load_causal_model(files, device=place).network
    context = files.context_length or UNLIMITED_CONTEXT_TOKENS
    return JudgeModel(name, model, tokenizer, context, eos, start)


def _tokenizer(name: str, files: PretrainedFiles) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            files.folder, trust_remote_code=files.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers lets errors of many libraries through
        raise UsageError(
            "cannot load the judge's tokenizer",
            where=name,
            got=first_line(error),
            remedy="save the tokenizer it was trained with beside it",
        ) from error
