"""A diagnosis against posteriors and samplers whose law is known, and its verdict on each kind of trouble."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_sparse as ps
from pyro_sparse.inference import diagnostics

N, P, FRICTION = 200, 5, 0.3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, P, generator=GENERATOR)
Y = X @ torch.randn(P, generator=GENERATOR) + torch.randn(N, generator=GENERATOR)
PRECISION = (X.T @ X + torch.eye(P)).double()


@pytest.fixture(autouse=True)
def arviz(optional_import: Callable[[str], ModuleType]) -> ModuleType:
    return optional_import("arviz")


def linear(x: Tensor, y: Tensor | None = None) -> Any:
    coefficients = pyro.sample("coefficients", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ coefficients, 1.0), obs=y)


def sampled(
    learning_rate: float, num_steps: int = 3_000, num_draws: int = 300, num_chains: int = 4, **options: Any
) -> ps.Run:
    schedule = ps.PriorAnnealing(0, 0, 0, 0, num_steps, learning_rate=learning_rate, friction=FRICTION)
    options = {"num_draws": num_draws, "num_chains": num_chains, "progress": False} | options
    return ps.anneal(linear, (X, Y), schedule, **options)


@pytest.fixture(scope="module")
def run() -> ps.Run:
    return sampled(0.05)


@pytest.fixture(scope="module")
def network_run() -> ps.Run:
    """A network's: a few draws near its start, in two chains."""
    torch.manual_seed(0)
    net = ps.SparseNet([P, 3, 1], prior=ps.SpikeSlab(0.5, 0.2, 1.0))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 40, learning_rate=0.02)
    run = ps.anneal(model, (X, Y), schedule, None, 20, 2, progress=False, input_names=list("abcde"))
    run.trace["sample_stats"]["loss"].values[:] = [[0.0], [1.0]]  # the first is the best
    return run


def temperature(learning_rate: float) -> float:
    """Of a discretised chain of a normal law: the mean of 1 / (1 - epsilon h / (2 (2 - alpha))) over curvatures h."""
    steps = learning_rate / N * torch.linalg.eigvalsh(PRECISION)
    return float((1 / (1 - steps / (2 * (2 - FRICTION)))).mean())


def test_a_linear_model_is_fine(run: ps.Run) -> None:
    """Five standard errors over 10 numbers: a false alarm in 200,000."""
    found = ps.diagnose(run, num_rows=5, num_projections=2)
    assert found.verdict.startswith("Fine: R-hat is at most 1.0")
    assert list(found.table["quantity"].values) == [
        *(f"mean[{row}]" for row in (0, 50, 100, 149, 199)),
        "log_likelihood",
        "projection[0]",
        "projection[1]",
    ]
    centre, covariance = torch.linalg.solve(PRECISION, X.T.double() @ Y.double()), torch.linalg.inv(PRECISION)
    rows = X[[0, 50, 100, 149, 199]].double()
    table = found.table.isel(quantity=slice(5))
    sd = (rows @ covariance @ rows.T).diag().sqrt().numpy()
    error = sd / np.sqrt(table["ess_bulk"].values)
    assert (np.abs(table["mean"].values - (rows @ centre).numpy()) < 5 * error).all()
    assert (np.abs(table["sd"].values / sd - 1) < 5 / np.sqrt(table["ess_bulk"].values)).all()
    check_temperatures(found, 0.05)
    text = str(found)
    assert text.startswith("Fine") and "configurational" in text and "log_likelihood" in text


def check_temperatures(found: ps.Diagnosis, learning_rate: float) -> None:
    mean = found.temperatures.mean("chain")
    for name in ("kinetic", "configurational"):
        error = float((found.temperatures[f"{name}_se"] ** 2).mean() / 4) ** 0.5
        assert abs(float(mean[name]) - temperature(learning_rate)) < 5 * error, f"{name} {float(mean[name])} ± {error}"
        assert error < 0.05
    assert (found.temperatures["nominal"] == 1).all() and (found.temperatures["minibatch"] == 0).all()


