"""The ancestral sampler, and what all whole-row samplers promise."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from shards.errors import UsageError
from shards.noise.kinds import dense_arrivals
from shards.noise.philox import race
from shards.testing import DenseNoise
from tests.trainer.sampling_cases import BOS, LENGTH, draw, noise_for, open_rows, tiny_student
from trainer.objective.batch import Places
from trainer.sampling.ancestral import AncestralConfig, FirstHittingConfig, FixedCountConfig
from trainer.sampling.confidence import ConfidenceConfig
from trainer.sampling.noise import NoiseUse
from trainer.sampling.registry import make_sampler
from trainer.sampling.revealing import ancestral_steps, ancestral_times, dense_ranks, random_ranks
from trainer.sampling.sampler import PlannedSampler, WholeRow
from trainer.sampling.token_rule import SampleKeys, position_uniforms
from trainer.students.registry import Student

SAMPLERS = (
    AncestralConfig(nfe=1),
    AncestralConfig(nfe=4, nucleus_p=0.9),
    AncestralConfig(nfe=50, decision="argmax", final_argmax=False),
    AncestralConfig(nfe=4, redraw_noise=True),
    FirstHittingConfig(nucleus_p=0.7),
    FixedCountConfig(nfe=3),
    ConfidenceConfig(nfe=3),
    ConfidenceConfig(nfe=4, decision="argmax", order_temperature=0.5),
)
IDS = torch.tensor([5, 0, 17, 2, 9])


def suited(sampler, student: Student):
    return sampler if student.is_conditioned else dataclasses.replace(sampler, redraw_noise=False)


def test_race_goldens(golden: Path) -> None:
    ops = load_file(golden / "ops.safetensors")
    probs, uniform = (ops[f"categorical.{name}"].flatten(0, 1) for name in "pu")
    assert torch.equal(race(probs, uniform), ops["categorical.index"].flatten())


def test_steps_by_hand() -> None:
    times = ancestral_times(4, last_time=0.0)
    assert times.tolist() == [1, 0.75, 0.5, 0.25, 0]
    uniform = torch.tensor([[0.9, 0.75, 0.6, 0.1, 0.3]], dtype=torch.float64)
    masked = torch.tensor([[True, True, True, True, False]])
    assert ancestral_steps(uniform, masked, times[1:]).tolist() == [[1, 2, 2, 4, 0]]
    assert random_ranks(uniform, masked).tolist() == [[0, 1, 2, 3, 4]]


def test_order_is_shared_by_all_samplers() -> None:
    keys = SampleKeys(1, torch.arange(200))
    uniform = position_uniforms(keys, "sampling order", LENGTH)
    masked = torch.ones_like(uniform, dtype=torch.bool)
    steps = ancestral_steps(uniform, masked, ancestral_times(1000)[1:])
    by_rank = steps.gather(1, random_ranks(uniform, masked).argsort(1))
    assert (by_rank.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
class TestPromises:
    def test_rows_are_filled_and_given_tokens_kept(self, sampler, conditioning: str) -> None:
        student = tiny_student(conditioning=conditioning)
        tokens = open_rows(student, len(IDS))
        tokens[1, 4:7] = torch.tensor([3, 8, 3])
        tokens[2, 1:] = 4
        result = draw(student, suited(sampler, student), IDS, tokens)
        given = tokens != student.mask_id
        assert torch.equal(result.tokens[given], tokens[given])
        assert (result.tokens < student.mask_id).all() and (result.tokens >= 0).all()
        assert result.nfe[2] == 0, "nothing to fill, nothing to run"
        assert (result.lengths == LENGTH).all()

    def test_samples_do_not_depend_on_the_batch(self, sampler, conditioning: str) -> None:
        student = tiny_student(conditioning=conditioning)
        sampler = suited(sampler, student)
        together = draw(student, sampler, IDS)
        for slot, sample_id in enumerate(IDS):
            alone = draw(student, sampler, sample_id[None])
            assert torch.equal(alone.tokens[0], together.tokens[slot])
            assert alone.nfe[0] == together.nfe[slot]
        if sampler.decision == "categorical" or student.is_conditioned:
            other = draw(student, sampler, IDS, seed=4)
            assert not torch.equal(other.tokens, together.tokens)

    def test_dropout_is_off_and_the_mode_is_restored(self, sampler, conditioning: str) -> None:
        student = tiny_student(conditioning=conditioning)
        sampler = suited(sampler, student)
        expected = draw(student, sampler, IDS).tokens
        student.train()
        assert torch.equal(draw(student, sampler, IDS).tokens, expected)
        assert student.training

    def test_nfe_counts_real_forward_passes(
        self, sampler, conditioning: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        student = tiny_student(conditioning=conditioning)
        calls = torch.zeros(len(IDS), dtype=torch.int64)
        original = WholeRow.__call__

        def counted(self, rows, tokens, where, steps):
            calls[rows] += 1
            return original(self, rows, tokens, where, steps)

        monkeypatch.setattr(WholeRow, "__call__", counted)
        result = draw(student, suited(sampler, student), IDS)
        assert torch.equal(result.nfe, calls)
        assert (result.nfe >= 1).all()


def test_nfe_budgets() -> None:
    student = tiny_student()
    ids = torch.arange(64)
    for nfe in (1, 2, 5, 16, 1000):
        used = draw(student, AncestralConfig(nfe=nfe, final_argmax=False), ids).nfe
        assert used.max() <= min(nfe, LENGTH - 1)
    assert (draw(student, FirstHittingConfig(), ids).nfe == LENGTH - 1).all()
    assert (draw(student, FixedCountConfig(nfe=3), ids).nfe == 3).all()


def test_many_steps_become_first_hitting() -> None:
    """In the limit each step reveals one token, in the same order with the same draws."""
    student, ids = tiny_student(), torch.arange(50)
    fine = draw(student, AncestralConfig(nfe=10**6, final_argmax=False), ids)
    assert torch.equal(fine.tokens, draw(student, FirstHittingConfig(), ids).tokens)


def test_one_argmax_step_is_the_argmax_of_x0() -> None:
    student, ids = tiny_student(), torch.arange(6)
    tokens, noise = open_rows(student, 6), noise_for(student, ids, 3)
    assert noise is not None
    result = draw(student, AncestralConfig(nfe=1, decision="argmax", tau=1.0), ids)
    xi = -noise.tile(0, 11).view(6, LENGTH, 11).log()
    condition = torch.softmax(xi, dim=-1) @ student.conditioner.weight
    with torch.no_grad():
        expected = student.predict(tokens, condition).argmax(-1)
    assert torch.equal(result.tokens, expected)
    assert (result.tokens[:, 0] == BOS).all()


def test_tau_scales_the_noise() -> None:
    """tau xi at scale 1 is xi at scale tau: arrivals F^tau at tau = 1."""
    student, ids = tiny_student(), torch.arange(20)
    tokens, noise = open_rows(student, 20), noise_for(student, ids, 3)
    assert noise is not None
    powered = DenseNoise(noise.tile(0, 11).pow(0.85))
    scaled = AncestralConfig(nfe=4).sample(student, tokens, ids, noise, 3)
    ours = AncestralConfig(nfe=4, tau=1.0).sample(student, tokens, ids, powered, 3)
    assert torch.equal(scaled.tokens, ours.tokens)
    other = AncestralConfig(nfe=4, tau=1.0).sample(student, tokens, ids, noise, 3)
    assert not torch.equal(other.tokens, ours.tokens)


def test_redrawn_noise_is_that_of_the_step() -> None:
    student, ids = tiny_student(), torch.arange(4)
    tokens, noise = open_rows(student, 4), noise_for(student, ids, 3)
    assert noise is not None
    masked = tokens == student.mask_id
    rows, steps = torch.tensor([3, 1]), torch.tensor([5, 2])
    use = NoiseUse(noise, 1.0, redraw=True).checked(student, tokens)
    both = use.embed(student, masked[rows], rows, steps=steps)
    assert both is not None
    for slot, (row, step) in enumerate(zip(rows, steps, strict=True)):
        fixed = NoiseUse(noise.redrawn(int(step)), 1.0).checked(student, tokens)
        expected = fixed.embed(student, masked, torch.arange(4))
        assert expected is not None
        assert torch.allclose(both[slot], expected[row])
    held = NoiseUse(noise, 1.0).checked(student, tokens).embed(student, masked, torch.arange(4))
    assert held is not None
    assert not torch.allclose(both[0], held[3])


def test_every_attempt_at_a_row_has_noise_of_its_own() -> None:
    """No step of an earlier attempt has met it either."""
    student, ids = tiny_student(), torch.arange(3)
    use = NoiseUse(noise_for(student, ids, 3), 1.0, redraw=True).checked(
        student, open_rows(student, 3)
    )
    rows = torch.tensor([2, 0])
    attempts = [use.of(rows, attempt).noise for attempt in range(3)]
    seen = [dense_arrivals(noise.redrawn(step)) for noise in attempts for step in range(4)]
    assert seen[0].shape == (2 * LENGTH, student.config.vocab_size)
    assert len(torch.stack(seen).unique()) == 12 * seen[0].numel()
    whole = dense_arrivals(use.noise).unflatten(0, (3, LENGTH))
    assert seen[0].tolist() == whole[rows].flatten(0, 1).tolist(), "the first is what was given"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NothingDrawn(PlannedSampler):
    """Leaves every masked position to the final fill."""

    label: ClassVar[str] = "nothing drawn"

    def steps(self, student, masked, keys, first=0):  # type: ignore[no-untyped-def]
        return torch.zeros_like(masked, dtype=torch.int64), masked.long()


def test_the_final_fill_takes_the_most_probable_tokens_whatever_the_rule() -> None:
    student = tiny_student()
    expected = draw(student, AncestralConfig(nfe=1, decision="argmax"), IDS).tokens.tolist()
    assert draw(student, NothingDrawn(decision="categorical"), IDS).tokens.tolist() == expected
    drawn = AncestralConfig(nfe=1, decision="categorical")
    assert draw(student, drawn, IDS).tokens.tolist() != expected, "the case must be able to tell"


def test_time_conditioned_student_is_told_the_time() -> None:
    student = tiny_student(diffusion={"time_conditioning": True}, conditioning="none")
    result = draw(student, AncestralConfig(nfe=6), IDS)
    assert (result.tokens != student.mask_id).all()
    tokens = open_rows(student, 2)
    sampler = AncestralConfig(nfe=4, final_argmax=False)
    predict = WholeRow(student, tokens, NoiseUse(None), sampler.times)
    rows, where = torch.arange(2), Places.of(tokens == student.mask_id)
    both = predict(rows, tokens, where, torch.tensor([2, 4])).unflatten(0, (2, -1))
    for slot, t in enumerate((0.75, 0.25)):  # time at the start of steps 2 and 4
        sigma = torch.full((2,), -math.log(1 - t))
        with torch.no_grad():
            expected = student.predict(tokens, None, sigma)[slot, 1:]
        assert torch.allclose(both[slot], expected, atol=1e-5)
    with pytest.raises(UsageError, match="time-conditioned"):
        draw(student, FirstHittingConfig(), IDS)


def test_dense_ranks_by_hand() -> None:
    steps = torch.tensor([[0, 7, 3, 7, 9], [2, 2, 1, 5, 5], [0, 0, 0, 0, 0]])
    expected = [[0, 2, 1, 2, 3], [2, 2, 1, 3, 3], [0, 0, 0, 0, 0]]
    assert dense_ranks(steps).tolist() == expected


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ancestral", {"nfe": 0}, "nfe"),
        ("ancestral", {"nucleus_p": 0.0}, "nucleus_p"),
        ("ancestral", {"nucleus_p": 1.5}, "nucleus_p"),
        ("ancestral", {"tau": -1.0}, "tau"),
        ("ancestral", {"decision": "greedy"}, "decision"),
        ("ancestral", {"nucleus": 0.9}, "did you mean 'nucleus_p'"),
        ("first_hitting", {"nfe": 4}, "unknown config key"),
        ("ancestor", {}, "did you mean 'ancestral'"),
        ("fixed_count", {"nfe": 0}, "nfe"),
    ],
)
def test_bad_settings_are_named(name: str, settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_sampler(name, **settings)


def test_mismatches_are_refused() -> None:
    student, plain = tiny_student(), tiny_student(conditioning="none")
    sampler, tokens = AncestralConfig(nfe=2), open_rows(student, 2)
    ids = torch.arange(2)
    noise = noise_for(student, ids, 3)
    with pytest.raises(UsageError, match="needs noise"):
        sampler.sample(student, tokens, ids, None, 3)
    with pytest.raises(UsageError, match=r"takes no noise.*tau"):
        AncestralConfig(nfe=2, tau=0.5).sample(plain, tokens, ids, None, 3)
    with pytest.raises(UsageError, match=r"takes no noise.*redraw_noise"):
        AncestralConfig(nfe=2, redraw_noise=True).sample(plain, tokens, ids, None, 3)
    with pytest.raises(UsageError, match="does not fit"):
        sampler.sample(student, tokens, ids, noise_for(student, torch.arange(3), 3), 3)
    with pytest.raises(UsageError, match="position 0"):
        sampler.sample(student, torch.full_like(tokens, student.mask_id), ids, noise, 3)
    with pytest.raises(UsageError, match="longer"):
        draw(student, sampler, ids, open_rows(student, 2, LENGTH + 1))
    with pytest.raises(UsageError, match=r"row 1, position 3.*got 12"):
        bad = tokens.clone()
        bad[1, 3] = 12
        sampler.sample(student, bad, ids, noise, 3)
    with pytest.raises(UsageError, match="block"):
        blocks = tiny_student("bd3lm", block_size=4)
        sampler.sample(blocks, tokens, ids, noise, 3)
