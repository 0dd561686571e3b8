"""Matched-entropy interpolation against hand-worked curves and a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluation.curve import CurvePoint, interpolate, matched_perplexity


def point(log_perplexity: float, entropy: float, num: int = 4) -> CurvePoint:
    """Samples without any spread."""
    return CurvePoint(np.full(num, log_perplexity), np.ones(num), np.full(num, entropy))


def test_log_perplexity_is_interpolated_not_perplexity() -> None:
    points = [point(math.log(100), 5.0), point(math.log(25), 4.0)]  # in any order
    value = matched_perplexity(points, 4.5, is_paired=True)
    assert value.perplexity == pytest.approx(50.0)  # the geometric mean, not 62.5
    assert value.interval == pytest.approx((50.0, 50.0))
    assert value.is_reached and value.entropy_nats == 4.5 and value.share_reached == 1.0


def test_only_the_two_neighbours_count() -> None:
    points = [point(1.0, 3.0), point(2.0, 4.0), point(5.0, 5.0), point(50.0, 6.0)]
    value = matched_perplexity(points, 4.25, is_paired=True)
    assert math.log(value.perplexity) == pytest.approx(2.75)
    ends = (matched_perplexity(points, end, is_paired=True) for end in (3.0, 6.0))
    assert [math.log(end.perplexity) for end in ends] == pytest.approx([1.0, 50.0])


@pytest.mark.parametrize(("target", "own", "log_perplexity"), [(2.0, 3.0, 1.0), (9.0, 4.0, 2.0)])
def test_an_entropy_out_of_reach_gives_the_nearest_point_as_itself(
    target: float, own: float, log_perplexity: float
) -> None:
    value = matched_perplexity([point(1.0, 3.0), point(2.0, 4.0)], target, is_paired=True)
    assert not value.is_reached and value.entropy_nats == own and value.share_reached == 0.0
    assert math.log(value.perplexity) == pytest.approx(log_perplexity)


def test_tokens_weigh_as_in_the_corpus_aggregate() -> None:
    entropies = np.array([4.0, 4.0])
    weighed = CurvePoint(np.array([10.0, 60.0]), np.array([10.0, 20.0]), entropies)
    assert weighed.log_perplexity == pytest.approx(70 / 30)
    value = matched_perplexity([weighed], 4.0, is_paired=True)
    assert math.log(value.perplexity) == pytest.approx(70 / 30) and value.is_reached


def test_beyond_an_end_the_last_segment_goes_on() -> None:
    x, y = np.array([[1.0, 2.0, 4.0]]), np.array([[0.0, 1.0, 5.0]])
    assert interpolate(x, y, 5.0)[0] == pytest.approx(7.0)
    assert interpolate(x, y, 0.0)[0] == pytest.approx(-1.0)
    assert interpolate(x[:, :1], y[:, :1], 3.0)[0] == 0.0
    assert interpolate(np.array([[2.0, 2.0]]), np.array([[1.0, 3.0]]), 2.0)[0] == pytest.approx(2.0)


def simulate(generator: np.random.Generator, is_paired: bool, num: int = 80) -> list[CurvePoint]:
    """Two points on the true curve log ppl = entropy - 1, with a part that paired samples share."""
    shared = generator.normal(0, 0.5, num)
    points = []
    for mean in (4.0, 5.0):
        part = shared if is_paired else generator.normal(0, 0.5, num)
        entropies = mean + generator.normal(0, 0.2, num)
        points.append(CurvePoint(mean - 1 + part, np.ones(num), entropies))
    return points


@pytest.mark.parametrize("is_paired", [True, False])
def test_intervals_cover_the_truth(is_paired: bool) -> None:
    """95% of 200 intervals, within four standard errors (0.062)."""
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        points = simulate(generator, is_paired)
        value = matched_perplexity(points, 4.5, is_paired=is_paired, num_draws=400)
        assert value.interval is not None
        covered += value.interval[0] <= math.exp(3.5) <= value.interval[1]
    assert covered / 200 > 0.95 - 0.062


def test_paired_points_are_drawn_together() -> None:
    """What all points share widens the paired interval by sqrt 2 against the unpaired one."""
    points = simulate(np.random.default_rng(4), is_paired=True, num=400)
    widths = []
    for is_paired in (True, False):
        interval = matched_perplexity(points, 4.5, is_paired=is_paired).interval
        assert interval is not None
        widths.append(math.log(interval[1] / interval[0]))
    assert widths[0] / widths[1] == pytest.approx(math.sqrt(2), rel=0.2)
    with pytest.raises(ValueError, match="sizes"):
        matched_perplexity([points[0], point(1.0, 2.0)], 4.5, is_paired=True)
