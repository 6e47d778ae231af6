"""anneal: reproducible, in law, disclosed in its trace, and refusing what it cannot run, with the fix in the message."""

import itertools
import json
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference import inspection, sampler
from pyro_sparse.inference.inspection import inspect
from pyro_sparse.inference.potential import Potential

Model = Callable[..., Any]

LAW = ps.SpikeSlab(0.3, 0.1, 1.0, 0.3)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(20, 3, generator=GENERATOR)
Y = X[:, 0] + 0.5 * torch.randn(20, generator=GENERATOR)
N = len(X)
QUICK = ps.PriorAnnealing(5, 5, 5, 10, learning_rate=1e-3)


def linear(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def network(prior: ps.SpikeSlab | None = LAW) -> tuple[ps.SparseNet, Callable[..., None]]:
    net = ps.SparseNet([3, 2, 1], prior=prior)

    def model(x: Tensor, y: Tensor) -> None:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return net, model


def quick(model: Callable[..., Any] = linear, data: Any = (X, Y), **options: Any) -> ps.Run:
    return ps.anneal(model, data, **{"schedule": QUICK, "num_draws": 5, "progress": False, **options})


# Reproducibility


@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_same_seed_gives_the_same_bits(batch_size: int | None) -> None:
    _, model = network()
    runs = []
    for seed, global_seed in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(global_seed)
        runs.append(quick(model, batch_size=batch_size, seed=seed, num_chains=2).draws)
    assert torch.equal(runs[0], runs[1])
    assert not torch.isclose(runs[0], runs[2]).any()


@pytest.mark.parametrize("train_steps", [0, 5])
def test_chains_differ_and_do_not_depend_on_their_number(train_steps: int) -> None:
    _, model = network()
    schedule = ps.PriorAnnealing(train_steps, 5, 5, 5, learning_rate=1e-3)
    three, one = (quick(model, schedule=schedule, num_chains=n, batch_size=5).draws for n in (3, 1))
    assert torch.allclose(three[:1], one, rtol=1e-4, atol=1e-6)
    for a, b in itertools.combinations(three, 2):
        assert not torch.isclose(a[-1], b[-1]).any()


def subsampling(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    with pyro.plate("data", len(x), subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])


@pytest.mark.parametrize(
    ("model", "batch_size"), [(network()[1], 5), (network()[1], None), (linear, 5), (linear, None), (subsampling, None)]
)
def test_chains_together_are_those_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, model: Model, batch_size: int | None
) -> None:
    schedule = ps.PriorAnnealing(5, 5, 5, 0, 30, learning_rate=1e-3, weight_decay=0.1)
    calls: list[int] = []
    of_chains = Potential.of_chains

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        found = of_chains(*arguments)
        assert found is not None
        return found

    monkeypatch.setattr(Potential, "of_chains", counted)
    together = quick(model, (X, Y), schedule=schedule, num_chains=3, batch_size=batch_size)
    assert calls == [1]
    monkeypatch.setattr(sampler, "TOGETHER", 0)
    apart = quick(model, (X, Y), schedule=schedule, num_chains=3, batch_size=batch_size)
    assert calls == [1]
    assert torch.allclose(together.draws, apart.draws, rtol=1e-4, atol=1e-6)
    for name, values in apart.trace["sample_stats"].data_vars.items():
        assert np.allclose(together.trace["sample_stats"][name], values, rtol=1e-3, equal_nan=True), name
    for name, values in apart.history.data_vars.items():
        assert np.allclose(together.history[name], values, rtol=1e-3), name
    one = together.chain(1)
    assert torch.equal(one.draws, together.draws[1:2]) and torch.equal(one.positions, together.positions[1:2])
    assert one.trace["posterior"].sizes["chain"] == 1 and one.history.sizes["chain"] == 1
    assert np.array_equal(one.history["loss"], together.history["loss"][1:2])
    with pytest.raises(ValueError, match="number must be one of the 3 chains, counted from 0, got 3"):
        together.chain(3)


