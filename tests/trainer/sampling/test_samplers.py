"""What all samplers promise, and ancestral sampling."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from shards.errors import UsageError
from shards.noise.philox import race
from tests.trainer.sampling_cases import BOS, LENGTH, draw, noise_for, open_rows, tiny_student
from trainer.objective.batch import Places
from trainer.objective.corruption import SCHEDULES
from trainer.sampling import fill
from trainer.sampling.fill import (
    AncestralSampler,
    Pass,
    Rows,
    ancestral_steps,
    ancestral_times,
    dense_ranks,
)
from trainer.sampling.noise import RowNoise, SampleKeys
from trainer.sampling.orders import FirstHittingSampler, FixedCountSampler, uniform_order
from trainer.sampling.registry import make_sampler
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.registry import Student

IDS = torch.tensor([5, 0, 17, 2, 9])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one step": ("ancestral", {"nfe": 1}),
    "nucleus": ("ancestral", {"nfe": 4, "nucleus_p": 0.9}),
    "argmax": ("ancestral", {"nfe": 50, "decision": "argmax", "final_argmax": False}),
    "redrawn": ("ancestral", {"nfe": 4, "redraw_noise": True}),
    "first-hitting": ("first_hitting", {"nucleus_p": 0.7}),
    "fixed count": ("fixed_count", {"nfe": 3}),
    "confidence": ("confidence", {"nfe": 3}),
    "noisy confidence": ("confidence", {"nfe": 4, "decision": "argmax", "order_temperature": 0.5}),
    "blocks": ("block", {"nfe": 6, "nucleus_p": 0.9}),
    "blocks, one by one": ("block", {"inner": "first_hitting"}),
    "blocks, redrawn": ("block", {"redraw_noise": True}),
    "blocks without cache": ("block", {"use_cache": False}),
    "sequential": ("sequential", {}),
    "apd": ("apd", {"mixture_weight": 0.5, "nucleus_p": 0.95}),
    "apd, five ahead": ("apd", {"mixture_weight": 0.5, "max_lookahead": 5}),
}


def case_of(case: str, conditioning: str, verifier: str) -> tuple[Student, Any]:
    """A student and a sampler that fits it."""
    name, settings = CASES[case]
    if name == "apd":
        settings = settings | {"verifier": verifier}
    if conditioning == "none":
        settings = {key: value for key, value in settings.items() if key != "redraw_noise"}
    kind = {"block": "bd3lm", "sequential": "ar"}.get(name, "mdlm")
    if kind == "ar" and conditioning != "none":
        pytest.skip("an autoregressive student takes no noise")
    student = tiny_student(kind, conditioning, block_size=3 if kind == "bd3lm" else None)
    return student, make_sampler(name, **settings)


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize("case", CASES)
def test_promises(
    case: str, conditioning: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are filled, given tokens kept; a sample depends on seed and index, not on the batch."""
    student, sampler = case_of(case, conditioning, verifier)
    tokens = open_rows(student, len(IDS))
    tokens[1, 4:7] = torch.tensor([3, 8, 3])
    tokens[2, 1:] = 4
    tokens[3, 1:9] = 6
    known = tokens != student.mask_id
    student.train()
    together = draw(student, sampler, IDS, tokens)
    assert student.training, "the mode is restored"
    student.eval()
    assert torch.equal(together.tokens[known], tokens[known])
    assert (together.tokens < student.mask_id).all() and (together.tokens >= 0).all()
    assert (together.lengths == LENGTH).all()
    assert together.nfe[2] == 0, "nothing to fill, nothing to run"
    with monkeypatch.context() as patch:
        patch.setattr(fill, "POSITIONS_AT_A_TIME", 7)  # in many groups of rows
        grouped = draw(student, sampler, IDS, tokens)
    assert torch.equal(grouped.tokens, together.tokens) and torch.equal(grouped.nfe, together.nfe)
    calls: list[int] = []
    student.backbone.register_forward_hook(lambda *_: calls.append(1))
    for slot, sample_id in enumerate(IDS):
        calls.clear()
        alone = draw(student, sampler, sample_id[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot]), "nor does dropout change it"
        assert alone.nfe[0] == together.nfe[slot] == len(calls)
    if getattr(sampler, "decision", "categorical") == "categorical" or student.is_conditioned:
        other = draw(student, sampler, IDS, tokens, seed=4)
        assert not torch.equal(other.tokens, together.tokens)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 30))
def test_groups_cover_the_rows_once_and_keep_to_the_bound(counts: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "POSITIONS_AT_A_TIME", most)
        groups = [counts[group] for group in fill.row_groups(counts)]
    assert [count for group in groups for count in group] == counts
    assert all(group and (sum(group) <= most or len(group) == 1) for group in groups)
    pairs = itertools.pairwise(groups)
    assert all(sum(one) + two[0] > most for one, two in pairs), "a group could be larger"


def test_race_goldens(golden: Path) -> None:
    ops = load_file(golden / "ops.safetensors")
    probs, uniform = (ops[f"categorical.{name}"].flatten(0, 1) for name in "pu")
    assert torch.equal(race(probs, uniform), ops["categorical.index"].flatten())


