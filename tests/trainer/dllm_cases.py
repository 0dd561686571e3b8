"""A tokenizer and weights of which tests of dllm's adapter know what comes of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.trainer.run_cases import VOCAB

MASK, WIDTH = VOCAB, 16


def tokenizer(**changes: Any) -> transformers.PreTrainedTokenizerFast:
    vocab = {letter: index for index, letter in enumerate("abcdefghijkl")}
    ends = dict.fromkeys(("pad_token", "bos_token", "eos_token"), "a")
    options = {"mask_token": "[MASK]", "padding_side": "right", **ends, **changes}
    model = Tokenizer(WordLevel(vocab, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **options)


def draw_weights(own: Any) -> torch.Tensor:
    """W of ones and zeros: the sum over its row is softmax(xi) itself."""
    with torch.no_grad():
        own.weight.copy_(torch.eye(VOCAB, WIDTH))
    return own.weight
