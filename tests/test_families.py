"""Each family of responses against the textbook of generalised linear models, and its intervals against simulation."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference import family as families
from pyro_sparse.inference.intervals import fisher_information
from pyro_sparse.inference.prediction import Moments, as_table

N = 80
GENERATOR = torch.Generator().manual_seed(0)
X = torch.cat([torch.randn(N, 2, generator=GENERATOR), torch.ones(N, 1)], 1)
NEW = torch.cat([torch.randn(9, 2, generator=GENERATOR), torch.ones(9, 1)], 1)
LINEAR = X @ torch.tensor([0.8, -0.5, 0.3])
UNIFORM = torch.rand(N, generator=GENERATOR)
LAW = ps.SpikeSlab(0.5, 0.01, 1.5)
COOL = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-9)
SAMPLE = ps.PriorAnnealing(0, 0, 0, 0, 4, learning_rate=1e-9)
Model = Callable[..., Any]

BINARY = (LINEAR.sigmoid() > UNIFORM).float()
COUNTS = torch.from_numpy(stats.poisson.ppf(UNIFORM, LINEAR.exp())).float()
CLASSES = (
    (UNIFORM[:, None] > torch.softmax(torch.stack([LINEAR, -LINEAR, LINEAR * 0], 1), 1).cumsum(1)).sum(1).clamp(max=2)
)
REAL = LINEAR + torch.from_numpy(stats.norm.ppf(UNIFORM)).float() * (0.5 * X[:, 0]).exp()


def model_of(law: Callable[[Tensor], Any], outputs: int = 1) -> Model:
    """A linear model whose weights are sites of spike and slab, all of them kept."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        weight = pyro.sample("weight", LAW.expand([outputs, 3]).to_event(2))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", law(x @ weight.T), obs=y)

    return model


MODELS: dict[str, tuple[Model, Tensor, int]] = {
    "bernoulli": (model_of(lambda f: dist.Bernoulli(logits=f[:, 0])), BINARY, 1),
    "poisson": (model_of(lambda f: dist.Poisson(f[:, 0].exp())), COUNTS, 1),
    "categorical": (model_of(lambda f: dist.Categorical(logits=f), 3), CLASSES, 3),
    "heteroscedastic": (model_of(lambda f: dist.Normal(f[:, 0], f[:, 1].exp()), 2), REAL, 2),
    "normal": (model_of(lambda f: dist.Normal(f[:, 0], 0.7)), REAL, 1),
}


def run_of(model: Model, y: Tensor, draws: Tensor, schedule: ps.PriorAnnealing = COOL, x: Tensor = X) -> ps.Run:
    """A run whose draws (draws, weights) are set by hand."""
    run = ps.anneal(model, (x, y), schedule, num_draws=1, progress=False)
    return dataclasses.replace(run, draws=draws[None], positions=draws[-1:])


def fit_of(name: str, keep_slab: bool = False) -> ps.Fit:
    model, y, outputs = MODELS[name]
    run = run_of(model, y, torch.full((1, 3 * outputs), 0.1) * torch.arange(1, 3 * outputs + 1))
    fit = ps.refit(run, ps.select(run), keep_slab=keep_slab, tolerance=1e-9)
    assert fit.structure.num_kept == 3 * outputs and fit.family.name == name
    return fit


