"""The ancestral sampler, and what all whole-row samplers promise."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shards.errors import UsageError
from shards.noise.kinds import dense_arrivals
from shards.noise.philox import race
from shards.testing import DenseNoise
from tests.trainer.sampling_cases import BOS, LENGTH, draw, noise_for, open_rows, tiny_student
from trainer.objective.batch import Places
from trainer.objective.corruption import SCHEDULES
from trainer.sampling.fill import (
    AncestralSampler,
    Pass,
    Rows,
    ancestral_steps,
    ancestral_times,
    dense_ranks,
    planned,
)
from trainer.sampling.noise import RowNoise, SampleKeys, TokenRule
from trainer.sampling.orders import (
    ConfidenceSampler,
    FirstHittingSampler,
    FixedCountSampler,
    uniform_order,
)
from trainer.sampling.registry import make_sampler
from trainer.students.registry import Student

SAMPLERS = (
    AncestralSampler(nfe=1),
    AncestralSampler(nfe=4, nucleus_p=0.9),
    AncestralSampler(nfe=50, decision="argmax", final_argmax=False),
    AncestralSampler(nfe=4, redraw_noise=True),
    FirstHittingSampler(nucleus_p=0.7),
    FixedCountSampler(nfe=3),
    ConfidenceSampler(nfe=3),
    ConfidenceSampler(nfe=4, decision="argmax", order_temperature=0.5),
)
IDS = torch.tensor([5, 0, 17, 2, 9])


def suited(sampler, student: Student):
    return sampler if student.is_conditioned else dataclasses.replace(sampler, redraw_noise=False)


def test_race_goldens(golden: Path) -> None:
    ops = load_file(golden / "ops.safetensors")
    probs, uniform = (ops[f"categorical.{name}"].flatten(0, 1) for name in "pu")
    assert torch.equal(race(probs, uniform), ops["categorical.index"].flatten())


def test_steps_by_hand() -> None:
    times = ancestral_times(4, final_argmax=False)
    assert times.tolist() == [1, 0.75, 0.5, 0.25, 0]
    uniform = torch.tensor([[0.9, 0.75, 0.6, 0.1, 0.3]], dtype=torch.float64)
    assert ancestral_steps(uniform, SCHEDULES["loglinear"], times).tolist() == [[1, 2, 2, 4, 3]]


def test_order_is_shared_by_all_samplers() -> None:
    """What ancestral sampling reveals first, the first-hitting sampler reveals first."""
    student, ids = tiny_student(), torch.arange(200)
    rows = Rows(student, open_rows(student, 200), RowNoise(None, LENGTH), SampleKeys(1, ids))

    def revealed(passes) -> Tensor:
        steps = torch.zeros_like(rows.tokens)
        for part in passes:
            assert part.steps is not None and not steps[part.places.index].any()
            steps[part.places.index] = part.steps[part.where.rows]
        return steps[:, 1:]

    columns = slice(0, LENGTH)
    one_by_one = revealed(uniform_order(rows, ids, columns, None))
    assert one_by_one.sort(dim=1).values.tolist() == [[*range(1, LENGTH)]] * 200
    steps = revealed(AncestralSampler(nfe=1000).order(rows))
    assert (steps.gather(1, one_by_one.argsort(1)).diff(dim=1) >= 0).all()


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
        original = Rows.predict

        def counted(self, part: Pass):
            calls[part.rows] += 1
            return original(self, part)

        monkeypatch.setattr(Rows, "predict", counted)
        result = draw(student, suited(sampler, student), IDS)
        assert torch.equal(result.nfe, calls)
        assert (result.nfe >= 1).all()


def test_nfe_budgets() -> None:
    student = tiny_student()
    ids = torch.arange(64)
    for nfe in (1, 2, 5, 16, 1000):
        used = draw(student, AncestralSampler(nfe=nfe, final_argmax=False), ids).nfe
        assert used.max() <= min(nfe, LENGTH - 1)
    assert (draw(student, FirstHittingSampler(), ids).nfe == LENGTH - 1).all()
    assert (draw(student, FixedCountSampler(nfe=3), ids).nfe == 3).all()


def test_many_steps_become_first_hitting() -> None:
    """In the limit each step reveals one token, in the same order with the same draws."""
    student, ids = tiny_student(), torch.arange(50)
    fine = draw(student, AncestralSampler(nfe=10**6, final_argmax=False), ids)
    assert torch.equal(fine.tokens, draw(student, FirstHittingSampler(), ids).tokens)


def test_one_argmax_step_is_the_argmax_of_x0() -> None:
    student, ids = tiny_student(), torch.arange(6)
    tokens, noise = open_rows(student, 6), noise_for(student, ids, 3)
    assert noise is not None
    result = draw(student, AncestralSampler(nfe=1, decision="argmax", tau=1.0), ids)
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
    scaled = AncestralSampler(nfe=4).sample(student, tokens, ids, noise, 3)
    ours = AncestralSampler(nfe=4, tau=1.0).sample(student, tokens, ids, powered, 3)
    assert torch.equal(scaled.tokens, ours.tokens)
    other = AncestralSampler(nfe=4, tau=1.0).sample(student, tokens, ids, noise, 3)
    assert not torch.equal(other.tokens, ours.tokens)


def test_redrawn_noise_is_that_of_the_step() -> None:
    student, ids = tiny_student(), torch.arange(4)
    tokens, noise = open_rows(student, 4), noise_for(student, ids, 3)
    assert noise is not None
    masked = tokens == student.mask_id
    rows, steps = torch.tensor([3, 1]), torch.tensor([5, 2])
    use = RowNoise(noise, LENGTH, 1.0, redraw=True)
    both = use.embed(student, masked[rows], rows, steps=steps)
    assert both is not None
    for slot, (row, step) in enumerate(zip(rows, steps, strict=True)):
        fixed = RowNoise(noise.redrawn(int(step)), LENGTH, 1.0)
        expected = fixed.embed(student, masked, torch.arange(4))
        assert expected is not None
        assert torch.allclose(both[slot], expected[row])
    held = RowNoise(noise, LENGTH, 1.0).embed(student, masked, torch.arange(4))
    assert held is not None
    assert not torch.allclose(both[0], held[3])


def test_every_attempt_at_a_row_has_noise_of_its_own() -> None:
    """No step of an earlier attempt has met it either."""
    student, ids = tiny_student(), torch.arange(3)
    use = RowNoise(noise_for(student, ids, 3), LENGTH, 1.0, redraw=True)
    rows = torch.tensor([2, 0])
    attempts = [use.of(rows, attempt).noise for attempt in range(3)]
    seen = [dense_arrivals(noise.redrawn(step)) for noise in attempts for step in range(4)]
    assert seen[0].shape == (2 * LENGTH, student.config.vocab_size)
    assert len(torch.stack(seen).unique()) == 12 * seen[0].numel()
    whole = dense_arrivals(use.noise).unflatten(0, (3, LENGTH))
    assert seen[0].tolist() == whole[rows].flatten(0, 1).tolist(), "the first is what was given"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NothingDrawn(AncestralSampler):
    """Leaves every masked position to the final fill."""

    def order(self, rows: Rows):  # type: ignore[no-untyped-def]
        steps = rows.masked.long()
        return planned(rows.everyone, slice(0, LENGTH), steps, TokenRule("argmax"))


def test_the_final_fill_takes_the_most_probable_tokens_whatever_the_rule() -> None:
    student = tiny_student()
    expected = draw(student, AncestralSampler(nfe=1, decision="argmax"), IDS).tokens.tolist()
    assert draw(student, NothingDrawn(decision="categorical"), IDS).tokens.tolist() == expected
    drawn = AncestralSampler(nfe=1, decision="categorical")
    assert draw(student, drawn, IDS).tokens.tolist() != expected, "the case must be able to tell"


def test_time_conditioned_student_is_told_the_time() -> None:
    student = tiny_student(diffusion={"time_conditioning": True}, conditioning="none")
    result = draw(student, AncestralSampler(nfe=6), IDS)
    assert (result.tokens != student.mask_id).all()
    tokens = open_rows(student, 2)
    ids, where = torch.arange(2), Places.of(tokens == student.mask_id)
    rows = Rows(student, tokens, RowNoise(None, LENGTH), SampleKeys(3, ids))
    rows.set_times(ancestral_times(4, False))
    with torch.no_grad():
        both = rows.predict(Pass(ids, where, where, torch.tensor([2, 4]))).unflatten(0, (2, -1))
    for slot, t in enumerate((0.75, 0.25)):  # time at the start of steps 2 and 4
        sigma = torch.full((2,), -math.log(1 - t))
        with torch.no_grad():
            expected = student.predict(tokens, None, sigma)[slot, 1:]
        assert torch.allclose(both[slot], expected, atol=1e-5)
    with pytest.raises(UsageError, match="time-conditioned"):
        draw(student, FirstHittingSampler(), IDS)


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
    sampler, tokens = AncestralSampler(nfe=2), open_rows(student, 2)
    ids = torch.arange(2)
    noise = noise_for(student, ids, 3)
    with pytest.raises(UsageError, match="needs noise"):
        sampler.sample(student, tokens, ids, None, 3)
    with pytest.raises(UsageError, match=r"takes no noise.*tau"):
        AncestralSampler(nfe=2, tau=0.5).sample(plain, tokens, ids, None, 3)
    with pytest.raises(UsageError, match=r"takes no noise.*redraw_noise"):
        AncestralSampler(nfe=2, redraw_noise=True).sample(plain, tokens, ids, None, 3)
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
