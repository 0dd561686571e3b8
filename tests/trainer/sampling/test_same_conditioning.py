"""Noise of the same content is conditioned on alike, from a store and in sampling, by any codec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import CODECS, make_codec
from shards.noise.kinds import KeyedPrior, Noise, dense_arrivals
from shards.noise.order_statistics import TopPrior
from shards.noise.philox import PositionKeys
from shards.provenance import derive_seed
from tests.trainer.sampling_cases import tiny_student
from trainer.loading import generate
from trainer.objective.batch import StoredRowNoise
from trainer.sampling.noise import sampling_noise

NUM_ROWS, LENGTH, SEED = 6, 9, 5
SETTINGS = {
    "topk": {"num_entries": 12},
    "seeded": {"tolerance_nats": 1e-3},
    "posterior": {"num_entries": 16},
    "hidden": {"dtype": "float16"},
}
ROUNDING = {"full": 2.0**-9, "quantized": 0.05, "topk": 2.0**-9, "seeded": 2e-3}
"""Largest relative error of a share where a codec rounds xi; the others store no xi."""


def keys_of_samples(draw: int = 0) -> PositionKeys:
    rows = torch.arange(NUM_ROWS).repeat_interleave(LENGTH)
    positions = torch.arange(LENGTH).repeat(NUM_ROWS)
    return PositionKeys(derive_seed(SEED, "sampling noise"), rows, positions, draw)


def training_noise(codec: Codec, vocab_size: int) -> StoredRowNoise:
    """Stored noise whose content is the prior noise of the samples.

    The posterior is F_x = p_x E_0 and F_j = E_j + p_j E_0: with p_x = E_x / E_0 and p_j = 0 it is
    the prior, entry by entry. Such a p is not normalised, which no codec minds.
    """
    keys = keys_of_samples()
    prior = dense_arrivals(KeyedPrior(keys, vocab_size))
    tokens = prior.argmin(1)
    own = (prior.gather(1, tokens[:, None]).squeeze(1) / keys.first_arrivals()).log()
    resources = {
        "unigram_log_probs": torch.linspace(0, -2, vocab_size).log_softmax(0),
        "lm_head": 300 * torch.eye(vocab_size),
        "lm_head_bias": torch.full((vocab_size,), -300.0),
    }
    hidden = torch.nn.functional.one_hot(tokens, vocab_size).float()
    log_probs = 300 * hidden - 300 + own[:, None]
    shape = (NUM_ROWS, LENGTH)

    def rows(values: Tensor) -> Tensor:
        return values.unflatten(0, shape)

    scored = TeacherOutput(
        rows(log_probs)[:, 1:],
        rows(tokens)[:, 1:],
        torch.arange(NUM_ROWS),
        rows(hidden)[:, 1:] if codec.needs_hidden else None,
    )
    encoded = codec.encode(scored, keys.seed, resources)
    arrays = {name: torch.cat([a[:, :1], a], dim=1) for name, a in encoded.items()}
    used = {name: resources[name] for name in codec.resource_names}
    return StoredRowNoise(
        codec, arrays, rows(tokens), rows(own), torch.arange(NUM_ROWS), keys.seed, 0, used
    )


def relative(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm()).detach())


def open_places() -> Tensor:
    """All positions but the first of each row."""
    mask = torch.ones(NUM_ROWS, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize("tau", [1.0, 0.85])
@pytest.mark.parametrize("name", CODECS)
def test_for_every_codec(name: str, tau: float) -> None:
    codec, mask = make_codec(name, **SETTINGS.get(name, {})), open_places()
    student = tiny_student(vocab_size=300, row_length=LENGTH, noise={"prior_weight": 0.5})
    student.conditioner.set_unigram(torch.linspace(0, -3, 300).log_softmax(0))
    mask[1, 3:5] = False
    trained = student.embed_noise(training_noise(codec, 300).at(mask), tau).embedding
    prior = sampling_noise(SEED, torch.arange(NUM_ROWS), LENGTH, 300, codec=codec)
    sampled = student.embed_noise(prior.select(mask.flatten()), tau).embedding
    assert relative(trained, sampled) <= ROUNDING.get(name, 1e-4)
    another = student.embed_noise(prior.redrawn(1).select(mask.flatten()), tau).embedding
    assert relative(another, sampled) > 0.3, "the case must tell draws apart"


@pytest.mark.parametrize("name", CODECS)
def test_through_generate(name: str) -> None:
    student = tiny_student(vocab_size=300, row_length=LENGTH)
    student.config.codec = {"name": name, "parameters": SETTINGS.get(name, {})}
    seen = watch(student)
    generate(student, num_samples=NUM_ROWS, nfe=2, seed=SEED, tau=0.85)
    (noise, tau, embedded), *others = seen
    assert not others, "the noise is embedded once"
    assert tau == 0.85 and noise.num_positions == NUM_ROWS * (LENGTH - 1)
    stored = training_noise(make_codec(name, **SETTINGS.get(name, {})), 300)
    trained = student.embed_noise(stored.at(open_places()), 0.85).embedding
    assert relative(trained, embedded) <= ROUNDING.get(name, 1e-4)


def watch(student) -> list[tuple[Noise, float, Tensor]]:
    """What the student's conditioner is given and gives, from now on."""
    seen: list[tuple[Noise, float, Tensor]] = []

    def hook(module, arguments, output) -> None:
        seen.append((*arguments[:2], output))

    student.conditioner.register_forward_hook(hook)
    return seen


@pytest.mark.parametrize("vocab_size", [600, 4500])
def test_noise_cut_at_k_keeps_the_weight_of_the_rest(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both below and above the size from which the k largest are drawn without the V."""
    draws: list[int] = []
    plain = TopPrior.drawn.func

    def counted(noise: TopPrior):
        draws.append(noise.num_positions)
        return plain(noise)

    monkeypatch.setattr(TopPrior.drawn, "func", counted)
    student = tiny_student(vocab_size=vocab_size, row_length=LENGTH)
    student.config.codec = {"name": "topk", "parameters": {"num_entries": 12}}
    seen = watch(student)
    generate(student, num_samples=NUM_ROWS, nfe=2, seed=SEED, tau=1.0)
    (noise, _, embedded) = seen[0]
    assert draws == [NUM_ROWS * (LENGTH - 1)], "the prior is drawn once"
    assert isinstance(noise, TopPrior) and student.conditioner is not None
    rates, rest = noise.drawn.arrivals.reciprocal(), noise.drawn.rest_rate
    shares = rates / (rates.sum(1) + rest)[:, None]
    expected = torch.einsum("nk,nkd->nd", shares, student.conditioner.weight[noise.drawn.ids])
    torch.testing.assert_close(embedded, expected, rtol=1e-4, atol=1e-5)
    assert float(rest.mean()) > float(rates.sum(1).median()) / 4, "the rest must count"
