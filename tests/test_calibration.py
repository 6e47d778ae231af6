"""NLL, Brier score, ECE and the distance of entropies: by hand, against others' code, and where the answer is known."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from scipy import stats
from sklearn.metrics import brier_score_loss, log_loss

import pyro_sparse as ps
from pyro_sparse.inference.calibration import ENTROPY_EDGES, calibration_bins, entropy_counts

Array = np.ndarray[Any, Any]

METRICS: list[Callable[..., float]] = [ps.nll, ps.brier, ps.ece]
HAND = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]])
LABELS = np.array([0, 1, 1])


def drawn(num_rows: int, num_classes: int = 4, seed: int = 0) -> tuple[Array, Array]:
    """Probabilities, and labels that are drawn by them."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(num_classes, 0.7), num_rows)
    labels = (probs.cumsum(1) > rng.random((num_rows, 1))).argmax(1)
    return probs, labels


def binary(confidence: list[float], correct: list[int]) -> tuple[Array, Array]:
    """Two classes, of which the first is predicted; a confidence of 0.5 as well."""
    c = np.array(confidence)
    return np.stack([c, 1 - c], 1), 1 - np.array(correct)


def with_entropies(entropies: list[float]) -> Array:
    """Two classes, by bisection."""
    p = [_probability(h) for h in entropies]
    return np.array([[one, 1 - one] for one in p])


def _probability(entropy: float) -> float:
    low, high = 0.0, 0.5
    for _ in range(200):
        p = 0.5 * (low + high)
        low, high = (p, high) if -p * math.log(p) - (1 - p) * math.log1p(-p) < entropy else (low, p)
    return p


def test_scores_by_hand() -> None:
    assert ps.nll(HAND, LABELS) == pytest.approx((-math.log(0.7) - math.log(0.1) - math.log(0.5)) / 3, abs=1e-12)
    # 0.3² + 0.2² + 0.1² = 0.14; 0.1² + 0.9² + 0.8² = 1.46; 2 · 0.25² + 0.5² = 0.375
    assert ps.brier(HAND, LABELS) == pytest.approx((0.14 + 1.46 + 0.375) / 3, abs=1e-12)
    # Each row alone in its bin: |1 − 0.7|, |0 − 0.8|, |1 − 0.5|
    assert ps.ece(HAND, LABELS) == pytest.approx((0.3 + 0.8 + 0.5) / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "expected"),
    [
        ([0.51, 0.55, 0.95, 0.99], [1, 0, 1, 1], 10, (abs(1 - 1.06) + abs(2 - 1.94)) / 4),
        ([0.8, 0.81], [1, 0], 10, (0.2 + 0.81) / 2),  # 0.8 is the last of (0.7, 0.8]
        ([0.79, 0.8], [1, 0], 10, abs(1 - 1.59) / 2),
        ([0.8, 0.81], [1, 0], 15, (0.2 + 0.81) / 2),  # 12 / 15, the same in binary fractions
        ([0.99, 1.0], [1, 0], 15, abs(1 - 1.99) / 2),  # 1 is in the last bin
        ([0.5, 0.6], [0, 1], 2, (0.5 + 0.4) / 2),  # a half is the last of (0, 0.5]
        ([0.6, 0.9, 0.7], [1, 0, 0], 1, abs(1 - 2.2) / 3),
        ([1.0], [0], 15, 1.0),
    ],
)
def test_ece_of_equal_widths_by_hand(
    confidence: list[float], correct: list[int], num_bins: int, expected: float
) -> None:
    assert ps.ece(*binary(confidence, correct), num_bins=num_bins) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_bins", [1, 2, 7, 10, 15, 20, 49])
def test_every_edge_ends_the_bin_below_it(num_bins: int) -> None:
    """Each fraction k / num_bins as it is typed, for which 1 / num_bins · k is often another number."""
    edges = [k / num_bins for k in range(1, num_bins + 1) if k / num_bins >= 0.5]
    count = calibration_bins(*binary(edges, [1] * len(edges)), num_bins)["count"].values
    assert count.tolist() == [0] * (num_bins - len(edges)) + [1] * len(edges)


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "expected"),
    [
        ([0.9, 0.6, 0.55, 0.8], [1, 0, 1, 0], 2, (abs(1 - 1.15) + abs(1 - 1.7)) / 4),
        ([0.6, 0.7, 0.8], [1, 0, 0], 2, (abs(1 - 1.3) + 0.8) / 3),  # three rows in two bins: the middle goes down
        ([0.6, 0.7, 0.7, 0.8], [1, 0, 1, 0], 2, (abs(2 - 2.0) + 0.8) / 4),  # a tie over the edge stays together
        ([0.7, 0.7, 0.7], [1, 0, 0], 3, abs(1 - 2.1) / 3),
        ([0.6, 0.9], [1, 0], 20, (0.4 + 0.9) / 2),  # more bins than rows
        ([0.99, 1.0, 1.0], [1, 0, 1], 3, (0.01 + 1.0) / 3),
    ],
)
def test_ece_of_equal_mass_by_hand(confidence: list[float], correct: list[int], num_bins: int, expected: float) -> None:
    assert ps.ece(*binary(confidence, correct), num_bins, "mass") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_rows", [400, 417])
