"""The two teachers of the codec benchmark: posteriors made by a law, and a small trained model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.protocol import TeacherOutput
from shards.provenance import generator

ROW_LENGTH = 33
"""Rows of 32 scored tokens: short, so that a batch with V = 50257 stays small."""

# log(s - 1) ~ N(-0.3, 0.7) and log a ~ N(-0.8, 1) give a mean entropy of 3.0 nats and a mean mass
# of the 64 likeliest tokens of 0.90.
LOG_EXPONENT = (-0.3, 0.7)
LOG_OFFSET = (-0.8, 1.0)
ZIPF_OFFSET = 2.7


@dataclass(frozen=True)
class SyntheticTeacher:
    """Rank-frequency laws p_r ~ (r + a)^-s, s and a drawn per position.

    Ranks go to ids by a perturbed Zipf unigram: the order of log u_j + Gumbel noise, with u the
    unigram, whose own order over the ids is a random permutation.
    """

    num_tokens: int
    vocab_size: int = 50257
    seed: int = 0
    row_length: int = ROW_LENGTH

    name = "synthetic"
    hidden_size = None

    def resources(self) -> dict[str, Tensor]:
        """The unigram."""
        ranks = torch.arange(self.vocab_size, dtype=torch.float64)
        log_probs = (-(ranks + ZIPF_OFFSET).log()).log_softmax(0).float()
        order = torch.randperm(self.vocab_size, generator=generator(self.seed, "unigram"))
        return {"unigram_log_probs": log_probs[order]}

    def batches(self, rows_per_batch: int = 4) -> Iterator[TeacherOutput]:
        """All tokens, a few rows at a time."""
        unigram = self.resources()["unigram_log_probs"]
        length = self.row_length - 1
        for first in range(0, self.num_tokens // length, rows_per_batch):
            rows = torch.arange(first, min(first + rows_per_batch, self.num_tokens // length))
            draws = generator(self.seed, "posteriors", first)
            log_probs = power_laws(len(rows) * length, unigram, draws)
            tokens = torch.multinomial(log_probs.exp(), 1, generator=draws)
            shape = (len(rows), length)
            yield TeacherOutput(log_probs.view(*shape, -1), tokens.view(shape), rows)


def power_laws(
    num: int, unigram: Float[Tensor, "v"], draws: torch.Generator
) -> Float[Tensor, "n v"]:
    """Log-probabilities of ``num`` positions, float32, nats."""
    exponent = 1 + (LOG_EXPONENT[0] + LOG_EXPONENT[1] * torch.randn(num, 1, generator=draws)).exp()
    offset = (LOG_OFFSET[0] + LOG_OFFSET[1] * torch.randn(num, 1, generator=draws)).exp()
    ranks = torch.arange(1, len(unigram) + 1)
    law = (-exponent * (ranks + offset).log()).log_softmax(-1)
    keys = unigram - torch.empty(num, len(unigram)).exponential_(generator=draws).log()
    return torch.empty_like(law).scatter_(1, keys.argsort(dim=1, descending=True), law)


@dataclass(frozen=True)
class TrainedTeacher:
    """A causal language model from a local folder, on rows of a text file.

    Attributes:
        model: Folder in the Hugging Face layout.
        text: UTF-8 text, documents ended by a line ``<|endoftext|>``.
    """

    model: Path
    text: Path
    num_tokens: int
    row_length: int = 129

    name = "stories260K"

    @cached_property
    def hidden_size(self) -> int:
        """Width of the last hidden state."""
        return int(self._model.config.hidden_size)

    def rows(self) -> Int[Tensor, "rows l"]:
        """Token rows: documents joined by the beginning-of-text token and cut."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        ids: list[int] = []
        needed = self.num_tokens // (self.row_length - 1) * self.row_length
        for document in self.text.read_text(encoding="utf-8").split("<|endoftext|>"):
            ids.extend(tokenizer(document.strip())["input_ids"])
            if len(ids) >= needed:
                break
        whole = len(ids) // self.row_length
        rows = torch.tensor(ids[: whole * self.row_length]).view(whole, self.row_length)
        return rows[: needed // self.row_length]

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def resources(self) -> dict[str, Tensor]:
        """The unigram of the rows (add-one counts) and the LM head."""
        model = self._model
        head = model.get_output_embeddings().weight.detach()
        counts = torch.bincount(self.rows().flatten(), minlength=len(head)) + 1.0
        return {
            "unigram_log_probs": (counts / counts.sum()).log(),
            "lm_head": head,
            "lm_head_bias": torch.zeros(len(head)),
        }

    @torch.no_grad()
    def batches(self, rows_per_batch: int = 8) -> Iterator[TeacherOutput]:
        """All rows, a few at a time."""
        model, rows = self._model, self.rows()
        for first in range(0, len(rows), rows_per_batch):
            part = rows[first : first + rows_per_batch]
            hidden = model.base_model(part).last_hidden_state[:, :-1]
            logits = model.get_output_embeddings()(hidden).float()
            logits = logits - logits.amax(-1, keepdim=True)
            index = torch.arange(first, first + len(part))
            yield TeacherOutput(logits.log_softmax(-1), part[:, 1:], index, hidden)
