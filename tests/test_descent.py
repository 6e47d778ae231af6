"""Refits by batches: PyTorch's SGD on the kept weights, to the maximum that is known, statistics moved, saved, averaged."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_sparse as ps
from pyro_sparse.inference import descent, refit
from pyro_sparse.inference.step import Step

N, BATCH = 60, 20
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR)
Y = 0.5 + X[:, 0] - 2 * X[:, 2] + 0.3 * torch.randn(N, generator=GENERATOR)
LABELS = (X[:, 0] + 0.3 * torch.randn(N, generator=GENERATOR) > 0).long()
LAW = ps.SpikeSlab(0.1, 0.1, 2.0, 0.5)
KEPT = torch.tensor([True, False, True, False, True])
PLAN = ps.PriorAnnealing(12, 0, 0, 0, learning_rate=0.05, weight_decay=0.02)
LONG = ps.PriorAnnealing(600, 0, 0, 0, learning_rate=0.1)


def linear(sigma: float | None = 1.0) -> Any:
    net = ps.SparseLinear(4, 1, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.sample("sigma", dist.HalfNormal(1.0)) if sigma is None else sigma
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, scale), obs=y)

    return model


def ended_at(model: Any, position: list[float], data: Any = (X, Y), batch_size: int | None = BATCH) -> ps.Run:
    plan = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-6)
    run = ps.anneal(model, data, plan, batch_size, num_draws=1, progress=False)
    return dataclasses.replace(run, positions=torch.tensor([position]))


START = [0.7, 0.0, -0.9, 0.0, 0.8]


def refitted(run: ps.Run, schedule: ps.PriorAnnealing | None = LONG, **options: Any) -> ps.Fit:
    return ps.refit(run, ps.select(run), schedule=schedule, progress=False, **options)


def coefficients(fit: ps.Fit) -> Tensor:
    return torch.cat([fit.values["weight"][0], fit.values["bias"]])


@pytest.mark.parametrize("keep_slab", [False, True])
@pytest.mark.parametrize("sigma", [1.0, 0.5])
def test_on_all_rows_it_reaches_least_squares_or_ridge(keep_slab: bool, sigma: float) -> None:
    """And so what L-BFGS does; the slab's variance is 4."""
    run = ended_at(linear(sigma), START, batch_size=None)
    fit = refitted(run, dataclasses.replace(LONG, learning_rate=0.1 * sigma**2), keep_slab=keep_slab)
    design = torch.cat([X, torch.ones(N, 1)], 1).double()[:, KEPT]
    gram = design.T @ design + (sigma**2 / 4 if keep_slab else 0.0) * torch.eye(3)
    right = torch.linalg.solve(gram, design.T @ Y.double())
    assert torch.allclose(coefficients(fit)[KEPT].double(), right, atol=1e-5)
    assert (coefficients(fit)[~KEPT] == 0).all()
    full = refitted(run, None, keep_slab=keep_slab, tolerance=1e-6)
    assert not full.by_batches and torch.allclose(coefficients(full), coefficients(fit).double(), atol=1e-5)
    assert fit.by_batches and fit.loss == pytest.approx(full.loss, rel=1e-4) and fit.penalised is keep_slab
    assert torch.equal(fit.free, coefficients(fit)[KEPT])


