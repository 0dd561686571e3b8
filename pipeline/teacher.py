"""The teacher: any causal language model of transformers, asked for log-probabilities of rows.

Token rows [B, L] -> log-probabilities [B, L-1, V], float32, nats. This is the only home of the
shift by one: a model's logits at position i - 1 are the distribution of the token at position i,
and position 0 has none. V is the tokenizer's size; what a model's output has beyond it is dropped
before the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.tokens.tokenizer import load_tokenizer
from shards.codec.protocol import TeacherOutput
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import DtypeName, Float32Head, largest_batch, resolve_device
from shards.language_model.loading import CausalModel, PretrainedFiles, find_pretrained, load_causal_model, probe_rows

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 1 << 12, 1 << 15
CPU_BATCH_BYTES = 1 << 30
GPU_MEMORY_SHARE = 0.4
FLOATS_PER_LOGIT = 6
"""Float32 tensors of the logits' size alive at once: two batches, their log-softmax, the codec's
temporaries."""
LARGEST_PADDING, LARGEST_PADDING_SHARE = 127, 0.05
TRIED_TOKENS = 8


def automatic_batch_size(row_length: int, vocab_size: int, weight_bytes: int, device: torch.device) -> int:
    """Rows of one forward pass by memory; the same on every machine with the same device."""
    budget, most = CPU_BATCH_BYTES, CPU_BATCH_TOKENS
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        budget = max(1 << 30, int(GPU_MEMORY_SHARE * (total - weight_bytes)))
        most = GPU_BATCH_TOKENS
    row_bytes = row_length * vocab_size * 4 * FLOATS_PER_LOGIT
    most_rows = min(most // row_length, largest_batch(row_length * vocab_size, device))
    return max(1, min(budget // row_bytes, most_rows))


@dataclass(frozen=True)
class RawLogits:
    """What one forward pass leaves on the device, not yet normalised: float32 logits [B, T, >= V]
    of the scored tokens, and the input of the LM head if it is asked for."""

    logits: Float[Tensor, "b t w"]
    tokens: Int[Tensor, "b t"]
    row_ids: Int[Tensor, "b"]
    hidden: Float[Tensor, "b t d"] | None

    def rows(self, part: slice) -> RawLogits:
        """Some of the rows."""
        hidden = None if self.hidden is None else self.hidden[part]
        return RawLogits(self.logits[part], self.tokens[part], self.row_ids[part], hidden)

    def normalise(self, vocab_size: int, buffer: Tensor | None = None) -> TeacherOutput:
        """Log-softmax over the V real tokens, in float32; into ``buffer`` if it is given."""
        real = self.logits[..., :vocab_size]
        if buffer is None:
            log_probs = real.log_softmax(-1, dtype=torch.float32)
        else:
            place = buffer[: real.numel()].view(real.shape)
            log_probs = torch.log_softmax(real, -1, dtype=torch.float32, out=place)
        return TeacherOutput(log_probs, self.tokens, self.row_ids, self.hidden)


def check_output(output: TeacherOutput, split: str = "") -> None:
    """Refuse log-probabilities of tokens that are not finite, by row and position.

    A NaN or +inf anywhere in a position's logits shows in this number, as it is in the normaliser.
    """
    picked = output.token_log_probs.cpu()
    for row, position in (~torch.isfinite(picked)).nonzero()[:1].tolist():
        what = "the teacher gave NaN or infinite logits"
        where = f"{split} row {int(output.rows[row])}, position {position + 1}".strip()
        got = f"log-probability {picked[row, position]} of token {output.tokens[row, position]}"
        remedy = "try --dtype float32; is the row text that the teacher can score?"
        raise GdistillError(what, where=where, got=got, expected="a finite number", remedy=remedy)


def rows_tensor(rows: np.ndarray) -> Int[Tensor, "b l"]:
    """Token rows as the teacher takes them: int64."""
    return torch.from_numpy(rows.astype(np.int64))


def check_vocabulary(num_logits: int, vocab_size: int, where: object) -> None:
    """Refuse a tokenizer that cannot be the teacher's: the output may be wider by 127 entries or 5%."""
    padding = num_logits - vocab_size
    if padding < 0 or padding > max(LARGEST_PADDING, LARGEST_PADDING_SHARE * num_logits):
        what = "tokenizer and teacher have different vocabularies"
        got, expected = f"a tokenizer of {vocab_size}", f"one for the teacher's {num_logits} logits"
        remedy = "give the tokenizer that the teacher was trained with (--tokenizer)"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)


def check_row_length(files: PretrainedFiles, row_length: int) -> None:
    """Refuse rows longer than the teacher's context."""
    limit = files.context_length
    if limit is not None and row_length > limit:
        what, where = "rows are longer than the teacher's context", f"teacher {files.name}"
        expected, remedy = f"at most {limit}", f"--row-length {limit}"
        raise UsageError(what, where=where, got=row_length, expected=expected, remedy=remedy)


