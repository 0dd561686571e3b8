"""Small teacher outputs for the codec tests, and round trips through arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from shards.codec.protocol import Codec, TeacherOutput, position_keys
from shards.noise.kinds import Noise
from shards.noise.philox import PositionKeys

SEED = 1234


def teacher_output(
    num_rows: int = 6,
    num_tokens: int = 20,
    vocab_size: int = 90,
    spread: float = 3.0,
    hidden_size: int | None = None,
    seed: int = 0,
) -> tuple[TeacherOutput, dict[str, Tensor]]:
    """A random teacher whose tokens were drawn from it, and the resources of its store."""
    generator = torch.Generator().manual_seed(seed)
    unigram = (torch.randn(vocab_size, generator=generator) * spread / 2).log_softmax(-1)
    resources = {"unigram_log_probs": unigram}
    hidden = None
    if hidden_size is None:
        noise = torch.randn(num_rows, num_tokens, vocab_size, generator=generator)
        logits = unigram + noise * spread
    else:
        hidden = torch.randn(num_rows, num_tokens, hidden_size, generator=generator)
        head = torch.randn(vocab_size, hidden_size, generator=generator) * spread
        resources["lm_head"] = head / hidden_size**0.5
        logits = hidden @ resources["lm_head"].T
    log_probs = logits.log_softmax(-1)
    flat = log_probs.flatten(0, 1).exp()
    tokens = torch.multinomial(flat, 1, generator=generator).view(num_rows, num_tokens)
    return TeacherOutput(log_probs, tokens, torch.arange(num_rows) + 3, hidden), resources


def flat_log_probs(output: TeacherOutput) -> Tensor:
    """[n, V] log-probabilities of all positions."""
    return output.log_probs.flatten(0, 1)


def decode(
    codec: Codec,
    output: TeacherOutput,
    resources: dict[str, Tensor],
    draw: int = 0,
    arrays: dict[str, Tensor] | None = None,
) -> Noise:
    """Encode, check against the declared arrays, decode all positions."""
    arrays = arrays or codec.encode(output, SEED, resources)
    check_specs(codec, output, arrays)
    flat = {name: array.flatten(0, 1) for name, array in arrays.items()}
    keys = position_keys(output, SEED, draw)
    assert isinstance(keys, PositionKeys)
    tokens = output.tokens.flatten()
    log_p = flat_log_probs(output).gather(1, tokens[:, None]).squeeze(1)
    return codec.decode(flat, tokens, log_p, keys, resources)


def check_specs(codec: Codec, output: TeacherOutput, arrays: dict[str, Tensor]) -> None:
    """Every array is declared, with its dtype and trailing shape."""
    hidden_size = None if output.hidden is None else output.hidden.shape[-1]
    specs = codec.array_specs(output.log_probs.shape[-1], hidden_size)
    assert set(specs) == set(arrays)
    for name, spec in specs.items():
        assert arrays[name].shape == (*output.tokens.shape, *spec.trailing_shape), name
        assert str(arrays[name].dtype).removeprefix("torch.") == spec.dtype, name
