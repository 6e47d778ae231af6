"""SpikeSlab is the mixture law it says it is, in value, gradient and draws, in both floating types."""

import copy
import itertools
import pickle
from collections.abc import Callable

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from scipy import integrate, stats
from torch import Tensor

import pyro_sparse as ps

DTYPES = [torch.float32, torch.float64]
PAPER_REGRESSION = (1e-7, 1e-6**0.5, 1e-2**0.5)
PAPER_START = (1e-7, 5e-5**0.5, 1e-2**0.5)
PAPER_CIFAR = (1e-9, 6e-5**0.5, 4e-2**0.5)
EASY = (0.3, 0.5, 2.0)
LAWS = [PAPER_START, PAPER_REGRESSION, PAPER_CIFAR, EASY]

# By 40-digit arithmetic (design/method.md): law, weight, log density, inclusion probability, gradient of the log density.
RIGHT_VALUES = [
    (PAPER_START, 0.0064, 3.62320515369, 1.0628761e-8, -127.9999986),
    (PAPER_START, 0.05, -14.857226002, 0.99777938, -7.209516873),
    (PAPER_REGRESSION, 0.0064, -13.9131894751, 0.43897728, -3590.826339),
    (PAPER_REGRESSION, 3.0, -464.734449091, 1.0, -300.0),
    (PAPER_CIFAR, 0.05, -16.8506371948, 0.040220468, -799.8665524),
]
RIGHT_THRESHOLDS = [(PAPER_START, 0.0434298998899), (PAPER_REGRESSION, 0.00643821998238), (PAPER_CIFAR, 0.053677287444)]


def make(arguments: tuple[float, ...], dtype: torch.dtype = torch.float64) -> ps.SpikeSlab:
    return ps.SpikeSlab(*(torch.tensor(a, dtype=dtype) for a in arguments))


def gradient(law: ps.SpikeSlab, value: Tensor) -> Tensor:
    value = value.detach().requires_grad_()
    return torch.autograd.grad(law.log_prob(value).sum(), value)[0]


def density(law: ps.SpikeSlab) -> Callable[[float], float]:
    return lambda w: float(law.log_prob(torch.tensor(w, dtype=torch.float64)).exp())


def assert_close(got: Tensor, right: Tensor, tolerance: float) -> None:
    """Error relative to max(1, |value|), as method.md counts it."""
    error = (got.double() - right.double()).abs() / right.double().abs().clamp(min=1)
    assert float(error.max()) <= tolerance


def moments(unnormalised: Callable[[float], float]) -> tuple[float, float]:
    """Mean and standard deviation of a law on the line, by quadrature."""
    mass, first, second = (
        integrate.quad(lambda w, k=k: w**k * unnormalised(w), -12, 12, points=[-1, 0, 1], limit=500)[0]
        for k in range(3)
    )
    return first / mass, (second / mass - (first / mass) ** 2) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("law", "weight", "log_prob", "inclusion", "slope"), RIGHT_VALUES)
