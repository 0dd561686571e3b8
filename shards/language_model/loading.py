"""A causal language model, whole and causal, or one line that says why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shards.base import GdistillError, UsageError, first_line, without_library_bars
from shards.language_model.device import DtypeName
from shards.language_model.files import PretrainedFiles, not_causal_lm
from shards.language_model.head import Float32Head, install_float32_head
from shards.language_model.probe import LENGTH, TOLERANCES, look_ahead, probe_rows
from shards.language_model.spread import ONE_DEVICE, Spread


@dataclass(frozen=True)
class CausalModel:
    """A loaded model.

    Attributes:
        files: Where it came from.
        network: The model of transformers, in evaluation mode, without gradients.
        head: The float32 output layer put in place of its own, if one was asked for and its own is
            a plain linear layer.
        dtype: Precision of the weights.
        device: Where it runs.
    """

    files: PretrainedFiles
    network: Any
    head: Float32Head | None
    dtype: DtypeName
    device: torch.device


def load_causal_model(
    files: PretrainedFiles,
    dtype: DtypeName = "float32",
    device: torch.device | str = "cpu",
    *,
    vocab_size: int | None = None,
    attention: str | None = None,
    float32_logits: bool = False,
    spread: Spread = ONE_DEVICE,
) -> CausalModel:
    """Load a model's weights and ask it, in one tiny forward pass, whether it is causal.

    Args:
        files: From :func:`find_pretrained`; its role names the model in messages.
        dtype: Precision of weights and activations.
        device: A device that exists; see :func:`resolve_device`.
        vocab_size: V, the columns of the output that are real tokens; its whole width unless told.
        attention: Attention kernel by transformers' name; its own choice unless told.
        float32_logits: Put a float32 head in place of the output layer.
        spread: Over which devices, if not on ``device`` alone.

    Raises:
        UsageError: If there are no weights, it is no causal language model, looks ahead, cannot
            be spread so, or its logits cannot be had in float32 though they are asked for.
        GdistillError: If the weights are damaged or incomplete.
    """
    place = torch.device(device)
    network = _load_network(files, dtype, attention, spread)
    if spread == ONE_DEVICE:
        network = network.to(place)
    else:
        place = spread.input_device(network, files.role)
    head = install_float32_head(network) if float32_logits else None
    model = CausalModel(files, network, head, dtype, place)
    _probe(model, vocab_size or files.num_logits, float32_logits)
    return model


def _load_network(
    files: PretrainedFiles, dtype: DtypeName, attention: str | None, spread: Spread
) -> Any:
    options = {"use_safetensors": files.has_safetensors, **spread.load_options()}
    if attention:
        options["attn_implementation"] = attention
    try:
        with without_library_bars():  # one bar per stage, and it is ours
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder,
                dtype=getattr(torch, dtype),
                trust_remote_code=files.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
        network, report = loaded
    except Exception as error:  # transformers lets errors of many libraries through
        if attention and attention in str(error):
            raise UsageError(
                "the attention kernel cannot be used",
                where=f"attention, {files.role} {files.name}",
                got=attention,
                expected="eager, sdpa, or another one of transformers that is installed here",
                remedy=first_line(error),
            ) from error
        if spread != ONE_DEVICE:
            raise spread.refused(files.role, error) from error
        raise not_causal_lm(files, error) from error
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GdistillError(
            f"the {files.role}'s weights are incomplete",
            where=files.folder,
            got=f"no values for {missing[0]}{more}",
            remedy="transformers would fill them with random numbers",
        )
    return network.eval().requires_grad_(False)


@torch.inference_mode()
def _probe(model: CausalModel, vocab_size: int, float32_logits: bool) -> None:
    """Refuse a model that looks ahead, or whose logits cannot be had in float32."""
    files, head = model.files, model.head
    rows = probe_rows(vocab_size, min(LENGTH, files.context_length or LENGTH))
    try:
        logits = _logits(model, rows)
        unused = head is None or head.last_logits is None
    finally:
        if head is not None:
            head.forget()
    if float32_logits and model.dtype != "float32" and (unused or logits.dtype != torch.float32):
        raise UsageError(
            f"this {files.role}'s output layer gives no float32 logits",
            where=f"{files.name}, --dtype {model.dtype}",
            got="no plain linear layer" if unused else f"logits rounded to {logits.dtype}",
            expected="logits that are not rounded: that would cost fidelity in every token",
            remedy="use --dtype float32",
        )
    moved = look_ahead(logits[..., :vocab_size].float(), TOLERANCES[model.dtype])
    if moved is not None:
        raise UsageError(
            f"the {files.role} is not causal",
            where=files.name,
            got=f"logits that move by {moved:.2g} of their spread when a later token changes",
            expected="a model that sees earlier tokens only",
            remedy="a BERT-type decoder needs is_decoder in its config.json; any other model of "
            "this kind tells a token's probability after seeing the token",
        )


def _logits(model: CausalModel, rows: Tensor) -> Tensor:
    try:
        return model.network(input_ids=rows.to(model.device), use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise GdistillError(
            f"the {model.files.role} cannot score a row",
            where=model.files.name,
            got=first_line(error),
            expected="logits for token ids alone",
        ) from error
