"""Partial dependence with intervals: against scikit-learn's, and against a linear model's textbook intervals."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from sklearn.inspection import partial_dependence

import pyro_sparse as ps
from pyro_sparse.inference.family import Bernoulli, Categorical, Poisson

SHORT = ps.PriorAnnealing(100, 400, 600, 100, learning_rate=1e-2)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(300, 4)) * [1.0, 2.0, 5.0, 1.0] + 3
X[:, 3] = RNG.integers(0, 2, 300)
Y = 2 * X[:, 0] + (X[:, 1] - 3) ** 2 + 3 * X[:, 3] + RNG.normal(size=300)


@pytest.fixture(scope="module")
def fitted() -> ps.SparseRegressor:
    return ps.SparseRegressor(hidden=(6,), schedule=SHORT, num_runs=1, num_networks=2, random_state=0).fit(X, Y)


def test_the_mean_is_that_of_scikit_learn(fitted: ps.SparseRegressor) -> None:
    table = fitted.effects(X, num_points=5, num_rows=300)
    assert list(table["input"].unique()) == [0, 1, 3]
    for column, part in table.groupby("input"):
        values = {column: part["value"].to_numpy()}
        theirs = partial_dependence(fitted, X, [column], custom_values=values, method="brute")["average"][0]
        assert np.allclose(part["mean"], theirs, atol=1e-5)
    assert ((table["mean_lower"] < table["mean"]) & (table["mean"] < table["mean_upper"])).all()
    assert table[table["input"] == 3]["value"].tolist() == [0.0, 1.0]
    assert np.allclose(table[table["input"] == 0]["value"].iloc[[0, -1]], np.quantile(X[:, 0], [0.05, 0.95]))


def test_the_shapes_are_those_of_the_truth(fitted: ps.SparseRegressor) -> None:
    table = fitted.effects(X).set_index("input")
    assert (np.diff(table.loc[0, "mean"]) > 0).all()
    valley = table.loc[1].reset_index().set_index("value")["mean"]
    assert abs(float(valley.idxmin()) - 3) < 0.8
    assert np.diff(table.loc[3, "mean"])[0] == pytest.approx(3, abs=0.6)


def linear_fit() -> tuple[ps.Fit, torch.Tensor, torch.Tensor]:
    """Three coefficients and an intercept, all kept, by plain maximum likelihood."""
    x = torch.as_tensor(X[:, :3] - 3, dtype=torch.float32)
    x = torch.cat([torch.ones(300, 1), x], 1)
    y = torch.as_tensor(X[:, 0] + 0.5 * RNG.normal(size=300), dtype=torch.float32)
    law = ps.SpikeSlab(0.9999, 0.3, 10.0, 0.5).expand([4]).to_event(1)

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        weights = pyro.sample("weights", law)
        with pyro.plate("data", 300, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x @ weights, 0.5), obs=y)

    run = ps.anneal(model, (x, y), ps.PriorAnnealing(200, 1, 1, 1, learning_rate=1e-2), num_draws=1, progress=False)
    return ps.refit(run, ps.select(run), keep_slab=False), x, y


def test_the_interval_is_the_textbooks_for_a_linear_model() -> None:
    """Averaged over rows a linear prediction is the one at the mean row: its variance is a' (X'X)^-1 a sigma²."""
    fit, x, y = linear_fit()
    values = [-1.0, 0.0, 2.0]
    table = ps.partial_dependence(fit, x, 2, values, prob=0.9)
    design, response = x.double().numpy(), y.double().numpy()
    inverse = np.linalg.inv(design.T @ design)
    weights = inverse @ design.T @ response
    sigma2 = np.sum((response - design @ weights) ** 2) / (300 - 4)
    at = np.repeat(design.mean(0)[None], 3, 0)
    at[:, 2] = values
    half = stats.norm.ppf(0.95) * np.sqrt(sigma2 * np.einsum("ij,jk,ik->i", at, inverse, at))
    assert np.allclose(table["mean"], at @ weights, atol=1e-6)
    assert np.allclose(table["mean_upper"] - table["mean"], half, rtol=1e-4)
    assert table["value"].values.tolist() == values
    slope = stats.norm.ppf(0.95) * np.sqrt(sigma2 * inverse[2, 2])
    assert np.allclose(table["difference"], weights[2] * np.array([0.0, 1.0, 3.0]), atol=1e-6)
    assert np.allclose(table["difference_upper"] - table["difference"], slope * np.array([0.0, 1.0, 3.0]), rtol=1e-4)
    assert np.allclose(table["difference_lower"] + table["difference_upper"], 2 * table["difference"])

    at[:, 1] = [0.0, 1.0, 1.0]
    both = ps.partial_dependence(fit, x, [2, 1], np.stack([values, at[:, 1]], 1), prob=0.9)
    assert np.allclose(both["mean"], at @ weights, atol=1e-6) and both["value"].values.tolist() == [0, 1, 2]
    half = stats.norm.ppf(0.95) * np.sqrt(sigma2 * np.einsum("ij,jk,ik->i", at, inverse, at))
    assert np.allclose(both["mean_upper"] - both["mean"], half, rtol=1e-4)


def test_intervals_of_probabilities_and_rates_stay_where_those_lie() -> None:
    mean, half = torch.tensor([0.001, 0.5, 0.97]).double(), torch.tensor([0.01, 0.1, 0.05]).double()
    for family in (Bernoulli(), Categorical()):
        lower, upper = family.around(mean, half)
        assert ((lower > 0) & (lower < mean) & (mean < upper) & (upper < 1)).all()
        assert float(upper[1] - 0.5) == pytest.approx(1 / (1 + np.exp(-0.4)) - 0.5)  # half / (p (1 - p)) = 0.4
    lower, upper = Poisson().around(mean, half)
    assert torch.allclose(lower * upper, mean**2) and float(upper[1]) == pytest.approx(0.5 * np.exp(0.2))


def test_several_fits_are_averaged_by_the_law_of_total_variance() -> None:
    fit, x, _ = linear_fit()
    other = dataclasses.replace(
        fit, values={name: 1.5 * value for name, value in fit.values.items()}, free=1.5 * fit.free
    )
    single = [ps.partial_dependence(one, x, 2, [-1.0, 2.0]) for one in (fit, other)]
    table = ps.partial_dependence([fit, other], x, 2, [-1.0, 2.0])
    means = np.array([one["mean"].values for one in single])
    assert np.allclose(table["mean"], means.mean(0)) and np.ptp(means, 0).max() > 0.1
    within = np.array([(one["mean_upper"] - one["mean"]).values / stats.norm.ppf(0.975) for one in single]) ** 2
    half = stats.norm.ppf(0.975) * np.sqrt(within.mean(0) + means.var(0))
    assert np.allclose(table["mean_upper"] - table["mean"], half, rtol=1e-6)
    new = x.numpy()
    slopes = [one["difference"].values[1] for one in single]
    sure = [
        (one["difference_upper"].values[1] - slope) / stats.norm.ppf(0.975)
        for one, slope in zip(single, slopes, strict=True)
    ]
    half = stats.norm.ppf(0.975) * np.sqrt(np.mean(np.square(sure)) + np.var(slopes))
    assert float(table["difference_upper"][1] - table["difference"][1]) == pytest.approx(half, rel=1e-6)
    single = [ps.predict(one, new, 0.9) for one in (fit, other)]
    table = ps.predict([fit, other], new, 0.9)
    means = np.array([one["mean"].values for one in single])
    z = stats.norm.ppf(0.95)
    for lower in ("mean_lower", "lower"):
        within = np.array([(one["mean"] - one[lower]).values / z for one in single]) ** 2
        assert np.allclose(table["mean"] - table[lower], z * np.sqrt(within.mean(0) + means.var(0)), rtol=1e-6)
    with pytest.raises(ValueError, match="source must hold at least one fit, got none"):
        ps.predict([], new)
    with pytest.raises(ValueError, match="source must hold at least one fit, got none"):
        ps.partial_dependence([], x, 2, [0.0])
    with pytest.raises(TypeError, match="source must hold fits alone where it holds several, got a str"):
        ps.predict(["fit"], new)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("column", "values", "prob", "message"),
    [
        (4, [0.0], 0.9, "column must be one of the 4 columns of the model's first argument, got 4"),
        (-1, [0.0], 0.9, "got -1"),
        (0, [], 0.9, r"values must list at least one number, got shape \(0,\)"),
        ([0, 1], [0.0, 1.0], 0.9, r"values must list rows of 2 numbers, one a column, got shape \(2,\)"),
        ([0, 1], [[0.0, 1.0, 2.0]], 0.9, r"values must list rows of 2 numbers, one a column, got shape \(1, 3\)"),
        ([0, 4], [[0.0, 1.0]], 0.9, "column must be one of the 4 columns of the model's first argument, got 4"),
        (0, [0.0], 90, r"prob must lie in \(0, 1\), got 90"),
    ],
)
def test_bad_arguments_are_named(column: Any, values: Any, prob: float, message: str) -> None:
    fit, x, _ = linear_fit()
    with pytest.raises(ValueError, match=message):
        ps.partial_dependence(fit, x, column, values, prob)


@pytest.mark.parametrize("own_size", [False, True])
def test_the_gradient_of_an_average_is_the_average_of_gradients(own_size: bool) -> None:
    """Also for a model with a batch size of its own, whose last block is padded."""
    x = torch.as_tensor(X[:120], dtype=torch.float32)
    law = ps.SpikeSlab(0.5, 0.3, 1.0, 0.5).expand([4]).to_event(1)

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        weights = pyro.sample("weights", law)
        with pyro.plate("data", len(x), subsample_size=40 if own_size else len(x)) as rows:
            batch = rows if own_size else slice(None)
            mean = (x[batch] @ weights).tanh()
            return pyro.sample("y", dist.Normal(mean, 0.5), obs=None if y is None else y[batch])

    schedule = ps.PriorAnnealing(20, 1, 1, 1, learning_rate=1e-2)
    run = ps.anneal(model, (x, x[:, 0] / 5), schedule, num_draws=1, progress=False)
    fit = ps.refit(run, ps.select(run))
    new = (x[:50].to(fit.free.dtype),)
    mean, gradient = fit.average(fit.mean, new)
    assert torch.allclose(mean, fit.evaluate(fit.mean, new).mean(0), atol=1e-6)
    assert torch.allclose(gradient, fit.jacobian(fit.mean, new).mean(0), atol=1e-5)
    assert float(gradient.abs().max()) > 0.01


@pytest.fixture(scope="module")
def coded() -> tuple[ps.SparseRegressor, pd.DataFrame]:
    """One input of four levels, where only two differ from the rest, and one number."""
    rng = np.random.default_rng(5)
    level = rng.integers(0, 4, 400)
    columns = {f"k={name}": (level == number).astype(float) for number, name in enumerate("abcd")}
    inputs = pd.DataFrame(columns | {"z": rng.normal(size=400)})
    y = 2.0 * (level == 1) - 3.0 * (level == 2) + inputs["z"] + 0.5 * rng.normal(size=400)
    return ps.SparseRegressor(hidden=(), steps=3_000, num_runs=1, random_state=0).fit(inputs, y), inputs


def test_a_coded_input_has_one_effect_with_the_mean_at_each_level(
    coded: tuple[ps.SparseRegressor, pd.DataFrame],
) -> None:
    """Each row as if it had that level and no other."""
    fitted, inputs = coded
    assert fitted.selected_inputs_ == ["k=b", "k=c", "z"]
    table = fitted.effects(inputs, num_points=3, groups={"k": [f"k={name}" for name in "abcd"]})
    assert table["input"].tolist() == ["k"] * 3 + ["z"] * 3
    own = table[table["input"] == "k"].set_index("value")
    assert own.index.tolist() == ["k=b", "k=c", "any other"]
    for level, row in own.iterrows():
        moved = inputs.assign(**{name: float(name == level) for name in inputs if name != "z"})
        assert row["mean"] == pytest.approx(fitted.predict(moved).mean(), abs=1e-6)
    assert own.loc["k=c", "difference"] == pytest.approx(own.loc["k=c", "mean"] - own.loc["k=b", "mean"])
    assert abs(own.loc["any other", "difference"] + 2) < 0.2 and own.loc["any other", "difference_upper"] < -1.8
    alone = fitted.effects(inputs, num_points=3)
    assert list(alone["input"].unique()) == ["k=b", "k=c", "z"]
    pd.testing.assert_frame_equal(
        alone.iloc[-3:].reset_index(drop=True), table.iloc[-3:].reset_index(drop=True), check_dtype=False
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"k": ["k=a", "k=e"]}, "groups must list known columns, got 'k=e' in 'k'"),
        ({"k": ["k=a"], "l": ["k=a"]}, "groups must list each column once, got 'k=a' in 'l'"),
        ({"z": ["k=a"]}, "groups must have names that no other column has, got 'z'"),
        ({"k": ["k=a", "z"]}, "groups must list columns of 0 and 1, at most one of them 1 in a row, got others in 'k'"),
    ],
)
def test_groups_that_are_none_are_named(
    coded: tuple[ps.SparseRegressor, pd.DataFrame], groups: dict[str, list[str | int]], message: str
) -> None:
    fitted, inputs = coded
    with pytest.raises(ValueError, match=message):
        fitted.effects(inputs, groups=groups)
