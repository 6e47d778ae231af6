"""On a linear model the Fisher information gives what the textbooks of regression give."""

import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats
from torch import Tensor

from pyro_sparse.inference.family import Normal
from pyro_sparse.inference.intervals import FisherInformation, fisher_information
from pyro_sparse.inference.prediction import Moments, as_table

N, K = 25, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, K, generator=GENERATOR, dtype=torch.float64)
Y = X @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + torch.randn(
    N, generator=GENERATOR, dtype=torch.float64
)
NEW = torch.randn(7, K, generator=GENERATOR, dtype=torch.float64)


def ridge(x: Tensor, y: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, FisherInformation]:
    """Coefficients, (X'X + precision)^-1 and the information of a linear model."""
    inverse = torch.linalg.inv(x.T @ x + precision.diag())
    coefficients = inverse @ x.T @ y
    return coefficients, inverse, linear_information(x, y - x @ coefficients, precision)


def linear_information(x: Tensor, residuals: Tensor, precision: Tensor) -> FisherInformation:
    """Of a linear model whose noise scale is taken to be 1."""
    return fisher_information(x[:, None], precision, residuals)


def table_of(mean: Tensor, sd: Tensor, information: FisherInformation, prob: float) -> xr.Dataset:
    noise = torch.full_like(mean, information.dispersion)
    variance = sd.square()
    return as_table(Moments(Normal(1.0), mean, variance, mean, variance, noise, information.quantile(prob)), prob)


def none(num_weights: int = K) -> Tensor:
    return torch.zeros(num_weights, dtype=torch.float64)


@pytest.mark.parametrize("precision", [none(), none() + 3.0, torch.tensor([0.0, 1.0, 10.0, 0.1]).double()])
def test_it_is_least_squares_or_bayesian_ridge(precision: Tensor) -> None:
    coefficients, inverse, information = ridge(X, Y, precision)
    hat = X @ inverse @ X.T
    assert torch.allclose(information.leverages, hat.diagonal(), rtol=1e-10)
    assert information.rank == K
    assert information.degrees_of_freedom == pytest.approx(N - float(hat.trace()))
    residuals = Y - X @ coefficients
    assert information.dispersion == pytest.approx(float(residuals.square().sum() / (N - hat.trace())), rel=1e-10)
    # The error of prediction, by leaving each row out and fitting the others.
    left_out = []
    for row in range(N):
        others = torch.arange(N) != row
        without = torch.linalg.solve(X[others].T @ X[others] + precision.diag(), X[others].T @ Y[others])
        left_out.append(float(Y[row] - X[row] @ without))
    assert float(hat.diagonal().max()) < 0.5
    assert information.prediction_error == pytest.approx(np.square(left_out).mean(), rel=1e-10)
    factor = information.factor
    assert torch.allclose(factor @ factor.T, inverse, rtol=1e-9)
    variance = information.dispersion * (NEW @ inverse * NEW).sum(1)
    assert torch.allclose(information.variance(NEW), variance, rtol=1e-10)
    assert not information.outside_range(NEW).any()
    assert torch.equal(torch.isfinite(coefficients), torch.ones(K, dtype=torch.bool))


@pytest.mark.parametrize("prob", [0.5, 0.95, 0.99])
def test_the_prediction_interval_is_the_textbooks(prob: float) -> None:
    coefficients, inverse, information = ridge(X, Y, none())
    mean, sd = NEW @ coefficients, information.variance(NEW).sqrt()
    table = table_of(mean, sd, information, prob)
    t = stats.t.ppf(0.5 * (1 + prob), N - K)
    leverage = (NEW @ inverse * NEW).sum(1).numpy()
    for name, extra in (("mean_", 0.0), ("", 1.0)):
        half = t * np.sqrt(information.dispersion * (extra + leverage))
        assert np.allclose(table[f"{name}upper"] - table["mean"], half, rtol=1e-10)
        assert np.allclose(table["mean"] - table[f"{name}lower"], half, rtol=1e-10)


def test_a_row_fitted_by_itself_alone_does_not_make_the_error_of_prediction() -> None:
    """Its leverage of 1 counts as 1/2; and the error is at least the dispersion."""
    x = torch.cat([X, torch.zeros(N, 1)], 1)
    x[0] = torch.tensor([0.0, 0, 0, 0, 1])
    residuals = Y - x @ torch.linalg.lstsq(x, Y[:, None]).solution[:, 0]
    residuals[0] = 0.3  # of a refit that stopped short
    information = linear_information(x, residuals, none(K + 1))
    rest = linear_information(X[1:], residuals[1:], none())
    assert float(information.leverages[0]) == pytest.approx(1.0)
    freedom = N - K - 1
    assert information.dispersion == pytest.approx(rest.dispersion + 0.3**2 / freedom)
    assert information.prediction_error == pytest.approx((rest.prediction_error * (N - 1) + 0.6**2) / N)
    exact = linear_information(X[:5], torch.ones(5).double(), none())
    assert exact.prediction_error == exact.dispersion


def test_with_many_rows_the_quantile_is_normal() -> None:
    x = torch.randn(204, K, dtype=torch.float64)
    assert linear_information(x[:203], x[:203, 0], none()).quantile(0.95) == pytest.approx(stats.t.ppf(0.975, 199))
    assert linear_information(x, x[:, 0], none()).quantile(0.95) == pytest.approx(stats.norm.ppf(0.975))


