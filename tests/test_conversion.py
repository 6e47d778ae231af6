"""Runs and any Pyro MCMC in ArviZ: values on their supports, log-likelihoods by hand, names of axes, every error."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc import StreamingMCMC
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_sparse as ps
from pyro_sparse.inference.conversion import to_datatree
from pyro_sparse.inference.layout import named_dims

ROOT = Path(__file__).parents[1]
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(50, 3, generator=GENERATOR)
Y = X[:, 0] + 0.5 * torch.randn(50, generator=GENERATOR)
LAW = ps.SpikeSlab(0.3, 0.1, 1.0, 0.3)
GROUPS = ("log_likelihood", "posterior_predictive")


def linear(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", 50, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def sampled(kernel: Any, num_chains: int = 2, num_samples: int = 20, model_data: Any = (X, Y)) -> MCMC:
    pyro.set_rng_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc = MCMC(kernel, num_samples, 20, num_chains=num_chains, disable_progbar=True)
        mcmc.run(*model_data)
    return mcmc


def annealed(model: Any = linear, data: Any = (X, Y), **options: Any) -> ps.Run:
    schedule = ps.PriorAnnealing(50, 20, 20, 0, 200, learning_rate=5e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ps.anneal(model, data, schedule, num_draws=20, num_chains=2, progress=False, **options)


@pytest.fixture(scope="module")
def run() -> ps.Run:
    return annealed(input_names=["a", "b", "c"])


@pytest.fixture(scope="module")
def nuts() -> MCMC:
    return sampled(NUTS(linear))


KERNELS: dict[str, Callable[[Any], Any]] = {
    "NUTS": NUTS,
    "HMC": lambda model: HMC(model, step_size=0.01, num_steps=3),
    "SGHMC": lambda model: ps.SGHMC(model, 1e-4, batch_size=10),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_draws_of_any_kernel_by_chain_on_their_supports(kernel: str) -> None:
    mcmc = sampled(KERNELS[kernel](linear), num_samples=5)
    tree = to_datatree(mcmc)
    samples = mcmc.get_samples(group_by_chain=True)
    posterior = tree["posterior"]
    assert dict(posterior.sizes) == {"chain": 2, "draw": 5, "w_dim_0": 3}
    for name, value in samples.items():
        assert np.array_equal(posterior[name].values, value.numpy())
    assert (posterior["sigma"] > 0).all() and posterior.attrs["inference_library"] == "pyro"
    assert ("sample_stats" in tree.children) == (kernel != "SGHMC")


def test_divergences_are_marked(nuts: MCMC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nuts, "_diagnostics", [{"divergences": [3]}, {"divergences": [0, 19]}])
    diverging = to_datatree(nuts)["sample_stats"]["diverging"].values
    assert diverging.shape == (2, 20) and np.argwhere(diverging).tolist() == [[0, 3], [1, 0], [1, 19]]


@pytest.mark.parametrize("which", ["run", "nuts"])
def test_log_likelihood_is_that_of_every_row_by_hand(which: str, request: pytest.FixtureRequest) -> None:
    tree = to_datatree(request.getfixturevalue(which), ["log_likelihood"])
    assert set(tree.children) >= {"posterior", "log_likelihood", "observed_data"}
    assert "posterior_predictive" not in tree.children
    posterior = tree["posterior"]
    w, sigma = (torch.as_tensor(posterior[name].values) for name in ("w", "sigma"))
    right = dist.Normal(w @ X.T, sigma[..., None]).log_prob(Y)
    assert tree["log_likelihood"]["y"].dims == ("chain", "draw", "y_dim_0")
    assert np.allclose(tree["log_likelihood"]["y"].values, right.numpy(), atol=1e-4)
    assert np.array_equal(tree["observed_data"]["y"].values, Y.numpy())


def test_groups_by_blocks_of_rows_and_of_a_model_that_subsamples_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", 50, subsample_size=20) as rows:
            pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])

    def masked(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", 50), pyro.poutine.mask(mask=x[:, 0] > 0):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    for model in (own, masked):
        monkeypatch.setattr("pyro_sparse.inference.conversion.BLOCK", 7 if model is own else 50)
        of = annealed(model)
        tree = to_datatree(of, ["log_likelihood"])
        w = torch.as_tensor(tree["posterior"]["w"].values)
        right = dist.Normal(w @ X.T, 1.0).log_prob(Y) * (1 if model is own else (X[:, 0] > 0))
        assert np.allclose(tree["log_likelihood"]["y"].values, right.numpy(), atol=1e-4)
        assert np.array_equal(tree["observed_data"]["y"].values, Y.numpy())


def test_sites_beside_the_rows_are_taken_once_and_scalars_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.tensor([1.0, 2.0, 0.5])

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        pyro.factor("penalty", -w.square().sum())
        with pyro.plate("others", 3):
            pyro.sample("z", dist.Normal(w, 1.0), obs=z)
        with pyro.plate("data", 50, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    monkeypatch.setattr("pyro_sparse.inference.conversion.BLOCK", 7)
    for source in (annealed(model), sampled(NUTS(model), 1, 3)):
        tree = to_datatree(source, ["log_likelihood"])
        assert set(tree["log_likelihood"].data_vars) == {"y", "z"}
        w = torch.as_tensor(tree["posterior"]["w"].values)
        assert np.allclose(tree["log_likelihood"]["z"], dist.Normal(w, 1.0).log_prob(z), atol=1e-4)
        assert np.allclose(tree["log_likelihood"]["y"], dist.Normal(w @ X.T, 1.0).log_prob(Y), atol=1e-4)
        assert np.array_equal(tree["observed_data"]["z"], z)


def test_predictive_draws_have_the_law_of_the_response_and_leave_the_generator_alone(run: ps.Run) -> None:
    state = torch.get_rng_state()
    tree = to_datatree(run, ["posterior_predictive"])
    assert torch.equal(torch.get_rng_state(), state)
    posterior, drawn = tree["posterior"], tree["posterior_predictive"]["y"].values
    standard = (drawn - posterior["w"].values @ X.numpy().T) / posterior["sigma"].values[..., None]
    assert drawn.shape == (2, 20, 50)
    assert abs(standard.mean()) < 5 / 2_000**0.5 and abs(standard.var() - 1) < 5 * (2 / 2_000) ** 0.5
    again = to_datatree(run, GROUPS)
    assert np.array_equal(again["posterior_predictive"]["y"].values, drawn)
    assert np.ptp(standard, 1).min() > 1 and not np.array_equal(drawn[0, 0], drawn[1, 0])


def test_several_responses_and_classes() -> None:
    labels = (Y > 0).long()

    def model(x: Tensor, y: Tensor, label: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", 50, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
            pyro.sample("label", dist.Bernoulli(logits=x @ w), obs=label.float())

    tree = to_datatree(annealed(model, (X, Y, labels), batch_size=10), GROUPS)
    for group in ("log_likelihood", "posterior_predictive", "observed_data"):
        assert set(tree[group].data_vars) == {"y", "label"}
    assert np.isin(tree["posterior_predictive"]["label"].values, (0, 1)).all()


def test_axes_are_named_by_their_layers_and_inputs_by_their_names(tmp_path: Path) -> None:
    net = ps.SparseNet([3, 4, 1])

    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", LAW.expand([3]).to_event(1))
        mean = net(x).squeeze(-1) + x @ slope
        with pyro.plate("data", 50, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    options: dict[str, Any] = {"batch_size": 10, "input_names": ["a", "b", "c"]}
    for run in (annealed(model, **options), annealed(model, **options, out=tmp_path / "run.zarr")):
        posterior = run.trace["posterior"]
        assert posterior["layer1.weight"].dims == ("chain", "draw", "layer1_out", "layer1_in")
        assert posterior["layer1.bias"].dims == ("chain", "draw", "layer1_out")
        assert posterior["layer2.weight"].dims == ("chain", "draw", "layer2_out", "layer2_in")
        for dim in ("layer1_in", "slope_dim_0"):
            assert posterior[dim].values.tolist() == ["a", "b", "c"]
        assert not {"layer1_out", "layer2_in"} & set(posterior.coords)
    pyro.set_rng_seed(0)
    dims = to_datatree(sampled(ps.SGHMC(model, 1e-5), num_samples=5))["posterior"]["layer1.weight"].dims
    assert dims == ("chain", "draw", "layer1_out", "layer1_in")


def test_sizes_that_contradict_each_other_share_no_axis() -> None:
    found = named_dims(
        {"a.weight": (4, 3), "a.bias": (5,), "b.weight": (8, 3, 5, 5), "weight": (2, 2), "c.scale": (3,)}
    )
    assert found == {
        "a.weight": ("a_out", "a_in"),
        "a.bias": ("a.bias_dim_0",),
        "b.weight": ("b_out", "b_in", "b_row", "b_column"),
        "weight": ("weight_dim_0", "weight_dim_1"),
        "c.scale": ("c.scale_dim_0",),
    }


def _named(site: str) -> Callable[..., Any]:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample(site, dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 50):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model


def _mixture(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 50):
        k = pyro.sample("k", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(w + k, 1.0), obs=y)


def _subset(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 50, subsample_size=10) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])


def _joint(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)


def _potential(values: dict[str, Tensor]) -> Tensor:
    return 0.5 * values["w"].square().sum()


FAULTS: dict[str, tuple[Callable[[], Any], tuple[str, ...], type[Exception], str]] = {
    "no source": (lambda: 3, (), TypeError, "source must be a Run, a DataTree or a pyro.infer.MCMC.*got int"),
    "streaming": (lambda: StreamingMCMC(NUTS(linear), 1), (), TypeError, "which keeps its draws, got StreamingMCMC"),
    "not run": (lambda: MCMC(NUTS(linear), 1), (), ValueError, "source must hold draws, but this MCMC was not run"),
    "a dim": (lambda: sampled(NUTS(_named("draw")), 1, 2), (), ValueError, "a site must not be called.*got 'draw'"),
    "a slash": (lambda: sampled(NUTS(_named("a/b")), 1, 2), (), ValueError, "nor have a '/' in its name, got 'a/b'"),
    "no group": (lambda: xr.DataTree(), ("prior",), ValueError, "groups must hold some of .* got .*prior"),
    "only a trace": (lambda: xr.DataTree(), GROUPS, TypeError, "source must be a Run or an MCMC for groups"),
    "marginalised": (
        lambda: sampled(NUTS(_mixture), 1, 2),
        GROUPS,
        ValueError,
        "but 'k' has none: was it marginalised",
    ),
    "a subset": (
        lambda: sampled(ps.SGHMC(_subset, 1e-4), 1, 2),
        GROUPS,
        ValueError,
        "groups need all rows at once.*got 'y'",
    ),
    "no plate": (
        lambda: sampled(NUTS(_joint), 1, 2),
        GROUPS,
        ValueError,
        "whose rows are independent, in a plate, got .*'y'",
    ),
    "a loader": (
        lambda: sampled(ps.SGHMC(linear, 1e-4), 1, 2, (DataLoader(TensorDataset(X, Y), 10),)),
        GROUPS,
        ValueError,
        "groups need all rows in memory, but this MCMC took them from a DataLoader",
    ),
    "no model": (
        lambda: _of_a_potential(),
        GROUPS,
        ValueError,
        "groups need the model, but the kernel of this MCMC was given a potential",
    ),
}


def _of_a_potential() -> MCMC:
    mcmc = MCMC(NUTS(potential_fn=_potential), 2, 2, initial_params={"w": torch.zeros(3)}, disable_progbar=True)
    mcmc.run()
    return mcmc


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_converted_is_named(fault: str) -> None:
    source, groups, kind, message = FAULTS[fault]
    made = source()
    with pytest.raises(kind, match=message):
        to_datatree(made, groups)


def test_streaming_statistics_of_sghmc() -> None:
    """Pyro's other driver takes the kernel too, and keeps moments instead of draws."""
    pyro.set_rng_seed(0)
    streaming = StreamingMCMC(ps.SGHMC(linear, 1e-4, batch_size=10), 50, 10, disable_progbar=True)
    streaming.run(X, Y)
    pyro.set_rng_seed(0)
    kept = MCMC(ps.SGHMC(linear, 1e-4, batch_size=10), 50, 10, disable_progbar=True)
    kept.run(X, Y)
    samples, statistics = kept.get_samples(), streaming.get_statistics(group_by_chain=False)
    for name, value in samples.items():
        assert torch.allclose(statistics[name]["mean"], value.mean(0), atol=1e-5)
        assert torch.allclose(statistics[name]["variance"], value.var(0), rtol=1e-3, atol=1e-7)


