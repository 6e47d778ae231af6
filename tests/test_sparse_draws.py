"""Draws that hold only what they include: exact moments of every weight beside them, on disk, resumed, and in room."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference import sampler, store
from pyro_sparse.inference.conversion import to_datatree
from pyro_sparse.inference.store import num_bytes

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 40, generator=GENERATOR)
Y = 2 * X[:, 0] - X[:, 3] + 0.5 * torch.randn(60, generator=GENERATOR)
LAW = ps.SpikeSlab(0.05, 0.02, 1.0, 0.05)
SCHEDULE = ps.PriorAnnealing(20, 30, 30, 0, 100, learning_rate=2e-3)


def model(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", LAW.expand([40]).to_event(1))
    v = pyro.sample("v.weight", LAW.expand([2, 3]).to_event(2))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w + v.sum(), sigma), obs=y)


def annealed(schedule: ps.PriorAnnealing = SCHEDULE, **options: Any) -> ps.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ps.anneal(model, (X, Y), schedule, num_draws=25, num_chains=2, progress=False, **options)


@pytest.fixture(scope="module")
def whole() -> ps.Run:
    return annealed()


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ps.Run:
    return annealed(out=tmp_path_factory.mktemp("sparse") / "run.zarr", sparse_draws=True)


def included(run: ps.Run) -> Tensor:
    """The whole draws with zeros for what they do not include, by hand."""
    weights = run.draws[..., :46]
    probability = LAW.inclusion_probability(weights)
    return torch.cat([torch.where(probability > 0.5, weights, 0.0), run.draws[..., 46:]], -1)


def test_draws_hold_what_they_include_and_all_other_sites(whole: ps.Run, sparse: ps.Run) -> None:
    found = torch.stack([torch.stack([sparse.draws[chain, draw] for draw in range(25)]) for chain in range(2)])
    expected = included(whole)
    assert torch.equal(found, expected)
    assert 0.05 < float((expected[..., :46] != 0).double().mean()) < 0.5  # a test of both
    assert np.array_equal(sparse.trace["posterior"]["w"].values, expected[..., :40].numpy())
    assert np.array_equal(sparse.trace["posterior"]["sigma"].values, whole.trace["posterior"]["sigma"].values)
    assert torch.equal(sparse.positions, whole.positions)


def test_moments_are_those_of_whole_draws(whole: ps.Run, sparse: ps.Run) -> None:
    posterior = whole.trace["posterior"].to_dataset().astype(float)
    for name, groups in {"w": posterior["w"], "v.weight": posterior["v.weight"]}.items():
        expected = {
            "posterior_mean": groups.mean("draw"),
            "posterior_variance": groups.var("draw", ddof=1),
            "posterior_inclusion": (
                ("chain", *groups.dims[2:]),
                LAW.inclusion_probability(torch.as_tensor(groups.values)).mean(1),
            ),
        }
        for group, right in expected.items():
            found = sparse.trace[group][name]
            assert found.dims == ("chain", *groups.dims[2:])
            assert np.allclose(found, right[1] if isinstance(right, tuple) else right, rtol=2e-4, atol=1e-6)
    assert found.dims == ("chain", "v_out", "v_in")


def test_inclusion_selection_and_refit_are_those_of_whole_draws(whole: ps.Run, sparse: ps.Run) -> None:
    for name, right in ps.mipp(whole).items():
        assert np.allclose(ps.mipp(sparse)[name], right, atol=1e-5)
    found, expected = ps.select(sparse), ps.select(whole)
    assert all(torch.equal(mask, expected.masks[name]) for name, mask in found.masks.items())
    assert np.allclose(ps.mipp(sparse.chain(1))["w"], ps.mipp(whole)["w"][1:], atol=1e-5)
    assert torch.allclose(ps.refit(sparse, found).values["w"], ps.refit(whole, expected).values["w"], atol=1e-5)
    mean = (included(whole)[..., :40] @ X.T + included(whole)[..., 40:46].sum(-1, keepdim=True)).mean((0, 1))
    with pytest.warns(UserWarning, match="draws are sparse: predicted is the average of networks without the weights"):
        assert np.allclose(ps.predict(sparse, X)["mean"], mean, atol=1e-4)
    with pytest.warns(UserWarning, match="draws are sparse: the groups are of networks without"):
        to_datatree(sparse, ["log_likelihood"])


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on_to_the_same_moments(
    sparse: ps.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between a draw and the next checkpoint, when both moments and draws are ahead of it."""
    monkeypatch.setattr(store, "SECONDS", 0.0)
    monkeypatch.setattr(store, "PATIENCE", 0)
    before, look = sampler._Way._look, []

    def dying(self: Any, step: Any, number: int, *rest: Any) -> None:
        before(self, step, number, *rest)
        look.append(number)
        if number > 130 and number in self._draw_of:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sampler._Way, "_look", dying)
        patch.setattr(store.Store, "close", lambda self: self._lock.close())  # as a kill does
        annealed(out=tmp_path / "run.zarr", sparse_draws=True)
    partial = ps.load(tmp_path / "run.zarr", model, (X, Y))
    assert np.isfinite(ps.mipp(partial)["w"]).all()
    resumed = annealed(out=tmp_path / "run.zarr", sparse_draws=True, resume=True)
    for run in (resumed, ps.load(tmp_path / "run.zarr", model, (X, Y))):
        xr.testing.assert_equal(run.trace.load(), sparse.trace.load())


