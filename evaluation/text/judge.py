"""A causal language model with its tokenizer, loaded for scoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from shards.base import GdistillError, UsageError


@dataclass(frozen=True)
class JudgeModel:
    """Scores text it did not write.

    Attributes:
        name: Hub id or local folder.
        model: The network, in float32 and evaluation mode.
        tokenizer: Its tokenizer.
        context_length: Longest input, in tokens.
        eos_id: The token whose predictions do not count.
        document_start_id: The token that stands in front of a text.
    """

    name: str
    model: Any
    tokenizer: Any
    context_length: int
    eos_id: int
    document_start_id: int


def resolve_device(name: str) -> torch.device:
    """``auto``, or a torch device that this machine can compute on.

    Raises:
        UsageError: When there is no such device, or this PyTorch cannot use it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            "unknown device",
            where="--device",
            got=name,
            expected="auto, cpu or cuda",
            remedy="use --device auto",
        ) from error
    try:
        torch.zeros(1, device=device).item()  # the name alone does not say that it is there
    except (RuntimeError, AssertionError) as error:  # PyTorch asserts that it has CUDA
        raise UsageError(
            "cannot use the device",
            where=f"--device {name}",
            got=str(error).splitlines()[0][:120],
            expected="a GPU, and a build of PyTorch for it",
            remedy="use --device cpu",
        ) from error
    return device


def load_judge(name: str, device: str = "cpu", trust_remote_code: bool = False) -> JudgeModel:
    """Load a judge by hub id or from a local folder, in float32.

    Args:
        name: Hub id or local folder.
        device: ``auto`` or a torch device.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        UsageError: When the model cannot be loaded, or the device cannot be used.
    """
    place = resolve_device(device)
    local = Path(name)
    if local.is_dir() and not (local / "config.json").is_file():
        raise UsageError(
            "the judge folder holds no model", where=local, expected="a config.json in it"
        )
    try:
        transformers_logging.disable_progress_bar()  # one bar per stage, and it is ours
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers lets errors of many libraries through
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            "cannot load the judge", where=name, got=first, remedy="give a hub id or a local folder"
        ) from error
    context = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise GdistillError("the judge states no context length", where=name)
    eos = tokenizer.eos_token_id
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else eos
    if eos is None:
        raise GdistillError("the judge's tokenizer has no end-of-text token", where=name)
    model = model.to(place).eval()  # type: ignore[arg-type]
    return JudgeModel(name, model, tokenizer, context, eos, start)