def weighted(x: Tensor, weights: Tensor) -> Tensor:
    return x.T @ (x * weights[:, None])


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
@pytest.mark.parametrize("keep_slab", [False, True])
def test_one_link_parameter_is_the_textbooks_glm(name: str, keep_slab: bool) -> None:
    """Maximum by iteratively reweighted least squares, covariance (X'WX + 1/slab²)^-1, intervals on the link's scale."""
    x, y, new = X.double(), MODELS[name][1].double(), NEW.double()
    inverse = torch.sigmoid if name == "bernoulli" else torch.exp
    precision = torch.eye(3).double() * (1.5**-2 if keep_slab else 0.0)
    beta = torch.zeros(3).double()
    for _ in range(50):
        mean = inverse(x @ beta)
        weights = mean * (1 - mean) if name == "bernoulli" else mean
        beta = beta + torch.linalg.solve(weighted(x, weights) + precision, x.T @ (y - mean) - precision @ beta)
    covariance = torch.linalg.inv(weighted(x, weights) + precision)
    fit = fit_of(name, keep_slab)
    assert torch.allclose(fit.values["weight"][0], beta, atol=1e-6)
    assert np.allclose(fit.covariance(), covariance, rtol=1e-6)
    likelihood = y * mean.log() + ((1 - y) * (1 - mean).log() if name == "bernoulli" else -mean - torch.lgamma(y + 1))
    assert fit.loss == pytest.approx(-float(likelihood.mean()), rel=1e-6)
    for prob in (0.95, 0.6):
        table = ps.predict(fit, NEW, prob)
        half = stats.norm.ppf(0.5 * (1 + prob)) * (new @ covariance * new).sum(1).sqrt()
        for column, sign in (("mean_lower", -1), ("mean", 0), ("mean_upper", 1)):
            assert np.allclose(table[column], inverse(new @ beta + sign * half), rtol=1e-6)
    if name == "poisson":  # far out, where the rate is as uncertain as the count
        table = ps.predict(fit, 3 * NEW, 0.8)
        rate, variance = torch.exp(3 * new @ beta).numpy(), 9 * (new @ covariance * new).sum(1).numpy()
        assert (rate**2 * variance > rate).any()
        for column, level in (("lower", 0.1), ("upper", 0.9)):
            assert np.array_equal(table[column], stats.nbinom.ppf(level, 1 / variance, 1 / (1 + rate * variance)))


def test_several_classes_are_multinomial_logistic_regression() -> None:
    """In the parametrisation with a reference class, whose information is regular; log-odds derived by hand."""
    x, new = X.double(), NEW.double()
    own = torch.nn.functional.one_hot(CLASSES, 3)[:, 1:].double()

    def logits(z: Tensor, beta: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(z), 1).double(), z @ beta.reshape(2, 3).T], 1)

    beta = torch.zeros(6).double()
    for _ in range(50):
        p = logits(x, beta).softmax(1)[:, 1:]
        blocks = [[weighted(x, p[:, a] * (float(a == b) - p[:, b])) for b in range(2)] for a in range(2)]
        information = torch.cat([torch.cat(row, 1) for row in blocks])
        beta = beta + torch.linalg.solve(information, ((own - p).T @ x).flatten())
    covariance = torch.linalg.inv(information)
    fit = fit_of("categorical")
    table = ps.predict(fit, NEW)
    right = logits(new, beta).softmax(1)
    assert table["mean"].dims == ("row", "class") and table.sizes == {"row": 9, "class": 3}
    assert np.allclose(table["mean"], right, atol=1e-6)
    assert fit.information.rank == 6  # of 9 weights: a constant added to all classes changes nothing
    for row, k in itertools.product(range(9), range(3)):
        p, e = right[row], torch.eye(3).double()[k]
        others = (1 - e) * p / (1 - p[k])
        gradient = ((e - others)[1:, None] * new[row]).flatten()
        half = 1.959964 * float(gradient @ covariance @ gradient) ** 0.5
        odds = float(torch.logit(p[k]))
        assert float(table["mean_lower"][row, k]) == pytest.approx(1 / (1 + np.exp(half - odds)), abs=1e-6)
        assert float(table["mean_upper"][row, k]) == pytest.approx(1 / (1 + np.exp(-half - odds)), abs=1e-6)


def test_two_classes_are_zero_and_one() -> None:
    """Bernoulli, two classes, and two classes of which one is hot: the same fit, the same table."""

    def two(f: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(f), f], 1)

    one_hot = torch.nn.functional.one_hot(BINARY.long(), 2).float()
    tables = []
    for law, y in (
        (lambda f: dist.Bernoulli(logits=f[:, 0]), BINARY),
        (lambda f: dist.Categorical(logits=two(f)), BINARY.long()),
        (lambda f: dist.OneHotCategorical(logits=two(f)), one_hot),
    ):
        run = run_of(model_of(law), y, torch.full((1, 3), 0.5))
        fit = ps.refit(run, ps.select(run), tolerance=1e-9)
        tables.append((ps.predict(fit, NEW), fit.covariance()))
    (bernoulli, covariance), *others = tables
    for table, other in others:
        assert np.allclose(other, covariance, rtol=1e-6)
        assert (table["in_set"] == bernoulli["in_set"]).all()
        for column in ("mean", "mean_lower", "mean_upper"):
            assert np.allclose(table[column][:, 1], bernoulli[column], atol=1e-7)
        assert np.allclose(table["mean_lower"][:, 0], 1 - bernoulli["mean_upper"], atol=1e-7)


