"""SGHMC under pyro.infer.MCMC samples the posterior of the model at its temperature."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from torch import Tensor

import pyro_sparse as ps

N = 200
GENERATOR = torch.Generator().manual_seed(0)
Y = 1.5 + torch.randn(N, generator=GENERATOR)
X = torch.randn(N, 3, generator=GENERATOR)
Model = Callable[..., Any]


def normal_mean(y: Tensor) -> None:
    """50 independent copies of the mean of a normal law, posterior N(n ȳ / (n + 4), 1 / (n + 4)) each."""
    mean = pyro.sample("mean", dist.Normal(0.0, 0.5).expand([50]).to_event(1))
    with pyro.plate("copies", 50, dim=-2), pyro.plate("data", N, subsample_size=len(y), dim=-1):
        pyro.sample("y", dist.Normal(mean[:, None], 1.0), obs=y.expand(50, -1))


POSTERIOR_MEAN, POSTERIOR_VARIANCE = float(Y.sum()) / (N + 4), 1 / (N + 4)


def run(kernel: ps.SGHMC, num_samples: int, *data: Tensor, **options: Any) -> MCMC:
    options = {"warmup_steps": 0, "disable_progbar": True} | options
    mcmc = MCMC(kernel, num_samples=num_samples, **options)
    mcmc.run(*data)
    return mcmc


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_a_conjugate_posterior_at_a_temperature(temperature: float) -> None:
    """With epsilon k = .04 the discrete law is 1 % too wide; the other 4 % are noise, 5 standard errors of it."""
    kernel = ps.SGHMC(normal_mean, step_size=2e-4, friction=0.3, temperature=temperature, num_steps=10)
    mean = run(kernel, 150, Y, warmup_steps=20).get_samples()["mean"]
    assert mean.shape == (150, 50)
    sd = (temperature * POSTERIOR_VARIANCE) ** 0.5
    assert float(mean.mean()) == pytest.approx(POSTERIOR_MEAN, abs=5 * sd / (50 * 40) ** 0.5)
    assert float(mean.std()) == pytest.approx(sd, rel=0.05)


def test_minibatches_are_weighed_by_the_plate() -> None:
    """A tenth of the rows: the same mean; the variance gains learning_rate N Var(g) / (2 friction m), about a third."""
    kernel = ps.SGHMC(normal_mean, step_size=2e-5, friction=0.3, batch_size=20, num_steps=30)
    mean = run(kernel, 100, Y, warmup_steps=30).get_samples()["mean"]
    # All copies see the same batches, so their common error is that of one chain.
    assert float(mean.mean()) == pytest.approx(POSTERIOR_MEAN, abs=0.3 * POSTERIOR_VARIANCE**0.5)
    within = (mean - mean.mean(1, keepdim=True)).std() * (50 / 49) ** 0.5
    assert float(within) == pytest.approx(POSTERIOR_VARIANCE**0.5, rel=0.05)


def glm(x: Tensor, y: Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weight, sigma), obs=y)


def test_a_noise_scale_is_sampled_on_its_support() -> None:
    y = X @ torch.tensor([1.0, -1.0, 0.0]) + 0.5 * torch.randn(N, generator=GENERATOR)
    kernel = ps.SGHMC(glm, step_size=2e-4, friction=0.3, num_steps=5)
    samples = run(kernel, 300, X, y, warmup_steps=100).get_samples()
    rss = float((y - X @ torch.linalg.lstsq(X, y[:, None]).solution[:, 0]).square().sum())
    sigma = samples["sigma"]
    assert (sigma > 0).all()
    # log sigma is about N(log sqrt(rss / (N - 3)), 1 / 2N) in the posterior
    assert float(sigma.log().mean()) == pytest.approx(0.5 * torch.tensor(rss / (N - 3)).log().item(), abs=0.02)
    assert float(sigma.log().std()) == pytest.approx((2 * N) ** -0.5, rel=0.3)
    right = torch.linalg.inv(X.T @ X / 0.25 + torch.eye(3)).diagonal().sqrt()
    assert torch.allclose(samples["weight"].std(0), right, rtol=0.35)


def chains(seed: int, num_chains: int = 2, **options: Any) -> Tensor:
    pyro.set_rng_seed(seed)
    kernel = ps.SGHMC(normal_mean, step_size=2e-4, batch_size=20, **options)
    return run(kernel, 5, Y, num_chains=num_chains, mp_context="fork").get_samples(group_by_chain=True)["mean"]


@pytest.mark.filterwarnings("ignore:num_chains=2 is more than available_cpu")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_chains_differ_and_follow_the_seed(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another with one kernel object, or each in a worker of its own: the same chains."""
    monkeypatch.setattr("torch.multiprocessing.cpu_count", lambda: num_workers + 1)
    first = chains(0)
    assert first.shape == (2, 5, 50) and not torch.allclose(first[0], first[1])
    assert torch.equal(first, chains(0)) and not torch.equal(first, chains(1))
    assert torch.equal(first[0], chains(0, num_chains=1)[0])
    monkeypatch.setattr("torch.multiprocessing.cpu_count", lambda: 2)
    assert torch.equal(first, chains(0))


