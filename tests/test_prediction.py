"""The table of predictions: right for any number of rows, honest about what cannot be predicted, and it covers."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from scipy import stats
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference import prediction, response
from pyro_sparse.inference.family import Normal

N = 60
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
Y = X[:, 0] - 0.5 * X[:, 1] + 0.3 * torch.randn(N, generator=GENERATOR)
NEW = torch.randn(101, 3, generator=GENERATOR)
LAW = ps.SpikeSlab(0.1, 0.1, 1.0, 0.5)
COOL = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-6)
SAMPLE = ps.PriorAnnealing(0, 0, 0, 0, 4, learning_rate=1e-6)
COLUMNS = ["mean", "mean_lower", "mean_upper", "lower", "upper"]
Model = Callable[..., Any]


def by_batches(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 0.3), obs=y)


def whole(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(x @ weight, 0.3), obs=y)


def without_a_plate(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    pyro.sample("y", dist.Normal(x @ weight, 0.3).to_event(1), obs=y)


def subsampling(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=20) as i:
        pyro.sample("y", dist.Normal(x[i] @ weight, 0.3), obs=None if y is None else y[i])


def subsampling_by_pyro(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=20):
        x = pyro.subsample(x, event_dim=1)
        y = None if y is None else pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Normal(x @ weight, 0.3), obs=y)


MODELS = [by_batches, whole, without_a_plate, subsampling, subsampling_by_pyro]


def run_of(
    model: Model, draws: list[list[float]], schedule: ps.PriorAnnealing = COOL, data: tuple[Tensor, ...] = (X, Y)
) -> ps.Run:
    """A run whose draws are set by hand."""
    run = ps.anneal(model, data, schedule, num_draws=1, progress=False)
    return dataclasses.replace(run, draws=torch.tensor([draws]), positions=torch.tensor(draws[-1:]))


def fit_of(model: Model, data: tuple[Tensor, ...] = (X, Y)) -> ps.Fit:
    run = run_of(model, [[1.0, -1.0, 0.0]], data=data)
    return ps.refit(run, ps.select(run), tolerance=1e-6)


def same(one: xr.Dataset, other: xr.Dataset) -> bool:
    return all(np.allclose(one[name], other[name], rtol=1e-9, atol=1e-9) for name in one)


@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_rows_gets_the_same_answers(model: Model) -> None:
    """More rows than the plate, one row, and rows that are no multiple of the model's own batch."""
    fit = fit_of(model)
    design = X[:, :2].double()
    precision = 0.3**2 * torch.eye(2).double()
    weight = torch.linalg.solve(design.T @ design + precision, design.T @ Y.double())
    table = ps.predict(fit, NEW)
    assert list(table) == COLUMNS and dict(table.sizes) == {"row": len(NEW)}
    assert np.allclose(table["mean"], NEW[:, :2].double() @ weight, atol=1e-6)
    factor = torch.linalg.inv(design.T @ design + precision)
    sd = (fit.noise_variance * (NEW[:, :2].double() @ factor * NEW[:, :2].double()).sum(1)).sqrt()
    t = stats.t.ppf(0.975, fit.information.degrees_of_freedom)
    assert np.allclose(table["mean_upper"] - table["mean"], t * sd, rtol=1e-6)
    left_out = (Y - design @ weight) / (1 - (design @ factor * design).sum(1))  # the error of each row from the others
    assert np.allclose(table["upper"] - table["mean"], t * (sd**2 + left_out.square().mean()).sqrt(), rtol=1e-6)
    for rows in (slice(0, 1), slice(3, 23), slice(7, 52)):
        assert same(ps.predict(fit, NEW[rows]), table.isel(row=rows))
    assert same(ps.predict(fit, (NEW,)), table) and same(ps.predict(fit, NEW.numpy()), table)


