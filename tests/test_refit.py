"""A refit is the maximum of the likelihood over the kept weights: least squares or ridge where the network is linear."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_sparse as ps

N = 60
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR)
Y = 0.5 + X[:, 0] - 2 * X[:, 2] + 0.3 * torch.randn(N, generator=GENERATOR)
LAW = ps.SpikeSlab(0.1, 0.1, 2.0, 0.5)
BRIEF = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-6)
Model = Callable[..., Any]

# Columns of the design that a kept mask of a linear network (weights, bias) leaves, in double precision.
DESIGN = torch.cat([X, torch.ones(N, 1)], 1).double()
KEPT = torch.tensor([True, False, True, False, True])


def linear(scale: Callable[[], Tensor | float] = lambda: 1.0, num_data: int = N) -> Model:
    net = ps.SparseLinear(4, 1, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        sigma = scale()
        mean = net(x).squeeze(-1)
        with pyro.plate("data", num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def ended_at(model: Model, position: list[float], data: tuple[Tensor, ...] = (X, Y), **options: Any) -> ps.Run:
    run = ps.anneal(model, data, BRIEF, num_draws=1, progress=False, **options)
    return dataclasses.replace(run, positions=torch.tensor([position]))


def refitted(model: Model, position: list[float], **options: Any) -> ps.Fit:
    run = ended_at(model, position)
    return ps.refit(run, ps.select(run), **options)


START = [0.7, 0.0, -0.9, 0.0, 0.8]


def coefficients(fit: ps.Fit) -> Tensor:
    return torch.cat([fit.values["weight"][0], fit.values["bias"]])


@pytest.mark.parametrize("keep_slab", [False, True])
@pytest.mark.parametrize("sigma", [1.0, 0.25])
def test_a_linear_network_is_fitted_by_least_squares_or_ridge(keep_slab: bool, sigma: float) -> None:
    fit = refitted(linear(lambda: sigma), START, keep_slab=keep_slab, tolerance=1e-6)
    design = DESIGN[:, KEPT]
    gram = design.T @ design + (sigma**2 / 2.0**2 if keep_slab else 0.0) * torch.eye(3)
    right = torch.zeros(5).double()
    right[KEPT] = torch.linalg.solve(gram, design.T @ Y.double())
    assert torch.allclose(coefficients(fit), right, atol=1e-7)
    assert (coefficients(fit)[~KEPT] == 0).all() and (coefficients(fit)[KEPT] != 0).all()
    assert fit.converged and fit.distance <= 1e-6 and fit.penalised is keep_slab
    residuals = Y.double() - DESIGN @ right
    likelihood = -dist.Normal(0.0, sigma).log_prob(residuals).mean()
    assert fit.loss == pytest.approx(float(likelihood), rel=1e-6)
    assert "converged" in str(fit) and "not converged" not in str(fit)
    factor = torch.from_numpy(fit.covariance().values)
    assert torch.allclose(factor, fit.noise_variance * torch.linalg.inv(gram), rtol=1e-6)


def test_a_slab_narrower_than_one_counts_as_one() -> None:
    net = ps.SparseLinear(4, 1, bias=False, prior=ps.SpikeSlab(0.1, 0.01, 0.2))

    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("y", dist.Normal(net(x).squeeze(-1), 1.0).to_event(1), obs=y)

    fit = refitted(model, [1.0] * 4, tolerance=1e-6)
    design = DESIGN[:, :4]
    right = torch.linalg.solve(design.T @ design + torch.eye(4), design.T @ Y.double())
    assert torch.allclose(fit.values["weight"][0], right, atol=1e-7)


def test_covariance_is_labelled_by_the_kept_weights() -> None:
    fit = refitted(linear(), START, keep_slab=False)
    labels = ["weight[0, 0]", "weight[0, 2]", "bias[0]"]
    covariance = fit.covariance()
    assert covariance["weight"].values.tolist() == labels and covariance["weight_"].values.tolist() == labels
    inverse = torch.linalg.inv(DESIGN[:, KEPT].T @ DESIGN[:, KEPT])
    right = fit.noise_variance * inverse[0, 2]
    assert float(covariance.sel(weight="weight[0, 0]", weight_="bias[0]")) == pytest.approx(float(right))


def test_the_models_own_network_and_the_run_are_left_alone() -> None:
    net = ps.SparseNet([4, 3, 1], prior=LAW)
    before = [p.detach().clone() for p in net.parameters()]
    model = ps.normal_regression(net, N)
    run = ps.anneal(model, (X, Y), ps.PriorAnnealing(20, 0, 0, 1), num_draws=1, progress=False)
    positions, structure = run.positions.clone(), ps.select(run)
    values = {name: value.clone() for name, value in structure.values.items()}
    fit = ps.refit(run, structure)
    module = fit.module()
    nn.init.zeros_(module.layer1.weight)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters()) and torch.equal(run.positions, positions)
    assert all(torch.equal(value, values[name]) for name, value in structure.values.items())
    assert not torch.equal(fit.module().layer1.weight, module.layer1.weight)


def test_module_and_compact_compute_the_fitted_mean() -> None:
    net = ps.SparseNet([4, 3, 1], prior=LAW)
    run = ended_at(ps.normal_regression(net, N), [-1.0, *[0.8, 0, -0.7, 0] * 2, *[0] * 4, 0.9, 0, 0, 1.1, -1, 0, 0.7])
    fit = ps.refit(run, ps.select(run))
    mean = torch.from_numpy(ps.predict(fit, X)["mean"].values)
    columns = fit.structure.input_indices
    assert 0 < len(columns) < 4
    assert torch.allclose(fit.module()(X)[:, 0].double(), mean, atol=1e-5)
    assert torch.allclose(fit.compact()(X[:, columns])[:, 0].double(), mean, atol=1e-5)
    for name, mask in fit.structure.masks.items():
        assert (fit.values[name][~mask] == 0).all()
    assert not fit.module().training and type(fit.module()) is nn.Sequential


def test_an_intercept_keeps_its_own_prior() -> None:
    net = ps.SparseLinear(4, 1, bias=False, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        intercept = pyro.sample("intercept", dist.Normal(0.0, 0.1))
        mean = net(x).squeeze(-1) + intercept
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    fit = refitted(model, [0.0, 1.0, 0.0, 1.0, 0.0], keep_slab=False, tolerance=1e-6)
    design = DESIGN[:, [4, 0, 2]]
    gram = design.T @ design + torch.tensor([100.0, 0, 0]).double().diag()
    right = torch.linalg.solve(gram, design.T @ Y.double())
    got = [float(fit.values["intercept"]), *fit.values["weight"][0, [0, 2]].tolist()]
    assert got == pytest.approx(right.tolist(), abs=1e-6)


@pytest.mark.parametrize("with_prior", [False, True])
def test_the_noise_scale_is_that_of_highest_likelihood_times_its_prior(with_prior: bool) -> None:
    def scale() -> Tensor:
        if with_prior:
            return pyro.sample("sigma", dist.HalfNormal(1.0))
        return pyro.param("sigma", torch.tensor(1.0), constraint=constraints.positive)

    run = ps.anneal(linear(scale), (X, Y), BRIEF, num_draws=1, progress=False)
    values = {"weight": torch.tensor([START[:4]]), "bias": torch.tensor(START[4:]), "sigma": torch.tensor(1.0)}
    run = dataclasses.replace(run, positions=run.spec.layout.unconstrained(values)[None])
    fit = ps.refit(run, ps.select(run), keep_slab=False, tolerance=1e-6)
    residuals = Y.double() - DESIGN[:, KEPT] @ torch.linalg.lstsq(DESIGN[:, KEPT], Y.double()[:, None]).solution[:, 0]
    rss = float(residuals.square().sum())
    # log p = -N log s - rss / 2 s² (- s² / 2), whose maximum solves s⁴ + N s² = rss with the prior
    variance = (-N + (N**2 + 4 * rss) ** 0.5) / 2 if with_prior else rss / N
    assert float(fit.values["sigma"]) == pytest.approx(variance**0.5, rel=1e-5)
    assert fit.converged and not fit.matters[0]
    assert fit.covariance()["weight"].values.tolist() == ["weight[0, 0]", "weight[0, 2]", "bias[0]"]


def test_max_iterations_is_honoured_and_said() -> None:
    net = ps.SparseNet([4, 3, 1], prior=LAW)
    # Unequal weights: from equal ones the refit comes to a saddle, which rounding errors may leave or not.
    position = 0.8 * torch.randn(20, generator=torch.Generator().manual_seed(1))
    run = ended_at(ps.normal_regression(net, N), position.tolist())
    structure = ps.select(run)
    for iterations in (0, 1, 3, 30):
        fit = ps.refit(run, structure, max_iterations=iterations, tolerance=1e-12)
        assert fit.num_iterations == iterations and not fit.converged
        assert "not converged" in str(fit)
    whole = ps.refit(run, structure)
    assert whole.converged and whole.distance <= 0.1 and whole.num_iterations > 3
    longer = ps.refit(run, structure, tolerance=1e-6)
    assert longer.loss == pytest.approx(whole.loss, abs=0.1 / N)  # a tenth of a nat in all
    gradient = torch.autograd.functional.jacobian(lambda z: penalised_loss(longer, z), longer.free)
    assert gradient.abs().max() < 1e-3  # of the sum over rows; 1e-6 standard errors of the stiffest weight are 1e-4


def penalised_loss(fit: ps.Fit, free: Tensor) -> Tensor:
    """Minus the log-likelihood, the slab's normal and the prior of the noise, by hand."""
    values = fit.values_at(free)
    sigma = values["sigma_above_floor"]
    x, y = fit.data
    hidden = torch.tanh(x @ values["layer1.weight"].T + values["layer1.bias"])
    mean = (hidden @ values["layer2.weight"].T + values["layer2.bias"])[:, 0]
    likelihood = dist.Normal(mean, 0.1 + sigma).log_prob(y).sum() - sigma**2 / 2
    slab = sum(value.square().sum() for name, value in values.items() if "layer" in name) / 2 / 2.0**2
    return -(likelihood - slab)


