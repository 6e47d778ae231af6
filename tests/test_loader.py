"""Data from a DataLoader: every row once an epoch, the same batches again, refusals by name, and what a run does with them."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import pyro_sparse as ps
from pyro_sparse.inference.minibatch import LoaderBatches

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X[:, 0] + 0.5 * torch.randn(60, generator=GENERATOR)
LAW = ps.SpikeSlab(0.3, 0.1, 1.0, 0.3)
CPU = torch.device("cpu")
SCHEDULE = ps.PriorAnnealing(10, 10, 10, 0, 30, learning_rate=1e-3)


def model(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", LAW.expand([3]).to_event(1))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def loader(batch_size: int = 10, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size, shuffle=shuffle, **options)


def annealed(data: Any, **options: Any) -> ps.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ps.anneal(model, data, SCHEDULE, num_draws=10, progress=False, **options)


class Augmented(Dataset[Any]):
    """Rows with noise of their own each time, from PyTorch's global generator."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return X[row] + 0.1 * torch.randn(3), Y[row]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"generator": torch.Generator()},
        {"shuffle": False, "sampler": RandomSampler(range(60), generator=torch.Generator())},
        {"num_workers": 1},
        {"batch_sampler": BatchSampler(RandomSampler(range(60), generator=torch.Generator()), 10, False)},
    ],
)
def test_batches_are_a_function_of_seed_chain_and_step(options: dict[str, Any]) -> None:
    """Every row once an epoch; again the same from a new object, in order or from the middle; generators as they were."""
    plain = {} if "batch_sampler" in options else {"batch_size": 10, "shuffle": True}
    given = DataLoader(Augmented(), **(plain | options))
    sampler = options.get("sampler") or getattr(options.get("batch_sampler"), "sampler", None)
    own = options.get("generator") or getattr(sampler, "generator", None)
    states = torch.get_rng_state(), None if own is None else own.get_state()
    batches = LoaderBatches(given, 3, 0, CPU)
    steps = [batches(step) for step in range(12)]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert own is None or torch.equal(own.get_state(), states[1])
    for epoch in (0, 1):
        seen = torch.cat([y for _, y in steps[6 * epoch : 6 * epoch + 6]])
        assert torch.equal(seen.sort().values, Y.sort().values)
    assert not torch.equal(steps[0][1], steps[6][1]) and not torch.equal(steps[0][1], Y[:10])
    again = LoaderBatches(given, 3, 0, CPU)
    for step in (8, 9, 2):  # forward, on, back
        assert all(torch.equal(one, other) for one, other in zip(again(step), steps[step], strict=True))
    for other in (LoaderBatches(given, 4, 0, CPU), LoaderBatches(given, 3, 1, CPU)):
        assert not torch.equal(other(0)[1], steps[0][1])


def test_a_short_last_batch_is_left_out() -> None:
    batches = LoaderBatches(loader(25), 0, 0, CPU)
    assert [len(batches(step)[0]) for step in range(5)] == 5 * [25]
    assert LoaderBatches(loader(25, drop_last=True), 0, 0, CPU)._of_epoch == 2
    with pytest.warns(UserWarning, match="the last 10 rows are never seen, as .* does not shuffle: shuffle=True"):
        ps.anneal(model, loader(25, shuffle=False), SCHEDULE, num_draws=2, progress=False)


def test_the_posterior_is_that_of_the_data_in_memory() -> None:
    """The exact posterior of a normal model under a normal prior; minibatch noise widens it a little."""

    def conjugate(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    precision = X.T @ X / 0.25 + torch.eye(3)
    exact = torch.linalg.solve(precision, X.T @ Y / 0.25)
    schedule = ps.PriorAnnealing(0, 0, 0, 0, 2_600, learning_rate=1.5e-3)
    run = ps.anneal(conjugate, loader(20), schedule, num_draws=650, progress=False)
    draws = run.draws[0, 50:].double()
    sd = precision.inverse().diagonal().sqrt().double()
    # 2,400 steps, each chain forgets in 2 / friction = 20: some 120 draws' worth, five standard errors; a tenth for batches.
    assert ((draws.mean(0) - exact).abs() < 5 * sd / 120**0.5).all()
    assert ((draws.std(0) / sd - 1).abs() < 5 / (2 * 120) ** 0.5 + 0.1).all()
    assert np.isfinite(run.trace["sample_stats"]["minibatch_temperature"]).all()


def test_a_run_from_a_loader_goes_the_whole_way(tmp_path: Path) -> None:
    run = annealed(loader(), num_chains=2, out=tmp_path / "run.zarr")
    assert run.trace.attrs["num_data"] == 60 and run.trace.attrs["batch_size"] == 10
    structure = ps.select(run)
    assert ps.predict(run, X[:5])["mean"].shape == (5,)
    with pytest.raises(
        ValueError, match="data must hold all rows in memory to refit a run that took them from a DataLoader"
    ):
        ps.refit(run, structure)
    fit = ps.refit(run, structure, data=(X, Y))
    right = ps.refit(annealed((X, Y), batch_size=10, num_chains=2), structure)
    assert torch.allclose(fit.values["w"], right.values["w"], atol=1e-6)
    with pytest.raises(ValueError, match="groups need all rows in memory"):
        ps.to_arviz(run, ["log_likelihood"])
    loaded = ps.load(tmp_path / "run.zarr", model, loader())
    assert torch.equal(loaded.positions, run.positions)
    with pytest.raises(ValueError, match="holds another run: its data_hash"):
        ps.load(tmp_path / "run.zarr", model, DataLoader(TensorDataset(X + 1, Y), 10, shuffle=True))


def test_of_a_sampler_of_some_rows_those_are_the_data() -> None:
    """A plate of 40 of the 60 rows; counted are they also where the last batch is short."""

    def some(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", 40, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    rows = SubsetRandomSampler(range(40))
    for data in (
        DataLoader(TensorDataset(X, Y), 10, sampler=rows),
        DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(rows, 10, False)),
    ):
        run = ps.anneal(some, data, SCHEDULE, num_draws=2, progress=False)
        assert run.trace.attrs["num_data"] == 40
    batches = LoaderBatches(DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(rows, 15, False)), 0, 0, CPU)
    assert [len(batches(step)[0]) for step in range(4)] == 4 * [15]
    seen = torch.cat([batches(step)[1] for step in (0, 1)])
    assert len(seen.unique()) == 30 and np.isin(seen, Y[:40]).all()