def test_right_values(
    law: tuple[float, ...], weight: float, log_prob: float, inclusion: float, slope: float, dtype: torch.dtype
) -> None:
    spike_slab, w = make(law, dtype), torch.tensor(weight, dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-9  # the table has 8 digits
    got = torch.stack([spike_slab.log_prob(w), spike_slab.inclusion_probability(w), gradient(spike_slab, w)])
    assert got.dtype is dtype
    assert_close(got, torch.tensor([log_prob, inclusion, slope], dtype=torch.float64), tolerance)
    assert float(got[1]) == pytest.approx(inclusion, rel=1e-5 if dtype is torch.float32 else 1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("law", "threshold"), RIGHT_THRESHOLDS)
def test_right_threshold(law: tuple[float, ...], threshold: float, dtype: torch.dtype) -> None:
    got = float(make(law, dtype).inclusion_threshold)
    assert got == pytest.approx(threshold, rel=1e-6 if dtype is torch.float32 else 1e-11)


@pytest.mark.parametrize("law", LAWS)
def test_single_precision_agrees_with_double_from_zero_far_out(law: tuple[float, ...]) -> None:
    positive = torch.cat([torch.zeros(1), torch.logspace(-8, 1.4771, 2000), torch.tensor([30.0])])
    weights = torch.cat([-positive, positive])
    single, double = make(law, torch.float32), make(law)
    for values in (single.log_prob, single.inclusion_probability, lambda w: gradient(single, w)):
        assert values(weights).isfinite().all()
    assert_close(single.log_prob(weights), double.log_prob(weights.double()), 1e-5)
    assert_close(single.inclusion_probability(weights), double.inclusion_probability(weights.double()), 1e-5)
    assert_close(gradient(single, weights), gradient(double, weights.double()), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_zero_the_gradient_is_zero(dtype: torch.dtype) -> None:
    assert float(gradient(make(PAPER_REGRESSION, dtype), torch.zeros((), dtype=dtype))) == 0.0


@pytest.mark.parametrize("law", LAWS)
def test_density_integrates_to_one_and_has_the_stated_moments(law: tuple[float, ...]) -> None:
    spike_slab = make(law)
    halves = [0.0, 5 * law[1], 5 * law[2], 20 * law[2]]
    for power, expected in ((0, 1.0), (2, float(spike_slab.variance))):
        pieces = [
            integrate.quad(lambda w, k=power: w**k * density(spike_slab)(w), a, b, epsabs=0, epsrel=1e-10, limit=500)[0]
            for a, b in itertools.pairwise(halves)
        ]
        assert 2 * sum(pieces) == pytest.approx(expected, rel=1e-7)
    assert float(spike_slab.mean) == 0.0  # the density is even: log_prob(w) = log_prob(-w)
    w = torch.linspace(0, 3 * law[2], 50, dtype=torch.float64)
    assert torch.equal(spike_slab.log_prob(w), spike_slab.log_prob(-w))


@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("law", [EASY, (0.02, 0.01, 1.0), (0.9, 0.1, 3.0)])
def test_draws_follow_the_density(law: tuple[float, ...], progress: float) -> None:
    """Kolmogorov-Smirnov on 20,000 draws against the integrated density; false alarms one in 1,000 for each case."""
    spike_slab = make((*law, 0.5 * (law[1] + law[2]))).at(progress)
    grid = np.sinh(np.linspace(-10, 10, 20_001)) / np.sinh(10) * 12 * law[2]
    heights = spike_slab.log_prob(torch.from_numpy(grid)).exp().numpy()
    cdf = integrate.cumulative_trapezoid(heights, grid, initial=0)
    assert cdf[-1] == pytest.approx(1, abs=1e-4)
    draws = spike_slab.sample((20_000,)).numpy()
    assert stats.kstest(draws, lambda w: np.interp(w, grid, cdf)).pvalue > 1e-3


def test_slab_and_spike_are_drawn_anew_for_each_weight() -> None:
    draws = ps.SpikeSlab(0.5, 1e-3, 1.0).expand([4]).sample((10_000,)).abs() > 0.01
    correlation = np.corrcoef(draws.numpy().T)
    assert np.abs(correlation - np.eye(4)).max() < 5 / 100


def test_hyper_parameters_may_differ_by_weight() -> None:
    slab_prob, spike, slab = torch.tensor([[0.1], [0.5]]), torch.tensor([0.1, 0.2, 0.3]), torch.tensor(2.0)
    law = ps.SpikeSlab(slab_prob, spike, slab)
    w = torch.tensor([0.05, 0.4, -1.0])
    assert law.batch_shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = ps.SpikeSlab(float(slab_prob[i, 0]), float(spike[j]), 2.0)
            assert float(law.log_prob(w)[i, j]) == pytest.approx(float(one.log_prob(w[j])), rel=1e-6)
            assert float(law.variance[i, j]) == pytest.approx(float(one.variance), rel=1e-6)
            assert float(law.inclusion_threshold[i, j]) == pytest.approx(float(one.inclusion_threshold), rel=1e-6)
    draws = law.sample((20_000,))
    assert draws.shape == (20_000, 2, 3)
    fourth = 3 * (slab_prob * slab**4 + (1 - slab_prob) * spike**4)
    error = (draws.square().mean(0) - law.variance) / ((fourth - law.variance**2) / 20_000).sqrt()
    assert float(error.abs().max()) < 5


def test_expand_and_to_event() -> None:
    law = ps.SpikeSlab(*EASY)
    wide = law.expand([3]).expand(torch.Size([2, 3]))
    event = wide.to_event(2)
    w = torch.randn(2, 3)
    assert isinstance(wide, ps.SpikeSlab) and wide.batch_shape == (2, 3) and wide.event_shape == ()
    assert event.batch_shape == () and event.event_shape == (2, 3)
    assert torch.equal(wide.log_prob(w), law.log_prob(w))
    assert torch.allclose(event.log_prob(w), law.log_prob(w).sum())
    assert event.sample((5,)).shape == (5, 2, 3)
    assert wide.mean.shape == wide.variance.shape == (2, 3)
    assert law.expand([2, 3]).log_prob(torch.tensor(0.1)).shape == (2, 3)
    with pytest.raises(RuntimeError):
        wide.expand([4])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda law: pickle.loads(pickle.dumps(law))])
