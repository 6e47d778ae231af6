"""The potential is the one method.md writes down, and the traced program is the eager model."""

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.minibatch import Batches
from pyro_sparse.inference.potential import Evaluation, Potential

CPU = torch.device("cpu")
LAW = ps.SpikeSlab(*(torch.tensor(a, dtype=torch.float64) for a in (0.2, 0.1, 1.0, 0.5)))
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR, dtype=torch.float64)
Y = X[:, 0] + 0.3 * torch.randn(60, generator=GENERATOR, dtype=torch.float64)
N = len(X)


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def glm(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(zero() + 1))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def network() -> Callable[..., None]:
    net = ps.SparseNet([3, 4, 1], prior=LAW).double()

    def mlp(x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.HalfNormal(zero() + 1))
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return mlp


def hierarchical(y: Tensor) -> None:
    """The eight schools, with effects whose size is shrunk by a spike and slab."""
    mean = pyro.sample("mean", dist.Normal(zero(), 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(zero() + 5))
    with pyro.plate("schools", 8):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        extra = pyro.sample("extra", LAW)
        pyro.sample("y", dist.Normal(effect + extra, 12.0), obs=y)


def subsampling(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=20) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def subsampling_by_pyro(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=20):
        x, y = pyro.subsample(x, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def subsampling_around_a_network() -> Callable[..., None]:
    net = ps.SparseNet([3, 2, 1], prior=LAW).double()

    def model(x: Tensor, y: Tensor) -> None:
        plate = pyro.plate("data", N, subsample_size=20)
        with plate as i:
            x, y = x[i], y[i]
        mean = net(x).squeeze(-1)
        with plate:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


SCHOOLS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
MODELS: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[Tensor, ...], int | None]] = {
    "mlp": (network, (X, Y), 20),
    "mlp, full batch": (network, (X, Y), None),
    "glm": (lambda: glm, (X, Y), 20),
    "hierarchical": (lambda: hierarchical, (SCHOOLS,), None),
    "subsample, x[i]": (lambda: subsampling, (X, Y), None),
    "subsample, pyro.subsample": (lambda: subsampling_by_pyro, (X, Y), None),
    "subsample, network": (subsampling_around_a_network, (X, Y), None),
}


def make(model: Callable[..., Any], data: tuple[Tensor, ...] = (X, Y), batch_size: int | None = None) -> Potential:
    spec = inspect(model, data, batch_size, seed=0)
    batches = Batches(spec.num_data, spec.batch_size, 0, 0, CPU)
    return Potential(spec, start(spec, 0, 0, fresh=False), (batches(0), batches(1)))


