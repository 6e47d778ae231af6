"""SGHMC in law: the discrete chain on a quadratic is known exactly, and at temperature 0 it is SGD with momentum.

Every update is elementwise, so one flat tensor of many coordinates is as many independent chains.
"""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference import sampler, sghmc
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.minibatch import Batches, Noise

CPU = torch.device("cpu")
NUM_CHAINS = 100_000


def stationary_covariance(curvature: float, step_size: float, friction: float, temperature: float) -> np.ndarray:
    """Covariance of (position, momentum) that one step leaves as it is, on the potential curvature/2 × position²."""
    drift = np.array([[1 - step_size * curvature, 1 - friction], [-step_size * curvature, 1 - friction]])
    noise = 2 * friction * step_size * temperature * np.ones((2, 2))
    return np.asarray(solve_discrete_lyapunov(drift, noise))


def assert_covariance(samples: np.ndarray, right: np.ndarray) -> None:
    """Within five standard errors of a normal law's second moments."""
    got = samples @ samples.T / samples.shape[1]
    error = np.sqrt((np.outer(np.diag(right), np.diag(right)) + right**2) / samples.shape[1])
    assert (np.abs(got - right) < 5 * error).all(), f"covariance {got} where {right} is right"


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize(("friction", "curvature"), [(0.1, 0.5), (0.1, 8.0), (0.5, 4.0), (1.0, 2.0)])
def test_started_in_the_exact_law_it_stays_there(friction: float, curvature: float, temperature: float) -> None:
    step_size, num_data = 0.1, 7
    law = stationary_covariance(curvature, step_size, friction, temperature)
    start = np.random.default_rng(0).multivariate_normal(np.zeros(2), law, NUM_CHAINS).T
    state = sghmc.State(*(torch.tensor(part) for part in start))
    controls = ps.Controls(step_size * num_data, friction, temperature, 1.0, 1.0, 0.0)
    noise = Noise(0, 0, CPU)
    for step in range(60):
        gradient = curvature * state.position / num_data
        state = sghmc.step(state, gradient, noise(step, torch.empty_like(state.position)), controls, num_data)
    assert_covariance(np.stack([part.numpy() for part in state]), law)


def test_the_exact_law_is_the_one_the_stability_warning_speaks_of() -> None:
    for friction in (0.1, 0.7):
        for ratio in (0.1, 0.5, 0.9):
            curvature = ratio * 2 * (2 - friction) / 0.1
            variance = stationary_covariance(curvature, 0.1, friction, 0.3)[0, 0]
            assert variance == pytest.approx(0.3 / curvature / (1 - ratio))


def test_init_is_at_rest_and_a_copy() -> None:
    position = torch.randn(3)
    state = sghmc.init(position)
    state.position.add_(1)
    assert not torch.equal(state.position, position) and not state.momentum.any()


def test_noise_is_standard_normal_and_of_one_step_chain_and_seed() -> None:
    """Kolmogorov-Smirnov at one in 1,000; correlations of 100,000 pairs within five standard errors."""
    like = torch.zeros(NUM_CHAINS)
    cases = {
        (seed, chain, step): Noise(seed, chain, CPU)(step, torch.empty_like(like))
        for seed in (0, 1)
        for chain in (0, 1)
        for step in (0, 1)
    }
    assert all(stats.kstest(draws.numpy(), "norm").pvalue > 1e-3 for draws in cases.values())
    correlation = np.corrcoef(torch.stack(list(cases.values())).numpy())
    assert np.abs(correlation - np.eye(len(cases))).max() < 5 / NUM_CHAINS**0.5
    noise = Noise(1, 1, CPU)
    torch.manual_seed(3)
    assert torch.equal(noise(1, torch.empty_like(like)), cases[1, 1, 1])
    assert torch.equal(noise(0, torch.empty_like(like)), cases[1, 1, 0])
    assert torch.equal(Noise(1, 1, CPU)(0, like.double()).float().isfinite(), torch.ones(NUM_CHAINS, dtype=torch.bool))


NUM_ROWS = 10_000
NOISE = 2.0


def normal_means(power: float) -> tuple[Callable[..., Any], Tensor]:
    """One weight a row; a spike all but equal to the slab makes the prior N(0, 1) to the power ``power``."""
    law = ps.SpikeSlab(0.5, 1.0, torch.tensor(1 + 1e-6, dtype=torch.float64))

    def model(y: Tensor) -> None:
        w = pyro.sample("w", law.expand([NUM_ROWS]).to_event(1))
        pyro.sample("y", dist.Normal(w, NOISE).to_event(1), obs=y)

    return ps.annealed(power)(model), torch.zeros(NUM_ROWS, dtype=torch.float64)


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="compiling on a CPU needs a C++ compiler")