def test_copies_are_the_same_law(duplicate: Callable[[ps.SpikeSlab], ps.SpikeSlab]) -> None:
    law = ps.SpikeSlab(0.3, 0.1, 1.0, 0.5).expand([3]).at(0.25)
    twin = duplicate(law)
    w = torch.linspace(-2, 2, 3)
    assert twin.batch_shape == law.batch_shape
    assert torch.equal(twin.log_prob(w), law.log_prob(w))
    assert torch.equal(twin.at(0.0).log_prob(w), law.at(0.0).log_prob(w))


def test_to_changes_the_floating_type() -> None:
    law = ps.SpikeSlab(0.3, 0.1, 1.0, 0.5).expand([3]).at(0.25)
    double = law.to(torch.float64)
    assert double.sample().dtype is double.mean.dtype is double.inclusion_threshold.dtype is torch.float64
    assert double.batch_shape == (3,) and double.progress == 0.25
    assert law.sample().dtype is torch.float32
    w = torch.linspace(-2, 2, 3)
    assert torch.allclose(double.log_prob(w.double()).float(), law.log_prob(w))


@pytest.mark.parametrize("law", [*LAWS, (0.3, 0.1, 1.0)])
def test_inclusion_is_one_half_at_the_threshold(law: tuple[float, ...]) -> None:
    spike_slab = make(law)
    threshold = spike_slab.inclusion_threshold
    assert float(spike_slab.inclusion_probability(threshold)) == pytest.approx(0.5, abs=1e-9)
    assert float(spike_slab.inclusion_probability(1.01 * threshold)) > 0.5


@pytest.mark.parametrize("law", [*LAWS, (0.9, 0.5, 1.0)])
def test_inclusion_is_the_slabs_share_of_the_density(law: tuple[float, ...]) -> None:
    w = np.linspace(0, 4 * law[1], 9)
    slab = law[0] * stats.norm.pdf(w, scale=law[2])
    spike = (1 - law[0]) * stats.norm.pdf(w, scale=law[1])
    got = make(law).inclusion_probability(torch.from_numpy(w)).numpy()
    assert got == pytest.approx(slab / (slab + spike), rel=1e-8)


def test_threshold_is_zero_where_every_weight_is_included() -> None:
    law = ps.SpikeSlab(0.9, 0.5, 1.0)
    assert float(law.inclusion_threshold) == 0.0
    assert float(law.inclusion_probability(torch.tensor(0.0))) > 0.5


@pytest.mark.parametrize(("slab_prob", "limit"), [(1e-300, 0.1), (1 - 1e-16, 2.0)])
def test_limits_are_spike_and_slab_alone(slab_prob: float, limit: float) -> None:
    w = torch.linspace(-0.5, 0.5, 11, dtype=torch.float64)
    law = make((slab_prob, 0.1, 2.0))
    assert torch.allclose(law.log_prob(w), dist.Normal(0.0, limit).log_prob(w), atol=1e-12)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("progress", [0.0, 0.25, 0.5, 1.0])
def test_at_moves_the_spike_linearly_in_the_variance(progress: float, tensor: bool) -> None:
    law = ps.SpikeSlab(0.3, 0.1, 1.0, 0.5)
    moved = law.at(torch.tensor(progress) if tensor else progress)
    variance = (1 - progress) * 0.5**2 + progress * 0.1**2
    w = torch.linspace(-2, 2, 9)
    assert float(moved.current_spike_scale) == pytest.approx(variance**0.5, rel=1e-6)
    assert torch.allclose(moved.log_prob(w), ps.SpikeSlab(0.3, variance**0.5, 1.0).log_prob(w), rtol=1e-5)
    assert float(law.current_spike_scale) == pytest.approx(0.1)
    assert float(law.at(0.9).at(moved.progress).current_spike_scale) == float(moved.current_spike_scale)


def test_progress_survives_every_change_of_shape() -> None:
    law = ps.SpikeSlab(0.3, 0.1, 1.0, 0.5).at(0.0)
    for changed in (law.expand([2]), law.expand([2]).to(torch.float64), law.expand([2]).to_event(1).base_dist):
        assert changed.current_spike_scale.allclose(torch.tensor(0.5, dtype=changed.slab_scale.dtype))
        assert float(changed.inclusion_threshold.max()) == pytest.approx(float(law.inclusion_threshold))