def test_bins_of_equal_mass_hold_equally_many_rows(num_rows: int) -> None:
    probs, labels = drawn(num_rows)
    bins = calibration_bins(probs, labels, 20, "mass")
    count = bins["count"].values
    assert count.sum() == num_rows and count.max() - count.min() <= (1 if num_rows % 20 else 0)
    order = np.argsort(probs.max(1))
    parts = np.split(probs.max(1)[order], count.cumsum()[:-1])
    assert bins["confidence"].values == pytest.approx([part.mean() for part in parts])


def test_ece_of_equal_mass_is_near_that_of_its_source() -> None:
    """Maddox et al. leave out the rows at the edges of the 20 bins: at most 21 of 4,000, each of which counts 1 / n."""
    probs, labels = drawn(4_000)
    confidence, hit = probs.max(1), probs.argmax(1) == labels
    edges = np.append(np.sort(confidence)[::200], confidence.max())
    inside = [(low < confidence) & (confidence < high) for low, high in itertools.pairwise(edges)]
    theirs = sum(abs(hit[rows].mean() - confidence[rows].mean()) * rows.mean() for rows in inside)
    assert ps.ece(probs, labels, 20, "mass") == pytest.approx(theirs, abs=21 / 4_000)


def test_bins_give_what_the_ece_is_made_of() -> None:
    bins = calibration_bins(*binary([0.51, 0.55, 0.95, 0.99], [1, 0, 1, 1]), num_bins=10)
    assert bins["count"].values.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 2]
    assert bins["confidence"].values[[5, 9]] == pytest.approx([0.53, 0.97])
    assert bins["accuracy"].values[[5, 9]].tolist() == [0.5, 1.0]
    assert np.isnan(bins["accuracy"].values[0]) and np.isnan(bins["confidence"].values[0])


def test_scores_are_those_of_scikit_learn() -> None:
    probs, labels = drawn(500)
    assert ps.nll(probs, labels) == pytest.approx(log_loss(labels, probs, labels=range(4)), rel=1e-9)
    theirs = brier_score_loss(labels, probs, labels=range(4), scale_by_half=False)
    assert ps.brier(probs, labels) == pytest.approx(theirs, rel=1e-9)


def test_ece_is_that_of_torchmetrics() -> None:
    """No confidence is on the edge of a bin, where theirs are [a, b)."""
    functional = pytest.importorskip("torchmetrics.functional.classification")
    probs, labels = drawn(500)
    theirs = functional.multiclass_calibration_error(torch.tensor(probs), torch.tensor(labels), 4, n_bins=15)
    assert ps.ece(probs, labels) == pytest.approx(float(theirs), abs=1e-6)  # theirs is in single precision


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_neither_the_order_of_rows_nor_that_of_classes_matters(scheme: str) -> None:
    """Also where confidences are tied: they are rounded to tenths, the largest class apart."""
    rng = np.random.default_rng(1)
    probs, labels = drawn(300)
    probs = np.round(probs, 1) + np.array([0.0, 0.0001, 0.0003, 0.0005])
    probs /= probs.sum(1, keepdims=True)
    rows, classes = rng.permutation(300), rng.permutation(4)
    inverse = np.argsort(classes)
    for metric in (ps.nll, ps.brier, lambda p, y: ps.ece(p, y, 20, scheme)):
        whole = metric(probs, labels)
        assert metric(probs[rows], labels[rows]) == pytest.approx(whole, abs=1e-12)
        assert metric(probs[:, classes], inverse[labels]) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_certain_and_right_certain_and_wrong_and_uniform(scheme: str) -> None:
    labels = np.arange(100) % 5
    right, wrong = np.eye(5)[labels], np.eye(5)[(labels + 1) % 5]
    uniform = np.full((100, 5), 0.2)
    assert (ps.nll(right, labels), ps.brier(right, labels), ps.ece(right, labels, 15, scheme)) == (0.0, 0.0, 0.0)
    assert (ps.nll(wrong, labels), ps.brier(wrong, labels), ps.ece(wrong, labels, 15, scheme)) == (math.inf, 2.0, 1.0)
    assert ps.nll(uniform, labels) == pytest.approx(math.log(5))
    assert ps.brier(uniform, labels) == pytest.approx(0.8)
    assert ps.ece(uniform, labels, 15, scheme) == pytest.approx(0.0, abs=1e-12)  # a fifth of the rows are right