def test_num_steps_thins() -> None:
    every, third = (chains(0, num_chains=1, num_steps=steps)[0] for steps in (1, 3))
    assert torch.equal(third[0], every[2])
    assert not torch.equal(third[1], every[3])


def test_at_temperature_zero_it_finds_the_mode() -> None:
    kernel = ps.SGHMC(normal_mean, step_size=1e-3, temperature=0.0, num_steps=10)
    mean = run(kernel, 40, Y).get_samples()["mean"]
    assert torch.allclose(mean[-1], torch.tensor(POSTERIOR_MEAN), atol=1e-5)


def test_a_wrapped_model_has_a_tempered_prior() -> None:
    """Weights no data speak of: at progress .5 and full power they follow the half-way law; at power 0 nothing holds them."""
    law = ps.SpikeSlab(0.999, 0.1, 1.0, 0.5)

    def model(y: Tensor) -> None:
        pyro.sample("w", law.expand([400]).to_event(1))
        pyro.sample("y", dist.Normal(0.0, 1.0).expand(y.shape).to_event(1), obs=y)

    for power, sd in ((1.0, 1.0), (0.25, 2.0)):
        kernel = ps.SGHMC(ps.annealed(power, 0.5)(model), step_size=0.03, friction=0.3, num_steps=20)
        w = run(kernel, 30, Y[:10], warmup_steps=20).get_samples()["w"]
        assert float(w.std()) == pytest.approx(sd, rel=0.05)


def test_start_values_can_be_given() -> None:
    start = torch.full((50,), 3.0)
    kernel = ps.SGHMC(normal_mean, step_size=1e-12)
    mean = run(kernel, 1, Y, initial_params={"mean": start}).get_samples()["mean"]
    assert torch.allclose(mean[0], start, atol=1e-3)
    kernel = ps.SGHMC(glm, step_size=1e-12)
    start_of_glm = {"weight": torch.ones(3), "sigma": torch.tensor(0.7).log()}  # on the unconstrained scale
    samples = run(kernel, 1, X, Y, initial_params=start_of_glm).get_samples()
    assert float(samples["sigma"]) == pytest.approx(0.7, rel=1e-3)


def test_a_networks_start_is_its_parameters() -> None:
    net = ps.SparseNet([3, 2, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0, 0.5))

    def model(x: Tensor, y: Tensor) -> None:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    samples = run(ps.SGHMC(model, step_size=1e-14), 1, X, Y).get_samples()
    assert torch.allclose(samples["layer1.weight"][0], net.module.layer1.weight.detach(), atol=1e-4)


def test_cleanup_may_come_twice_and_the_driver_gets_what_it_expects() -> None:
    kernel = ps.SGHMC(normal_mean, step_size=2e-4)
    kernel.cleanup()
    kernel.setup(0, Y)
    kernel.sample(kernel.initial_params)
    assert set(kernel.logging()) == {"step size", "potential"}
    assert all(isinstance(value, str) for value in kernel.logging().values())
    assert kernel.diagnostics() == {"divergences": {}}
    kernel.cleanup()
    kernel.cleanup()
    run(ps.SGHMC(normal_mean, step_size=2e-4), 4, Y).summary()


def test_a_network_that_blows_up_says_so() -> None:
    with pytest.raises(ArithmeticError, match=r"NaN or infinite at step \d+: lower step_size \(10\)"):
        run(ps.SGHMC(normal_mean, step_size=10.0), 200, Y)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("step_size", 0.0, "be > 0"),
        ("step_size", float("nan"), "be > 0"),
        ("friction", 0.0, r"lie in \(0, 1\]"),
        ("friction", 1.1, r"lie in \(0, 1\]"),
        ("temperature", -1.0, "be >= 0"),
        ("num_steps", 0, "be >= 1"),
    ],
)
def test_arguments_are_checked(name: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must {rule}, got {value}"):
        ps.SGHMC(normal_mean, **({"step_size": 1e-3} | {name: value}))


def test_keyword_arguments_of_the_model_are_refused() -> None:
    kernel = ps.SGHMC(normal_mean, step_size=1e-3)
    with pytest.raises(TypeError, match=r"must be given by position, got \['y'\]"):
        kernel.setup(0, y=Y)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size must lie in \[1, 200\]"):
        ps.SGHMC(normal_mean, step_size=1e-3, batch_size=500).setup(0, Y)
