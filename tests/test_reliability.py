"""What a hostile model or file must not do: give a wrong number without a word."""

from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.tables import read_csv

N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
Y = X[:, 0] + 0.1 * torch.randn(N, generator=torch.Generator().manual_seed(2))
LAW = ps.SpikeSlab(0.3, 0.05, 1.0, 0.3)
SHORT = ps.PriorAnnealing(20, 20, 40, 20, learning_rate=1e-2)


def annealed(model: Any, data: Any = (X, Y), **options: Any) -> ps.Run:
    return ps.anneal(model, data, SHORT, num_draws=2, progress=False, **options)


def coefficients(name: str = "b") -> Tensor:
    return pyro.sample(name, LAW.expand([3]).to_event(1))


def test_a_masked_response_has_no_intervals() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        mean = x @ coefficients()
        with pyro.plate("data", N, subsample_size=len(x)), pyro.poutine.mask(mask=x[:, 1] > 0):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    run = annealed(model)
    with pytest.raises(ValueError, match="masked response at site 'y'"):
        _ = ps.refit(run, ps.select(run)).information


def test_rows_must_stand_leftmost_to_be_predicted() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        mean = torch.stack([x @ coefficients(), x[:, 0]])
        with pyro.plate("responses", 2, dim=-2), pyro.plate("data", N, subsample_size=len(x), dim=-1):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=None if y is None else y.T)

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 10, learning_rate=1e-3)
    run = ps.anneal(model, (X, torch.stack([Y, Y], 1)), schedule, num_draws=2, progress=False)
    with pytest.raises(ValueError, match="plate 'data' over the rows must be the leftmost"):
        ps.predict(run, X[:2])


def test_the_mean_of_a_row_must_be_its_own() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        mean = (x - x.mean(0)) @ coefficients()
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    run = annealed(model)
    with pytest.raises(ValueError, match="must not depend on the other rows"):
        ps.predict(ps.refit(run, ps.select(run)), X)


def test_inputs_are_credited_to_whom_they_belong() -> None:
    first, second = ps.SparseNet([3, 3], prior=LAW, name="first"), ps.SparseNet([3, 1], prior=LAW, name="second")
    for net in (first, second):
        for p in net.parameters():
            nn.init.ones_(p)
    with torch.no_grad():
        first.module.layer1.weight[:, 1:] = 0

    def stacked(x: Tensor, y: Tensor | None = None) -> None:
        mean = second(torch.tanh(first(x))).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    def of_another(x: Tensor, z: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("y", dist.Normal(second(z).squeeze(-1), 1.0).to_event(1), obs=y)

    def of_a_matrix(x: Tensor, y: Tensor | None = None) -> None:
        b = pyro.sample("b", LAW.expand([3, 3]).to_event(2))
        pyro.sample("y", dist.Normal((x @ b).sum(1), 1.0).to_event(1), obs=y)

    still = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-12, temperature=0.0)
    for model, data, right in ((stacked, (X, Y), [0]), (of_another, (X, 1 + X, Y), []), (of_a_matrix, (X, Y), [])):
        run = ps.anneal(model, data, still, num_draws=1, progress=False)
        assert ps.select(run).selected_inputs == right
    assert "inputs selected" not in str(ps.select(run))  # not known is not none


@pytest.mark.parametrize("name", ["chain", "draw", "input", "column"])
def test_names_that_a_trace_uses_are_refused_before_the_run(name: str) -> None:
    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("y", dist.Normal(x @ coefficients(name), 1.0).to_event(1), obs=y)

    with pytest.raises(ValueError, match=f"nor be chain, draw, input or column.*{name}"):
        annealed(model)


def test_a_site_whose_unconstrained_shape_differs_has_a_trace() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        factor = pyro.sample("factor", dist.LKJCholesky(3, 1.0))
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
        pyro.sample("y", dist.Normal(x @ factor @ share, 1.0).to_event(1), obs=y)

    posterior = annealed(model).trace["posterior"]
    assert posterior["factor"].shape == (1, 2, 3, 3) and posterior["share"].shape == (1, 2, 3)
    assert np.allclose(posterior["share"].sum("share_dim_0"), 1, atol=1e-5)


def test_a_frozen_network_of_single_precision_can_stand_in_a_model() -> None:
    frozen = nn.Linear(3, 3)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        mean = frozen(x).detach() @ coefficients()
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    run = annealed(model)
    assert bool(np.isfinite(ps.predict(ps.refit(run, ps.select(run)), X)["lower"]).all())


def test_batch_norm_in_evaluation_mode_is_refitted() -> None:
    net = ps.sparsify(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval(), prior=LAW)
    run = annealed(ps.normal_regression(net, N))
    before = {name: buffer.clone() for name, buffer in net.module.named_buffers()}
    assert bool(np.isfinite(ps.predict(ps.refit(run, ps.select(run)), X)["lower"]).all())
    assert all(torch.equal(before[name], buffer) for name, buffer in net.module.named_buffers())
    assert not run.spec.layout.num_buffers  # in training mode they are a part of the draws: see test_buffers.py


def test_another_floating_type_is_named() -> None:
    net = ps.SparseNet([3, 2, 1], prior=LAW)
    with pytest.raises(ValueError, match=r"floating type of the model's parameters, got \['float64', 'float64'\]"):
        annealed(ps.normal_regression(net, N), (X.double().numpy(), Y.double().numpy()))


def test_an_array_changed_after_the_run_changes_nothing() -> None:
    x, y = X.numpy().copy(), Y.numpy().copy()
    run = annealed(ps.normal_regression(ps.SparseNet([3, 2, 1], prior=LAW), N), (x, y))
    x += 100
    assert torch.equal(run.spec.data[0], X)


def test_values_too_large_for_a_variance_are_refused() -> None:
    x = X.double().numpy().copy()
    x[0, 1] = 1e300
    with pytest.raises(ValueError, match=r"X must have a finite variance, got values too large in columns \[1\]"):
        ps.SparseRegressor(schedule=SHORT).fit(x, Y.numpy())


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b,a\n1,2,3\n", "two columns named 'a'"), ("a,b,y\n1,5,2,5\n", "more fields than its header.*decimal commas")],
)
def test_a_file_that_would_be_misread_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(path)


def test_a_refit_that_did_not_converge_is_said_by_refit_and_by_predict() -> None:
    run = annealed(ps.normal_regression(ps.SparseNet([3, 2, 1], prior=LAW), N))
    structure = ps.select(run)
    with pytest.warns(UserWarning, match="standard errors from the maximum after 1 iterations.*sample_steps"):
        fit = ps.refit(run, structure, max_iterations=1, tolerance=1e-9)
    with pytest.warns(UserWarning, match="intervals are not to be trusted"):
        ps.predict(fit, X)