def test_it_is_sgd_of_plain_pytorch_on_the_kept_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after every step, with slab and weight decay; a momentum of what is pruned is exactly zero throughout."""
    states: list[tuple[Tensor, Tensor]] = []
    call = Step.__call__

    def noted(step: Step, number: int) -> None:
        call(step, number)
        states.append((step.state.position.clone(), step.state.momentum.clone()))

    run = ended_at(linear(), START)
    monkeypatch.setattr(Step, "__call__", noted)
    fit = refitted(run, PLAN)
    assert len(states) == 12 and torch.equal(states[-1][0], coefficients(fit)) and fit.num_iterations == 12
    weights = torch.tensor(START).requires_grad_()
    optimiser = torch.optim.SGD([weights], lr=0.05, momentum=0.9)
    batches, losses = run.spec.batches(0, 0, X.device), []
    for number, (position, momentum) in enumerate(states):
        rows = batches(number)
        likelihood = -dist.Normal(X[rows] @ weights[:4] + weights[4], 1.0).log_prob(Y[rows]).mean()
        losses.append(float(likelihood.detach()))
        optimiser.zero_grad()
        (likelihood + 0.5 * (0.02 + 0.25 / N) * weights.square().sum()).backward()
        assert weights.grad is not None
        weights.grad *= KEPT
        optimiser.step()
        assert torch.allclose(position, weights.detach(), atol=1e-6)
        assert (position[~KEPT] == 0).all() and (momentum[~KEPT] == 0).all() and (momentum[KEPT] != 0).all()
    assert fit.loss == pytest.approx(losses[-1], rel=1e-5)  # of the last tenth


def test_weight_decay_leaves_other_sites_alone() -> None:
    """A noise scale is fitted with its own prior, whatever decays beside it."""
    run = ended_at(linear(None), [0.0, *START], batch_size=None)
    plan = dataclasses.replace(LONG, learning_rate=0.02, weight_decay=0.5)
    fit = refitted(run, plan, keep_slab=False)
    squares = float((Y - X @ fit.values["weight"][0] - fit.values["bias"]).square().sum())
    sigma = float(fit.values["sigma"])  # where the log density of squares and of the half-normal is largest
    assert -N / sigma + squares / sigma**3 - sigma == pytest.approx(0.0, abs=0.05)
    assert float(fit.values["weight"].norm()) < 0.98 * float(refitted(run, keep_slab=False).values["weight"].norm())


def images() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3, 2)),
    )


def classifier(module: nn.Module) -> Any:
    net = ps.sparsify(module, prior=LAW)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        logits = net(x)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model


def classified(seed: int = 0, data: Any = (X, LABELS), batch_size: int | None = BATCH) -> ps.Run:
    torch.manual_seed(seed)
    plan = ps.PriorAnnealing(20, 0, 0, 1, learning_rate=0.05)
    return ps.anneal(classifier(images()), data, plan, batch_size, num_draws=1, progress=False, seed=seed)


@pytest.fixture(scope="module")
def run() -> ps.Run:
    pyro.clear_param_store()
    return classified()


def test_a_network_with_batchnorm_is_fitted_as_by_plain_pytorch(run: ps.Run) -> None:
    structure = ps.select(run)
    fit = ps.refit(run, structure, keep_slab=False, schedule=PLAN, progress=False)
    module = images().train()
    state = {site.parameter: structure.values[site.name] for site in run.spec.layout.sites}
    module.load_state_dict(state, strict=False)
    masks = {name: structure.masks[name] for name, _ in module.named_parameters()}
    assert not all(bool(mask.all()) for mask in masks.values()) and bool(masks["1.weight"].any())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.02)
    batches = run.spec.batches(0, 0, X.device)
    for number in range(12):
        rows = batches(number)
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(X[rows]), LABELS[rows]).backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            parameter.grad *= masks[name]
        optimiser.step()
    right = module.eval().state_dict()
    for name, value in fit.values.items():
        assert torch.allclose(value, right[name], atol=1e-5), name
        assert name not in masks or (value[~masks[name]] == 0).all()
    assert not torch.equal(fit.values["2.running_var"], structure.values["2.running_var"])
    plain = fit.module()
    assert not plain.training and torch.allclose(plain(X), module(X), atol=1e-5)
    table = ps.predict(fit, X[:7])
    assert set(table) == {"mean", "in_set"}
    assert np.allclose(table["mean"], module(X[:7]).softmax(1).detach(), atol=1e-5)
    assert "refit by 12 steps of SGD" in str(fit) and "by batches" in repr(fit)


def test_it_has_no_intervals(run: ps.Run) -> None:
    fit = refitted(run, PLAN)
    normal = refitted(ended_at(linear(), START), PLAN)
    for asked in (
        fit.covariance,
        lambda: ps.partial_dependence(fit, X, 0, [0.0, 1.0]),
        normal.covariance,
        lambda: normal.noise_variance,
    ):
        with pytest.raises(ValueError, match="are those of a maximum, which a refit by batches does not reach"):
            asked()


def test_several_fits_are_averaged(run: ps.Run) -> None:
    fits = [refitted(one, PLAN) for one in (run, classified(1))]
    alone = [ps.predict(fit, X[:7])["mean"] for fit in fits]
    together = ps.predict(fits, X[:7], prob=0.6)
    assert np.allclose(together["mean"], (alone[0] + alone[1]) / 2) and not np.allclose(alone[0], alone[1])
    mean, chosen = together["mean"].values, together["in_set"].values
    assert ((mean * chosen).sum(1) >= 0.6 - 1e-9).all() and (chosen.sum(1) == 1 + (mean.max(1) < 0.6)).all()
    with pytest.raises(ValueError, match="sparse must be False for a fit"):
        ps.predict(fits, X[:7], sparse=True)
    with pytest.raises(ValueError, match="source must hold fits of one family of responses, got categorical, normal"):
        ps.predict([fits[0], refitted(ended_at(linear(), START), PLAN)], X[:7])


def test_a_saved_fit_predicts_the_same(run: ps.Run, tmp_path: Path) -> None:
    fit = refitted(run, PLAN)
    fit.save(tmp_path / "fit")
    model, seen = classifier(images()), []

    def counting(x: Tensor, y: Tensor | None = None) -> Any:
        seen.append(len(x))
        return model(x, y)

    loaded = ps.Fit.load(tmp_path / "fit", counting, (X[:3], LABELS[:3]))
    assert max(seen) == 2 * BATCH
    for name in ("mean", "in_set"):
        assert np.array_equal(ps.predict(loaded, X)[name], ps.predict(fit, X)[name])
    assert loaded.by_batches and np.isnan(loaded.distance) and not loaded.converged and str(loaded) == str(fit)
    assert torch.equal(loaded.module()(X), fit.module()(X))


def test_weights_without_which_the_network_is_not_defined_are_not_refitted() -> None:
    module = images()
    nn.utils.parametrizations.weight_norm(module[5])
    run = ps.anneal(classifier(module), (X, LABELS), ps.PriorAnnealing(2, 0, 0, 1), BATCH, num_draws=1, progress=False)
    found, directions = ps.select(run, 1e-9), "5.parametrizations.weight.original1"
    masks = found.masks | {directions: torch.zeros_like(found.masks[directions])}
    values = found.values | {directions: torch.zeros_like(found.values[directions])}
    with pytest.raises(ValueError, match="structure must keep weights at which the model's log density"):
        ps.refit(run, dataclasses.replace(found, masks=masks, values=values), schedule=PLAN, progress=False)


def test_a_run_from_a_loader_is_refitted_by_batches_without_its_data() -> None:
    loader = DataLoader(TensorDataset(X, LABELS), BATCH, shuffle=True)
    run = classified(data=loader, batch_size=None)
    fit, on_rows = refitted(run, None), refitted(run, None, data=(X, LABELS))
    assert fit.num_iterations == on_rows.num_iterations == 10 * N // BATCH  # ten epochs
    assert on_rows.response.spec.batch_size == BATCH and on_rows.response.spec.loader is None
    assert ps.predict(fit, X)["mean"].shape == (N, 2)
    assert float(np.mean(ps.predict(fit, X)["mean"].argmax("class") == LABELS.numpy())) > 0.7


def test_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended_at(linear(), START)
    assert not refitted(run, None).by_batches
    monkeypatch.setattr(refit, "MAX_WORK", 3 * N)
    assert not refitted(run, None).by_batches
    monkeypatch.setattr(refit, "MAX_WORK", 3 * N - 1)
    fit = refitted(run, None)
    assert fit.by_batches and fit.num_iterations == 30
    assert not refitted(ended_at(linear(), START, batch_size=None), None).by_batches
    last = ps.PriorAnnealing(4, 0, 0, 4, learning_rate=0.5, friction=0.3, learning_rate_drops=(4,))
    short = descent.short_schedule(last, 3)
    assert (short.num_steps, short.train_steps, short.friction) == (30, 30, 0.3)
    assert short.learning_rate == pytest.approx(0.05) and short.weight_decay == 0


def test_only_a_train_phase_refits() -> None:
    with pytest.raises(
        ValueError, match="schedule must have steps in its train phase alone to refit, got some in others"
    ):
        refitted(ended_at(linear(), START), ps.PriorAnnealing(5, 0, 0, 5))