@pytest.mark.parametrize(
    ("power", "temperature", "program"),
    [
        (1.0, 1.0, "traced"),
        (1.0, 0.3, "traced"),
        (0.2, 1.0, "traced"),
        (0.2, 3.0, "traced"),
        pytest.param(0.2, 0.3, "compiled", marks=needs_compiler),
    ],
)
def test_prior_power_and_temperature_alone_through_anneal(
    power: float, temperature: float, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exp(-U/tau) with U = likelihood + eta × prior, to the discrete chain's own step-size bias, at each control alone."""
    monkeypatch.setattr(sampler, "repays_compiling", lambda *counts: program == "compiled")
    step_size = 0.2
    model, y = normal_means(power)
    schedule = ps.PriorAnnealing(
        0, 0, 0, 0, 120, learning_rate=step_size * NUM_ROWS, friction=0.3, sample_temperature=temperature
    )
    run = ps.anneal(model, y, schedule, num_draws=1, progress=False)
    assert run.trace.attrs["program"] == program
    curvature = power + 1 / NOISE**2
    variance = stationary_covariance(curvature, step_size, 0.3, temperature)[:1, :1]
    assert_covariance(run.draws[0, 0].numpy()[None], variance)
    assert run.draws.shape == (1, 1, NUM_ROWS)


@pytest.mark.parametrize("cool_steps", [0, 5])
def test_power_phase_moves_the_target_with_the_schedule(cool_steps: int) -> None:
    """Temperature 0 and quadratic potentials: the run equals the recursion written out, control by control."""
    model, y = normal_means(1.0)
    y = y + 3.0
    schedule = ps.PriorAnnealing(4, 5, 3, cool_steps, learning_rate=0.1 * NUM_ROWS, temperature=0.0)
    run = ps.anneal(model, y, schedule, num_draws=1, progress=False, seed=2)
    w = float(_start_of(model, y, seed=2)[0])
    momentum = 0.0
    for step in range(schedule.num_steps):
        eta = schedule.at(step).prior_power
        momentum = 0.9 * momentum - 0.1 * (eta * w - (3.0 - w) / NOISE**2)
        w += momentum
    assert float(run.positions[0, 0]) == pytest.approx(w, abs=1e-5)


def _start_of(model: Callable[..., Any], y: Tensor, seed: int) -> Tensor:
    return start(inspect(model, y, None, seed), seed, 0, fresh=False)


def network_and_data() -> tuple[ps.SparseNet, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(60, generator=generator, dtype=torch.float64)
    return ps.SparseNet([4, 5, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0)).double(), x, y


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("batch_size", [None, 20, 25])
def test_at_temperature_zero_it_is_sgd_with_momentum(batch_size: int | None, weight_decay: float) -> None:
    """100 steps of ps.anneal and of torch.optim.SGD on the mean loss, the same batches, to 1e-12."""
    net, x, y = network_and_data()

    def model(x: Tensor, y: Tensor) -> None:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    schedule = ps.PriorAnnealing(100, 0, 0, 0, learning_rate=0.05, friction=0.1, weight_decay=weight_decay)
    run = ps.anneal(model, (x, y), schedule, batch_size, num_draws=1, seed=5, progress=False)

    module = net.module
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=weight_decay)
    batches = Batches(60, batch_size, 5, 0, CPU)
    for step in range(100):
        rows = batches(step)
        optimiser.zero_grad()
        (0.5 * (module(x[rows]).squeeze(-1) - y[rows]) ** 2).mean().backward()
        optimiser.step()
    right = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert torch.allclose(run.positions[0], right, rtol=1e-12, atol=1e-14)
    assert (run.positions[0] - nn.utils.parameters_to_vector(network_and_data()[0].parameters())).abs().max() > 0.1


def test_weight_decay_leaves_sites_with_a_prior_of_their_own_alone() -> None:
    def model(y: Tensor) -> None:
        intercept = pyro.sample("intercept", dist.Normal(torch.tensor(0.0), 10.0))
        flat = pyro.param("flat", torch.tensor(1.0))
        pyro.sample("w", ps.SpikeSlab(0.1, 0.1, 1.0))
        pyro.sample("y", dist.Normal(intercept + 0.0 * flat, 1.0).expand(y.shape).to_event(1), obs=y)

    ends = []
    for weight_decay in (0.0, 0.5):
        schedule = ps.PriorAnnealing(10, 0, 0, 0, learning_rate=0.1, weight_decay=weight_decay)
        pyro.clear_param_store()
        run = ps.anneal(model, torch.full((5,), 3.0), schedule, num_draws=1, progress=False)
        ends.append(run.spec.layout.constrained(run.positions[0]))
    without, with_decay = ends
    assert torch.equal(without["intercept"], with_decay["intercept"]) and float(without["intercept"]) > 1
    assert float(without["flat"]) == 1.0 > float(with_decay["flat"])
    assert abs(float(with_decay["w"])) < abs(float(without["w"]))