def test_a_large_step_heats_both_temperatures_alike() -> None:
    found = ps.diagnose(sampled(1.5), num_rows=1, num_projections=1)
    assert temperature(1.5) > 1.5
    check_temperatures(found, 1.5)
    assert found.verdict.startswith("Biased: the temperature of the draws is ")
    assert found.verdict.endswith(" in place of 1; lower learning_rate.")


def test_few_independent_draws_have_the_right_configurational_temperature() -> None:
    """About the mean of its own half, of four draws, it would be a quarter less; its standard error is 0.06."""
    run = sampled(0.05, 8, 8, 16)
    centre, root = torch.linalg.solve(PRECISION, X.T.double() @ Y.double()), torch.linalg.cholesky(PRECISION.inverse())
    draws = (centre + torch.randn(16, 8, P, generator=torch.Generator().manual_seed(0)).double() @ root.T).float()
    found = ps.diagnose(dataclasses.replace(run, draws=draws), num_rows=1, num_projections=0).temperatures
    assert abs(float(found["configurational"].mean()) - 1) < 0.15


def test_small_batches_heat_the_draws() -> None:
    with pytest.warns(UserWarning, match="minibatch noise adds"):
        run = sampled(0.1, batch_size=10)
    found = ps.diagnose(run, num_rows=1, num_projections=1)
    assert found.verdict.startswith("Biased") and "of which minibatch noise adds at most" in found.verdict
    assert found.verdict.endswith("lower learning_rate or raise batch_size.")


def test_chains_that_are_too_short_or_apart_do_not_mix(run: ps.Run) -> None:
    short = ps.diagnose(sampled(5e-4, 200, 100), num_rows=1)
    assert short.verdict.startswith("Not mixing: the chains are apart (R-hat ")
    slow = ps.diagnose(sampled(3e-3, 1_500, 100), num_rows=1)
    assert slow.verdict.startswith("Not mixing: the effective sample size of ") and "raise sample_steps" in slow.verdict
    assert isinstance(run.draws, Tensor)
    shift = torch.tensor([0.0, 0.0, 0.0, 0.3])[:, None, None]  # four standard deviations
    apart = ps.diagnose(dataclasses.replace(run, draws=run.draws + shift), num_rows=1)
    assert apart.verdict.startswith("Not mixing")


def test_one_chain_is_told_so(run: ps.Run) -> None:
    found = ps.diagnose(run.chain(0), num_rows=1, num_projections=1)
    assert found.verdict.startswith("One chain only") and "num_chains=4" in found.verdict
    assert float(found.table["r_hat"].max()) < 1.05


def test_draws_on_disk_are_the_same(tmp_path: Path) -> None:
    options = {"learning_rate": 0.05, "num_steps": 20, "num_draws": 10, "num_chains": 2}
    kept, stored = sampled(**options), sampled(**options, out=tmp_path / "run.zarr")
    state = torch.get_rng_state()
    one, other = (ps.diagnose(run, num_rows=3) for run in (kept, stored))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.table.identical(other.table) and one.temperatures.equals(other.temperatures)


def test_sparse_draws_have_no_configurational_temperature(tmp_path: Path) -> None:
    net = ps.SparseNet([P, 3, 1])

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 40, learning_rate=0.004)
    run = ps.anneal(model, (X, Y), schedule, None, 20, 2, progress=False, out=tmp_path / "run.zarr", sparse_draws=True)
    found = ps.diagnose(run, num_rows=2)
    assert found.temperatures["configurational"].isnull().all() and found.temperatures["kinetic"].notnull().all()
    assert found.table["mean"].notnull().all() and found.verdict.startswith("Not mixing")
    assert list(ps.matched(run).trace.children) == ["sample_stats"]