def somewhere(potential: Potential, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(potential.spec.layout.num_coordinates, generator=generator, dtype=torch.float64)


def evaluate(
    potential: Potential, position: Tensor, rows: Tensor, eta: float = 1.0, u: float = 1.0, tau: float = 1.0
) -> Evaluation:
    return potential(position, potential.tempering(eta, u, tau, position), rows)


@pytest.mark.parametrize("name", MODELS)
def test_the_traced_program_is_the_eager_model(name: str) -> None:
    """At positions, rows and controls other than those it was traced and checked with."""
    build, data, batch_size = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        potential = make(build(), data, batch_size)
    assert potential.reason is None and not potential.draws_random_numbers
    for seed, controls in enumerate([(0.0, 0.0, 0.0), (0.3, 0.6, 2.0), (1.0, 1.0, 1.0)]):
        position = somewhere(potential, seed)
        rows = torch.randperm(len(data[0]))[: potential.spec.batch_size]
        arguments = (position, potential.tempering(*controls, position), rows)
        traced, eager = (potential._run(program, *arguments) for program in (potential.program, potential._eager))
        assert traced.log_prob.keys() == eager.log_prob.keys()
        assert all(float(traced.log_prob[n]) == pytest.approx(float(v), rel=1e-12) for n, v in eager.log_prob.items())
        assert torch.allclose(traced.mean_gradient, eager.mean_gradient, rtol=1e-12, atol=1e-14)
        assert float(traced.mean_potential) == pytest.approx(float(eager.mean_potential), rel=1e-12)


@pytest.mark.parametrize("batch_size", [None, 20, 7])
@pytest.mark.parametrize(("eta", "u", "tau"), [(1.0, 1.0, 1.0), (0.3, 0.6, 0.1), (0.0, 0.0, 0.0), (0.5, 0.0, 4.0)])
def test_value_and_gradient_are_those_of_the_formula(batch_size: int | None, eta: float, u: float, tau: float) -> None:
    """N/m × likelihood, eta × spike and slab at u, the scale's prior whole, and tau × log Jacobian."""
    potential = make(glm, (X, Y), batch_size)
    rows = torch.arange(N) if batch_size is None else torch.arange(3, 3 + batch_size)
    position = somewhere(potential).requires_grad_()
    w, sigma = position[:3], position[3].exp()
    likelihood = N / len(rows) * dist.Normal(X[rows] @ w, sigma).log_prob(Y[rows]).sum()
    spike_scale = ((1 - u) * 0.5**2 + u * 0.1**2) ** 0.5
    slab, spike = (dist.Normal(zero(), zero() + scale).log_prob(w).exp() for scale in (1.0, spike_scale))
    prior = torch.log(0.2 * slab + 0.8 * spike).sum()
    scale_prior = dist.HalfNormal(1.0).log_prob(sigma)
    right = -(likelihood + eta * prior + scale_prior + tau * position[3]) / N
    gradient, right = torch.autograd.grad(right, position)[0], right.detach()
    got = evaluate(potential, position.detach(), rows, eta, u, tau)
    assert float(got.mean_potential) == pytest.approx(float(right), rel=1e-10)
    assert torch.allclose(got.mean_gradient, gradient, rtol=1e-9, atol=1e-12)
    parts = {"y": likelihood, "w": eta * prior, "sigma": scale_prior}
    assert {n: float(v) for n, v in got.log_prob.items()} == pytest.approx(
        {n: float(v.detach()) for n, v in parts.items()}
    )


@pytest.mark.parametrize("model", [subsampling, subsampling_by_pyro])
def test_a_model_that_subsamples_is_scaled_by_rows_over_its_own_size(model: Callable[..., None]) -> None:
    potential = make(model)
    rows = torch.tensor([5, 59, 0, *range(20, 37)])
    w = somewhere(potential)
    right = 3 * dist.Normal(X[rows] @ w, 1.0).log_prob(Y[rows]).sum()
    assert float(evaluate(potential, w, rows).log_prob["y"]) == pytest.approx(float(right), rel=1e-12)


def gamma_model(shape: list[int]) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        pyro.sample("g", dist.Gamma(zero() + 5, zero() + 1).expand(shape).to_event(len(shape)))
        pyro.sample("y", dist.Normal(zero(), 1.0).expand(y.shape).to_event(1), obs=y)

    return model


@pytest.mark.parametrize(("tau", "mean"), [(0.1, 4.1), (1.0, 5.0), (2.0, 6.0)])
def test_the_temperature_leaves_the_jacobian_alone(tau: float, mean: float) -> None:
    """Gamma(5) at tau has density ~ g^(4/tau) e^(-g/tau), whose mean is 4 + tau; by quadrature of exp(-U/tau)."""
    potential = make(gamma_model([]), (torch.zeros(1, dtype=torch.float64),))
    log_g = np.linspace(-6, 4, 1001)
    energy = [float(evaluate(potential, torch.tensor([z]), torch.arange(1), tau=tau).mean_potential) for z in log_g]
    density = np.exp(-(np.array(energy) - min(energy)) / tau)
    got = integrate.trapezoid(np.exp(log_g) * density, log_g) / integrate.trapezoid(density, log_g)
    assert got == pytest.approx(mean, rel=1e-4)


def test_sampling_at_a_temperature_leaves_the_jacobian_alone() -> None:
    """The same through anneal, on 2,000 independent copies, at tau = .1: mean 4.1, not 5."""
    schedule = ps.PriorAnnealing(0, 0, 0, 0, 400, learning_rate=0.02, friction=0.3, sample_temperature=0.1)
    run = ps.anneal(gamma_model([2_000]), torch.zeros(1, dtype=torch.float64), schedule, num_draws=4, progress=False)
    g = run.trace["posterior"]["g"].values[0, -1]
    assert g.mean() == pytest.approx(4.1, abs=5 * g.std() / 2_000**0.5 + 0.02)
    assert g.std() == pytest.approx(0.41**0.5, rel=5 / (2 * 2_000) ** 0.5 + 0.02)


@pytest.mark.parametrize("batch_size", [20, 30, 1, 60])
def test_over_an_epoch_batches_average_to_the_full_gradient(batch_size: int) -> None:
    model = network()
    on_batches, full = make(model, (X, Y), batch_size), make(model, (X, Y), None)
    batches = Batches(N, batch_size, 3, 0, CPU)
    position = somewhere(full)
    for epoch in (0, 4):
        steps = range(epoch * N // batch_size, (epoch + 1) * N // batch_size)
        average = torch.stack([evaluate(on_batches, position, batches(step)).mean_gradient for step in steps]).mean(0)
        right = evaluate(full, position, torch.arange(N)).mean_gradient
        assert torch.allclose(average, right, rtol=1e-10, atol=1e-13)


def test_where_the_batch_does_not_divide_each_batch_is_unbiased() -> None:
    """All pairs of five rows average to the full gradient, and all are equally likely (chi-square, one in 1,000)."""
    x, y = X[:5], Y[:5]

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", 5, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    on_batches, full = make(model, (x, y), 2), make(model, (x, y), None)
    position = somewhere(full)
    pairs = [tuple(pair) for pair in itertools.combinations(range(5), 2)]
    gradients = [evaluate(on_batches, position, torch.tensor(pair)).mean_gradient for pair in pairs]
    right = evaluate(full, position, torch.arange(5)).mean_gradient
    assert torch.allclose(torch.stack(gradients).mean(0), right, rtol=1e-10)
    for number in (0, 1):  # the first and the second batch of an epoch
        batches = Batches(5, 2, 0, 0, CPU)
        drawn = [tuple(sorted(batches(2 * epoch + number).tolist())) for epoch in range(3_000)]
        assert stats.chisquare([drawn.count(pair) for pair in pairs]).pvalue > 1e-3


def test_batches_are_permutations_and_functions_of_seed_chain_and_step() -> None:
    def order(seed: int, chain: int, steps: list[int]) -> list[list[int]]:
        batches = Batches(10, 3, seed, chain, CPU)
        return [batches(step).tolist() for step in steps]

    forwards = order(0, 0, list(range(9)))
    torch.manual_seed(5)
    assert order(0, 0, list(range(9))[::-1]) == forwards[::-1]
    for epoch in (forwards[:3], forwards[3:6], forwards[6:]):
        assert len({row for batch in epoch for row in batch}) == 9
    assert len({str(b) for b in (forwards, order(1, 0, list(range(9))), order(0, 1, list(range(9))))}) == 3
    assert forwards[:3] != forwards[3:6]
    assert Batches(4, None, 0, 0, CPU)(7).tolist() == [0, 1, 2, 3]


def eager(
    model: Callable[..., Any], message: str, data: tuple[Tensor, ...] = (X, Y), batch_size: int | None = None
) -> Potential:
    with pytest.warns(UserWarning, match=message):
        potential = make(model, data, batch_size)
    assert potential.reason is not None
    return potential


def test_a_branch_on_a_latent_runs_eagerly_and_the_warning_names_the_line() -> None:
    def branching(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        mean = x @ w if w.sum() > 0 else -x @ w
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    message = r"run eagerly, several times slower, as it cannot be traced.*test_potential.py, line \d+: mean = x @ w if"
    potential = eager(branching, message)
    for w in (torch.tensor([1.0, 2, 3]).double(), torch.tensor([-1.0, -2, -3]).double()):
        right = dist.Normal(X @ w.abs(), 1.0).log_prob(Y).sum()
        assert float(evaluate(potential, w, torch.arange(N)).log_prob["y"]) == pytest.approx(float(right))


def test_python_state_in_a_model_runs_eagerly_and_the_warning_names_the_site() -> None:
    calls = itertools.count(1)

    def counting(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        pyro.sample("response", dist.Normal(x @ w, float(next(calls))).to_event(1), obs=y)

    potential = eager(counting, "run eagerly.*the traced program differs from it at site 'response'")
    position = somewhere(potential)
    first, second = (evaluate(potential, position, torch.arange(N)).log_prob["response"] for _ in range(2))
    assert not torch.equal(first, second)


RARE = torch.cat(
    [X[:, :2], torch.zeros(N, 1).double().index_fill(0, torch.tensor([55]), 1.0)], 1
)  # row 55 of no first batch
BY_VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a boolean index": lambda h, x: h - h[x[:, 2] == 0].mean(),
    "unique": lambda h, x: h + 0.5 * torch.unique(x[:, 2]).numel(),
    "nonzero": lambda h, x: h + 0.5 * x[:, 2].nonzero().shape[0],
    "masked_select": lambda h, x: h - torch.masked_select(h, x[:, 2] == 0).sum(),
    "an index of a weight": lambda h, x: h + h[h > 0].sum(),
}


@pytest.mark.parametrize("batch_size", [20, None])
@pytest.mark.parametrize("kind", BY_VALUES)
def test_what_has_a_shape_that_depends_on_values_is_no_program(kind: str, batch_size: int | None) -> None:
    """A program would have the shape of its first batch; all rows at once are always the same, but weights are not."""
    scale, intercept = LAW.expand([3]).to_event(1), dist.Normal(zero(), 1.0)

    def model(x: Tensor, y: Tensor) -> None:
        mean = BY_VALUES[kind](x @ pyro.sample("w", scale) + pyro.sample("b", intercept), x)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    if batch_size is None and kind in ("a boolean index", "unique", "nonzero"):
        potential = make(model, (RARE, Y))
        assert potential.kind == "traced"
    else:
        potential = eager(model, "as the shape of what .* depends on values", (RARE, Y), batch_size)
    rows = torch.arange(40, 60) if batch_size else torch.arange(N)
    w, b = torch.tensor([1.0, 2.0, 0.0]).double(), -0.25
    position = torch.cat([w, torch.tensor([b]).double()])
    found = evaluate(potential, position, rows).log_prob["y"]
    right = dist.Normal(BY_VALUES[kind](RARE[rows] @ w + b, RARE[rows]), 1.0).log_prob(Y[rows]).sum() * N / len(rows)
    assert float(found) == pytest.approx(float(right), rel=1e-12)


def test_a_mask_of_the_models_own_and_an_index_by_numbers_stay_a_program() -> None:
    mask, order = torch.tensor([True, False, True]), torch.tensor([1, 0])

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([2]).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x[:, mask][:, order] @ w, 1.0), obs=y)

    assert make(model, batch_size=20).kind == "traced"


def test_a_program_that_fails_on_other_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_sparse.inference.potential.varying_shape", lambda *_: None)

    def model(x: Tensor, y: Tensor) -> None:
        mean = x @ pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            large = x[:, 0] > 0
            pyro.sample("y", dist.Normal(mean.index_put((large,), 2 * mean[large]), 1.0), obs=y)

    eager(model, "as the traced program fails on other rows: RuntimeError", (X, Y), 20)


def test_a_model_that_fails_raises_its_own_error() -> None:
    def failing(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([4]).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    with pytest.raises(RuntimeError, match="size mismatch"):
        make(failing)


def dropout_model() -> tuple[ps.SparseModule, Callable[..., None]]:
    net = ps.sparsify(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)), LAW).double()

    def model(x: Tensor, y: Tensor) -> None:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return net, model


