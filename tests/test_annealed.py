"""annealed tempers spike-and-slab sites, as stated, and nothing else, under any of Pyro's handlers and inferences."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta
from scipy import integrate, stats

import pyro_sparse as ps

LAW = ps.SpikeSlab(0.3, 0.1, 1.0, 0.5)
OTHER = ps.SpikeSlab(0.01, 0.02, 3.0, 2.0)
ETA, U = 0.5, 0.3


def model() -> None:
    """Two spike-and-slab sites with scales of their own, one of them in a plate, beside sites of every other kind."""
    pyro.sample("noise", dist.HalfNormal(1.0))
    pyro.sample("w", LAW.expand([3]).to_event(1))
    pyro.sample("seen", LAW, obs=torch.tensor(0.4))
    with pyro.plate("units", 10, subsample_size=5):
        pyro.sample("v", OTHER)
        pyro.sample("intercept", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.ones(5))


def log_probs(wrapped: Callable[[], Any], values: poutine.Trace) -> dict[str, float]:
    trace = poutine.trace(poutine.replay(wrapped, values)).get_trace()
    trace.compute_log_prob()
    return {name: float(node["log_prob_sum"]) for name, node in trace.nodes.items() if node["type"] == "sample"}


def of_site(fn: Callable[[], dist.Distribution], wrap: Callable[[Any], Any]) -> tuple[float, torch.Tensor]:
    """The log density of the only site of a model, handlers applied, and the value it was taken at."""

    def single() -> None:
        pyro.sample("w", fn())

    values = poutine.trace(single).get_trace()
    return log_probs(wrap(single), values)["w"], values.nodes["w"]["value"]


def messages(record: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in record if "annealed met no spike-and-slab site" in str(w.message)]


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(("eta", "u"), [(0.5, 0.3), (0.0, 0.0), (1.0, 0.0), (0.25, 1.0), (0.7, None)])
def test_scales_spike_and_slab_sites_only(eta: float, u: float | None, tensors: bool) -> None:
    values = poutine.trace(model).get_trace()
    arguments = [a if a is None or not tensors else torch.tensor(a) for a in (eta, u)]
    before, after = log_probs(model, values), log_probs(ps.annealed(*arguments)(model), values)
    progress = 1.0 if u is None else u
    for name, law, plate in (("w", LAW, 1), ("v", OTHER, 2)):
        right = eta * plate * float(law.at(progress).log_prob(values.nodes[name]["value"]).sum())
        assert after.pop(name) == pytest.approx(right, rel=1e-5)
        before.pop(name)
    assert after == before  # to the last bit: an observed spike-and-slab site is likelihood


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda law: law.to_event(2),
        lambda law: law.mask(torch.tensor([True, False, True])),
        lambda law: law.mask(torch.tensor([True, False, True])).to_event(1),
        lambda law: law.to_event(1).mask(False),
        lambda law: dist.ExpandedDistribution(law, torch.Size([4, 2, 3])),
        lambda law: law.to_event(1).expand([4, 2]),
        lambda law: law.mask(True).expand([4, 2, 3]).to_event(2),
    ],
)
def test_wrappers_are_rebuilt(wrapper: Callable[[ps.SpikeSlab], Any]) -> None:
    base = LAW.expand([2, 3])
    got, value = of_site(lambda: wrapper(base), ps.annealed(ETA, U))
    right = ETA * wrapper(base.at(U)).log_prob(value).sum()
    assert got == pytest.approx(float(right), rel=1e-5)


def test_nested_powers_multiply_and_the_outermost_progress_wins() -> None:
    for handlers, power, progress in (
        ([(0.5, 0.2), (0.4, 0.9)], 0.2, 0.9),
        ([(0.5, 0.2), (0.4, None)], 0.2, 0.2),
        ([(0.5, 0.2), (1.0, 0.6), (0.5, 0.1)], 0.25, 0.1),
    ):

        def nest(inner: Callable[[], Any], handlers: Any = handlers) -> Callable[[], Any]:
            for arguments in handlers:  # the last one is outermost
                inner = ps.annealed(*arguments)(inner)
            return inner

        got, value = of_site(lambda: LAW, nest)
        assert got == pytest.approx(float(power * LAW.at(progress).log_prob(value)), rel=1e-5)


@pytest.mark.parametrize("order", [1, -1])
def test_composes_with_scale_and_mask_in_either_order(order: int) -> None:
    mask = torch.tensor([True, False, True])

    def nest(inner: Callable[[], Any]) -> Callable[[], Any]:
        for handler in [ps.annealed(ETA, U), poutine.scale(scale=3.0), poutine.mask(mask=mask)][::order]:
            inner = handler(inner)
        return inner

    got, value = of_site(lambda: LAW.expand([3]), nest)
    assert got == pytest.approx(float(3 * ETA * LAW.at(U).log_prob(value)[mask].sum()), rel=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda: dist.TransformedDistribution(LAW, [dist.transforms.AffineTransform(1.0, 2.0)]),
        lambda: dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), LAW.expand([2])),
        lambda: dist.TransformedDistribution(LAW, [dist.transforms.AffineTransform(1.0, 2.0)]).expand([3]).to_event(1),
        lambda: dist.MaskedMixture(torch.tensor(True), LAW, dist.Normal(0.0, 1.0)),
    ],
)
def test_a_law_inside_another_distribution_is_an_error(fn: Callable[[], dist.Distribution]) -> None:
    with pytest.raises(ValueError, match=r"a SpikeSlab inside a \w+ cannot be annealed: use it alone or inside"):
        of_site(fn, ps.annealed(ETA, U))


@pytest.mark.parametrize("name", ["prior_power", "spike_progress"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_arguments_lie_in_the_unit_interval(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\], got {value}"):
        ps.annealed(**{name: value})


def test_leaving_without_having_met_a_site_warns() -> None:
    def easy() -> None:
        pyro.sample("w", LAW)

    kernel = NUTS(easy)
    with pytest.warns(UserWarning, match=r"annealed met no .*wrap the model"), ps.annealed(ETA):
        MCMC(kernel, num_samples=1, warmup_steps=0, disable_progbar=True).run()
    handler = ps.annealed(ETA)
    with handler:
        easy()
    with pytest.warns(UserWarning, match="annealed met no"), handler:  # each block by itself
        pass
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        MCMC(NUTS(ps.annealed(ETA)(easy)), num_samples=1, warmup_steps=0, disable_progbar=True).run()
        with ps.annealed(ETA):
            poutine.trace(model).get_trace()
        with pytest.raises(KeyError), ps.annealed(ETA):
            raise KeyError
    assert not messages(record)


def test_a_call_inside_a_call_keeps_the_count() -> None:
    wrapped = ps.annealed(ETA)

    @wrapped
    def easy() -> None:
        pyro.sample("w", LAW)

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        easy()
        easy()
    assert not messages(record)


def test_svi_inside_the_block_sees_the_tempered_prior() -> None:
    def regression() -> None:
        w = pyro.sample("w", LAW)
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.8))

    guide = AutoDelta(regression)
    svi = SVI(regression, guide, pyro.optim.SGD({"lr": 0.0}), Trace_ELBO())
    with ps.annealed(ETA, U):
        loss = svi.evaluate_loss()
    w = guide.median()["w"]
    right = dist.Normal(w, 1.0).log_prob(torch.tensor(0.8)) + ETA * LAW.at(U).log_prob(w)
    assert loss == pytest.approx(-float(right), rel=1e-5)


def test_predictive_inside_the_block_draws_from_the_moved_spike() -> None:
    law = ps.SpikeSlab(1e-6, 0.1, 1.0, 0.9)
    with ps.annealed(ETA, 0.0):
        draws = Predictive(lambda: pyro.sample("w", law.expand([5_000]).to_event(1)), num_samples=1)()["w"]
    assert float(draws.std()) == pytest.approx(0.9, rel=5 / 100)


def test_nuts_on_the_wrapped_model_matches_the_tempered_law() -> None:
    """Thirty independent copies of one weight; the law by quadrature of likelihood × prior at u to the power eta."""
    law = ps.SpikeSlab(0.3, 0.1, 2.0, 0.5)

    def copies() -> None:
        with pyro.plate("copies", 30):
            w = pyro.sample("w", law)
            pyro.sample("y", dist.Normal(w, 1.0), obs=torch.full((30,), 1.5))

    mcmc = MCMC(NUTS(ps.annealed(ETA, U)(copies)), num_samples=200, warmup_steps=60, disable_progbar=True)
    mcmc.run()
    grid = np.linspace(-8, 8, 20_001)
    prior = law.to(torch.float64).at(U).log_prob(torch.from_numpy(grid)).numpy()
    tempered = np.exp(ETA * prior + stats.norm.logpdf(1.5, grid, 1.0))
    mass, first, second = (integrate.trapezoid(grid**k * tempered, grid) for k in range(3))
    mean, variance = first / mass, second / mass - (first / mass) ** 2
    draws = mcmc.get_samples()["w"]
    for got, expected in ((draws, mean), ((draws - mean) ** 2, variance)):
        means = got.mean(0)
        error = float(means.std()) / 30**0.5
        assert error < 0.1 * expected, "not mixing: the copies disagree"
        assert abs(float(means.mean()) - expected) < 5 * error, "biased"