def test_two_scales_are_the_textbooks_location_and_scale() -> None:
    """Orthogonal: X'S^-2 X for the mean, 2 X'X for the log scale, times the dispersion."""
    fit = fit_of("heteroscedastic")
    x, new = X.double(), NEW.double()
    beta, gamma = fit.values["weight"]
    scale = (x @ gamma).exp()
    residuals = (REAL.double() - x @ beta) / scale
    assert (x.T @ (residuals / scale)).abs().max() < 1e-5 and (
        x.T @ (residuals**2 - 1)
    ).abs().max() < 1e-5  # the maximum
    of_mean = torch.linalg.inv(weighted(x, scale**-2))
    leverages = (x @ of_mean * x).sum(1) / scale**2
    freedom = N - float(leverages.sum())
    dispersion = float((residuals**2).sum()) / freedom
    right = dispersion * torch.block_diag(of_mean, torch.linalg.inv(2 * x.T @ x))
    assert np.allclose(fit.covariance(), right, rtol=1e-6, atol=1e-9)
    table = ps.predict(fit, NEW, 0.9)
    t, variance = stats.t.ppf(0.95, freedom), dispersion * (new @ of_mean * new).sum(1)
    assert np.allclose(table["mean_upper"] - table["mean"], t * variance.sqrt(), rtol=1e-6)
    error = max(dispersion, float((residuals / (1 - leverages.clamp(max=0.5))).square().mean()))  # of prediction
    half = t * (variance + error * (2 * new @ gamma).exp()).sqrt()
    assert np.allclose(table["mean"] - table["lower"], half, rtol=1e-6)