class Stopping(Dataset[Any]):
    """Raises at the so manyth row that it is asked for."""

    def __init__(self, last: int) -> None:
        self.last, self.asked = last, 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        if self.asked > self.last:
            raise OSError("the disk with the images is gone")
        return X[row], Y[row]


def test_a_loader_that_raises_leaves_the_draws_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    expected = annealed(DataLoader(Stopping(10**9), 10, shuffle=True), num_chains=2)
    broken = DataLoader(Stopping(900), 10, shuffle=True)
    with pytest.raises(OSError, match="images is gone") as caught:
        annealed(broken, num_chains=2, out=tmp_path / "run.zarr")
    (note,) = caught.value.__notes__
    assert "raised by the DataLoader, asked for batch" in note
    mended = DataLoader(Stopping(10**9), 10, shuffle=True)
    assert len(ps.load(tmp_path / "run.zarr", model, mended).trace["posterior"]["draw"]) > 0
    found = annealed(mended, num_chains=2, out=tmp_path / "run.zarr", resume=True)
    assert torch.equal(found.positions, expected.positions)
    assert np.array_equal(found.trace["posterior"]["w"], expected.trace["posterior"]["w"])


def test_nan_in_a_batch_is_named_with_its_row() -> None:
    class Faulty(Dataset[Any]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
            return X[row], Y[row] if row != 41 else torch.tensor(torch.nan)

    faulty = DataLoader(Faulty(), 10, sampler=[*range(40), *range(59, 39, -1)])
    message = (
        r"at step 5 \(.*the DataLoader gave NaN or infinity in row 8 of argument 1 of this batch: mend its dataset"
    )
    with pytest.raises(ps.NonFiniteError, match=message) as caught:
        annealed(faulty)
    assert caught.value.values["w"].isfinite().all()


def test_sghmc_under_pyros_driver_takes_a_loader() -> None:
    pyro.set_rng_seed(0)
    mcmc = pyro.infer.MCMC(ps.SGHMC(model, 1e-4), 20, 5, disable_progbar=True)
    mcmc.run(loader())
    assert mcmc.get_samples()["w"].shape == (20, 3)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X[0], Y[0])] * 60)


def _ragged(rows: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    return (x.double() if bool((y == Y[59]).any()) else x), y


FAULTS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a size": (
        loader(),
        {"batch_size": 5},
        ValueError,
        "batch_size must be None for a DataLoader, which has its own, got 5",
    ),
    "no length": (DataLoader(Endless(), 10), {}, ValueError, "a DataLoader of a dataset that has a length"),
    "few rows": (loader(100), {}, ValueError, "at least one full batch, got 60 rows for batches of 100"),
    "weights": (
        DataLoader(TensorDataset(X, Y), 10, sampler=WeightedRandomSampler([1.0] * 60, 60)),
        {},
        ValueError,
        "gives each row once an epoch, got a WeightedRandomSampler",
    ),
    "replacement": (
        DataLoader(TensorDataset(X, Y), 10, sampler=RandomSampler(range(60), replacement=True)),
        {},
        ValueError,
        "gives each row once an epoch, got a RandomSampler",
    ),
    "no batches": (
        DataLoader(TensorDataset(X, Y), batch_size=None),
        {},
        ValueError,
        "that makes batches, got batch_size=None",
    ),
    "lasting workers": (loader(num_workers=1, persistent_workers=True), {}, ValueError, "got persistent_workers=True"),
    "no tensors": (DataLoader([{"x": 1.0}] * 60, 10), {}, TypeError, "must give tensors, .*got dict"),
    "other batches": (
        loader(10, shuffle=False, collate_fn=_ragged),
        {},
        ValueError,
        r"every batch of the DataLoader must be as its first, .*float64.* at step 5",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_loaders_that_cannot_serve_are_named(fault: str) -> None:
    data, options, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message):
        annealed(data, **options)


def test_a_plate_of_another_size_is_named() -> None:
    def small(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", LAW.expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    with pytest.raises(ValueError, match=r"observed site 'y' must stand in a plate of size 60, got .*'data': 10"):
        ps.anneal(small, loader(), SCHEDULE, num_draws=1, progress=False)
