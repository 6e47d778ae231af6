"""The compiled program is the traced one, taken by counts, and left alone where it cannot be had."""

import shutil
import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference import sampler
from pyro_sparse.inference import step as steps
from pyro_sparse.inference.program import repays_compiling

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X[:, 0] + 0.3 * torch.randn(60, generator=GENERATOR)
SCHEDULE = ps.PriorAnnealing(5, 5, 5, 0, 30, learning_rate=1e-3)


def annealed(monkeypatch: pytest.MonkeyPatch, compiling: bool, model: Any = None, **options: Any) -> ps.Run:
    monkeypatch.setattr(sampler, "repays_compiling", lambda *counts: compiling)
    torch.manual_seed(0)
    model = ps.normal_regression(ps.SparseNet([3, 4, 1]), 60) if model is None else model
    options = {"batch_size": 20, "num_draws": 10, "progress": False} | options
    return ps.anneal(model, (X, Y), SCHEDULE, **options)


@pytest.mark.skipif(shutil.which("c++") is None, reason="compiling on a CPU needs a C++ compiler")
def test_a_compiled_run_is_the_traced_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chains together; the test below has one alone."""
    traced, compiled = (annealed(monkeypatch, c, num_chains=2) for c in (False, True))
    assert (traced.trace.attrs["program"], compiled.trace.attrs["program"]) == ("traced", "compiled")
    assert torch.allclose(compiled.draws, traced.draws, rtol=1e-4, atol=1e-6)
    for name, values in traced.trace["sample_stats"].data_vars.items():
        assert np.allclose(compiled.trace["sample_stats"][name], values, rtol=1e-3, equal_nan=True), name
    assert torch.equal(annealed(monkeypatch, True, num_chains=2).draws, compiled.draws)


@pytest.mark.skipif(shutil.which("c++") is None, reason="compiling on a CPU needs a C++ compiler")
def test_laws_whose_operations_write_in_place_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-Cauchy and Dirichlet densities beside two networks, whose priors are one law."""
    torch.manual_seed(0)
    net = ps.SparseNet([3, 4, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0))

    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfCauchy(torch.tensor(1.0)))
        share = pyro.sample("share", dist.Dirichlet(torch.ones(2)))
        mean = share[0] * net(x).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced, compiled = (annealed(monkeypatch, c, model) for c in (False, True))
    assert compiled.trace.attrs["program"] == "compiled"
    assert torch.allclose(compiled.draws, traced.draws, rtol=1e-4, atol=1e-6)
    for name, values in traced.trace["sample_stats"].data_vars.items():
        assert np.allclose(compiled.trace["sample_stats"][name], values, rtol=1e-3, equal_nan=True), name


def test_without_a_compiler_the_traced_program_runs_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> None:
        raise RuntimeError("no working C++ compiler found")

    traced = annealed(monkeypatch, False, num_chains=2)
    monkeypatch.setattr(steps, "compiled", missing)
    with pytest.warns(UserWarning, match="run uncompiled, more slowly, as RuntimeError: no working C") as caught:
        run = annealed(monkeypatch, True, num_chains=2)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert run.trace.attrs["program"] == "traced" and torch.equal(run.draws, traced.draws)


def test_a_compiled_program_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Any, arguments: Any) -> Any:
        def run(position: Tensor, momentum: Tensor, *arguments: Any) -> Any:
            found = function(position, momentum, *arguments)
            momentum *= 1.01
            return found

        return run

    traced = annealed(monkeypatch, False)
    monkeypatch.setattr(steps, "compiled", wrong)
    run = annealed(monkeypatch, True)
    assert run.trace.attrs["program"] == "traced" and torch.equal(run.draws, traced.draws)


@pytest.mark.parametrize("reason", ["dropout", "a branch"])
def test_a_model_that_draws_random_numbers_or_runs_eagerly_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    dropout = nn.Dropout(0.5)
    law = ps.SpikeSlab(0.2, 0.1, 1.0, 0.5)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", law.expand([3]).to_event(1))
        mean = dropout(x) @ w if reason == "dropout" else x @ w if float(w[0].detach()) < 1e9 else x[:, 0]
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    def never(*arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(steps, "compiled", never)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model is run eagerly")
        run = annealed(monkeypatch, True, model)
    assert run.trace.attrs["program"] == ("traced" if reason == "dropout" else "eager")


def test_it_is_compiled_by_the_counts_of_steps_and_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not repays_compiling(ps.PriorAnnealing().num_steps, 2_252)  # the README's model
    assert repays_compiling(ps.PriorAnnealing.paper_regression().num_steps, 2_252)
    assert not repays_compiling(400, 2_100_000) and repays_compiling(1_000, 2_100_000)
    # On a card by the steps alone: the paper's images, not a refit of theirs.
    assert repays_compiling(117_000, 1_000, True) and not repays_compiling(3_900, 1_000_000, True)
    asked: list[tuple[int, int]] = []

    def ask(num_steps: int, num_coordinates: int, on_card: bool) -> bool:
        asked.append((num_steps, num_coordinates))
        return False

    monkeypatch.setattr(sampler, "repays_compiling", ask)
    for together in (True, False):
        monkeypatch.setattr(sampler, "TOGETHER", sampler.TOGETHER if together else 0)
        model = ps.normal_regression(ps.SparseNet([3, 4, 1]), 60)
        ps.anneal(model, (X, Y), SCHEDULE, 20, num_draws=10, num_chains=2, progress=False)
    assert asked == [(45, 44), (90, 22)]  # together one program of all coordinates, apart one for all steps