def test_dropout_draws_a_mask_a_step_and_is_reproducible() -> None:
    net, model = dropout_model()
    potential = make(model, (X, Y), 20)
    assert potential.reason is None and potential.draws_random_numbers
    position, rows = somewhere(potential), torch.arange(20)
    values = {float(evaluate(potential, position, rows).mean_potential) for _ in range(5)}
    assert len(values) == 5  # the mask is not baked in
    schedule = ps.PriorAnnealing(20, 5, 5, 5, learning_rate=0.01)
    ends = []
    for seed in (1, 1, 2):
        torch.manual_seed(random.randrange(1000))
        ends.append(ps.anneal(model, (X, Y), schedule, 20, num_draws=5, seed=seed, progress=False).positions)
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])
    net.eval()
    assert not make(model, (X, Y), 20).draws_random_numbers


@pytest.mark.parametrize("data", [(), (X, Y)])
@pytest.mark.parametrize(
    "masked", [lambda x: nn.functional.dropout(x, 0.5), lambda x: 2 * x * torch.bernoulli(torch.full_like(x, 0.5))]
)
def test_every_random_number_is_drawn_anew_each_step(
    masked: Callable[[Tensor], Tensor], data: tuple[Tensor, ...]
) -> None:
    """Data from a closure are constants of the program: a mask over them must not become one."""

    def model(x: Tensor = X, y: Tensor = Y) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        first, second = (masked(x) @ w for _ in range(2))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(first + second, 1.0), obs=y)
            pyro.sample("noise", dist.Normal(0.0 * w.sum(), 1.0).expand([N]), obs=torch.rand_like(y))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        potential = make(model, data)
    assert potential.reason is None and potential.draws_random_numbers
    w = torch.ones(3, dtype=torch.float64)
    evaluations = [evaluate(potential, w, torch.arange(N)).log_prob for _ in range(10)]
    assert len({float(log_prob["y"]) for log_prob in evaluations}) == 10
    assert len({float(log_prob["noise"]) for log_prob in evaluations}) == 10
    # Two masks of one shape are two draws, not one used twice: the variance says so.
    square = np.mean([-2 * float(log_prob["y"]) - N * np.log(2 * np.pi) for log_prob in evaluations])
    mean = 2 * X @ w - Y
    assert square == pytest.approx(float((mean**2 + 2 * (X**2).sum(1)).sum()), rel=0.15)