PYTHONS = {"here": sys.executable, "ArviZ 1": os.environ.get("ARVIZ_1_PYTHON")}


@pytest.mark.parametrize("which", PYTHONS)
def test_arviz_of_either_generation_reads_what_is_written(
    which: str, run: ps.Run, nuts: MCMC, tmp_path: Path, optional_import: Callable[[str], ModuleType]
) -> None:
    python = PYTHONS[which]
    if python is None:
        pytest.skip("ARVIZ_1_PYTHON names no Python with ArviZ 1.x, which this one may not have")
    optional_import("arviz")
    for name, source in (("run", run), ("nuts", nuts)):
        to_datatree(source, GROUPS).to_zarr(tmp_path / f"{name}.zarr")
    done = subprocess.run([python, ROOT / ".ci" / "arviz_contract.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["nuts.zarr", "run.zarr"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:arviz")
def test_the_installed_arviz_gets_its_own_type(
    run: ps.Run, nuts: MCMC, optional_import: Callable[[str], ModuleType]
) -> None:
    az = optional_import("arviz")
    expected = xr.DataTree if int(az.__version__.split(".")[0]) >= 1 else az.InferenceData
    for source in (run, run.trace, nuts):
        assert type(ps.to_arviz(source)) is expected
    assert az.loo(ps.to_arviz(run, "log_likelihood")) is not None