def test_known_scales_are_weighted_least_squares() -> None:
    """Scales that differ between rows and of which the model says three times too little."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        weight = pyro.sample("weight", LAW.expand([3]).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ weight, (0.5 * x[:, 0]).exp() / 3), obs=y)

    run = run_of(model, REAL, torch.full((1, 3), 0.5))
    fit = ps.refit(run, ps.select(run), keep_slab=False, tolerance=1e-9)
    x, new = X.double(), NEW.double()
    inverse = torch.linalg.inv(weighted(x, (-x[:, 0]).exp()))
    beta = inverse @ x.T @ ((-x[:, 0]).exp() * REAL.double())
    residuals = (REAL.double() - x @ beta) * (-0.5 * x[:, 0]).exp()
    leverages = (x @ inverse * x).sum(1) * (-x[:, 0]).exp()
    variance = float(residuals.square().sum()) / (N - 3)
    assert np.allclose(fit.covariance(), variance * inverse, rtol=1e-6)
    assert leverages.max() < 0.5
    error = float((residuals / (1 - leverages)).square().mean())  # of rows left out one by one
    half = stats.t.ppf(0.975, N - 3) * (variance * (new @ inverse * new).sum(1) + error * new[:, 0].exp()).sqrt()
    table = ps.predict(fit, NEW)
    assert np.allclose(table["upper"] - table["mean"], half, rtol=1e-6)
    assert np.allclose(table["mean"], new @ beta, atol=1e-6)


def test_equal_scales_are_one_scale() -> None:
    scale = 0.7
    link = torch.stack([LINEAR, torch.full((N,), scale).log()], 1).double()
    jacobian = torch.stack([X, torch.zeros(N, 3)], 1).double()
    tables = []
    for family, of in ((families.Normal(scale), slice(1)), (families.HeteroscedasticNormal(), slice(2))):
        rooted = family.root(link[:, of]).mT @ jacobian[:, of]
        information = fisher_information(rooted, torch.ones(3).double(), family.residuals(link[:, of], REAL.double()))
        variance, noise = information.variance(X.double()), family.noise_variance(link[:, of])
        assert noise is not None
        score = family.score(link[:, of])
        moments = Moments(family, score, variance, score, variance, information.dispersion * noise, 1.5)
        tables.append(as_table(moments, 0.9))
    assert all(np.allclose(tables[0][column], tables[1][column], rtol=1e-9) for column in tables[0])


@pytest.mark.parametrize("rate", [0.3, 4.0, 200.0])
@pytest.mark.parametrize("relative_sd", [0.05, 0.5])
def test_a_new_counts_quantile_averages_over_the_rate(rate: float, relative_sd: float) -> None:
    """Against the Poisson law integrated over a gamma law of the rate; without uncertainty it is Poisson."""
    variance = (relative_sd * rate) ** 2
    gamma = stats.gamma(rate**2 / variance, scale=variance / rate)
    for level in (0.025, 0.5, 0.975):
        got = float(families.count_quantile(torch.tensor([rate]), torch.tensor([variance]), level))

        def below(count: float) -> float:
            at = np.linspace(0, 1, 20_001)[1:-1]  # midpoint rule in the quantiles of the rate
            return float(stats.poisson.cdf(count, gamma.ppf(at)).mean())

        assert below(got) >= level - 1e-3 and below(got - 1) < level + 1e-3
        certain = families.count_quantile(torch.tensor([rate]), torch.zeros(1), level)
        assert float(certain) == stats.poisson.ppf(level, rate)


def test_prediction_sets_are_the_smallest_that_hold_the_probability() -> None:
    probabilities = torch.rand(40, 4, generator=GENERATOR).double() ** 3
    probabilities[0] = torch.tensor([0.25, 0.25, 0.25, 0.25])
    probabilities = probabilities / probabilities.sum(1, keepdim=True)
    for prob in (0.3, 0.75, 0.95):
        for row, chosen in zip(probabilities, families.prediction_sets(probabilities, prob), strict=True):
            sets = [
                s
                for size in range(5)
                for s in itertools.combinations(range(4), size)
                if row[list(s)].sum() >= prob - 1e-9
            ]
            smallest = min(len(s) for s in sets)
            assert chosen.sum() == smallest and row[chosen].sum() >= prob - 1e-9
            assert row[chosen].sum() >= max(row[list(s)].sum() for s in sets if len(s) == smallest) - 1e-9


def test_a_fits_prediction_sets_come_from_its_probabilities() -> None:
    for name in ("bernoulli", "categorical"):
        table = ps.predict(fit_of(name), NEW, 0.7)
        mean = table["mean"].values
        probabilities = np.stack([1 - mean, mean], 1) if name == "bernoulli" else mean
        right = families.prediction_sets(torch.from_numpy(probabilities), 0.7)
        assert table["in_set"].dims == ("row", "class") and table["in_set"].dtype == bool
        assert np.array_equal(table["in_set"], right) and table["class"].values.tolist() == list(range(right.shape[1]))


def test_a_run_is_averaged_over_its_draws() -> None:
    for name, (model, y, outputs) in MODELS.items():
        draws = torch.randn(5, outputs, 3, generator=GENERATOR) * 0.5
        table = ps.predict(run_of(model, y, draws.flatten(1), SAMPLE), 3 * NEW, 0.8)
        f = torch.einsum("rp,dkp->drk", 3 * NEW, draws).double()
        if name == "categorical":
            mean = f.softmax(-1)
            score, inverse = torch.logit(mean), torch.sigmoid
        else:
            score = f[..., 0]
            inverse = {"bernoulli": torch.sigmoid, "poisson": torch.exp}.get(name, lambda s: s)
            mean = inverse(score)
        half = stats.norm.ppf(0.9) * score.std(0, correction=0)
        assert np.allclose(table["mean"], mean.mean(0), rtol=1e-5, atol=1e-5)
        assert np.allclose(table["mean_lower"], inverse(score.mean(0) - half), rtol=1e-5, atol=1e-5)
        assert np.allclose(table["mean_upper"], inverse(score.mean(0) + half), rtol=1e-5, atol=1e-5)
        if name == "poisson":
            rate, variance = mean.mean(0).numpy(), mean.var(0, correction=0).numpy()
            for column, level in (("lower", 0.1), ("upper", 0.9)):
                right = stats.nbinom.ppf(level, rate**2 / variance, rate / (rate + variance))
                assert np.array_equal(table[column], right)
        if name == "heteroscedastic":
            of_rows = torch.einsum("rp,dkp->drk", X, draws).double()
            expected = (2 * of_rows[..., 1]).exp().mean(0)
            dispersion = ((REAL - of_rows[..., 0]).square() / expected).mean()
            noise = dispersion * (2 * f[..., 1]).exp().mean(0)
            total = stats.norm.ppf(0.9) * (mean.var(0, correction=0) + noise).sqrt()
            assert np.allclose(table["upper"] - table["mean"], total, rtol=1e-4)
        if name in ("bernoulli", "categorical"):
            p = mean.mean(0)
            right = families.prediction_sets(torch.stack([1 - p, p], 1) if name == "bernoulli" else p, 0.8)
            assert np.array_equal(table["in_set"], right)


def test_separable_classes_are_held_by_the_slab() -> None:
    y = (X[:, 0] > 0).float()
    run = run_of(MODELS["bernoulli"][0], y, torch.full((1, 3), 0.5))
    fit = ps.refit(run, ps.select(run), tolerance=1e-6)
    weight = fit.values["weight"][0]
    score = X.double().T @ (y - (X.double() @ weight).sigmoid()) - weight / 1.5**2
    assert fit.converged and score.abs().max() < 1e-4 and weight.abs().max() < 20
    table = ps.predict(fit, NEW)
    assert np.isfinite(fit.covariance()).all() and (table["mean_lower"] < table["mean_upper"]).all()


def noisy_line(num_rows: int, slope: float) -> tuple[Any, Any]:
    """A line whose noise grows or falls along it."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(num_rows, 3))
    return x, x[:, 0] + np.exp(slope * x[:, 0]) * rng.normal(size=num_rows)


