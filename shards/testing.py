"""For tests, of this project and of others: what a codec must pass.

def test_my_codec():
    shards.testing.check_codec(MyCodec(), min_agreement=0.9)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shards.codec.protocol import Codec, TeacherOutput, codec_parameters, position_keys
from shards.noise.embedding import Noise, dense_arrivals
from shards.settings import from_mapping

VOCAB_SIZE, HIDDEN_SIZE, NUM_ROWS, NUM_TOKENS, SEED = 90, 16, 12, 20, 1234


def random_teacher(seed: int = 0) -> tuple[TeacherOutput, dict[str, Tensor]]:
    """A teacher with a linear head whose tokens were drawn from it, and its store's resources."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_ROWS, NUM_TOKENS, HIDDEN_SIZE, generator=generator)
    head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) * 0.75
    log_probs = (hidden @ head.T).log_softmax(-1)
    tokens = torch.multinomial(log_probs.flatten(0, 1).exp(), 1, generator=generator)
    resources = {
        "unigram_log_probs": log_probs.flatten(0, 1).logsumexp(0).log_softmax(0),
        "lm_head": head,
        "lm_head_bias": torch.zeros(VOCAB_SIZE),
    }
    tokens = tokens.view(NUM_ROWS, NUM_TOKENS)
    return TeacherOutput(log_probs, tokens, torch.arange(NUM_ROWS) + 3, hidden), resources


def check_codec(codec: Codec, *, min_agreement: float = 0.0) -> None:
    """What every codec must pass; an AssertionError says which of it does not hold.

    Args:
        codec: With its parameters.
        min_agreement: Least share of positions at which argmax(log p + decoded xi) is the token.
    """
    output, resources = random_teacher()
    if not codec.needs_hidden:
        output = replace(output, hidden=None)
    resources = {name: resources[name] for name in codec.resource_names}
    arrays = codec.encode(output, SEED, resources)
    specs = codec.array_specs(VOCAB_SIZE, HIDDEN_SIZE if codec.needs_hidden else None)
    assert set(specs) == set(arrays), "array_specs must name what encode returns"
    for name, spec in specs.items():
        expected = (*output.tokens.shape, *spec.trailing_shape)
        assert arrays[name].shape == expected, f"{name}: shape {tuple(arrays[name].shape)}"
        assert str(arrays[name].dtype) == f"torch.{spec.dtype}", f"{name}: {arrays[name].dtype}"
    part = slice(2, 3)
    hidden = None if output.hidden is None else output.hidden[part]
    one = TeacherOutput(output.log_probs[part], output.tokens[part], output.rows[part], hidden)
    for name, array in codec.encode(one, SEED, resources).items():
        # Matrix products over other rows round their last bit differently.
        theirs = arrays[name][part].double()
        torch.testing.assert_close(array.double(), theirs, rtol=1e-2, atol=1e-2)
    rebuilt = from_mapping(type(codec), json.loads(json.dumps(codec_parameters(codec))))
    assert rebuilt == codec, "parameters must rebuild the codec through JSON"

    def decoded(arrays: Mapping[str, Tensor], draw: int) -> Noise:
        flat = {name: array.flatten(0, 1) for name, array in arrays.items()}
        tokens, own = output.tokens.flatten(), output.token_log_probs.flatten()
        return codec.decode(flat, tokens, own, position_keys(output, SEED, draw), resources)

    noise = decoded(arrays, 1)
    first, again, other = (dense_arrivals(n) for n in (noise, decoded(arrays, 1), decoded(arrays, 2)))
    assert torch.equal(first, again), "the same draw must be the same noise"
    cut = dense_arrivals(decoded(codec.cut(arrays), 1))
    assert torch.equal(first, cut), "slots that no row uses must not matter"
    assert torch.equal(first, other) != codec.is_fresh, "is_fresh must say whether draws differ"
    check_noise(noise, VOCAB_SIZE)
    log_probs = output.log_probs.flatten(0, 1)
    winners = (log_probs.double() + noise.gumbels().double()).argmax(1)
    agreement = float((winners == output.tokens.flatten()).double().mean())
    assert agreement >= min_agreement, f"the token is the argmax at {agreement:.3f} of positions"
    keys = position_keys(output, SEED)
    prior = codec.prior(keys, VOCAB_SIZE)
    check_noise(prior, VOCAB_SIZE)
    redrawn = (prior.redrawn(2), codec.prior(keys.redrawn(2), VOCAB_SIZE))
    assert torch.equal(*map(dense_arrivals, redrawn)), "redrawn(d) must be the prior of draw d"
    known = [torch.isfinite(dense_arrivals(n)).sum(1).double() for n in (noise, prior)]
    assert bool((known[0] == known[1]).all()), "sampling must cut off as training does"


def check_noise(noise: Noise, vocab_size: int) -> None:
    """Reads in tiles and selections are parts of the whole, and softmax_embed is the softmax."""
    whole = dense_arrivals(noise)
    assert whole.shape == (noise.num_positions, vocab_size) and whole.dtype == torch.float32
    assert bool((whole > 0).all()), "arrival times must be positive"
    for width in (7, 32):
        parts = [noise.tile(i, min(i + width, vocab_size)) for i in range(0, vocab_size, width)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=0)
    chosen = torch.tensor([3, 0, 3])
    selected = dense_arrivals(noise.select(chosen))
    torch.testing.assert_close(selected, whole[chosen], rtol=1e-4, atol=0)
    if bool(torch.isfinite(whole).all()):
        rates = whole.double().reciprocal()
        shares = (rates / rates.sum(1, keepdim=True)).float()
        embedded = noise.softmax_embed(torch.eye(vocab_size))
        torch.testing.assert_close(embedded, shares, rtol=1e-3, atol=1e-6)