def test_a_singular_jacobian_is_used_in_its_range() -> None:
    """A duplicate column: rank K, and in its range the pseudo-inverse."""
    x = torch.cat([X, X[:, :1]], 1)
    coefficients = torch.linalg.pinv(x) @ Y
    information = linear_information(x, Y - x @ coefficients, none(K + 1))
    assert information.rank == K
    assert information.degrees_of_freedom == pytest.approx(N - K)
    inside = torch.cat([NEW, NEW[:, :1]], 1)
    right = information.dispersion * (inside @ torch.linalg.pinv(x.T @ x) * inside).sum(1)
    assert torch.allclose(information.variance(inside), right, rtol=1e-9)
    assert torch.allclose(information.variance(inside), ridge(X, Y, none())[2].variance(NEW), rtol=1e-9)
    assert not information.outside_range(inside).any()
    outside = torch.cat([NEW, -NEW[:, :1]], 1)
    assert information.outside_range(outside).all()
    assert information.outside_range(torch.stack([inside[0], outside[0], inside[1]])).tolist() == [False, True, False]


def test_a_ridge_leaves_no_direction_outside() -> None:
    x = torch.cat([X, X[:, :1]], 1)
    precision = none(K + 1) + 0.5
    _, inverse, information = ridge(x, Y, precision)
    outside = torch.cat([NEW, -NEW[:, :1]], 1)
    assert information.rank == K + 1 and not information.outside_range(outside).any()
    right = information.dispersion * (outside @ inverse * outside).sum(1)
    assert torch.allclose(information.variance(outside), right, rtol=1e-9)


@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_the_units_of_the_columns_do_not_matter(spread: float) -> None:
    """Scaled so that X'X alone is far too badly conditioned: rank, leverages and variances stay."""
    units = torch.logspace(-1, 1, K, base=spread, dtype=torch.float64)
    plain = ridge(X, Y, none())[2]
    scaled = linear_information(X * units, Y - X @ ridge(X, Y, none())[0], none())
    assert scaled.rank == K
    assert torch.allclose(scaled.leverages, plain.leverages, rtol=1e-8)
    assert torch.allclose(scaled.variance(NEW * units), plain.variance(NEW), rtol=1e-8)
    assert not scaled.outside_range(NEW * units).any()
    doubled = torch.cat([X * units, X[:, :1]], 1)
    information = linear_information(doubled, Y, none(K + 1))
    assert information.rank == K
    inside = torch.cat([NEW * units, NEW[:, :1]], 1)
    assert not information.outside_range(inside).any()
    inside[:, -1] *= 1.01
    assert information.outside_range(inside).all()


def test_without_a_weight_only_the_noise_is_left() -> None:
    information = linear_information(X[:, :0], Y, none(0))
    assert information.rank == 0 and information.degrees_of_freedom == N
    assert information.dispersion == pytest.approx(float(Y.square().mean()))
    assert information.variance(NEW[:, :0]).tolist() == [0] * len(NEW)
    assert not information.outside_range(NEW[:, :0]).any()
    assert information.quantile(0.95) == pytest.approx(stats.t.ppf(0.975, N))


@pytest.mark.parametrize("ridge_precision", [0.0, 1.0])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_with_no_more_rows_than_weights_nothing_is_nan(num_rows: int, ridge_precision: float) -> None:
    x, y = X[:num_rows], Y[:num_rows]
    precision = none() + ridge_precision
    coefficients = torch.linalg.pinv(torch.cat([x, precision.sqrt().diag()])) @ torch.cat([y, none()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        information = linear_information(x, y - x @ coefficients, precision)
    if not ridge_precision:
        assert any("4 kept weights leave" in str(w.message) and "degrees of freedom" in str(w.message) for w in caught)
        assert information.rank == num_rows
    table = table_of(NEW @ coefficients, information.variance(NEW).sqrt(), information, 0.95)
    assert all(bool(np.isfinite(column).all()) for column in table.values())
    assert bool((table["upper"] >= table["mean_upper"]).all()) and bool((table["mean_lower"] >= table["lower"]).all())


@pytest.mark.parametrize(("num_data", "precision"), [(40, 0.0), (40, 1.0), (400, 0.0), (20, 0.0)])
def test_intervals_cover_what_they_say(num_data: int, precision: float) -> None:
    """1,500 data sets of a linear model, with coefficients drawn from the ridge's own prior where it has one.

    The bounds are those of a binomial of the stated content that a right interval leaves once in 10,000 times (16 checks:
    a false alarm in 600 seeds). Where half as many weights as rows are kept, a variance that counts no weights, or leaves
    out rows one by one, is caught.
    """
    generator = torch.Generator().manual_seed(1)
    replications, num_weights = 1_500, 10 if num_data == 20 else 3
    x, new = torch.randn(num_data + 1, num_weights, generator=generator, dtype=torch.float64).split([num_data, 1])
    relative = torch.full((num_weights,), precision).double()
    inverse = torch.linalg.inv(x.T @ x + relative.diag())
    hits = np.zeros((2, 2))
    for _ in range(replications):
        beta, noise = torch.randn(num_weights + num_data + 1, generator=generator, dtype=torch.float64).split(
            [num_weights, num_data + 1]
        )
        coefficients = inverse @ x.T @ (x @ beta + noise[1:])
        information = linear_information(x, x @ (beta - coefficients) + noise[1:], relative)
        error = new[0] @ (coefficients - beta)
        variance = information.variance(new)[0]
        for row, prob in enumerate((0.95, 0.5)):
            half = information.quantile(prob) * torch.stack([variance, variance + information.dispersion]).sqrt()
            hits[row] += (torch.stack([error, error - noise[0]]).abs() <= half).numpy()
    for row, prob in zip(hits / replications, (0.95, 0.5), strict=True):
        low, high = stats.binom.ppf([5e-5, 1 - 5e-5], replications, prob) / replications
        assert ((low <= row) & (row <= high)).all(), (row, prob)