@pytest.mark.parametrize("slope", [0.0, 0.6])
def test_noise_that_varies_is_warned_of(slope: float) -> None:
    x, y = noisy_line(1_000, slope)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.SparseRegressor(hidden=(), random_state=0, steps=2_000, num_runs=1).fit(x, y)
    assert any("noise is clearly larger" in str(w.message) for w in caught) == (slope > 0)


def test_the_test_of_varying_noise_has_its_level_and_the_same_value_as_by_hand() -> None:
    rng, normal = np.random.default_rng(0), families.Normal(1.0)
    z = rng.normal(size=(200, 2))
    found = [normal.varying_noise(torch.from_numpy(r), torch.from_numpy(z))[0] for r in rng.normal(size=(2_000, 200))]
    # Uniform p-values: 4 standard errors of a share of 2,000, a false alarm in 16,000.
    assert all(
        abs(np.mean(np.array(found) < level) - level) < 4 * (level * (1 - level) / 2_000) ** 0.5
        for level in (0.05, 0.5)
    )
    r = np.exp(0.5 * z[:, 0]) * rng.normal(size=200)
    squares, design = r**2, np.column_stack([np.ones(200), z])
    fitted = design @ np.linalg.lstsq(design, squares, rcond=None)[0]
    statistic = 200 * fitted.var() / squares.var()
    order = np.argsort(fitted)
    p_value, ratio = normal.varying_noise(torch.from_numpy(r), torch.from_numpy(np.column_stack([z, z.sum(1)])))
    assert p_value == pytest.approx(stats.chi2.sf(statistic, 2), rel=1e-6)  # the third regressor adds nothing
    assert ratio == pytest.approx(squares[order[-40:]].mean() / squares[order[:40]].mean())


def test_counts_that_vary_more_than_poisson_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"vary .* times as much .* as Poisson counts.*log\(1 \+ count\)"):
        model = MODELS["poisson"][0]
        run = run_of(model, COUNTS * 4, torch.full((1, 3), 0.5))
        ps.predict(ps.refit(run, ps.select(run)), NEW)
    # Pearson's statistic by hand, and its law under the model.
    link, rate = torch.log(torch.tensor([2.0, 0.5])).double(), torch.tensor([2.0, 0.5])
    ratio, deviations = families.Poisson().overdispersion(link[:, None], torch.tensor([4.0, 0.0]), 1)
    assert ratio == pytest.approx(2.5) and deviations == pytest.approx(1.5 / float((2 + 1 / rate).sum()) ** 0.5)
    rates = np.linspace(0.2, 5, 4_000)
    counts = np.random.default_rng(0).poisson(rates, (200, 4_000))
    found = [
        families.Poisson().overdispersion(torch.from_numpy(np.log(rates))[:, None], torch.from_numpy(c), 0)[1]
        for c in counts
    ]
    assert abs(np.mean(found)) < 5 / 200**0.5 and 0.8 < np.std(found) < 1.2


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_fit_predicts_the_same(name: str, tmp_path: Path) -> None:
    fit = fit_of(name, keep_slab=True)
    fit.save(tmp_path)
    again = ps.Fit.load(tmp_path, MODELS[name][0], (X[:1], MODELS[name][1][:1]))
    assert ps.predict(again, NEW).identical(ps.predict(fit, NEW)) and again.family == fit.family