def test_chains_of_a_model_with_dropout_run_one_after_the_other() -> None:
    dropout = nn.Dropout(0.5)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", len(X), subsample_size=len(x)):
            pyro.sample("y", dist.Normal(dropout(x) @ w, 1.0), obs=y)

    two, one = (quick(model, (X, Y), num_chains=n, batch_size=5).draws for n in (2, 1))
    assert torch.equal(two[:1], one)


def test_the_first_chain_starts_from_the_networks_weights_and_the_others_afresh_where_it_trains() -> None:
    net, model = network()
    still = {"learning_rate": 1e-12, "temperature": 0.0}
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    first, second = quick(model, schedule=ps.PriorAnnealing(5, 0, 0, 5, **still), num_chains=2).positions
    assert torch.allclose(first, weights, atol=1e-6)
    assert float((second - weights).abs().min()) > 1e-5 and float(second.abs().max()) < 1
    first, second = quick(model, schedule=ps.PriorAnnealing(0, 0, 0, 5, **still), num_chains=2).positions
    assert torch.allclose(first, weights, atol=1e-6) and torch.allclose(second, weights, atol=1e-6)


def test_sites_without_a_network_start_at_the_initial_spike_and_the_median() -> None:
    wide = ps.SpikeSlab(1e-3, 0.01, 5.0, 3.0)

    def model(y: Tensor) -> None:
        pyro.sample("w", wide.expand([2000]).to_event(1))
        sigma = pyro.sample("sigma", dist.LogNormal(1.0, 0.3))
        pyro.sample("y", dist.Normal(0.0, sigma).expand(y.shape).to_event(1), obs=y)

    run = quick(model, (Y,), schedule=ps.PriorAnnealing(1, 0, 0, 0, learning_rate=1e-12), num_draws=1)
    values = run.spec.layout.constrained(run.positions[0])
    assert float(values["w"].std()) == pytest.approx(3.0, rel=5 / 4000**0.5)
    assert float(values["sigma"]) == pytest.approx(np.e, rel=0.2)


# What it refuses


def pyro_model(body: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        body(x @ w, y)

    return model


def in_plate(size: int | None, subsample: bool = True) -> Callable[[Tensor, Tensor], Any]:
    def body(mean: Tensor, y: Tensor) -> None:
        options = {"subsample_size": len(y)} if subsample else {}
        with pyro.plate("rows", size if size else len(y), **options):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return pyro_model(body)


def without_plate(mean: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def with_local_latent(mean: Tensor, y: Tensor) -> None:
    with pyro.plate("rows", N, subsample_size=len(y)):
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean + offset, 1.0), obs=y)


def with_discrete_latent(mean: Tensor, y: Tensor) -> None:
    flip = pyro.sample("flip", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(mean * flip, 1.0).to_event(1), obs=y)


def with_slash(mean: Tensor, y: Tensor) -> None:
    pyro.sample("a/b", dist.Normal(0.0, 1.0))
    without_plate(mean, y)


def with_registered_parameter(mean: Tensor, y: Tensor) -> None:
    scale = pyro.param("scale", nn.Parameter(torch.ones(())))
    without_plate(mean * scale, y)


def with_sampled_hyper_parameter(mean: Tensor, y: Tensor) -> None:
    slab_prob = pyro.sample("slab_prob", dist.Beta(1.0, 1.0))
    v = pyro.sample("v", ps.SpikeSlab(slab_prob, 0.1, 1.0))
    without_plate(mean + v, y)