def test_steps_by_hand() -> None:
    times = ancestral_times(4, final_argmax=False)
    assert times.tolist() == [1, 0.75, 0.5, 0.25, 0]
    uniform = torch.tensor([[0.9, 0.75, 0.6, 0.1, 0.3]], dtype=torch.float64)
    assert ancestral_steps(uniform, SCHEDULES["loglinear"], times).tolist() == [[1, 2, 2, 4, 3]]
    steps = torch.tensor([[0, 7, 3, 7, 9], [2, 2, 1, 5, 5], [0, 0, 0, 0, 0]])
    assert dense_ranks(steps).tolist() == [[0, 2, 1, 2, 3], [2, 2, 1, 3, 3], [0, 0, 0, 0, 0]]


def test_order_is_shared_by_all_samplers() -> None:
    """What ancestral sampling reveals first, the first-hitting sampler reveals first."""
    student, ids = tiny_student(), torch.arange(200)
    rows = Rows(student, open_rows(student, 200), RowNoise(None, LENGTH), SampleKeys(1, ids))

    def revealed(passes: Any) -> Tensor:
        steps = torch.zeros_like(rows.tokens)
        for part in passes:
            assert part.steps is not None and not steps[part.places.index].any()
            steps[part.places.index] = part.steps[part.where.rows]
        return steps[:, 1:]

    one_by_one = revealed(uniform_order(rows, None))
    assert one_by_one.sort(dim=1).values.tolist() == [[*range(1, LENGTH)]] * 200
    steps = revealed(AncestralSampler(nfe=1000).order(rows))
    assert (steps.gather(1, one_by_one.argsort(1)).diff(dim=1) >= 0).all()


def test_nfe_budgets() -> None:
    student, ids = tiny_student(), torch.arange(64)
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
    condition = EmbeddedNoise(torch.softmax(xi, dim=-1) @ student.conditioner.weight)
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


def test_a_time_conditioned_student_is_told_the_time() -> None:
    student = tiny_student(diffusion={"time_conditioning": True}, conditioning="none")
    result = draw(student, AncestralSampler(nfe=6), IDS)
    assert (result.tokens != student.mask_id).all()
    tokens, ids = open_rows(student, 2), torch.arange(2)
    where = Places.of(tokens == student.mask_id)
    rows = Rows(student, tokens, RowNoise(None, LENGTH), SampleKeys(3, ids))
    rows.set_times(ancestral_times(4, final_argmax=False))
    with torch.no_grad():
        both = rows.predict(Pass(ids, where, where, torch.tensor([2, 4]))).unflatten(0, (2, -1))
        for slot, t in enumerate((0.75, 0.25)):  # time at the start of steps 2 and 4
            sigma = torch.full((2,), -math.log(1 - t))
            expected = student.predict(tokens, None, sigma)[slot, 1:]
            assert torch.allclose(both[slot], expected, atol=1e-5)


def final_fill(sampler: AncestralSampler, student: Student, keys: SampleKeys) -> Tensor:
    """Whether a pass of the final fill, which has a rule of its own, reveals a position."""
    tokens = open_rows(student, len(keys.sample_ids))
    rows, left = Rows(student, tokens, RowNoise(None, LENGTH), keys), tokens < 0
    for part in sampler.order(rows):
        if part.rule is not None:
            left[part.places.index] = True
    return left


def test_the_final_fill_takes_the_most_probable_tokens() -> None:
    """Under the square-root schedule 3.2e-3 of the positions are left after the last step."""
    student = tiny_student(conditioning="none", diffusion={"schedule": "square_root"})
    ids, sampler = torch.arange(1200), AncestralSampler(nfe=1, nucleus_p=0.5)
    result, left = draw(student, sampler, ids), final_fill(sampler, student, SampleKeys(3, ids))
    assert left.sum() >= 20  # 42 expected
    rows = left.any(dim=1)
    assert torch.equal(result.nfe, 1 + rows.long())
    before = result.tokens.masked_fill(left, student.mask_id)[rows]
    where = before == student.mask_id
    with torch.no_grad():
        best = student.predict_at(before, where)[:, :-1].argmax(dim=-1)
    assert torch.equal(result.tokens[rows][where], best)
    to_zero = dataclasses.replace(sampler, final_argmax=False)
    assert not final_fill(to_zero, student, SampleKeys(3, ids)).any()


@pytest.mark.parametrize(
    ("message", "student", "change"),
    [
        ("needs noise", {}, {"noise": None}),
        ("does not fit", {}, {"noise": 3}),
        ("position 0", {}, {"token": (0, 0, 11)}),
        (r"row 1, position 3.*got 12", {}, {"token": (1, 3, 12)}),
        ("longer", {}, {"length": LENGTH + 1}),
        ("block", {"kind": "bd3lm", "block_size": 4}, {}),
    ],
)
def test_mismatches_are_refused(message: str, student: dict[str, Any], change: Any) -> None:
    model, ids = tiny_student(**student), torch.arange(2)
    tokens = open_rows(model, 2, change.get("length"))
    if "token" in change:
        row, position, token = change["token"]
        tokens[row, position] = token
    num_rows = change.get("noise", 2)
    noise = num_rows and noise_for(model, torch.arange(num_rows), 3, tokens.shape[1])
    with pytest.raises(UsageError, match=message):
        AncestralSampler(nfe=2).sample(model, tokens, ids, noise, 3)