def test_updates_in_place_are_neither_merged_nor_remembered() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        mean, offset = torch.zeros_like(X[:, 0]), torch.zeros_like(X[:, 0])
        for _ in range(3):
            mean.add_(X @ w.detach())
        pyro.sample("y", dist.Normal(x @ w + mean + offset, 1.0).to_event(1), obs=y)

    potential = make(model)
    assert potential.reason is None
    w = somewhere(potential)
    for _ in range(2):
        got = evaluate(potential, w, torch.arange(N)).log_prob["y"]
        assert float(got) == pytest.approx(float(dist.Normal(4 * X @ w, 1.0).log_prob(Y).sum()), rel=1e-12)


@pytest.mark.parametrize("with_dropout", [False, True])
def test_network_generators_and_param_store_are_left_alone(with_dropout: bool) -> None:
    net, model = dropout_model()
    net.train(with_dropout)

    def whole(x: Tensor, y: Tensor) -> None:
        shift = pyro.param("shift", zero() + 0.5)
        model(x, y - shift)

    pyro.param("other", torch.ones(2))
    before = (
        copy.deepcopy(net.state_dict()),
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),
    )
    schedule = ps.PriorAnnealing(5, 5, 5, 5, learning_rate=0.01)
    run = ps.anneal(whole, (X, Y), schedule, 20, num_draws=2, num_chains=2, progress=False)
    assert all(torch.equal(value, before[0][name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2] and (np.random.get_state()[1] == before[3]).all()
    assert list(pyro.get_param_store().keys()) == ["other"]
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert all(part.training is with_dropout for part in net.module.modules())
    assert "shift" in run.trace["posterior"]


def test_a_param_site_starts_from_the_store() -> None:
    def model(y: Tensor) -> None:
        scale = pyro.param("scale", zero() + 1, constraint=dist.constraints.positive)
        pyro.sample("y", dist.Normal(pyro.sample("w", LAW), scale).expand(y.shape).to_event(1), obs=y)

    spec = inspect(model, (Y,), None, 0)
    for stored in (3.0, 4.0):
        pyro.get_param_store().setdefault("scale", zero() + 1, constraint=dist.constraints.positive)
        pyro.get_param_store()["scale"] = zero() + stored
        assert float(spec.layout.constrained(start(spec, 0, 0, fresh=False))["scale"]) == pytest.approx(stored)


def test_validation_settings_are_left_alone() -> None:
    for setting in (True, False):
        with pyro.validation_enabled(setting):
            potential = make(glm)
            evaluate(potential, somewhere(potential), torch.arange(N))
            assert pyro.infer.util.is_validation_enabled() is setting
            assert dist.Normal._validate_args is setting


def test_positions_round_trip_through_constrained_values() -> None:
    def model(y: Tensor) -> None:
        pyro.sample("simplex", dist.Dirichlet(torch.ones(3, dtype=torch.float64)))
        pyro.sample("share", dist.Beta(zero() + 2, 3.0))
        pyro.sample("scales", dist.Gamma(torch.ones(2, 2, dtype=torch.float64), 1.0).to_event(2))
        pyro.param("rate", zero() + 0.5, constraint=dist.constraints.positive)
        pyro.sample("w", LAW.expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(zero(), 1.0).expand(y.shape).to_event(1), obs=y)

    spec = inspect(model, torch.zeros(3, dtype=torch.float64), None, seed=0)
    layout = spec.layout
    assert layout.num_coordinates == 2 + 1 + 4 + 1 + 2
    flat = torch.randn(5, layout.num_coordinates, dtype=torch.float64)
    values = layout.constrained(flat)
    assert {n: tuple(v.shape[1:]) for n, v in values.items()} == {
        "simplex": (3,),
        "share": (),
        "scales": (2, 2),
        "rate": (),
        "w": (2,),
    }
    assert torch.allclose(values["simplex"].sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.allclose(layout.unconstrained({n: v[0] for n, v in values.items()}), flat[0])
    jacobian = torch.autograd.functional.jacobian(lambda z: torch.cat(free_coordinates(layout.constrained(z))), flat[0])
    _, log_jacobian = layout.constrained_with_log_jacobian(flat[0])
    assert float(log_jacobian) == pytest.approx(float(jacobian.slogdet().logabsdet))


def free_coordinates(values: dict[str, Tensor]) -> list[Tensor]:
    """As many as the position has: the last entry of a simplex follows from the others."""
    return [value[:-1] if name == "simplex" else value.reshape(-1) for name, value in values.items()]


def test_small_sites_as_one_law_and_large_sites_one_by_one_have_the_same_density(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = ps.SpikeSlab(*(torch.tensor(a, dtype=torch.float64) for a in (0.4, 0.02, 2.0, 0.3)))
    own = ps.SpikeSlab(0.3, torch.linspace(0.01, 0.1, 3, dtype=torch.float64), 1.0)  # one hyper-parameter a weight

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        v = pyro.sample("v", wide.expand([2, 3]).to_event(2))
        u = pyro.sample("u", own.to_event(1))
        masked = pyro.sample("masked", LAW.expand([3]).mask(torch.tensor([True, False, True])).to_event(1))
        with pyro.plate("weights", 3), pyro.poutine.scale(scale=0.5):
            t = pyro.sample("t", wide)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ (w + v.sum(0) + u + masked + t), 1.0), obs=y)

    spec = inspect(model, (X, Y), 20, 0)
    position = torch.randn(spec.layout.num_coordinates, dtype=torch.float64)
    indices = torch.arange(20), torch.arange(20, 40)
    evaluations = []
    for limit in (50_000, 0):
        monkeypatch.setattr("pyro_sparse.inference.potential._SMALL", limit)
        potential = Potential(spec, position, indices)
        evaluations.append(potential(position, potential.tempering(0.3, 0.6, 0.1, position), indices[0]))
    joint, single = evaluations
    assert joint.log_prob.keys() == single.log_prob.keys()
    for name, value in single.log_prob.items():
        assert float(joint.log_prob[name]) == pytest.approx(float(value), rel=1e-12), name
    assert torch.allclose(joint.mean_gradient, single.mean_gradient, rtol=1e-12, atol=1e-14)
    assert float(joint.mean_potential) == pytest.approx(float(single.mean_potential), rel=1e-12)


def test_a_model_may_compute_its_network_in_bfloat16() -> None:
    """Autocast inside the model is traced with it; weights, prior and gradient stay in single precision."""
    net = ps.SparseNet([3, 8, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0))

    def model(x: Tensor, y: Tensor, low: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            mean = net(x).squeeze(-1)
        assert mean.dtype == (torch.bfloat16 if low else torch.float32)
        with pyro.plate("data", len(X), subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean.to(y), 1.0), obs=y)

    gradients = []
    for low in (False, True):
        potential = make(functools.partial(model, low=low), (X.float(), Y.float()), 20)
        assert potential.kind == "traced"
        position = start(potential.spec, 0, 0, False)
        gradients.append(
            potential(position, potential.tempering(1.0, 0.5, 0.1, position), torch.arange(20)).mean_gradient
        )
    error = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert gradients[1].dtype == torch.float32 and 1e-6 < error < 0.03