class Teacher:
    """A loaded causal language model; see :meth:`load`."""

    def __init__(self, loaded: CausalModel, vocab_size: int) -> None:
        self.files, self.model, self.head = loaded.files, loaded.network, loaded.head
        self.dtype, self.device = loaded.dtype, loaded.device
        self.vocab_size, self._scorer = vocab_size, loaded.network

    @classmethod
    def load(
        cls,
        source: str | Path | PretrainedFiles,
        dtype: DtypeName = "float32",
        device: str | torch.device = "auto",
        *,
        vocab_size: int | None = None,
        attention: str | None = None,
        compiled: bool = False,
        device_map: str | None = None,
    ) -> Teacher:
        """Load a model for scoring; see :func:`load_causal_model` for options and errors.

        Args:
            source: Local directory, hub id, or files already found.
            dtype: Precision of weights and activations; logits are float32 either way.
            vocab_size: V; the tokenizer's beside the model by default, else the output's width.

        Raises:
            UsageError: Also if it does not fit the tokenizer.
        """
        files = source if isinstance(source, PretrainedFiles) else find_pretrained(source)
        place = resolve_device(device) if isinstance(device, str) else device
        if vocab_size is None:
            vocab_size = tokenizer_size(files) or files.num_logits
        check_vocabulary(files.num_logits, vocab_size, files.name)
        how = {"attention": attention, "float32_logits": True, "device_map": device_map}
        loaded = load_causal_model(files, dtype, place, vocab_size=vocab_size, **how)
        teacher = cls(loaded, vocab_size)
        if compiled:
            teacher._scorer = torch.compile(loaded.network, dynamic=False)
        return teacher

    @property
    def lm_head(self) -> tuple[Float[Tensor, "v d"], Float[Tensor, "v"] | None]:
        """Weight and bias of the output layer for the V real tokens, float32 on the CPU."""
        head = self._require_head()
        bias = None if head.bias is None else head.bias[: self.vocab_size].float().cpu()
        return head.weight[: self.vocab_size].detach().float().cpu(), bias

    @torch.inference_mode()
    def forward(self, rows: Int[Tensor, "b l"], row_ids: Int[Tensor, "b"], need_hidden: bool = False) -> RawLogits:
        """The forward pass alone; on a GPU it may still be running when this returns.

        A UsageError, if the rows do not fit or logits are no linear function of a hidden state that is asked for.
        """
        check_row_length(self.files, rows.shape[1])
        for row, position in ((rows < 0) | (rows >= self.vocab_size)).nonzero()[:1].tolist():
            what, where = "token id outside the teacher's vocabulary", f"row {int(row_ids[row])}"
            where, expected = f"{where}, position {position}", f"0 to {self.vocab_size - 1}"
            raise UsageError(what, where=where, got=int(rows[row, position]), expected=expected)
        rows = sent(rows, self.device)
        try:
            logits = self._scorer(input_ids=rows[:, :-1], use_cache=False).logits
            hidden = self._hidden(logits) if need_hidden else None
        finally:  # a smaller batch needs the memory of one that did not fit
            self._forget()
        place = logits.device  # of a model on several devices, the last one's
        return RawLogits(logits, rows[:, 1:].to(place), sent(row_ids, place), hidden)

    @property
    def num_devices(self) -> int:
        """Devices that hold its weights."""
        return len({parameter.device for parameter in self.model.parameters()})

    def try_out(self, need_hidden: bool, sequential: bool) -> None:
        """Ask for what a run will need, of one short row: refused now, not after stage 1."""
        for name, weight in self.model.named_parameters():
            if not weight.is_meta and torch.isnan(weight).any():
                raise GdistillError("the teacher's weights hold NaN", where=self.files.folder, got=name)
        row = probe_rows(self.vocab_size, min(TRIED_TOKENS, self.files.context_length or TRIED_TOKENS))
        if need_hidden:
            self.forward(row[:1], torch.arange(1), need_hidden=True)
        if sequential:
            self.next_log_probs(row[:1, :1])

    @torch.inference_mode()
    def next_log_probs(self, tokens: Int[Tensor, "b n"], cache: Any = None) -> tuple[Float[Tensor, "b v"], Any]:
        """The distribution of the token after the last one given, float32, nats, and the cache for the next call."""
        last = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        try:
            output = self.model(input_ids=tokens.to(self.device), **last)
        finally:
            self._forget()
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            what, remedy = "this teacher keeps no key-value cache", "use --mode parallel"
            raise UsageError(what, where=self.files.name, remedy=remedy)
        logits = output.logits[:, -1, : self.vocab_size]
        return logits.log_softmax(-1, dtype=torch.float32), cache

    def _forget(self) -> None:
        if self.head is not None:
            self.head.forget()

    def _require_head(self) -> Float32Head:
        if self.head is None:
            what = "this teacher's output layer is not a plain linear layer"
            remedy = "choose a codec that needs no LM head"
            raise UsageError(what, where=self.files.name, remedy=remedy)
        return self.head

    def _hidden(self, logits: Tensor) -> Tensor:
        head = self._require_head()
        assert head.last_hidden is not None and head.last_logits is not None
        last = head.last_logits.to(logits.device)
        if logits is not last and not torch.equal(logits, last):
            what, remedy = "this teacher changes its logits after the LM head", "use another codec"
            expected = "logits that are a linear function of the last hidden state"
            raise UsageError(what, where=self.files.name, expected=expected, remedy=remedy)
        return head.last_hidden.to(logits.device)


def tokenizer_size(files: PretrainedFiles) -> int | None:
    """Entries of the tokenizer beside the model; None if there is none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any((files.folder / name).is_file() for name in names):
        return None
    return len(load_tokenizer(files.folder))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on the device; a GPU need not finish its work first."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