@pytest.mark.parametrize("model", MODELS)
def test_blocks_do_not_show(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_of(model)
    run = run_of(model, [[1.0, -1.0, 0.0], [0.9, -0.8, 0.1]], SAMPLE)
    right = [ps.predict(source, NEW) for source in (fit, run)]
    monkeypatch.setattr(response, "BLOCK", 7)
    monkeypatch.setattr(response, "NUMBERS_AT_ONCE", 10)
    assert all(same(ps.predict(source, NEW), table) for source, table in zip((fit, run), right, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_a_run_is_averaged_over_its_draws(model: Model) -> None:
    draws = [[1.0, -1.0, 0.0], [0.5, -0.8, 0.1], [1.5, 0.2, -0.3]]
    for prob in (0.95, 0.5):
        table = ps.predict(run_of(model, draws, SAMPLE), NEW, prob)
        means = np.array(draws) @ NEW.numpy().T
        noise = np.square(Y.numpy() - np.array(draws) @ X.numpy().T).mean()
        z = stats.norm.ppf(0.5 * (1 + prob))
        assert np.allclose(table["mean"], means.mean(0), atol=1e-5)
        assert np.allclose(table["mean_upper"] - table["mean"], z * means.std(0), atol=1e-5)
        assert np.allclose(table["mean"] - table["mean_lower"], z * means.std(0), atol=1e-5)
        half = z * np.sqrt(means.var(0) + noise)
        assert np.allclose(table["upper"] - table["mean"], half, atol=1e-5)
        assert np.allclose(table["mean"] - table["lower"], half, atol=1e-5)


def test_the_noise_of_averages_over_draws_is_unbiased_with_few_rows_to_a_parameter() -> None:
    """Draws of the exact posterior of a linear model with 30 parameters on 60 rows: 200 data sets, 4 standard errors.

    The mean squared residual of the averaged prediction would be a half.
    """
    rng, found = np.random.default_rng(1), []
    for _ in range(200):
        x = rng.normal(size=(60, 30))
        y = x @ rng.normal(size=30) + rng.normal(size=60)
        inverse = np.linalg.inv(x.T @ x)
        draws = torch.from_numpy(rng.multivariate_normal(inverse @ x.T @ y, inverse, 200))
        stand_in: Any = Exact(x, y)
        residuals = prediction._Residuals(Normal(1.0), stand_in, draws[0])  # type: ignore[arg-type]
        for draw in draws:
            residuals.add(draw)  # type: ignore[arg-type]
        found.append(float(residuals.dispersion))
    assert abs(np.mean(found) - 1) < 4 * np.std(found) / 200**0.5 < 0.1


class Exact:
    """Stands for the response of a linear model of noise scale 1."""

    def __init__(self, x: Any, y: Any) -> None:
        self.spec, self.x, self.y = SimpleNamespace(data=()), torch.from_numpy(x), torch.from_numpy(y)

    def evaluate(self, of: Any, values: Tensor, data: Any) -> Tensor:
        return (self.x @ values)[:, None]

    def observed(self, values: Tensor) -> Tensor:
        return self.y


def test_several_chains_are_averaged_together() -> None:
    run = run_of(by_batches, [[1.0, -1.0, 0.0], [0.5, -0.8, 0.1]], SAMPLE)
    chains = dataclasses.replace(run, draws=run.draws.transpose(0, 1))
    assert same(ps.predict(run, NEW), ps.predict(chains, NEW))


def test_the_level_is_the_one_asked_for() -> None:
    fit = fit_of(by_batches)
    wide, narrow = ps.predict(fit, NEW, prob=0.99), ps.predict(fit, NEW, prob=0.5)
    freedom = fit.information.degrees_of_freedom
    for lower, upper in (("mean_lower", "mean_upper"), ("lower", "upper")):
        ratio = (wide[upper] - wide[lower]) / (narrow[upper] - narrow[lower])
        assert np.allclose(ratio, stats.t.ppf(0.995, freedom) / stats.t.ppf(0.75, freedom))
        assert np.allclose((wide[upper] + wide[lower]) / 2, wide["mean"])


@pytest.mark.parametrize("prob", [0, 1, 95, float("nan")])
def test_a_level_outside_of_its_range_is_refused(prob: float) -> None:
    for source in (fit_of(by_batches), run_of(by_batches, [[1.0, 0, 0]], SAMPLE)):
        with pytest.raises(ValueError, match=rf"prob must lie in \(0, 1\), got {prob}"):
            ps.predict(source, NEW, prob=prob)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (NEW[:, :2], r"x_new must have shape \(rows, 3\) as data\[0\], got \(101, 2\)"),
        (NEW[0], r"x_new must have shape \(rows, 3\) as data\[0\], got \(3,\)"),
        (NEW[:0], r"x_new must have shape \(rows, 3\) as data\[0\], got \(0, 3\)"),
        (torch.full((2, 3), float("nan")), "x_new must be finite"),
        (torch.full((2, 3), float("inf")), "x_new must be finite"),
        ((NEW, NEW[:, 0], NEW), "x_new must hold 1 to 2 arguments of the model, got 3"),
        ((), "x_new must hold 1 to 2 arguments of the model, got 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused(new: Any, message: str) -> None:
    for source in (fit_of(by_batches), run_of(by_batches, [[1.0, 0, 0]], SAMPLE)):
        with pytest.raises(ValueError, match=message):
            ps.predict(source, new)


def test_whole_numbers_are_rows_too() -> None:
    new = torch.arange(6).reshape(2, 3)
    fit = fit_of(by_batches)
    assert same(ps.predict(fit, new), ps.predict(fit, new.float()))


def test_a_model_that_reads_its_data_from_outside_cannot_predict() -> None:
    def model() -> None:
        by_batches(X, Y)

    run = run_of(model, [[1.0, -1.0, 0.0]], data=())
    fit = ps.refit(run, ps.select(run))
    with pytest.raises(ValueError, match="reads its data from outside its arguments"):
        ps.predict(fit, NEW)


def test_a_model_that_needs_its_response_is_told_how_to_do_without() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 0.3), obs=y.clone())

    with pytest.raises(ValueError, match=r"must run without its response, called with None for it.*obs=y"):
        ps.predict(fit_of(model), NEW)


def test_a_model_that_observes_something_in_its_place_is_refused() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        by_batches(x, torch.zeros(len(x)) if y is None else y)

    with pytest.raises(ValueError, match="site 'y' must be unobserved when its response is None"):
        ps.predict(fit_of(model), NEW)


def test_a_cooled_run_is_no_posterior() -> None:
    with pytest.raises(ValueError, match=r"must end with a sampling phase.*ends with 'cool'"):
        ps.predict(run_of(by_batches, [[1.0, 0, 0]]), NEW)


def pairs(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        mean = (x @ weight)[:, None].expand(-1, 2)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def positive(x: Tensor, y: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.LogNormal(x @ weight, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "y", "message"),
    [
        (positive, Y.exp(), r"intervals need a Normal, Bernoulli, .* or Poisson response, got LogNormal at site 'y'"),
        (pairs, torch.stack([Y, Y], 1), r"intervals need one number a row, got shape \(60, 2\)"),
    ],
)
def test_intervals_from_a_fit_are_for_known_families(model: Model, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.predict(fit_of(model, (X, y)), NEW)


def test_other_responses_have_no_interval_for_an_observation() -> None:
    draws = [[1.0, -1.0, 0.0], [0.5, -0.8, 0.1]]
    table = ps.predict(run_of(positive, draws, SAMPLE, (X, Y.exp())), NEW)
    assert list(table) == COLUMNS[:3]
    means = torch.exp(torch.tensor(draws) @ NEW.T + 0.5)
    assert np.allclose(table["mean"], means.mean(0), rtol=1e-5)
    table = ps.predict(run_of(pairs, draws, SAMPLE, (X, torch.stack([Y, Y], 1))), NEW)
    assert table["mean"].shape == (101, 2) and list(table) == COLUMNS[:3]


def test_what_the_rows_say_nothing_about_is_warned_of() -> None:
    """Two columns that were always equal, and a row in which they differ."""
    x = torch.stack([X[:, 0], X[:, 0], torch.zeros(N)], 1)
    run = run_of(by_batches, [[1.0, -1.0, 0.0]], data=(x, Y))
    fit = ps.refit(run, ps.select(run), keep_slab=False)
    with pytest.warns(UserWarning, match="at 1 of 2 rows .* rank 1"):
        ps.predict(fit, torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def test_intervals_of_the_mean_cover_the_function_of_a_sparse_network() -> None:
    """Data from a sparse network, 60 data sets, its function at a fresh point, and a new observation there.

    The bounds are those that a binomial of 95 % leaves once in 10,000 times on either side, two checks: a false alarm in
    2,500 seeds. The weights themselves are as far from the truth as their standard errors say: the mean square of that
    distance, in all directions, is chi-squared but for the curvature of the network and its slab, for which a tenth is
    allowed upwards. Standard errors that are off by a quarter are caught.
    """
    torch.manual_seed(0)
    net = ps.SparseNet([3, 2, 1], prior=LAW)
    truth = torch.tensor([1.5, 0.0, 0.0, 0.0, -1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.5])

    def model(x: Tensor, y: Tensor | None = None) -> None:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 800, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(1.5 * x[:, 0] + 0.5) + torch.tanh(-x[:, 1]) + 0.5

    x = torch.randn(800, 3)
    run = run_of(model, [truth.tolist()], data=(x, function(x)))
    structure = ps.select(run)
    assert structure.num_kept == 6
    hits, replications, distances = np.zeros(2), 60, []
    for _ in range(replications):
        data = (x, function(x) + 0.5 * torch.randn(800))
        again = dataclasses.replace(run, spec=dataclasses.replace(run.spec, data=data))
        new = torch.randn(1, 3)
        fit = ps.refit(again, structure, tolerance=0.05)
        table = ps.predict(fit, new)
        error = (fit.free - truth[truth != 0]).numpy()
        distances.append(error @ np.linalg.solve(fit.covariance().values, error) / len(error))
        mean = float(function(new))
        for number, (prefix, value) in enumerate((("mean_", mean), ("", mean + 0.5 * float(torch.randn(()))))):
            hits[number] += float(table[f"{prefix}lower"][0]) <= value <= float(table[f"{prefix}upper"][0])
    low, high = stats.binom.ppf([1e-4, 1 - 1e-4], replications, 0.95)
    assert ((low <= hits) & (hits <= high)).all(), hits
    chi_squared = stats.chi2(6 * replications)
    low, high = (chi_squared.ppf(tail) / 6 / replications for tail in (1e-4, 1 - 1e-4))
    assert low <= np.mean(distances) <= 1.1 * high, np.mean(distances)