def test_one_impossible_class_that_was_observed_makes_the_likelihood_zero() -> None:
    assert ps.nll([[0.5, 0.5], [1.0, 0.0]], [0, 1]) == math.inf
    assert ps.nll([[0.5, 0.5], [1.0, 0.0]], [0, 0]) == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_right_probabilities_have_the_scores_of_their_law(scheme: str) -> None:
    """Five standard errors each: one false alarm in 1.7 million.

    The sum of hits less confidences of a bin is near normal with variance V = Σ c (1 − c), so that its size has mean
    √(2 V / π) and variance V (1 − 2 / π), and bins are independent.
    """
    n = 20_000
    probs, labels = drawn(n)
    c = probs.max(1)
    order = np.argsort(c)
    groups = (
        np.array_split(order, 15) if scheme == "mass" else [np.flatnonzero(np.ceil(c * 15) == k) for k in range(16)]
    )
    variance = np.array([(c[rows] * (1 - c[rows])).sum() for rows in groups])
    mean, error = np.sqrt(2 * variance / np.pi).sum() / n, np.sqrt((variance * (1 - 2 / np.pi)).sum()) / n
    assert abs(ps.ece(probs, labels, 15, scheme) - mean) < 5 * error
    logs = np.log(probs)
    entropy = -(probs * logs).sum(1)
    spread = np.sqrt(((probs * logs**2).sum(1) - entropy**2).sum()) / n
    assert abs(ps.nll(probs, labels) - entropy.mean()) < 5 * spread
    square = np.square(probs).sum(1)
    spread = 2 * np.sqrt(((probs**3).sum(1) - square**2).sum()) / n  # of 1 + Σ p² − 2 p_y
    assert abs(ps.brier(probs, labels) - (1 - square).mean()) < 5 * spread


@pytest.mark.parametrize(("scheme", "expected"), [("mass", 0.25), ("width", 0.05)])
def test_a_known_excess_of_confidence_is_the_ece(scheme: str, expected: float) -> None:
    """Right in 70 of 100 at a confidence of 0.9, in 90 of 100 at 0.6: apart, and both in (0.5, 1], where they make up."""
    probs, labels = binary([0.9] * 1_000 + [0.6] * 1_000, ([1] * 7 + [0] * 3) * 100 + ([1] * 9 + [0]) * 100)
    assert ps.ece(probs, labels, 2, scheme) == pytest.approx(expected)


def test_distance_by_hand() -> None:
    """Entropies in the middle of three bins: counts (3, 1, 0) in distribution, (0, 2, 2) out of it."""
    low, middle, high = np.sqrt(ENTROPY_EDGES[[10, 20, 26]] * ENTROPY_EDGES[[11, 21, 27]])
    inside = with_entropies([low, low, low, middle])
    outside = with_entropies([middle, high, middle, high])
    assert entropy_counts(inside).tolist() == [3 * (k == 10) + (k == 20) for k in range(29)]
    # Each term is (a − b) log(a / b) with the same total 4 + 29e-7, which cancels in the logarithm.
    expected = (
        3 * math.log(3.0000001 / 1e-7) + 1 * math.log(2.0000001 / 1.0000001) + 2 * math.log(2.0000001 / 1e-7)
    ) / (4 + 29e-7)
    assert ps.js_distance(inside, outside) == pytest.approx(expected, abs=1e-9)
    assert ps.js_distance(outside, inside) == pytest.approx(expected, abs=1e-9)
    assert ps.js_distance(inside, inside) == 0
    assert ps.js_distance(inside, np.repeat(inside, 5, 0)) == pytest.approx(0.0, abs=1e-5)  # of shares


def test_distance_is_kullback_and_leiblers_by_scipy() -> None:
    inside, outside = drawn(3_000, 10)[0], np.random.default_rng(5).dirichlet(np.full(10, 2.0), 1_000)
    a, b = (np.histogram(stats.entropy(p, axis=1), np.logspace(-8, 0.5, 30))[0] + 1e-7 for p in (inside, outside))
    expected = stats.entropy(a, b) + stats.entropy(b, a)
    assert ps.js_distance(inside, outside) == pytest.approx(expected, rel=1e-9) and expected > 1