def test_what_has_no_interval_says_why() -> None:
    def masked(x: Tensor, y: Tensor | None = None) -> None:
        with pyro.poutine.mask(mask=x[:, 0] > 0):
            MODELS["bernoulli"][0](x, y)

    run = run_of(masked, BINARY, torch.full((1, 3), 0.5))
    with pytest.raises(ValueError, match="intervals need every row, got a masked response at site 'y'"):
        ps.predict(ps.refit(run, ps.select(run)), NEW)
    grid = model_of(lambda f: dist.Bernoulli(logits=f).to_event(1), 2)
    run = run_of(grid, torch.stack([BINARY, BINARY], 1), torch.full((1, 6), 0.5))
    with pytest.raises(ValueError, match=r"intervals need one number a row, got shape \(80, 2\) at site 'y'"):
        ps.predict(ps.refit(run, ps.select(run)), NEW)
    with pytest.raises(ValueError, match="only a normal response with one scale has a noise variance, got bernoulli"):
        _ = fit_of("bernoulli").noise_variance


def simulated(name: str, replications: int, num_data: int) -> np.ndarray[Any, Any]:
    """How often the mean's interval covers at a fresh row, and a new observation lies in its interval or set."""
    family, hits = families.FAMILIES[name](), np.zeros(2)
    generator = torch.Generator().manual_seed(1)
    numpy = np.random.default_rng(1)
    truth = torch.tensor([0.7, -0.5, 0.5]).double()
    for _ in range(replications):
        x = torch.randn(num_data + 1, 3, generator=generator).double()
        x[:, 2] = 1
        mean = family.mean(x @ truth)
        draw = numpy.poisson(mean) if name == "poisson" else numpy.random(num_data + 1) < mean.numpy()
        y, beta = torch.from_numpy(np.asarray(draw, dtype=float)), truth
        for _ in range(5):  # Newton's method from the truth, with a weak ridge
            root = family.root((x[1:] @ beta)[:, None])[:, 0]
            residual = y[1:] - family.mean(x[1:] @ beta)
            hessian = (x[1:] * root).T @ (x[1:] * root) + 1e-3 * torch.eye(3)
            beta = beta + torch.linalg.solve(hessian, x[1:].T @ residual - 1e-3 * beta)
        root = family.root((x[1:] @ beta)[:, None])
        information = fisher_information(root * x[1:, None], torch.full((3,), 1e-3).double())
        score, variance = x[:1] @ beta, information.variance(x[:1])
        centre = family.mean(score)
        spread = family.mean_variance(centre, variance)
        table = as_table(Moments(family, centre, spread, score, variance, None, information.quantile(0.95)), 0.95)
        hits[0] += float(table["mean_lower"][0]) <= float(mean[0]) <= float(table["mean_upper"][0])
        if name == "poisson":
            hits[1] += float(table["lower"][0]) <= float(y[0]) <= float(table["upper"][0])
        else:
            hits[1] += bool(table["in_set"][0, int(y[0])])
    return hits / replications


@pytest.mark.parametrize("name", ["poisson", "bernoulli"])
def test_intervals_and_sets_cover_what_they_say(name: str) -> None:
    """400 data sets of 200 rows. The mean's interval is nominal, with an error of order 1 / n: 94 to 96 %, widened by what
    a binomial leaves once in 10,000 times (a false alarm in 2,500 seeds). Discrete observations cover no less than nominal.
    """
    replications = 400
    mean, observation = simulated(name, replications, 200)
    low = stats.binom.ppf(1e-4, replications, 0.94) / replications
    high = stats.binom.ppf(1 - 1e-4, replications, 0.96) / replications
    assert low <= mean <= high and observation >= low, (mean, observation)


# The models to start from.


def outputs_of(family: str) -> int:
    return {"heteroscedastic": 2, "categorical": 3}.get(family, 1)