def test_initial_spike_defaults_to_the_final_one() -> None:
    law = ps.SpikeSlab(*EASY)
    assert float(law.at(0.0).current_spike_scale) == float(law.current_spike_scale) == 0.5


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.1, 1.0), r"slab_prob must lie in \(0, 1\), got 0$"),
        ((1.0, 0.1, 1.0), r"slab_prob must lie in \(0, 1\), got 1$"),
        ((-0.1, 0.1, 1.0), r"slab_prob must lie in \(0, 1\), got -0.1$"),
        ((NAN, 0.1, 1.0), r"slab_prob must lie in \(0, 1\), got nan$"),
        ((0.3, 0.0, 1.0), r"^spike_scale must be > 0, got 0$"),
        ((0.3, -0.1, 1.0), r"^spike_scale must be > 0, got -0.1$"),
        ((0.3, NAN, 1.0), r"^spike_scale must be > 0, got nan$"),
        ((0.3, 0.1, 1.0, 0.05), r"^initial_spike_scale must be >= spike_scale, got 0.05$"),
        ((0.3, 0.1, 1.0, NAN), r"^initial_spike_scale must be >= spike_scale, got nan$"),
        ((0.3, 0.1, 0.1), r"^slab_scale must be .*> spike_scale and initial_spike_scale, got 0.1$"),
        ((0.3, 0.1, 1.0, 1.0), r"^slab_scale must be .*> spike_scale and initial_spike_scale, got 1$"),
        ((0.3, 0.1, NAN), r"^slab_scale must be .*> spike_scale and initial_spike_scale, got nan$"),
        ((0.3, 0.1, INF), r"^slab_scale must be finite .*, got inf$"),
        ((0.3, torch.tensor([0.1, -2.0]), 1.0), r"^spike_scale must be > 0, got -2$"),
    ],
)
def test_validation_names_argument_rule_and_value(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.SpikeSlab(*arguments, validate_args=True)
    ps.SpikeSlab(*arguments, validate_args=False)


def test_value_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError):
        ps.SpikeSlab(*EASY, validate_args=True).log_prob(torch.tensor(NAN))


def test_in_a_pyro_module() -> None:
    class Net(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = PyroModule[torch.nn.Linear](3, 1, bias=False)
            self.linear.weight = PyroSample(ps.SpikeSlab(*EASY).expand([1, 3]).to_event(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    trace = pyro.poutine.trace(Net()).get_trace(torch.ones(2, 3))
    trace.compute_log_prob()
    node = trace.nodes["linear.weight"]
    assert node["value"].shape == (1, 3)
    assert float(node["log_prob_sum"]) == pytest.approx(float(ps.SpikeSlab(*EASY).log_prob(node["value"]).sum()))


def test_nuts_matches_the_posterior_by_quadrature() -> None:
    """Thirty independent copies of one weight under one observation; means of copies give the standard error."""

    def model() -> None:
        with pyro.plate("copies", 30):
            w = pyro.sample("w", ps.SpikeSlab(*EASY))
            pyro.sample("y", dist.Normal(w, 1.0), obs=torch.full((30,), 1.5))

    mcmc = MCMC(NUTS(model), num_samples=200, warmup_steps=60, disable_progbar=True)
    mcmc.run()
    draws = mcmc.get_samples()["w"]
    prior = density(make(EASY))
    mean, deviation = moments(lambda w: prior(w) * stats.norm.pdf(1.5, w, 1.0))
    for got, expected in ((draws, mean), ((draws - mean) ** 2, deviation**2)):
        copies = got.mean(0)
        error = float(copies.std()) / 30**0.5
        assert error < 0.1 * expected, "not mixing: the copies disagree"
        assert abs(float(copies.mean()) - expected) < 5 * error, "biased"


def test_svi_learns_the_slabs_conjugate_posterior() -> None:
    data = 3.0 + torch.randn(50)

    def model() -> None:
        w = pyro.sample("w", ps.SpikeSlab(0.3, 0.05, 2.0))
        with pyro.plate("data", 50):
            pyro.sample("y", dist.Normal(w, 1.0), obs=data)

    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.99}), Trace_ELBO(num_particles=2))
    losses = [svi.step() for _ in range(300)]
    assert np.isfinite(losses).all()
    precision = 50 + 1 / 2.0**2
    assert float(guide.median()["w"]) == pytest.approx(float(data.sum()) / precision, abs=0.05)
    assert float(guide.scales.w.detach()) == pytest.approx(precision**-0.5, rel=0.15)