def test_quantities_are_those_of_the_draws(network_run: ps.Run) -> None:
    run = network_run
    assert isinstance(run.draws, Tensor)
    found = ps.diagnose(run, X[:4], num_rows=2, num_projections=3).table
    net = run.spec.readers[0]
    means, likelihoods, counts = [], [], []
    for draw in run.draws.reshape(40, -1):
        values = {str(site.parameter): part for site, part in run.spec.layout.parts(draw)}
        outputs = torch.func.functional_call(net.module, values, (X,)).squeeze(-1)
        means.append(outputs[[0, 3]])
        likelihoods.append(torch.distributions.Normal(outputs, 1.0).log_prob(Y).sum())
        counts.append(
            sum((run.priors[f"{name}"].inclusion_probability(part) > 0.5).sum() for name, part in values.items())
        )
    right = {
        "mean[0]": torch.stack(means)[:, 0],
        "mean[3]": torch.stack(means)[:, 1],
        "log_likelihood": torch.stack(likelihoods),
        "num_included": torch.stack([torch.as_tensor(count).float() for count in counts]),
    }
    for name, values in right.items():
        assert np.isclose(found["mean"].sel(quantity=name), values.mean(), rtol=1e-4), name
        assert np.isclose(found["sd"].sel(quantity=name), values.std(), rtol=1e-3), name
    assert np.allclose(found["mean"].sel(quantity=[f"input[{name}]" for name in "abcde"]), ps.mipp(run)["input"])


def test_projections_are_of_matched_units(network_run: ps.Run) -> None:
    """A second chain that is the first one with its units in another order and their signs flipped is the same one."""
    assert isinstance(network_run.draws, Tensor)
    first = network_run.draws[0]
    values = {site.name: part.clone() for site, part in network_run.spec.layout.parts(first)}
    order = [2, 0, 1]
    values["layer1.weight"], values["layer1.bias"] = (
        -values["layer1.weight"][:, order],
        -values["layer1.bias"][:, order],
    )
    values["layer2.weight"] = -values["layer2.weight"][:, :, order]
    moved = torch.cat([part.reshape(len(first), -1) for part in values.values()], 1)
    found = {}
    for name, other in (("same", first), ("moved", moved)):
        draws = torch.stack([first, other])
        found[name] = ps.diagnose(dataclasses.replace(network_run, draws=draws, positions=draws[:, -1].clone()))
    assert np.allclose(found["moved"].table["mean"], found["same"].table["mean"], atol=1e-4)
    assert np.allclose(found["moved"].table["sd"], found["same"].table["sd"], atol=1e-4)


@pytest.mark.parametrize("number", [1, 3, 8])
def test_projections_are_random_signs_in_orthogonal_rows(number: int) -> None:
    project = diagnostics._Projection(64, number, seed=1)
    rows = torch.stack([project(unit) for unit in torch.eye(64)], 1)
    assert rows.shape == (number, 64)
    assert torch.allclose(rows.abs(), torch.full_like(rows, 1 / 8))
    assert torch.allclose(rows @ rows.T, torch.eye(number).double())
    assert abs(float(rows.sign().sum(1).abs().max())) < 5 * 8  # five standard deviations
    again, other = diagnostics._Projection(64, number, seed=1), diagnostics._Projection(64, number, seed=2)
    position = torch.randn(64)
    assert torch.equal(project(position), again(position)) and not torch.equal(project(position), other(position))
    assert diagnostics._Projection(5, number, 0)(torch.zeros(5)).shape == (number,)