RESPONSES = {"normal": REAL, "heteroscedastic": REAL, "bernoulli": BINARY, "categorical": CLASSES, "poisson": COUNTS}


@pytest.mark.parametrize("family", RESPONSES)
def test_a_regression_model_has_the_law_it_says(family: str) -> None:
    torch.manual_seed(0)
    net = ps.SparseNet([3, 4, outputs_of(family)])
    offset: Any = [0.3, -0.2, 0.5] if family == "categorical" else 0.4
    model = ps.regression_model(net, N, family, min_scale=0.2, offset=offset)
    values = dict(net.named_parameters()) | {"sigma_above_floor": torch.tensor(0.5)}
    f = net(X)
    node = pyro.poutine.trace(pyro.condition(model, data=values)).get_trace(X, RESPONSES[family]).nodes["y"]
    assert node["is_observed"] and float(node["scale"]) == 1
    value = node["fn"].log_prob(RESPONSES[family])
    y = RESPONSES[family]
    if family == "normal":
        right = torch.from_numpy(stats.norm.logpdf(y, (offset + f[:, 0]).detach(), 0.7))
    elif family == "heteroscedastic":
        scale = 0.2 + torch.log1p(torch.exp(f[:, 1]) * np.expm1(0.8))
        right = torch.from_numpy(stats.norm.logpdf(y, (offset + f[:, 0]).detach(), scale.detach()))
        assert float(torch.as_tensor(0.2 + np.log1p(np.expm1(0.8)))) == pytest.approx(1.0)  # where f is 0
    elif family == "bernoulli":
        right = torch.log(torch.where(y == 1, 1.0, 0.0) + (1 - 2 * y) / (1 + torch.exp(offset + f[:, 0])))
    elif family == "categorical":
        odds = (f + torch.tensor(offset)).exp()
        right = (odds / odds.sum(1, keepdim=True))[torch.arange(N), y].log()
    else:
        right = torch.from_numpy(stats.poisson.logpmf(y, torch.exp(offset + f[:, 0]).detach()))
    assert np.allclose(value.detach(), right.detach(), atol=1e-5)


@pytest.mark.parametrize("family", RESPONSES)
def test_every_family_goes_through_the_four_verbs_by_batches(family: str) -> None:
    torch.manual_seed(0)
    model = ps.regression_model(ps.SparseNet([3, 4, outputs_of(family)]), N, family)
    schedule = ps.PriorAnnealing(60, 20, 20, 10, 10, learning_rate=2e-3)
    run = ps.anneal(model, (X, RESPONSES[family]), schedule, batch_size=20, num_draws=3, progress=False)
    assert run.positions.dtype == torch.float32
    fit = ps.refit(run, ps.select(run), tolerance=0.5)
    assert fit.family.name == family or (family, fit.structure.num_kept) == ("heteroscedastic", 0)
    for source in (fit, run):
        table = ps.predict(source, NEW)
        assert all(bool(np.isfinite(column).all()) for column in table.values())
        assert (table["mean_lower"] <= table["mean_upper"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_data": 0}, "num_data must be >= 1, got 0"),
        ({"family": "gamma"}, "family must be one of normal, heteroscedastic, .*, got 'gamma'"),
        ({"min_scale": float("nan")}, "min_scale must be > 0, got nan"),
        ({"family": "heteroscedastic", "min_scale": 1.0}, r"min_scale must lie in \(0, 1\), got 1.0"),
        ({"offset": float("inf")}, "offset must be finite, got inf"),
        ({"family": "categorical", "offset": 1.0}, "offset must list a number for each class for the categorical"),
        ({"offset": [1.0, 2.0]}, r"offset must be one number for the normal family, got \[1.0, 2.0\]"),
        ({"family": "categorical", "offset": [0.0, float("nan")]}, "offset must be finite, got"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.regression_model(ps.SparseNet([3, 1]), **({"num_data": N} | arguments))


@pytest.mark.parametrize(("family", "outputs"), [("heteroscedastic", 1), ("poisson", 2)])
def test_a_network_of_the_wrong_width_is_refused(family: str, outputs: int) -> None:
    model = ps.regression_model(ps.SparseNet([3, outputs]), N, family)
    with pytest.raises(
        ValueError, match=rf"net must have \d outputs? for the {family} family, got shape \(80, {outputs}\)"
    ):
        model(X, REAL)
