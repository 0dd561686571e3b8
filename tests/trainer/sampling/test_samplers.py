"""What all samplers promise, the laws they follow, and ancestral sampling."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.goldens import predict
from benchmarks.sampler_statistics import Goldens, run_case, run_tau
from shards.errors import UsageError
from shards.noise.philox import PositionKeys, race, uniforms
from tests.changed_settings import changed
from tests.trainer.sampling_cases import LENGTH, draw, noise_for, open_rows, tiny_student
from trainer.loading import generate
from trainer.objective.batch import Places
from trainer.objective.corruption import RATE_SCHEDULE, SCHEDULES
from trainer.sampling import fill
from trainer.sampling.fill import AncestralSampler, Pass, Rows, Sampler, ancestral_steps
from trainer.sampling.noise import RowNoise, SampleKeys
from trainer.sampling.orders import FirstHittingSampler, FixedCountSampler
from trainer.sampling.registry import make_sampler
from trainer.sampling.stopping import StopRule
from trainer.students.registry import Student

IDS = torch.tensor([5, 0, 17, 2, 9])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one step": ("ancestral", {"nfe": 1}),
    "nucleus": ("ancestral", {"nfe": 4, "nucleus_p": 0.9}),
    "argmax": ("ancestral", {"nfe": 50, "decision": "argmax", "final_argmax": False}),
    "first-hitting": ("first-hitting", {"nucleus_p": 0.7}),
    "fixed count": ("fixed_count", {"nfe": 3}),
    "confidence": ("confidence", {"nfe": 3}),
    "noisy confidence": ("confidence", {"nfe": 4, "decision": "argmax", "order_temperature": 0.5}),
    "blocks": ("block", {"nfe": 6, "nucleus_p": 0.9}),
    "blocks, one by one": ("block", {"inner": "first_hitting"}),
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
    kind = {"block": "bd3lm", "sequential": "ar"}.get(name, "mdlm")
    student = tiny_student(kind, conditioning, block_size=3 if kind == "bd3lm" else None)
    return student, make_sampler(name, **settings)


@pytest.mark.parametrize(
    ("case", "conditioning"),
    [(case, "none") for case in CASES]
    + [(case, "gumbel") for case, (name, _) in CASES.items() if name != "sequential"],
)
def test_promises(case: str, conditioning: str, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        patch.setattr(fill, "LOG_PROBS_AT_A_TIME", 7 * (student.mask_id + 1))  # in many groups of rows
        grouped = draw(student, sampler, IDS, tokens)
    assert torch.equal(grouped.tokens, together.tokens) and torch.equal(grouped.nfe, together.nfe)
    calls: list[int] = []
    student.backbone.register_forward_hook(lambda *_: calls.append(1))
    for slot, sample_id in enumerate(IDS):
        calls.clear()
        alone = draw(student, sampler, sample_id[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot]), "nor does dropout change it"
        assert alone.nfe[0] == together.nfe[slot] == len(calls) and not student.training
    if getattr(sampler, "decision", "categorical") == "categorical" or student.is_conditioned:
        other = draw(student, sampler, IDS, tokens, seed=4)
        assert not torch.equal(other.tokens, together.tokens)


VALUES = {
    "inner": "ancestral", "nfe": 3, "nucleus_p": 0.6, "passes_per_block": 2, "tau": 0.3,
    "order_temperature": 5.0, "stop.at_eos": True, "stop.entropy_window": 6, "top_k": 2,
    "stop.max_tries": 1, "stop.min_entropy_nats": 1.0, "temperature": 3.0,
}  # fmt: skip
REDRAWN = {"stop": StopRule(min_entropy_nats=1.7, entropy_window=LENGTH, max_tries=3)}
ARGMAX = {"decision": "argmax", "nucleus_p": 1.0}
KNOWN = {"final_argmax", "use_cache"}
"""One shows once in 10,000 rows, and a cache changes nothing: other tests have them."""
BASES: dict[str, list[dict[str, Any]]] = {
    "ancestral": [{"nfe": 6}],
    "fixed_count": [{"nfe": 6}],
    "confidence": [{"nfe": 6}],
    "first_hitting": [{}],
    "sequential": [{}],
    "block": [{"nfe": 6, "inner": "confidence"}, {"passes_per_block": 1, "inner": "confidence"}],
}
STUDENTS = {"block": partial(tiny_student, "bd3lm", block_size=4), "sequential": partial(tiny_student, "ar", "none")}


def told(student: Student, sampler: Sampler) -> str:
    """All that is said of the samples."""
    values = vars(draw(student, sampler, torch.arange(24))).values()
    return repr([value.tolist() if isinstance(value, Tensor) else value for value in values])


@pytest.mark.parametrize("name", BASES)
def test_every_setting_does_something(name: str) -> None:
    """Each changed alone, beside settings that let it matter: other tokens, or other counts."""
    student, silent = STUDENTS.get(name, tiny_student)(), []
    nucleus = {"nucleus_p": 0.8}
    for own, more in itertools.product(BASES[name], (nucleus, nucleus | REDRAWN, ARGMAX)):
        base = make_sampler(name, **{**own, **more})
        result, still = told(student, base), set()
        for key, other in changed(base, VALUES):
            try:
                if other is None or told(student, other) == result:
                    still.add(key)
            except UsageError:  # it means nothing without another one
                still.add(key)
        silent.append(still)
    refused = {"tau"} if name == "sequential" else set()  # an AR student takes no noise
    assert not set.intersection(*silent) - KNOWN - refused


# The laws, from exact distributions of a tiny model: runs of ``benchmarks/sampler_statistics.py``.

NUM = 20_000
LAWS = {
    "ar.": ["p0.8"],
    "mdlm.": ["fixed_k_T2.p1.0", "first_hitting.p1.0"],
    "mdlm.ancestral_": ["T1.p1.0", "T5.p1.0", "T2.p0.8.noise_removal"],
    "mdlm_gumbel.": ["ancestral_T2.p1.0", "first_hitting.p0.8"],
    "bd3lm.": ["first_hitting.p1.0", "fixed_k_T1.p1.0", "fixed_k_T2.p0.8"],
    "bd3lm_gumbel.": ["first_hitting.p1.0", "fixed_k_T1.p0.8"],
}


@pytest.fixture(scope="module")
def goldens(golden: Path) -> Goldens:
    return Goldens.read(golden)


@pytest.mark.parametrize("case", [model + law for model, laws in LAWS.items() for law in laws])
def test_samplers_follow_the_exact_distribution(goldens: Goldens, case: str) -> None:
    result = run_case(goldens, case, NUM)
    assert result.passed, result
    # w <= 0.09 found with probability 0.99: a total variation of 4.5% at most goes unseen.
    assert result.detectable_effect < 0.09


def test_tau_has_its_own_distribution_and_the_test_can_fail(goldens: Goldens) -> None:
    """Another tau, another number of steps, missing noise or another nucleus p is rejected."""
    assert run_tau(goldens, 0.5, NUM, judged_by=0.5).passed
    assert not run_tau(goldens, 0.5, NUM, judged_by=1.0).passed
    for drawn, judged in (
        ("mdlm.ancestral_T1.p1.0", "mdlm.ancestral_T2.p1.0"),
        ("mdlm.ancestral_T1.p1.0", "mdlm_gumbel.ancestral_T1.p1.0"),
        ("mdlm.ancestral_T5.p1.0", "mdlm.ancestral_T5.p0.8"),
    ):
        assert not run_case(goldens, drawn, NUM, judged_by=judged).passed


def test_race_goldens_and_uniforms_finer_than_float32(ops: dict[str, Tensor]) -> None:
    probs, uniform = (ops[f"categorical.{name}"].flatten(0, 1) for name in "pu")
    assert torch.equal(race(probs, uniform), ops["categorical.index"].flatten())
    scaled = uniforms(PositionKeys(3, torch.arange(4), torch.arange(4)), 0, 2000) * 2.0**24
    assert float((scaled != scaled.floor()).double().mean()) > 0.9, "else rare tokens are drawn too rarely"


# Orders and steps.


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 30), st.integers(1, 30))
def test_groups_cover_the_rows_once_and_keep_to_the_bounds(counts: list[int], positions: int, held: int) -> None:
    most = min(positions, held)  # of all log-probabilities too: V + 1 = 9 a position
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "POSITIONS_AT_A_TIME", positions)
        patch.setattr(fill, "LOG_PROBS_AT_A_TIME", 9 * held)
        groups = [counts[group] for group in fill.row_groups(counts, 9)]
    assert [count for group in groups for count in group] == counts
    assert all(group and (sum(group) <= most or len(group) == 1) for group in groups)
    pairs = itertools.pairwise(groups)
    assert all(sum(one) + two[0] > most for one, two in pairs), "a group could be larger"


def test_steps_by_hand() -> None:
    times = fill.ancestral_times(4, final_argmax=False)
    assert times.tolist() == [1, 0.75, 0.5, 0.25, 0] and fill.ancestral_times(4, final_argmax=True)[-1] == 1e-5
    uniform = torch.tensor([[0.9, 0.75, 0.6, 0.1, 0.3]], dtype=torch.float64)
    assert ancestral_steps(uniform, SCHEDULES["loglinear"], times).tolist() == [[1, 2, 2, 4, 3]]
    uniform = torch.tensor([[0.7495]], dtype=torch.float64)  # 0.75 x 0.999 is below it, 0.75 is not
    assert ancestral_steps(uniform, RATE_SCHEDULE, times).tolist() == [[2]], "relative to p(1) = 0.999"
    steps = torch.tensor([[0, 7, 3, 7, 9], [2, 2, 1, 5, 5], [0, 0, 0, 0, 0]])
    assert fill.dense_ranks(steps).tolist() == [[0, 2, 1, 2, 3], [2, 2, 1, 3, 3], [0, 0, 0, 0, 0]]


def test_budgets_and_their_limit() -> None:
    """Of very many steps each reveals one token, in the same order with the same draws."""
    student, ids = tiny_student(), torch.arange(64)
    for nfe in (1, 2, 5, 16, 1000, 10**6):
        result = draw(student, AncestralSampler(nfe=nfe, final_argmax=False), ids)
        assert result.nfe.max() <= min(nfe, LENGTH - 1)
    one_by_one = draw(student, FirstHittingSampler(), ids)
    assert torch.equal(result.tokens, one_by_one.tokens)
    assert (one_by_one.nfe == LENGTH - 1).all()
    assert (draw(student, FixedCountSampler(nfe=3), ids).nfe == 3).all()


def test_a_time_conditioned_student_is_told_the_time() -> None:
    student = tiny_student(diffusion={"time_conditioning": True}, conditioning="none")
    predict_at, levels = student.predict_at, list[Any]()
    student.predict_at = lambda *given: levels.append(given[3]) or predict_at(*given)
    result = draw(student, AncestralSampler(nfe=6), IDS)
    assert (result.tokens != student.mask_id).all() and all(level is not None for level in levels)
    tokens, ids = open_rows(student, 2), torch.arange(2)
    where = Places.of(tokens == student.mask_id)
    rows = Rows(student, tokens, RowNoise(None, LENGTH), SampleKeys(3, ids))
    rows.set_times(fill.ancestral_times(4, final_argmax=False))
    with torch.no_grad():
        both = rows.predict(Pass(ids, where, where, torch.tensor([2, 4]))).unflatten(0, (2, -1))
        for slot, t in enumerate((0.75, 0.25)):  # time at the start of steps 2 and 4
            sigma = torch.full((2,), -math.log(1 - t))
            expected = predict(student, tokens, None, sigma)[slot, 1:]
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
        (r"row 0, position 2.*got -1", {}, {"token": (0, 2, -1)}),
        ("longer", {}, {"length": LENGTH + 1}),
        ("block", {"kind": "bd3lm", "block_size": 6}, {}),
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


# ``generate``: what it fills, what it keeps, what it refuses.


def test_generate_fills_rows_and_keeps_what_is_given() -> None:
    """A short prompt is continued to the row as if its masks were given."""
    student, prompt = tiny_student(), torch.tensor([[2, 5, 1], [2, 0, 7]])
    student.config.bos_token_id = 2
    rows = generate(student, num_samples=3, nfe=4, seed=5)
    assert rows.shape == (3, LENGTH) and (rows[:, 0] == 2).all() and (rows < 11).all()
    assert torch.equal(rows, generate(student, num_samples=3, nfe=4, seed=5))
    assert not torch.equal(rows, generate(student, num_samples=3, nfe=4, seed=6))
    rows = generate(student, input_ids=prompt, attention_mask=torch.ones_like(prompt), nfe=2)
    masked = open_rows(student, 2)
    masked[:, :3] = prompt
    assert torch.equal(rows, generate(student, masked.int(), nfe=2))
    assert torch.equal(rows[:, :3], prompt) and bool((rows < 11).all())
    assert generate(student, prompt, nfe=2, max_length=5).shape == (2, 5)
    plain, noise = tiny_student(conditioning="none"), noise_for(student, torch.arange(2), 5)
    assert torch.equal(generate(plain, num_samples=2, noise=noise), generate(plain, num_samples=2)), "none is read"


def test_generate_begins_with_eos_without_bos_and_says_what_is_wrong() -> None:
    student, whole = tiny_student(), torch.zeros(1, LENGTH, dtype=torch.int64)
    student.config.bos_token_id, student.config.eos_token_id = None, 3
    assert (generate(student, num_samples=2, nfe=1)[:, 0] == 3).all()
    student.config.eos_token_id = None
    padded = torch.ones_like(whole)
    padded[0, 0] = 0
    for tokens, settings, message in (
        (whole, {"stop": {"at_eos": True}}, "no eos token"),
        (None, {}, "first token"),
        (whole, {"sampler": "guess"}, "unknown sampler"),
        (whole, {"max_length": LENGTH - 1}, r"too long.*max_length"),
        (whole, {"attention_mask": padded}, "padded"),
    ):
        with pytest.raises(UsageError, match=message):
            generate(student, tokens, **settings)