def test_large_data_are_looked_at_in_batches(run: ps.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(run.draws, Tensor)
    batches = dataclasses.replace(run, spec=dataclasses.replace(run.spec, batch_size=20))
    whole = ps.diagnose(batches, num_rows=1, num_projections=0)
    monkeypatch.setattr(diagnostics, "WORK", 50 * P)
    found = ps.diagnose(batches, num_rows=1, num_projections=0)
    assert whole.table.attrs["num_rows"] == 200 and found.table.attrs["num_rows"] == 50
    rows = torch.linspace(0, N - 1, 50, dtype=torch.float64).round().long()
    means = run.draws.reshape(-1, P) @ X[rows].T
    likelihood = 4 * torch.distributions.Normal(means, 1.0).log_prob(Y[rows]).sum(1)
    assert np.isclose(found.table["mean"].sel(quantity="log_likelihood"), likelihood.mean(), rtol=1e-5)
    assert np.isclose(found.table["sd"].sel(quantity="log_likelihood"), likelihood.std(), rtol=1e-3)
    assert not whole.temperatures.equals(found.temperatures)
    check_temperatures(found, 0.05)


def test_data_of_a_loader_are_looked_at_in_its_batches() -> None:
    loader = DataLoader(TensorDataset(X, Y), 50, shuffle=True)
    schedule = ps.PriorAnnealing(0, 0, 0, 0, 8, learning_rate=1e-3)
    found = ps.diagnose(ps.anneal(linear, loader, schedule, num_draws=8, progress=False), num_rows=2)
    assert found.table.attrs["num_rows"] == 50 and found.temperatures["configurational"].notnull().all()
    assert list(found.table["quantity"].values[:2]) == ["mean[0]", "mean[49]"]


@pytest.mark.parametrize(
    ("law", "names"),
    [
        (lambda mean: dist.StudentT(4.0, mean, 1.0), ["mean[0]", "mean[1]"]),
        (lambda mean: dist.Bernoulli(logits=mean), ["mean[0]", "mean[1]"]),
        (
            lambda mean: dist.Categorical(logits=torch.stack([mean, -mean, 0 * mean], -1)),
            [f"mean[{row}, {label}]" for row in (0, 1) for label in (0, 1, 2)],
        ),
    ],
)
def test_any_law_has_means(law: Any, names: list[str]) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        slope = pyro.sample("slope", dist.HalfNormal(1.0))
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", law(slope * x[:, 0]), obs=y)

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 8, learning_rate=0.01)
    run = ps.anneal(model, (X, (Y > 0).float()), schedule, None, 8, progress=False)
    found = ps.diagnose(run, X[:2], num_projections=1).table["quantity"].values
    assert list(found) == [*names, "log_likelihood", "projection[0]"]


@pytest.mark.parametrize("middle", [nn.PReLU, lambda: nn.BatchNorm1d(3)])
def test_any_network_on_a_matrix_is_looked_at(middle: Callable[[], nn.Module]) -> None:
    """One that is no chain of linear layers is probed for the inputs it reads, draw by draw."""
    net = ps.sparsify(nn.Sequential(nn.Linear(P, 3), middle(), nn.Linear(3, 1)), ps.SpikeSlab(0.5, 0.2, 1.0))
    run = ps.anneal(
        *(ps.normal_regression(net, N), (X, Y), ps.PriorAnnealing(0, 0, 0, 0, 20, learning_rate=0.02), None, 8),
        progress=False,
    )
    table = ps.diagnose(run, num_rows=1, num_projections=0).table["mean"]
    thresholds, reads = run.spec.layout.thresholds(run.positions[0]), []
    for draw in run.draws[0]:
        mask = {site.name: part for site, part in run.spec.layout.parts(draw.abs() > thresholds)}
        # A PReLU lets what is positive through without its weight, a BatchNorm nothing.
        alive = mask["2.weight"][0] & (mask["1.weight"] if "1.bias" in mask else True)
        reads.append((mask["0.weight"] & alive[:, None]).any(0).double())
    shares = torch.stack(reads).mean(0).tolist()
    assert 0 < sum(shares) < P
    assert [float(table.sel(quantity=f"input[{i}]")) for i in range(P)] == pytest.approx(shares)