def subsampling(size: int) -> Model:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        weight = pyro.sample("weight", LAW.expand([4]).to_event(1))
        with pyro.plate("data", N, subsample_size=size) as i:
            pyro.sample("y", dist.Normal(x[i] @ weight, 1.0), obs=None if y is None else y[i])

    return model


def test_a_model_that_subsamples_is_fitted_to_every_row() -> None:
    fit = refitted(subsampling(20), [1.0, 0.0, 1.0, 0.0], keep_slab=False, tolerance=1e-6)
    design = DESIGN[:, [0, 2]]
    right = torch.linalg.lstsq(design, Y.double()[:, None]).solution[:, 0]
    assert torch.allclose(fit.values["weight"][[0, 2]], right, atol=1e-7)
    residuals = Y.double() - design @ right
    assert fit.loss == pytest.approx(float(-dist.Normal(0.0, 1.0).log_prob(residuals).mean()))
    assert fit.noise_variance == pytest.approx(float(residuals.square().sum()) / (N - 2))


def test_a_subsample_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="subsample_size must divide its 60 rows to be refitted, got 25"):
        refitted(subsampling(25), [1.0, 0.0, 1.0, 0.0])


def two_responses(x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> None:
    weight = pyro.sample("weight", LAW.expand([4]).to_event(1))
    other = pyro.sample("other", LAW.expand([4]).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 1.0), obs=y)
        pyro.sample("z", dist.Normal(x @ other, 1.0), obs=z)


