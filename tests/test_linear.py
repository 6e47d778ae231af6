"""The estimators' linear models: where they start, what they keep where inputs are nearly equal or more than rows."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

import pyro_sparse as ps
from pyro_sparse.estimators import _forward_selection

Array = np.ndarray[Any, Any]


def test_with_more_inputs_than_rows_one_input_of_each_group_that_acts_is_kept() -> None:
    # Fifteen groups of twenty nearly equal inputs, 100 rows. From a random start, or with a phase before the prior is there,
    # five to twenty inputs of all groups are kept, or none.
    for seed in range(2):
        rng = np.random.RandomState(seed)
        z = rng.standard_normal((100, 15))
        x = np.repeat(z, 20, 1) + 0.3 * rng.standard_normal((100, 300))
        y = 0.7 * z[:, 0] - 0.7 * z[:, 1] + rng.standard_normal(100)
        fitted = ps.SparseRegressor(hidden=(), steps=2_000, random_state=seed).fit(x, y)
        assert [column // 20 for column in fitted.get_support(indices=True)] == [0, 1]
        assert all([column // 20 for column in np.flatnonzero(run)] == [0, 1] for run in fitted.supports_)


def test_noise_that_small_batches_let_in_is_dropped_where_the_start_is_better() -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((1_000, 100)) + 0.5 * rng.standard_normal((1_000, 1))
    signs = np.array([1, -1, 1, -1, -1])
    y = 0.3 * x[:, :5] @ signs + rng.standard_normal(1_000)
    fitted = ps.SparseRegressor(hidden=(), steps=2_000, batch_size=50, random_state=0).fit(x, y)
    assert fitted.supports_[:, 5:].sum(1).min() > 0  # in every run
    assert fitted.selected_inputs_ == [0, 1, 2, 3, 4]


def test_forward_selection_is_the_best_subset_of_orthogonal_inputs() -> None:
    rng = np.random.RandomState(0)
    for _ in range(10):
        x = np.linalg.qr(rng.standard_normal((40, 6)))[0] * math.sqrt(40)
        y = x @ rng.uniform(-0.8, 0.8, 6) + rng.standard_normal(40)
        subsets = [s for k in range(7) for s in itertools.combinations(range(6), k)]

        def criterion(subset: tuple[int, ...], x: Array = x, y: Array = y) -> float:
            left = y - x[:, subset] @ (x[:, subset].T @ y) / 40
            k = len(subset)
            share = float(np.mean(left**2) / np.mean(y**2))
            return 0.5 * (39 - k) * math.log(share) + 0.5 * k * math.log(40) + math.log(math.comb(6, k))

        best = min(subsets, key=criterion)
        (found,) = _forward_selection(x, y[:, None])
        assert tuple(np.flatnonzero(found)) == best
        assert np.allclose(found[list(best)], x[:, best].T @ y / 40)


@pytest.mark.parametrize("noise", [0.01, 0.5, 1.0])
def test_with_many_more_inputs_than_rows_a_third_of_the_rows_is_not_fitted_to_noise(noise: float) -> None:
    for seed in range(5):
        rng = np.random.RandomState(seed)
        x = rng.standard_normal((50, 1_000))
        y = x[:, 0] + x[:, 1] + noise * rng.standard_normal(50)
        (found,) = _forward_selection(x - x.mean(0), (y - y.mean())[:, None])
        assert np.count_nonzero(found) <= 3
        if noise < 1:
            assert set(np.flatnonzero(found)) >= {0, 1}


def test_a_small_effect_under_the_floor_of_the_noise_scale_is_kept() -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((200, 6))
    y = x[:, 0] + 0.02 * x[:, 1] + 0.001 * rng.standard_normal(200)
    fitted = ps.SparseRegressor(hidden=(), steps=500, num_runs=1, random_state=0).fit(x, y)
    assert fitted.selected_inputs_ == [0, 1]
    assert fitted.noise_scale_ == pytest.approx(0.001, rel=0.3)


def test_forward_selection_of_noise_of_copies_and_of_few_rows() -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((200, 10))
    assert not _forward_selection(x, rng.standard_normal((200, 1))).any()
    copies = np.repeat(x[:, :1], 4, 1)
    assert np.count_nonzero(_forward_selection(copies, x[:, :1] + 0.1 * x[:, 1:2])) == 1
    assert _forward_selection(x[:2], x[:2, :1]).tolist() == [[0.0] * 10]
    assert _forward_selection(x, np.zeros((200, 1))).tolist() == [[0.0] * 10]


SLOPES = np.array([0.2, -0.2])
MAKERS = {
    "normal": lambda f, rng: f + rng.standard_normal(len(f)),
    "heteroscedastic": lambda f, rng: f + rng.standard_normal(len(f)),
    "poisson": lambda f, rng: rng.poisson(np.exp(1 + f)),
    "bernoulli": lambda f, rng: (f + 1 + rng.logistic(size=len(f)) > 0).astype(int),
    "categorical": lambda f, rng: (np.outer(f, [0, 1, 0]) + rng.gumbel(size=(len(f), 3))).argmax(1),
}


@pytest.mark.parametrize("family", MAKERS)
def test_a_linear_model_starts_near_the_slopes_of_its_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((40_000, 2))
    y = MAKERS[family](x @ SLOPES, rng)
    starts: list[Array] = []

    def model(self: Any, *arguments: Any) -> None:
        starts.append(arguments[-1])
        raise InterruptedError

    monkeypatch.setattr("pyro_sparse.estimators.SparseEstimator._model", model)
    fitted = ps.SparseClassifier if family in ("bernoulli", "categorical") else ps.SparseRegressor
    options = {"family": family} if fitted is ps.SparseRegressor else {}
    with pytest.raises(InterruptedError):
        fitted(hidden=(), random_state=0, **options).fit(x, y)
    (start,) = starts
    if family == "categorical":  # determined up to what all classes share
        start = start[1] - start[[0, 2]].mean(0)
    elif family == "heteroscedastic":
        assert not start[1].any()
        start = start[0]
    scale = y.std() if family in ("normal", "heteroscedastic") else 1.0
    # First order in slopes of .2: 4 % off at most; standard errors are up to .013 (three classes), a tolerance of three.
    assert np.allclose(start.ravel() * scale / x.std(0), SLOPES, atol=0.05)


def test_an_input_that_only_widens_the_noise_is_found_and_no_other() -> None:
    # Batches of a twentieth of the rows let in two to eight inputs that do nothing.
    rng = np.random.RandomState(1)
    x = rng.standard_normal((1_000, 20))
    y = x[:, 1] + (0.2 + np.log1p(np.exp(0.5 + x[:, 0]))) * rng.standard_normal(1_000)
    fitted = ps.SparseRegressor("heteroscedastic", hidden=(), steps=2_000, num_runs=1, random_state=1).fit(x, y)
    assert fitted.selected_inputs_ == [0, 1]


def test_a_network_is_not_held_to_the_floor_of_its_noise_scale_where_a_linear_model_is_not() -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((400, 3))
    y = x[:, 0] + 0.06 * (x[:, 1] ** 2 - 1) / math.sqrt(2)
    fitted = ps.SparseRegressor(steps=1_000, num_runs=1, num_networks=1, random_state=0).fit(x, y)
    assert fitted.hidden_ == (20, 10) and fitted.selected_inputs_ == [0, 1]


def test_the_run_kept_is_the_one_that_chose() -> None:
    """Of runs that choose different ones of nearly equal inputs."""
    rng, others = np.random.default_rng(0), 0
    for seed in range(6):
        x = rng.normal(size=(60, 15))
        x[:, 1:4] = x[:, :1] + 0.3 * rng.normal(size=(60, 3))
        y = x[:, 0] + 0.4 * x[:, 5] + rng.normal(size=60)
        fitted = ps.SparseRegressor(hidden=(), steps=400, num_runs=3, random_state=seed).fit(x, y)
        chosen = fitted.structure_.selected_inputs
        runs = [[f"x{column}" for column in np.flatnonzero(run)] for run in fitted.supports_]
        if chosen in runs:
            others += runs.index(chosen) > 0
            assert ps.select(fitted.run_).selected_inputs == chosen
    assert others  # in some of them it is not the first run