def test_entropies_outside_of_the_edges_are_not_counted() -> None:
    certain, wide = np.array([[1.0, 0.0]]), np.full((1, 30), 1 / 30)  # log 30 = 3.4 nats
    some = with_entropies([0.1, 0.2])
    assert entropy_counts(np.concatenate([some, certain])).tolist() == entropy_counts(some).tolist()
    with pytest.raises(
        ValueError, match=r"probs must have a row with an entropy from 1e-08 to 3.16 nats, got 3.4 to 3.4"
    ):
        entropy_counts(wide)
    with pytest.raises(ValueError, match="probs_in must have a row with an entropy"):
        ps.js_distance(certain, some)
    with pytest.raises(ValueError, match="probs_out must have a row with an entropy"):
        ps.js_distance(some, certain)


@pytest.mark.parametrize(
    ("probs", "labels"),
    [
        (HAND.tolist(), LABELS.tolist()),
        (torch.tensor(HAND, requires_grad=True), torch.tensor(LABELS)),
        (torch.tensor(HAND, dtype=torch.float32), torch.tensor(LABELS, dtype=torch.int32)),
        (xr.DataArray(HAND, dims=("row", "class")), xr.DataArray(LABELS, dims="row")),
        (pd.DataFrame(HAND), pd.Series(LABELS, dtype=float)),
    ],
)
def test_any_array_will_do_and_none_is_changed(probs: Any, labels: Any) -> None:
    before = copy.deepcopy(probs)
    for metric in METRICS:
        assert metric(probs, labels) == pytest.approx(metric(HAND, LABELS), rel=1e-6)
    assert ps.js_distance(probs, probs) == 0
    assert np.array_equal(
        probs.tolist() if isinstance(probs, torch.Tensor) else probs,
        before.tolist() if isinstance(before, torch.Tensor) else before,
    )


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        ([0.5, 0.5], [0, 1], r"probs must have shape \(rows, classes\) .* got \(2,\)"),
        ([[1.0], [1.0]], [0, 0], r"probs must have shape .* at least 1 row and 2 classes, got \(2, 1\)"),
        (np.zeros((0, 3)), [], r"probs must have shape .* got \(0, 3\)"),
        (HAND, [0, 1], r"labels must have shape \(3,\), one a row of probs, got \(2,\)"),
        (HAND, [[0], [1], [1]], r"labels must have shape \(3,\), one a row of probs, got \(3, 1\)"),
        (HAND, [0, 1, 3], "labels must be whole numbers from 0 to 2, got 3 in row 2"),
        (HAND, [0, -1, 1], "labels must be whole numbers from 0 to 2, got -1 in row 1"),
        (HAND, [0.5, 1, 1], "labels must be whole numbers from 0 to 2, got 0.5 in row 0"),
        (HAND, [0, 1, np.nan], "labels must be whole numbers from 0 to 2, got nan in row 2"),
        (HAND, ["a", "b", "c"], "labels must be an array of numbers, got a list"),
        ([[0.5, 0.5], [0.5]], [0, 1], "probs must be an array of numbers, got a list"),
        ([[0.5, 0.5], [np.nan, 1.0]], [0, 1], "probs must be finite, got nan in row 1"),
        ([[np.inf, -np.inf], [0.5, 0.5]], [0, 1], "probs must be finite, got nan in row 0"),
        ([[1.2, -0.2], [0.5, 0.5]], [0, 1], "probs must be >= 0, got -0.2 in row 0"),
        ([[0.5, 0.5], [0.5, 0.4]], [0, 1], "probs must sum to 1 within 0.001 in each row, got 0.9 in row 1"),
        ([[0.5, 0.5], [0.501, 0.501]], [0, 1], "probs must sum to 1 within 0.001 in each row, got 1.002 in row 1"),
    ],
)
def test_what_is_no_distribution_or_no_label_is_refused(probs: Any, labels: Any, message: str) -> None:
    for metric in METRICS:
        with pytest.raises(ValueError, match=message):
            metric(probs, labels)


@pytest.mark.parametrize("num_bins", [0, -1, 2.5, True, np.nan, "15"])
def test_number_of_bins_that_is_none_is_refused(num_bins: Any) -> None:
    with pytest.raises(ValueError, match=f"num_bins must be a whole number >= 1, got {num_bins!r}"):
        ps.ece(HAND, LABELS, num_bins)


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme must be one of width, mass, got 'equal'"):
        ps.ece(HAND, LABELS, scheme="equal")


def test_distance_names_the_argument_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="probs_in must sum to 1"):
        ps.js_distance(2 * HAND, HAND)
    with pytest.raises(ValueError, match="probs_out must be finite"):
        ps.js_distance(HAND, np.nan * HAND)