def with_two_floating_types(mean: Tensor, y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    without_plate(mean + v.float(), y)


def with_infinite_start(mean: Tensor, y: Tensor) -> None:
    v = pyro.param("v", torch.tensor(float("inf")))
    without_plate(mean + v, y)


def with_two_subsample_sizes(mean: Tensor, y: Tensor) -> None:
    for name, size in (("first", 5), ("second", 10)):
        with pyro.plate(name, N, subsample_size=size) as i:
            pyro.sample(f"y_{name}", dist.Normal(mean[i], 1.0), obs=y[i])


def with_fixed_subsample(mean: Tensor, y: Tensor) -> None:
    with pyro.plate("rows", N, subsample_size=5) as i:
        pyro.sample("y", dist.Normal(mean[i], 1.0), obs=y[i])


def with_a_column_for_a_response(mean: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(mean, 1.0), obs=y[:, None])


def nothing_latent(x: Tensor, y: Tensor) -> None:
    without_plate(x[:, 0], y)


def nothing_observed(mean: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1))


def blank(row: int, value: float) -> Tensor:
    x = X.clone()
    x[row, 1] = value
    return x


NAN, INF = float("nan"), float("inf")
FIX = rf"write `with pyro.plate\('data', {N}, subsample_size=len\(x\)\):` around it"
REFUSED: dict[str, tuple[Callable[..., Any], Any, dict[str, Any], str]] = {
    "no plate": (
        pyro_model(without_plate),
        (X, Y),
        {"batch_size": 5},
        f"site 'y' must stand in a plate over the rows.*{FIX}",
    ),
    "response of another shape": (
        pyro_model(with_a_column_for_a_response),
        (X, Y),
        {},
        rf"response of site 'y' must have the shape of its distribution, \({N},\), got \({N}, 1\): squeeze",
    ),
    "wrong plate size": (in_plate(100), (X, Y), {"batch_size": 5}, rf"plate of size 20, got \{{'rows': 100\}}: {FIX}"),
    "wrong plate size, full batch": (in_plate(100), (X, Y), {}, rf"plate of size 20, got \{{'rows': 100\}}: {FIX}"),
    "plate of the batch": (
        in_plate(None, subsample=False),
        (X, Y),
        {"batch_size": 5},
        r"plate 'rows' must weigh each row of a batch of 5 by 4 at site 'y', got 1: write pyro.plate\('rows', 20, subsample",
    ),
    "local latent": (
        pyro_model(with_local_latent),
        (X, Y),
        {"batch_size": 5},
        "'offset' must stand outside .* plate 'rows'",
    ),
    "discrete latent": (
        pyro_model(with_discrete_latent),
        (X, Y),
        {},
        "site 'flip' is discrete: enumerate or marginalise it",
    ),
    "slash": (pyro_model(with_slash), (X, Y), {}, r"site names must not contain '/'.*got \['a/b'\]"),
    "registered parameter": (
        pyro_model(with_registered_parameter),
        (X, Y),
        {},
        "'scale' is a torch.nn.Parameter.*ps.sparsify",
    ),
    "sampled hyper-parameter": (
        pyro_model(with_sampled_hyper_parameter),
        (X, Y),
        {},
        "slab_prob of site 'v' must be a number or a constant tensor, got one that is sampled",
    ),
    "two floating types": (
        pyro_model(with_two_floating_types),
        (X, Y),
        {},
        "one floating type, got .*float32.*float64",
    ),
    "infinite start": (pyro_model(with_infinite_start), (X, Y), {}, r"start values must be finite.* at sites \['v'\]"),
    "two subsample sizes": (pyro_model(with_two_subsample_sizes), (X, Y), {}, r"one subsample_size, got \[5, 10\]"),
    "batch size beside the model's own": (
        pyro_model(with_fixed_subsample),
        (X, Y),
        {"batch_size": 10},
        "batch_size must be None or 5, the model's own subsample_size, got 10",
    ),
    "nothing latent": (nothing_latent, (X, Y), {}, "model must have a latent site"),
    "nothing observed": (
        pyro_model(nothing_observed),
        (X, Y),
        {},
        r"model must have an observed site \(obs=...\), got none",
    ),
    "response left out": (linear, (X,), {}, "was it called without its response"),
    "NaN": (linear, (blank(7, NAN), Y), {}, r"data\[0\] must be finite, got NaN or infinity in row 7"),
    "infinity": (linear, (X, -INF * Y.abs()), {}, r"data\[1\] must be finite, got NaN or infinity in row 0"),
    "unequal rows": (linear, (X, Y[:-1]), {}, r"same number of rows, got \[20, 19\]"),
    "no rows": (linear, (X[:0], Y[:0]), {}, r"data\[0\] must have at least one row, got shape \(0, 3\)"),
    "a number": (linear, (torch.tensor(1.0), Y), {}, r"data\[0\] must have at least one row, got shape \(\)"),
    "batch size 0": (linear, (X, Y), {"batch_size": 0}, r"batch_size must lie in \[1, 20\].*got 0"),
    "batch size above N": (linear, (X, Y), {"batch_size": 21}, r"batch_size must lie in \[1, 20\].*got 21"),
    "no draws": (
        linear,
        (X, Y),
        {"num_draws": 0},
        r"num_draws must lie in \[1, 10\], the steps of the last phase, got 0",
    ),
    "too many draws": (linear, (X, Y), {"num_draws": 11}, r"num_draws must lie in \[1, 10\].*got 11"),
    "no chains": (linear, (X, Y), {"num_chains": 0}, "num_chains must be >= 1, got 0"),
    "too few names": (linear, (X, Y), {"input_names": ["a", "b"]}, "input_names must be 3 different names.*got 2"),
    "names twice": (linear, (X, Y), {"input_names": ["a", "b", "a"]}, "input_names must be 3 different names"),
    "unstable": (
        linear,
        (X, Y),
        {"schedule": ps.PriorAnnealing(1, 1, 1, 10, learning_rate=2.0)},
        r"at site 'w' \(num_data 20\); it must stay under 3.8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_run(name: str) -> None:
    """With batches of 5 the model is looked at with 10 rows."""
    model, data, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        quick(model, data, **options)


@pytest.mark.parametrize("name", [name for name, (_, _, options, _) in REFUSED.items() if "batch_size" in options])
def test_refused_in_the_same_words_where_it_is_looked_at_with_all_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(model: Model, data: tuple[Tensor, ...], batch_size: int | None, seed: int) -> Any:
        return inspection.trace_at_start(model, data, seed, 0), data

    monkeypatch.setattr(inspection, "_first_look", whole)
    test_refused_before_the_run(name)


@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_model_is_given_two_batches_of_rows_at_most(num_chains: int) -> None:
    seen: set[int] = set()

    def counting(x: Tensor, y: Tensor | None = None) -> None:
        seen.add(len(x))
        linear(x, y)

    for schedule in (QUICK, ps.PriorAnnealing(5, 5, 5, 0, 10, learning_rate=1e-3)):
        quick(counting, batch_size=5, num_chains=num_chains, schedule=schedule)
    assert seen == {5, 10}
    seen.clear()
    quick(counting, batch_size=10, num_chains=num_chains)  # all rows are two batches
    assert seen == {10, 20}


def test_a_model_that_draws_its_own_rows_is_given_them_all() -> None:
    """And with the same size given, after one try with two batches."""
    seen: set[int] = set()

    def counting(x: Tensor, y: Tensor) -> None:
        seen.add(len(x))
        subsampling(x, y)

    own, given = (quick(counting, batch_size=size) for size in (None, 5))
    assert seen == {10, N} and own.spec.subsamples_itself and given.spec.subsamples_itself
    assert torch.equal(own.draws, given.draws)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": X, "y": Y}, "data must be a tuple of tensors or arrays.*got dict"),
        ((X, None), r"data\[1\] must be a tensor or an array, got NoneType"),
        ((X, [1.0] * N), r"data\[1\] must be a tensor or an array, got list"),
    ],
)
def test_data_are_tensors_or_arrays(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quick(linear, data)


def test_on_all_rows_no_plate_is_needed_and_a_factor_will_do() -> None:
    def by_factor(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        pyro.factor("likelihood", -0.5 * ((y - x @ w) ** 2).sum())

    plated = quick(in_plate(N), seed=1)
    for model in (pyro_model(without_plate), in_plate(None, subsample=False), by_factor):
        assert torch.allclose(quick(model, seed=1).draws, plated.draws, rtol=1e-4, atol=1e-6)


def test_arrays_and_a_single_tensor_are_data() -> None:
    tensors, arrays = quick(), quick(data=[X.numpy(), Y.numpy()])
    assert torch.equal(tensors.draws, arrays.draws)

    def location(y: Tensor) -> None:
        pyro.sample("y", dist.Normal(pyro.sample("w", LAW), 1.0).expand(y.shape).to_event(1), obs=y)

    assert quick(location, Y).spec.num_data == N


# What goes wrong on the way


def overflowing(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("offset", LAW)
    pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)


def test_a_run_that_diverges_stops_with_step_site_remedy_and_last_values() -> None:
    schedule = ps.PriorAnnealing(1000, 0, 0, 0, learning_rate=50.0)
    message = r"of '\w+'.* became NaN or infinite at step \d+ \(train step \d+\): lower learning_rate \(50\)"
    with pytest.raises(ps.NonFiniteError, match=message) as caught:
        quick(overflowing, schedule=schedule, num_draws=1)
    error = caught.value
    assert 3 < error.step < 1000 and error.run is None
    assert set(error.values) == {"w", "offset"} and all(v.isfinite().all() for v in error.values.values())
    assert float(error.values["w"].abs().max()) > 1e3
    assert isinstance(error, ArithmeticError)


@pytest.mark.parametrize("together", [False, True])
def test_a_later_chain_that_diverges_keeps_the_earlier_ones(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """At weights of zero the gradient is zero: the first chain stays where it is, the second runs away.

    One after the other the first has ended by then; together all stop.
    """
    monkeypatch.setattr(sampler, "TOGETHER", sampler.TOGETHER if together else 0)
    net, model = network()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    schedule = ps.PriorAnnealing(2_000, 0, 0, 0, learning_rate=50.0)
    with pytest.raises(ps.NonFiniteError, match=r"at step \d+ \(train step \d+\): lower learning_rate") as caught:
        quick(model, (X, 0 * Y), schedule=schedule, num_chains=3)
    earlier = caught.value.run
    assert all(v.isfinite().all() for v in caught.value.values.values())
    assert float(max(v.abs().max() for v in caught.value.values.values())) > 1e3
    if together:
        assert earlier is None
        return
    assert earlier is not None and earlier.draws.shape[:2] == (1, 5)
    assert not earlier.draws.any() and earlier.trace["posterior"].sizes["chain"] == 1


def test_a_density_that_is_nan_from_the_start_blames_the_data_and_the_start() -> None:
    def broken(y: Tensor) -> None:
        w = pyro.sample("w", LAW)
        pyro.sample("y", dist.Normal(w, 1.0).expand(y.shape).mask(y > -INF).to_event(1), obs=y)
        pyro.factor("penalty", torch.where(w == w, 0 * w / 0, w))

    message = (
        r"log density of 'penalty' became NaN or infinite at step 0 \(train step 0\): check the data and the model's"
    )
    with pyro.validation_enabled(False), pytest.raises(ps.NonFiniteError, match=message):
        quick(broken, Y)


def test_minibatch_heat_is_estimated_and_warned_of() -> None:
    """A normal mean, N = 10,000, m = 500: learning_rate × N × Var(g) / (2 friction × m) = .1 at learning rate 1e-3."""
    y = torch.randn(10_000, 300, generator=torch.Generator().manual_seed(1))

    def means(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(300), 1.0).to_event(1))
        with pyro.plate("data", 10_000, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)

    def heat(learning_rate: float, temperature: float, batch_size: int | None = 500) -> float:
        schedule = ps.PriorAnnealing(0, 0, 0, 0, 30, learning_rate=learning_rate, sample_temperature=temperature)
        run = quick(means, (y,), schedule=schedule, num_draws=30, batch_size=batch_size)
        return float(run.trace["sample_stats"]["minibatch_temperature"].mean())

    right = 1e-3 * float(y.var(0).mean()) / (2 * 0.1) * 10_000 / 500  # ten pairs of batches are distinct
    with pytest.warns(
        UserWarning, match=r"minibatch noise adds up to 0\.\d+ to the temperature 0.1 .*lower learning_rate"
    ):
        assert heat(1e-3, 0.1) == pytest.approx(right, rel=5 * (2 / 3_000) ** 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert heat(4e-3, 10.0) == pytest.approx(4 * right, rel=5 * (2 / 3_000) ** 0.5)
        assert heat(1e-3, 0.1, batch_size=None) == 0.0


def test_kinetic_temperature_is_the_one_of_the_discrete_chain() -> None:
    """A normal mean of curvature k: (1 - a/2) E v² / e = tau (1 - a/2) / (1 - a/2 - e k / 4), here 1.15 tau."""
    y = torch.randn(10, 2_000, generator=torch.Generator().manual_seed(1))

    def means(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2_000), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 1_500, learning_rate=0.4, friction=0.2, sample_temperature=0.7)
    run = quick(means, (y,), schedule=schedule, num_draws=20, num_chains=2)
    found = run.trace["sample_stats"]["kinetic_temperature"].values
    assert found.shape == (2, 20)
    exact = 0.7 * 0.9 / (0.9 - 0.4 / 10 * 11 / 4)
    # 76,000 nearly independent squares (75 steps apart, friction .2): five standard errors, the first draw left out.
    assert found[:, 1:].mean() == pytest.approx(exact, rel=5 * (2 / 76_000) ** 0.5)


def test_the_bar_shows_phase_loss_and_kept_weights(capsys: pytest.CaptureFixture[str]) -> None:
    quick(progress=True)
    bar = capsys.readouterr().err
    assert all(word in bar for word in ("cool", "loss", "kept", "step/s", "25/25"))
    quick(progress=True, schedule=ps.PriorAnnealing(5, 0, 0, 0))
    bar = capsys.readouterr().err
    assert "train" in bar and "loss" in bar and "kept" not in bar  # by a prior that is not there
    quick(progress=False)
    assert not any(capsys.readouterr())


# What it leaves behind


@pytest.fixture(scope="module")
def run() -> ps.Run:
    pyro.clear_param_store()
    schedule = ps.PriorAnnealing(5, 5, 5, 6, 40, learning_rate=1e-3, sample_temperature=0.5, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ps.anneal(linear, (X, Y), schedule, 5, num_draws=8, num_chains=2, seed=7, progress=False)


def test_posterior_holds_every_site_on_its_support(run: ps.Run) -> None:
    posterior = run.trace["posterior"]
    assert dict(posterior.sizes) == {"chain": 2, "draw": 8, "w_dim_0": 3}
    assert posterior["w"].dims == ("chain", "draw", "w_dim_0") and posterior["sigma"].dims == ("chain", "draw")
    assert (posterior["sigma"] > 0).all()
    assert np.array_equal(posterior["w"].values, run.draws[..., :3].numpy())
    assert np.allclose(posterior["sigma"].values, run.draws[..., 3].exp().numpy())
    assert torch.equal(run.draws[:, -1], run.positions)


def test_sample_stats_hold_every_control_of_each_draw(run: ps.Run) -> None:
    statistics = run.trace["sample_stats"]
    assert statistics["step"].values.tolist() == 2 * [list(range(25, 61, 5))]  # evenly over the last phase, to its end
    for chain, draw in itertools.product(range(2), range(8)):
        one = statistics.isel(chain=chain, draw=draw)
        controls = run.schedule.at(int(one["step"]))
        assert {name: float(one[name]) for name in ps.Controls._fields} == pytest.approx(controls._asdict())
    kept = (run.draws[..., :3].abs() > LAW.inclusion_threshold).sum(-1)
    assert np.array_equal(statistics["num_kept"].values, kept.numpy())
    assert np.isfinite(statistics["loss"].values).all()


def test_loss_is_the_mean_negative_log_likelihood() -> None:
    run = quick(schedule=ps.PriorAnnealing(10, 0, 0, 0, learning_rate=1e-12), num_draws=1)
    values = run.spec.layout.constrained(run.positions[0])
    right = -dist.Normal(X @ values["w"], values["sigma"]).log_prob(Y).mean()
    assert float(run.trace["sample_stats"]["loss"][0, 0]) == pytest.approx(float(right), rel=1e-5)


def test_the_trace_discloses_its_target(run: ps.Run) -> None:
    for node in (run.trace, run.trace["posterior"], run.trace["sample_stats"]):
        attributes = node.attrs
        assert attributes["phase"] == "sample" and attributes["is_posterior"] == 1
        assert attributes["temperature"] == 0.5 and attributes["prior_power"] == attributes["spike_progress"] == 1.0
        assert attributes["num_data"] == N and attributes["batch_size"] == 5 and attributes["seed"] == 7
        assert attributes["torch_version"] == torch.__version__ and attributes["pyro_version"] == pyro.__version__
        assert attributes["inference_library"] == "pyro_sparse"
        schedule = json.loads(attributes["schedule"])
        assert ps.PriorAnnealing(**{**schedule, "learning_rate_drops": ()}) == run.schedule
    cooled = quick().trace.attrs
    assert cooled["phase"] == "cool" and cooled["is_posterior"] == 0
    assert cooled["temperature"] == pytest.approx(QUICK.temperature / 10) and cooled["batch_size"] == N


@pytest.mark.filterwarnings("ignore::DeprecationWarning:arviz")
def test_arviz_reads_it(run: ps.Run, optional_import: Callable[[str], ModuleType]) -> None:
    az = optional_import("arviz")
    data = ps.to_arviz(run)
    summary = az.summary(data)
    assert list(summary.index) == ["w[0]", "w[1]", "w[2]", "sigma"]
    assert np.isfinite(summary[["mean", "sd", "ess_bulk"]].to_numpy(dtype=float)).all()
    expected = run.trace["posterior"]["sigma"].mean()
    assert float(summary.loc["sigma", "mean"]) == pytest.approx(float(expected), abs=1e-3)
    for statistic in (az.rhat(data), az.ess(data)):
        assert float(statistic["sigma"]) > 0 and statistic["w"].shape == (3,)
    for plot in (az.plot_trace, az.plot_forest):
        plot(data)
        assert plt.get_fignums()
        plt.close("all")
    assert type(ps.to_arviz(run.trace)) is type(data)


def test_priors_of_the_run_are_the_ones_in_force() -> None:
    net, model = network(prior=None)
    run = quick(model)
    right = ps.default_prior(net.module, N)
    assert set(run.priors) == set(right)
    for name, law in run.priors.items():
        for argument in ("slab_prob", "spike_scale", "slab_scale", "initial_spike_scale"):
            assert torch.equal(getattr(law, argument), getattr(right[name], argument))
    assert net.priors == {}  # the user's network keeps its prior unset


def test_the_run_prints_what_it_is(run: ps.Run) -> None:
    assert repr(run) == "Run(2 chains, 8 draws from the sample phase, 4 coordinates)"


def test_uncovered_parameters_are_sampled_flat_and_never_counted() -> None:
    net = ps.sparsify(nn.Sequential(nn.Linear(3, 1)), LAW, where=lambda name, parameter: "weight" in name)

    def model(x: Tensor, y: Tensor) -> None:
        mean = net(x).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    layout = inspect(model, (X, Y + 50), None, 0).layout
    assert [(site.name, site.kind) for site in layout.sites] == [("0.weight", "spike_slab"), ("0.bias", "param")]
    schedule = ps.PriorAnnealing(0, 0, 0, 200, learning_rate=0.02, temperature=0.0)
    run = quick(model, (X, Y + 50), schedule=schedule)
    assert float(run.trace["posterior"]["0.bias"][0, -1, 0]) == pytest.approx(50, abs=0.5)  # no prior pulls it to zero
    assert int(run.trace["sample_stats"]["num_kept"].max()) <= 3


# In law


def test_a_conjugate_posterior_is_sampled() -> None:
    """500 normal means at temperature 1 and full batch: mean and standard deviation of each posterior."""
    y = torch.randn(20, 500, generator=torch.Generator().manual_seed(2)) + 1.0

    def means(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(torch.zeros(500), 2.0).to_event(1))
        with pyro.plate("data", 20, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0).to_event(1), obs=y)

    precision, step_size, friction = 20 + 1 / 2.0**2, 2e-3, 0.3
    schedule = ps.PriorAnnealing(200, 0, 0, 0, 1000, learning_rate=20 * step_size, friction=friction)
    draws = torch.tensor(quick(means, (y,), schedule=schedule, num_draws=10).trace["posterior"]["mu"].values[0])
    standardised = ((draws - y.sum(0) / precision) * precision**0.5).double().flatten()
    excess = 1 / (1 - step_size * precision / (2 * (2 - friction)))  # of the discrete chain, about 1 %
    assert abs(float(standardised.mean())) < 5 / 5000**0.5
    assert float(standardised.var()) == pytest.approx(excess, rel=5 * (2 / 5000) ** 0.5)
    assert stats.kstest(standardised.numpy() / excess**0.5, "norm").pvalue > 1e-3


def enumerated_inclusion(x: np.ndarray, y: np.ndarray, law: tuple[float, float, float]) -> np.ndarray:
    """Exact posterior inclusion probabilities of a linear model with unit noise, over all 2^p patterns."""
    patterns = np.array(list(itertools.product([False, True], repeat=x.shape[1])))
    log_weights = []
    for pattern in patterns:
        variance = np.where(pattern, law[2] ** 2, law[1] ** 2)
        covariance = np.eye(len(y)) + (x * variance) @ x.T
        prior = np.where(pattern, np.log(law[0]), np.log(1 - law[0])).sum()
        log_weights.append(prior + stats.multivariate_normal.logpdf(y, np.zeros(len(y)), covariance))
    weights = np.exp(np.array(log_weights) - max(log_weights))
    return (weights / weights.sum()) @ patterns


@pytest.mark.parametrize("num_inputs", [4, 7])
def test_inclusion_probabilities_are_those_of_enumeration(num_inputs: int) -> None:
    """1,500 independent chains in one position, on correlated inputs with effects from none to clear."""
    law, copies = (0.3, 0.1, 1.0), 1_500
    generator = np.random.default_rng(num_inputs)
    common = generator.normal(size=(30, 1))
    x = (generator.normal(size=(30, num_inputs)) + common) / 2**0.5
    effects = np.array([0.9, 0.5, 0.3, 0.0, -0.4, 0.0, 0.2])[:num_inputs]
    y = x @ effects + generator.normal(size=30)
    inputs, response = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", ps.SpikeSlab(*law).expand([num_inputs, copies]).to_event(2))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(2), obs=y[:, None].expand(-1, copies))

    schedule = ps.PriorAnnealing(0, 0, 0, 0, 2_500, learning_rate=30 * 1e-3)
    run = quick(model, (inputs, response), schedule=schedule, num_draws=250)
    settled = torch.tensor(run.trace["posterior"]["w"].values[0, 150:])
    got = ps.SpikeSlab(*law).inclusion_probability(settled).mean((0, 2)).numpy()
    right = enumerated_inclusion(x, y, law)
    assert 0.1 < right.min() < 0.5 < right.max()
    assert np.abs(got - right).max() <= 0.02, f"{got} where {right} is right"