def test_room_is_that_of_the_included_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """100,000 weights, a tenth of them included: 13 % of the bytes, moments apart."""
    size, path = 100_000, tmp_path / "run.zarr"
    law = ps.SpikeSlab(0.1, 0.01, 1.0, 0.01).expand([size]).to_event(1)

    def prior() -> None:
        w = pyro.sample("w", law)
        with pyro.plate("data", 1):
            pyro.sample("y", dist.Normal(0.0 * w[0], 1.0), obs=torch.zeros(1))

    wide = ps.PriorAnnealing(0, 0, 0, 0, 40, learning_rate=1e-9)  # stays at its start: a tenth of the weights is wide
    start = torch.where(torch.rand(size, generator=GENERATOR) < 0.1, 1.0, 0.001) * torch.randn(
        size, generator=GENERATOR
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "start", lambda *arguments, **options: start.clone())
        run = ps.anneal(prior, (), wide, num_draws=40, out=path, sparse_draws=True)
    assert f"up to 22 MB go to {path}" in capfd.readouterr().err.replace("\n", " ")
    held = sum(file.stat().st_size for file in (path / "posterior" / "w").rglob("*"))
    share = float((run.draws[0, 0] != 0).double().mean())
    assert 0.05 < share < 0.11 and held < 1.6 * share * 4 * size * 40


def test_bytes_at_least_and_at_most() -> None:
    layout, like = annealed().spec.layout, torch.zeros(1)
    assert num_bytes(layout, like, 2, 10, sparse=False) == (4 * (2 * 10 * 48 + 12 * 47),) * 2
    assert num_bytes(layout, like, 2, 10, sparse=True) == (4 * (20 * 2 + 564 + 828), 4 * (20 * 48 + 564 + 828))


def test_a_model_without_a_sparse_site_has_none_to_leave_out(tmp_path: Path) -> None:
    def plain(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(40), 1.0).to_event(1))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    options: dict[str, Any] = {"schedule": SCHEDULE, "num_draws": 5, "progress": False}
    with pytest.raises(ValueError, match="sparse_draws must be False for a model without a spike-and-slab site"):
        ps.anneal(plain, (X, Y), out=tmp_path / "run.zarr", sparse_draws=True, **options)
    assert not (tmp_path / "run.zarr").exists()
    run = ps.anneal(plain, (X, Y), **options)
    assert ps.mipp(run).sizes["column"] == 0


def test_refusals(tmp_path: Path, sparse: ps.Run) -> None:
    with pytest.raises(ValueError, match="out must name a folder for sparse_draws=True"):
        annealed(sparse_draws=True)
    annealed(out=tmp_path / "run.zarr")
    with pytest.raises(ValueError, match="its sparse_draws is False, here it is True"):
        annealed(out=tmp_path / "run.zarr", sparse_draws=True, resume=True)
