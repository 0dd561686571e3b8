"""Sequential extraction: the teacher writes the rows itself, by Gumbel-max, with a KV cache.

Every row begins with the token that borders documents, as the teacher has seen texts begin; each
further token is argmax(log p + xi) with keyed prior noise. The row is then scored like any other,
and the codec stores the noise of the posterior given the token. That is Gumbel-max drawn top-down:
which entry wins is independent of when it arrives, so (token, posterior draw) has the law of
(argmax, noise) exactly, while the token is the argmax of the *stored* pair by construction. Storing
the noise that chose the token would not give that: the scores of a full forward pass differ from
the cached ones in the last bits, and a near tie (about one token in a million in float32) would
name another winner. The choosing noise has a stream of its own; were it the codec's stream, stored
noise would no longer be a posterior draw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.settings import SequentialSettings
from pipeline.teacher import Teacher, rows_tensor
from pipeline.tokens.dataset import TokenDataset
from shards.codec.protocol import TeacherOutput
from shards.language_model.forward import BatchSize, in_batches
from shards.noise.gumbel import KeyedPrior, gumbel_argmax
from shards.noise.nucleus import truncate_to_nucleus
from shards.noise.philox import PositionKeys
from shards.settings import derive_seed

CPU_ROWS, GPU_ROWS = 128, 512
CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.5
"""Of what the weights leave; a cache is copied as it grows, one layer at a time."""
STEP_BYTES_PER_LOGIT = 72
"""Of one step: noise (int64 words, eager), log-probabilities, their copies in float64."""
SORTED_AT_ONCE = 1 << 26
"""Log-probabilities in one sort, which takes some 40 bytes for each."""
Note = Callable[[str], None]
Check = Callable[[], None]


def processed(
    log_probs: Float[Tensor, "*batch v"], settings: SequentialSettings, tokens: Int[Tensor, "*batch"] | None = None
) -> Float[Tensor, "*batch v"]:
    """Temperature, then nucleus, then normalised again; nats, -inf where a token is cut off.

    Args:
        tokens: Tokens that stay whatever the nucleus: those already drawn, which rounding may
            have moved across its border.
    """
    if settings.temperature != 1.0:
        log_probs = (log_probs / settings.temperature).log_softmax(-1)
    if settings.nucleus_p == 1.0:
        return log_probs
    rows, p = log_probs.reshape(-1, log_probs.shape[-1]), settings.nucleus_p
    parts = rows.split(max(1, SORTED_AT_ONCE // rows.shape[1]))
    kept = torch.cat([truncate_to_nucleus(part.double().exp(), p) > 0 for part in parts])
    kept = kept.view(log_probs.shape)
    if tokens is not None:
        kept.scatter_(-1, tokens[..., None], True)
    return log_probs.masked_fill(~kept, -torch.inf).log_softmax(-1)


@torch.inference_mode()
def generate_rows(
    teacher: Teacher,
    first_tokens: Int[Tensor, "b"],
    row_ids: Int[Tensor, "b"],
    row_length: int,
    stream_seed: int,
    settings: SequentialSettings | None = None,
    note: Note = lambda _: None,
    check: Check = lambda: None,
    given: Int[Tensor, "b l"] | None = None,
    ends: Collection[int] = (),
) -> Int[Tensor, "b l"]:
    """Rows written by the teacher; token i of row r depends on (stream_seed, r, i) and p alone.

    Args:
        first_tokens: Position 0, given.
        row_ids: Key of each row's noise.
        stream_seed: Seed of the noise that chooses the tokens.
        note: Told how far generation has come.
        check: Called before every step; may raise to stop.
        given: Marked rows (:mod:`pipeline.tokens.chat`): -1 - id where a token is given, else what
            stands behind the end of an answer.
        ends: Tokens that end an answer.
    """
    settings = settings or SequentialSettings()
    device, vocab_size = teacher.device, teacher.vocab_size
    row_ids = row_ids.to(device)
    tokens, cache = first_tokens.to(device)[:, None], None
    given = None if given is None else given.to(device)
    ended = torch.zeros_like(row_ids, dtype=torch.bool)
    last = torch.tensor(sorted(ends), device=device)
    for position in range(1, row_length):
        check()
        note(f"writing rows, token {position} of {row_length - 1}")
        log_probs, cache = teacher.next_log_probs(tokens[:, -1:], cache)
        keys = PositionKeys(stream_seed, row_ids, torch.full_like(row_ids, position))
        arrivals = KeyedPrior(keys, vocab_size).tile(0, vocab_size)
        chosen = gumbel_argmax(processed(log_probs, settings), arrivals)
        if given is not None:
            fixed = given[:, position]
            written = ~ended & (fixed >= 0)
            chosen = torch.where(written, chosen, torch.where(fixed < 0, ~fixed, fixed))
            ended |= written & torch.isin(chosen, last)
            if bool(ended.all()):
                return torch.cat([tokens, chosen[:, None], given[:, position + 1 :]], dim=1)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
    return tokens


def rows_at_once(teacher: Teacher, row_length: int) -> int:
    """Rows written side by side. The same on every machine with the same device.

    A step costs a small model more for being a step than for its rows: on one core stories260K
    writes 1.7 times as many rows per second at 128 rows as at 32, and hardly more at 512. The keys
    and values of a large model's rows are what takes memory (heads may share theirs), and on a GPU
    the distributions of a step.
    """
    files, weights = teacher.files, [*teacher.model.parameters()]
    config: Any = files.text_config
    num_heads = int(getattr(config, "num_attention_heads", 0) or 1)
    num_shared = int(getattr(config, "num_key_value_heads", 0) or num_heads)
    head_width = int(getattr(config, "head_dim", 0) or files.hidden_size // num_heads)
    layers = int(getattr(config, "num_hidden_layers", 1))
    row_bytes = 2 * row_length * layers * num_shared * head_width * weights[0].element_size()
    budget, most = CPU_CACHE_BYTES, CPU_ROWS
    if teacher.device.type == "cuda":
        taken = sum(weight.numel() * weight.element_size() for weight in weights)
        total = torch.cuda.get_device_properties(teacher.device).total_memory
        budget, most = int(GPU_CACHE_SHARE * (total - taken)), GPU_ROWS
        row_bytes += STEP_BYTES_PER_LOGIT * files.num_logits
    return max(1, min(most, budget // row_bytes))


def marked_answers(tokens: Int[Tensor, "b l"], given: Int[Tensor, "b l"], ends: Collection[int]) -> Int[Tensor, "b l"]:
    """Completed rows, marked: what was given, and what stands behind an end, does not count."""
    free = given >= 0
    is_end = free & torch.isin(tokens, torch.tensor(sorted(ends)))
    behind = is_end.cumsum(1) > is_end.long()
    return torch.where(free & ~behind, tokens, ~tokens)


@dataclass(frozen=True)
class GeneratedRows:
    """Rows that the teacher writes, each begun like a document, or by its prompt.

    Attributes:
        dataset: The corpus's rows; they lend the row length and the token that borders documents.
    """

    teacher: Teacher
    dataset: TokenDataset
    settings: SequentialSettings
    seed: int
    check: Check = lambda: None

    @cached_property
    def batch_size(self) -> BatchSize:
        """Rows written side by side; once memory has run out, fewer for every shard to come."""
        default = rows_at_once(self.teacher, self.dataset.row_length)
        return BatchSize(self.settings.batch_size or default)

    @cached_property
    def ends(self) -> set[int]:
        """Tokens that end an answer: the tokenizer's, and those that the teacher itself names."""
        own = getattr(self.teacher.model.generation_config, "eos_token_id", None)
        return {self.dataset.eos_id, *(own if isinstance(own, list) else [own])} - {None}

    def read(self, split: str, start: int, stop: int, note: Note) -> np.ndarray:
        """Rows start..stop-1 of a split, [n, L] int32; a pure function of both."""
        row_ids, length = torch.arange(start, stop), self.dataset.row_length
        first, given = torch.full_like(row_ids, self.dataset.bos_id), None
        if self.dataset.packing == "prompts":
            given = rows_tensor(self.dataset.read_marked(split, start, stop))
            first = ~given[:, 0]
        rows = torch.zeros(stop - start, length, dtype=torch.int64)
        seed = derive_seed(self.seed, "sequential rows", split)

        def work(part: slice) -> None:
            begun = self.teacher, first[part], row_ids[part], length, seed
            answer = (None, ()) if given is None else (given[part], self.ends)
            rows[part] = generate_rows(*begun, self.settings, note, self.check, *answer).cpu()

        in_batches(work, stop - start, self.batch_size)
        if given is not None:
            rows = marked_answers(rows, given, self.ends)
        return rows.numpy().astype(np.int32)

    def process(self, output: TeacherOutput) -> TeacherOutput:
        """The distribution that wrote the row: what the stored noise belongs to."""
        log_probs = processed(output.log_probs, self.settings, output.tokens)
        return replace(output, log_probs=log_probs)
