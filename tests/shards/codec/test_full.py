"""``full``: half-precision rounding and nothing else; and what holds for every codec."""

from __future__ import annotations

import json

import pytest
import torch

from shards.codec.full import frozen_posterior, round_down_to_half
from shards.codec.protocol import PART_ELEMENTS, Codec, TeacherOutput
from shards.codec.registry import CODECS, codec_parameters, make_codec
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import dense_arrivals
from tests.shards.codec_cases import SEED, decode, flat_log_probs, teacher_output


def test_every_entry_is_the_posterior_draw_rounded() -> None:
    output, resources = teacher_output()
    decoded = decode(make_codec("full"), output, resources).gumbels()
    exact = frozen_posterior(output, SEED).gumbels()
    # Half precision has 11 significant bits; a rounding down doubles the largest error.
    assert bool(((decoded - exact).abs() <= exact.abs() * 2.0**-10 + 1e-6).all())
    tokens = output.tokens.flatten()[:, None]
    torch.testing.assert_close(decoded.gather(1, tokens), exact.gather(1, tokens))


def test_the_token_stays_the_argmax() -> None:
    for seed in range(3):
        output, resources = teacher_output(40, 50, 60, spread=1.0, seed=seed)
        noise = decode(make_codec("full"), output, resources)
        chosen = gumbel_argmax(flat_log_probs(output), dense_arrivals(noise))
        assert torch.equal(chosen, output.tokens.flatten())


def test_round_down_to_half() -> None:
    values = torch.cat([torch.randn(10_000) * 10, torch.tensor([1e-9, -1e-9, 0.0, 2.0])])
    rounded = round_down_to_half(values).float()
    assert bool((rounded <= values).all())
    assert bool((rounded >= values - values.abs() * 2.0**-10 - 1e-7).all())


@pytest.mark.parametrize("name", [name for name in CODECS if name != "hidden"])
def test_parts_and_batches_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output, resources = teacher_output()
    codec = make_codec(name)
    whole = codec.encode(output, SEED, resources)
    monkeypatch.setitem(PART_ELEMENTS, "cpu", 700)
    for array, expected in codec.encode(output, SEED, resources).items():
        assert torch.equal(expected, whole[array])
    one_row = TeacherOutput(output.log_probs[2:3], output.tokens[2:3], output.rows[2:3])
    for array, expected in codec.encode(one_row, SEED, resources).items():
        assert torch.equal(expected[0], whole[array][2])


@pytest.mark.parametrize("name", list(CODECS))
def test_parameters_rebuild_the_codec_through_json(name: str) -> None:
    codec = make_codec(name)
    assert make_codec(name, **json.loads(json.dumps(codec_parameters(codec)))) == codec
    assert isinstance(codec, Codec) and codec.name == name