def test_the_configurational_temperature_is_of_parameters_alone() -> None:
    """Against the gradient of the joint density by Pyro; buffers of a BatchNorm have none and do not count."""
    law = ps.SpikeSlab(0.5, 0.2, 1.0)
    net = ps.sparsify(nn.Sequential(nn.Linear(P, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)), law)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 40, learning_rate=0.02)
    run = ps.anneal(model, (X, Y), schedule, None, 8, progress=False)
    layout, products = run.spec.layout, []
    assert layout.num_buffers == 6
    halves = run.draws[0].unflatten(0, (2, 4)).mean(1)
    for number, draw in enumerate(run.draws[0]):
        parts = {site: part for site, part in layout.parts(draw) if site.kind != "buffer"}
        values = {site.name: part.clone().requires_grad_() for site, part in parts.items()}
        trace = pyro.poutine.trace(pyro.poutine.condition(model, data=values)).get_trace(X, Y)
        gradients = torch.autograd.grad(-trace.log_prob_sum(), list(values.values()))
        centre = {site.name: part for site, part in layout.parts(halves[1 - number // 4])}
        terms = [((values[name] - centre[name]) * g).flatten() for name, g in zip(values, gradients, strict=True)]
        products.append(float(torch.cat(terms).detach().double().mean()))
    found = ps.diagnose(run, num_rows=1, num_projections=0).temperatures["configurational"]
    assert float(found[0]) == pytest.approx(np.mean(products), rel=1e-3)


def test_a_cooled_run_is_no_posterior() -> None:
    run = ps.anneal(linear, (X, Y), ps.PriorAnnealing(0, 0, 0, 10), None, 10, progress=False)
    with pytest.raises(
        ValueError, match="must end with a sampling phase to be diagnosed, got one that ends with 'cool'"
    ):
        ps.diagnose(run)


def test_bad_arguments_are_refused(run: ps.Run) -> None:
    for argument, number in (("num_rows", 0), ("num_projections", -1)):
        with pytest.raises(ValueError, match=rf"{argument} must be a whole number >= \d, got {number}"):
            ps.diagnose(run, **{argument: number})
    with pytest.raises(ValueError, match=r"x_new must have shape \(rows, 5\)"):
        ps.diagnose(run, X[:, :2])
    few = dataclasses.replace(run, draws=run.draws[:, :7])  # type: ignore[index]
    with pytest.raises(ValueError, match="run must hold at least 8 draws a chain, got 7"):
        ps.diagnose(few)
    cold = dataclasses.replace(run, schedule=dataclasses.replace(run.schedule, sample_temperature=0.0))
    with pytest.raises(ValueError, match=r"sample_temperature must be > 0 .*got 0\.0"):
        ps.diagnose(cold)


def autoregressive(rho: float, shape: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """(chain, draw, quantity) of variance 1."""
    noise = np.random.default_rng(0).normal(size=shape)
    values = noise.copy()
    for draw in range(1, shape[1]):
        values[:, draw] = rho * values[:, draw - 1] + np.sqrt(1 - rho**2) * noise[:, draw]
    return values


@pytest.mark.parametrize("rho", [0.0, 0.6, -0.3])
def test_effective_sample_size_of_an_autoregression(rho: float) -> None:
    """It is the number of draws times (1 - rho) / (1 + rho); one estimate is known to some 6 %, their mean to 2 %."""
    values = autoregressive(rho, (4, 1_000, 10))
    found = diagnostics.convergence(values)
    right = (1 - rho) / (1 + rho)
    assert abs(found["ess_bulk"].mean() / 4_000 / right - 1) < 0.1
    assert found["r_hat"].max() < 1.02
    errors = diagnostics.standard_errors(values.reshape(4_000, 10).T.reshape(40, 1_000))
    assert abs((errors**2).mean() * 1_000 * right - 1) < 0.15


def test_constants_have_no_r_hat_and_chains_that_differ_an_infinite_one() -> None:
    values = np.random.default_rng(0).normal(size=(2, 100, 3))
    values[:, :, 0], values[:, :, 1] = 3.0, [[0.0], [1.0]]
    found = diagnostics.convergence(values)
    assert np.isnan([found[name][0] for name in found]).all()
    assert found["r_hat"][1] == np.inf and found["ess_bulk"][1] < 10
    assert found["r_hat"][2] < 1.1


def heat(kinetic: float = 1.0, configurational: float = 1.0, minibatch: float = 0.0, chains: int = 4) -> xr.Dataset:
    columns = {"kinetic": kinetic, "configurational": configurational, "nominal": 1.0, "minibatch": minibatch}
    columns |= {"kinetic_se": 0.02, "configurational_se": 0.02}
    return xr.Dataset({name: ("chain", np.full(chains, value)) for name, value in columns.items()})


def verdict(values: np.ndarray[Any, Any], temperatures: xr.Dataset | None = None) -> str:
    table = diagnostics._table([f"q[{i}]" for i in range(values.shape[2])], values)
    return diagnostics.verdict(
        table, heat(chains=len(values)) if temperatures is None else temperatures, values.shape[1]
    )


@pytest.mark.parametrize("draws", [150, 1_000])
def test_independent_draws_are_fine(draws: int) -> None:
    """R-hat of 60 quantities of 150 draws exceeds 1.01 by chance, but not the limit for so few: an alarm in 1,000."""
    assert verdict(np.random.default_rng(1).normal(size=(4, draws, 60))).startswith("Fine")


def test_the_verdict_names_the_trouble() -> None:
    fine = np.random.default_rng(0).normal(size=(4, 400, 5))
    drifting = fine.copy()
    drifting[:, :, 2] += np.linspace(0, 3, 400)
    apart = np.random.default_rng(0).normal(size=(4, 4_000, 5))
    apart[0, :, 3] += 0.5
    assert verdict(drifting).startswith("Not mixing: the effective sample size of q[2] is ")
    assert "q[3]" in verdict(apart) and verdict(apart).startswith("Not mixing")
    assert verdict(fine[:, :50]).startswith("Too few draws to tell") and "raise num_draws" in verdict(fine[:, :50])
    assert verdict(np.zeros((2, 10, 3))).startswith("Nothing moves")
    assert verdict(fine[:1]).startswith("One chain only")


@pytest.mark.parametrize(
    ("temperatures", "start"),
    [
        (heat(1.05, 1.05), "Fine"),  # significant, but 2 % of a standard deviation
        (heat(1.3, 1.3), "Biased: the temperature of the draws is 1.3 in place of 1; lower learning_rate."),
        (
            heat(2.0, 2.0, 1.0),
            "Biased: the temperature of the draws is 2 in place of 1, of which minibatch noise adds at most 1;",
        ),
        (heat(2.0, 1.05, 1.0), "Fine"),  # batches that do not repeat a row heat momenta alone
        (heat(2.0, 1.05, float("nan")), "Fine"),
        (heat(1.3, float("nan")), "Biased: the temperature of the draws is 1.3"),
        (heat(1.0, 1.3), "Not in equilibrium: the configurational temperature is 1.3 and the kinetic one 1,"),
        (heat(1.0, 0.7), "Not in equilibrium: the configurational temperature is 0.7 and the kinetic one 1,"),
        (heat(1.0, 0.7, float("nan")), "Not in equilibrium"),
    ],
)
def test_the_verdict_on_temperatures(temperatures: xr.Dataset, start: str) -> None:
    assert verdict(np.random.default_rng(0).normal(size=(4, 400, 5)), temperatures).startswith(start)


def test_a_temperature_that_cannot_be_told_is_not_called_fine() -> None:
    temperatures = heat(1.0, 1.3)
    temperatures["configurational_se"] = 10 * temperatures["configurational_se"]
    assert verdict(np.random.default_rng(0).normal(size=(4, 400, 5)), temperatures).startswith(
        "Too little to tell the temperature: it is 1.3 with a standard error of 0.1"
    )


def test_means_are_of_the_rows_that_they_are_named_by() -> None:
    """A model that looks its rows up by the numbers of its plate."""
    group = torch.arange(60) // 20
    y = torch.tensor([-3.0, 0.0, 3.0])[group] + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(0))

    def model(y: Tensor | None = None) -> Any:
        a = pyro.sample("a", dist.Normal(torch.zeros(3), 10.0).to_event(1))
        with pyro.plate("data", 60) as rows:
            return pyro.sample("y", dist.Normal(a[group[rows]], 0.1), obs=y)

    schedule = ps.PriorAnnealing(300, 0, 0, 0, 100, learning_rate=1e-3)
    found = ps.diagnose(ps.anneal(model, (y,), schedule, num_draws=10, progress=False), num_rows=4, num_projections=0)
    means = found.table["mean"].sel(quantity=["mean[0]", "mean[20]", "mean[39]", "mean[59]"])
    assert np.allclose(means, [-3, 0, 0, 3], atol=0.3)