def test_of_several_responses_one_must_be_named() -> None:
    run = ended_at(two_responses, [1.0] * 8, (X, Y, X[:, 1] + 0.1 * Y))
    structure = ps.select(run)
    with pytest.raises(ValueError, match=r"site must name one of the model's responses \['y', 'z'\], got None"):
        ps.refit(run, structure)
    with pytest.raises(ValueError, match=r"site must be one of the model's responses \['y', 'z'\], got 'w'"):
        ps.refit(run, structure, site="w")
    for site, response in (("y", Y), ("z", X[:, 1] + 0.1 * Y)):
        fit = ps.refit(run, structure, site=site, keep_slab=False, tolerance=1e-6)
        right = DESIGN[:, :4] @ torch.linalg.lstsq(DESIGN[:, :4], response.double()[:, None]).solution[:, 0]
        assert np.allclose(ps.predict(fit, X)["mean"], right, atol=1e-4)
        labels = fit.covariance()["weight"].values
        assert len(labels) == 4 and all(label.startswith("weight" if site == "y" else "other") for label in labels)


def test_of_several_networks_one_must_be_named() -> None:
    first, second = (ps.SparseLinear(4, 1, bias=False, prior=LAW, name=name) for name in ("first", "second"))

    def model(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("y", dist.Normal((first(x) + second(x.square())).squeeze(-1), 1.0).to_event(1), obs=y)

    fit = refitted(model, [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    for name in (None, "third"):
        with pytest.raises(ValueError, match=r"name must be one of the model's networks.*'first.*'second"):
            fit.module(name)
    for name, column in (("first", 1), ("second", 0)):
        weight = fit.module(name).weight
        assert weight[0].nonzero().tolist() == [[column]]
        assert torch.equal(weight.double(), fit.values[f"{name}.weight"].float().double())
    assert fit.structure.input_indices == [0, 1]
    assert fit.compact("second")[0].in_features == 1


def test_a_network_without_a_name_beside_others_is_the_empty_name() -> None:
    first, second = ps.SparseLinear(4, 1, prior=LAW), ps.SparseLinear(4, 1, prior=LAW, name="second")

    def model(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("y", dist.Normal((first(x) + second(x.square())).squeeze(-1), 1.0).to_event(1), obs=y)

    fit = refitted(model, [1.0] * 10)
    assert torch.equal(fit.module("").bias.double(), fit.values["bias"].float().double())
    with pytest.raises(ValueError, match=r"one of the model's networks \['', 'second'\], got None"):
        fit.module()


def test_what_is_refitted_is_a_run_and_its_structure(tmp_path: Path) -> None:
    run = ended_at(linear(), START)
    with pytest.raises(TypeError, match="must be a Run and a Structure of it, got a Structure and a Run"):
        ps.refit(ps.select(run), run)  # type: ignore[arg-type]
    other = ps.anneal(of(small(nn.Tanh())), (X, Y), BRIEF, num_draws=1, progress=False)
    with pytest.raises(ValueError, match="structure must be one of the run, with masks of"):
        ps.refit(run, ps.select(other, 1e-9))
    with pytest.raises(ValueError, match="tolerance must be > 0, got -1"):
        ps.refit(run, ps.select(run), tolerance=-1)


def test_a_fit_of_a_law_without_intervals_leaves_no_folder(tmp_path: Path) -> None:
    net = ps.SparseLinear(4, 1, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        with pyro.plate("data", N):
            pyro.sample("y", dist.StudentT(4.0, net(x).squeeze(-1), 1.0), obs=y)

    with pytest.raises(ValueError):
        refitted(model, START).save(tmp_path / "fit")
    assert not (tmp_path / "fit").exists()


def test_a_model_without_a_network_has_no_module() -> None:
    fit = refitted(subsampling(20), [1.0, 0.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="network"):
        fit.module()


@pytest.mark.parametrize("kind", ["network", "subsampling", "two"])
def test_a_saved_fit_predicts_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    data: tuple[Tensor, ...] = (X, Y)
    if kind == "network":
        model: Model = ps.normal_regression(ps.SparseNet([4, 3, 1], prior=LAW), N)
        position = [0.5] * 20
    elif kind == "subsampling":
        model, position = subsampling(20), [1.0, 0.0, 1.0, 0.0]
    else:
        model, position, data = two_responses, [1.0] * 8, (X, Y, X[:, 1])
    run = dataclasses.replace(ended_at(model, position, data), input_names=("a", "b", "c", "d"))
    fit = ps.refit(run, ps.select(run), site="z" if kind == "two" else None)
    fit.save(tmp_path / "fit")
    fit.save(tmp_path / "fit")  # again, into the folder that is there
    if kind == "network":
        model = ps.normal_regression(ps.SparseNet([4, 3, 1], prior=LAW), N)  # of other start values
    for rows in (N, 5, 1):
        again = ps.Fit.load(tmp_path / "fit", model, tuple(d[:rows] for d in data))
        new = torch.randn(70, 4)
        assert ps.predict(again, new).identical(ps.predict(fit, new))
        assert str(again) == str(fit) and again.covariance().identical(fit.covariance())
        assert again.structure.selected_inputs == fit.structure.selected_inputs
        assert again.noise_variance == fit.noise_variance
    files = sorted(path.name for path in (tmp_path / "fit").iterdir())
    assert files == ["fit.json", "fit.npz"]
    with np.load(tmp_path / "fit" / "fit.npz", allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "bfiu" for name in file.files)
    json.loads((tmp_path / "fit" / "fit.json").read_text())


def test_loading_with_another_model_says_so(tmp_path: Path) -> None:
    fit = refitted(linear(), START)
    fit.save(tmp_path)
    others: list[Model] = [subsampling(20), two_responses, ps.normal_regression(ps.SparseNet([4, 3, 1], prior=LAW), N)]
    for other in others:
        with pytest.raises(ValueError, match="model must have the sites of the saved fit"):
            ps.Fit.load(tmp_path, other, (X, Y, Y) if other is two_responses else (X, Y))


def test_a_network_with_nothing_kept_is_refitted_to_its_noise() -> None:
    net = ps.SparseNet([4, 3, 1], prior=LAW)
    run = ended_at(ps.normal_regression(net, N), [0.0] * 20)
    fit = ps.refit(run, ps.select(run))
    assert fit.structure.num_kept == 0 and fit.converged
    assert fit.noise_variance == pytest.approx(float(Y.double().square().mean()))
    table = ps.predict(fit, X)
    assert np.allclose(table["mean"], 0) and np.allclose(table["mean_upper"], 0) and (table["upper"] > 0).all()
    assert torch.equal(fit.compact()(X[:, :0]), torch.zeros(N, 1)) and fit.covariance().shape == (0, 0)


def test_a_weight_on_a_column_that_never_varied_is_as_uncertain_as_its_slab() -> None:
    """The rows say nothing about it: the slab's normal is all that is known, and without it a warning."""
    x = torch.cat([X[:, :3], torch.zeros(N, 1)], 1)
    net = ps.SparseLinear(4, 1, bias=False, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("y", dist.Normal(net(x).squeeze(-1), 1.0).to_event(1), obs=y)

    run = ended_at(model, [1.0, 0.0, 1.0, 1.0], (x, Y))
    new = torch.tensor([[0.0, 0, 0, 1]])
    fit = ps.refit(run, ps.select(run))
    sd = float(fit.covariance().sel(weight="weight[0, 3]", weight_="weight[0, 3]")) ** 0.5
    assert sd == pytest.approx(2.0 * fit.noise_variance**0.5)  # of the slab, per unit of the noise that was estimated
    table = ps.predict(fit, new)
    assert float(table["mean_upper"][0] - table["mean"][0]) == pytest.approx(sd * fit.information.quantile(0.95))
    plain = ps.refit(run, ps.select(run), keep_slab=False)
    with pytest.warns(UserWarning, match="at 1 of 1 rows the mean depends on directions"):
        ps.predict(plain, new)


def in_two_places(net: ps.SparseModule, second: float) -> Model:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        mean = (net(x) + (second * net(input=x.flip(-1)) if second else 0.0)).squeeze(-1) + shift
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


@pytest.mark.parametrize("flat_biases", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 1.0])
def test_the_small_network_computes_what_the_whole_one_does(kept: float, flat_biases: bool) -> None:
    """Mean and derivatives, with dead units, unread units, units that are constants, and a network called twice."""
    plain = ps.SparseNet([4, 6, 5, 1], activation="relu").module

    def is_sparse(name: str, parameter: Tensor) -> bool:
        return not (flat_biases and "bias" in name)

    net, second = ps.sparsify(plain, LAW, where=is_sparse), 0.0 if flat_biases else 0.5
    run = ps.anneal(in_two_places(net, second), (X, Y), BRIEF, num_draws=1, progress=False)
    generator = torch.Generator().manual_seed(round(10 * kept))
    position = torch.randn(run.positions.shape, generator=generator)
    structure = ps.select(dataclasses.replace(run, positions=position))
    masks = {name: torch.rand(mask.shape, generator=generator) < kept for name, mask in structure.masks.items()}
    values = {
        name: value * masks.get(name, torch.tensor(1.0))
        for name, value in run.spec.layout.constrained(position[0]).items()
    }
    structure = dataclasses.replace(structure, masks=masks, values=values)
    fit = ps.refit(run, structure, max_iterations=0)
    inputs = (X.double(),)

    def means(law: Any) -> Tensor:
        return law.loc[:, None]

    whole = fit.response.evaluate(means, fit.values_at(fit.free), inputs)
    assert torch.allclose(fit.evaluate(means, inputs), whole, rtol=1e-12, atol=1e-12)
    derivatives = fit.response.jacobian(means, fit.values_at, fit.free, inputs)[..., fit.matters]
    assert torch.allclose(fit.jacobian(means, inputs), derivatives, rtol=1e-12, atol=1e-12)
    by_hand = fit.module().double()
    shift = fit.values["shift"]
    assert torch.allclose(whole, by_hand(X.double()) + second * by_hand(X.double().flip(-1)) + shift, atol=1e-6)
    small = fit._small[1].spec.layout.num_coordinates
    assert small == sum(p.numel() for p in fit.compact().parameters()) + 1  # and the shift
    assert "forward" not in vars(net) and torch.equal(net(X), net.module(X))


def test_a_network_that_is_no_chain_stays_whole() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + torch.tanh(self.first(x)))

    net = ps.sparsify(Skip(), LAW)
    run = ended_at(ps.normal_regression(net, N), [0.0, *([0.5, 0, 0, 0] * 4), *[0] * 4, 1.0, 0, 0, 0, 0.5])
    fit = ps.refit(run, ps.select(run))
    assert fit.converged and fit._small[1].spec.layout.num_coordinates == fit.layout.num_coordinates
    mean = torch.from_numpy(ps.predict(fit, X)["mean"].values)
    assert torch.allclose(fit.module()(X)[:, 0].double(), mean, atol=1e-5)


def of(module: nn.Module) -> Model:
    net = ps.sparsify(module, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model


def small(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 1))


def test_a_fit_is_not_loaded_by_a_model_that_computes_something_else(tmp_path: Path) -> None:
    run = ps.anneal(of(small(nn.Tanh())), (X, Y), BRIEF, num_draws=1, progress=False)
    fit = ps.refit(run, ps.select(run, 1e-9))
    fit.save(tmp_path)
    again = ps.Fit.load(tmp_path, of(small(nn.Tanh())), (X[:1], Y[:1]))
    assert np.array_equal(ps.predict(again, X)["mean"], ps.predict(fit, X)["mean"])
    with pytest.raises(ValueError, match=r"model must be the one that was saved in .*, got one that computes"):
        ps.Fit.load(tmp_path, of(small(nn.Softplus())), (X[:1], Y[:1]))


def test_a_fit_whose_model_takes_no_row_of_ones_is_saved_all_the_same(tmp_path: Path) -> None:
    """A column that is a place in a table."""
    net, table, x = ps.SparseLinear(4, 1, prior=LAW), torch.tensor([0.5]), torch.cat([X[:, :3], torch.zeros(N, 1)], 1)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1) + table[x[:, 3].long()]
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    run = ended_at(model, START, (x, Y))
    fit = ps.refit(run, ps.select(run))
    fit.save(tmp_path)
    again = ps.Fit.load(tmp_path, model, (x[:1], Y[:1]))
    assert np.array_equal(ps.predict(again, x)["mean"], ps.predict(fit, x)["mean"])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_time, self.last = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.over_time(x[..., None])[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: small(nn.PReLU()), Recurrent], ids=["PReLU", "LSTM"])
def test_derivatives_that_cannot_be_had_of_all_rows_at_once_are_had_row_by_row(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    run = ps.anneal(of(make()), (X, Y), BRIEF, num_draws=1, progress=False)
    fit = ps.refit(run, ps.select(run, 1e-9), max_iterations=0)
    jacobian = fit.jacobian(lambda law: law.mean[:, None], fit.data)[:, 0]
    step = 1e-6 * torch.eye(len(fit.free)).to(fit.free)
    means = [
        [fit.response.evaluate(lambda law: law.mean, fit.values_at(fit.free + way * one), fit.data) for way in (1, -1)]
        for one in step
    ]
    differences = torch.stack([(up - down) / 2e-6 for up, down in means], 1)
    assert torch.allclose(jacobian, differences[:, fit.matters], atol=1e-6)


def test_where_it_ends_before_max_iterations_more_of_them_are_no_remedy() -> None:
    run = ps.anneal(of(small(nn.ReLU())), (X, Y), BRIEF, num_draws=1, progress=False)
    with pytest.warns(UserWarning, match=r"A network with kinks \(ReLU\) may have its maximum at one") as caught:
        fit = ps.refit(run, ps.select(run, 1e-9), tolerance=1e-12)
    assert fit.num_iterations < 2_000 and not any("Raise max_iterations" in str(one.message) for one in caught)


def rooted(power: str) -> Callable[..., Any]:
    net = ps.SparseNet([4, 1], prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        mean = mean.square().sqrt() if power == "kink" else mean.abs().sqrt()
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


def test_where_the_gradient_is_not_a_number_the_refit_says_so_and_no_interval_is_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ended_at(rooted("kink"), START)
    monkeypatch.setattr("pyro_sparse.inference.refit._minimise", lambda _, start, *rest: (0 * start, float("nan"), 1))
    with pytest.warns(UserWarning, match=r"the refit stopped nan standard errors .* are not to be trusted"):
        fit = ps.refit(run, ps.select(run))
    assert not fit.converged
    with pytest.raises(ValueError, match="the fitted model has no derivatives at row 0 of its data"):
        ps.predict(fit, X)


def test_a_start_without_a_gradient_is_refused() -> None:
    run = ps.anneal(rooted("root"), (X, Y), BRIEF, num_draws=1, progress=False)
    with pytest.raises(
        ValueError, match="structure must keep weights at which the model's log density and its gradient"
    ):
        ps.refit(run, ps.select(run).without_inputs().with_biases())


def test_a_table_is_asked_for_as_an_array() -> None:
    fit = refitted(linear(), START)
    with pytest.raises(TypeError, match="x_new must hold tensors or arrays, got DataFrame"):
        ps.predict(fit, pd.DataFrame(X.numpy()))


def test_a_model_that_reads_its_data_from_outside_has_no_intervals() -> None:
    def model() -> None:
        w = pyro.sample("w", LAW.expand([4]).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=Y)

    run = ps.anneal(model, (), BRIEF, num_draws=1, progress=False)
    fit = ps.refit(run, ps.select(run, 1e-9))
    with pytest.raises(ValueError, match="reads its data from outside its arguments, so no intervals are known"):
        fit.covariance()


def test_a_refit_on_other_data_is_augmented_as_the_run_was() -> None:
    calls: list[int] = []

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        calls.append(len(x))
        return x

    torch.manual_seed(0)
    model = of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)))
    run = ps.anneal(model, (X, Y), BRIEF, 20, num_draws=1, augment=augment, progress=False)
    before = len(calls)
    ps.refit(run, ps.select(run, 1e-9), data=(X, Y), schedule=ps.PriorAnnealing(3, 0, 0, 0), progress=False)
    assert len(calls) >= before + 3
