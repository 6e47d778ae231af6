"""Augmentation inside the step: a function of seed, chain and step, of training batches alone, and part of what a run is."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_sparse as ps
from pyro_sparse.inference import step as steps
from pyro_sparse.inference import store
from pyro_sparse.inference.inspection import inspect
from pyro_sparse.inference.minibatch import Batches

N = 60
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
Y = X[:, 0] + 0.3 * torch.randn(N, generator=GENERATOR)
SCHEDULE = ps.PriorAnnealing(5, 5, 5, 0, 10, learning_rate=1e-2, temperature=0.0)


def model(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", ps.SpikeSlab(0.1, 0.1, 1.0, 0.3).expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def jitter(x: Tensor, generator: torch.Generator, scale: float = 0.5) -> Tensor:
    return x + scale * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def tripled(x: Tensor, generator: torch.Generator) -> Tensor:
    return 3 * x


def untouched(x: Tensor, generator: torch.Generator) -> Tensor:
    torch.randn(5, generator=generator)
    return x


def annealed(data: Any = (X, Y), **options: Any) -> ps.Run:
    given: dict[str, Any] = {
        "schedule": SCHEDULE,
        "batch_size": 20,
        "num_draws": 5,
        "progress": False,
        "augment": jitter,
    }
    return ps.anneal(model, data, **(given | options))


def test_a_batch_is_a_function_of_seed_chain_and_step() -> None:
    spec = inspect(model, (X, Y), 20, 0, jitter)

    def batch(step: int, seed: int = 0, chain: int = 0, purpose: str = "batches", first: int | None = None) -> Tensor:
        batches = spec.batches(seed, chain, X.device, purpose)
        if first is not None:
            batches(first)
        x, y = batches(step)
        rows = Batches(N, 20, seed, chain, X.device, purpose)(step)
        assert torch.equal(y, Y[rows])  # rows belong together, labels stay
        return x - X[rows]

    torch.manual_seed(1)
    one = batch(4)
    torch.manual_seed(2)
    assert torch.equal(one, batch(4, first=9))
    assert float(one.std()) == pytest.approx(0.5, rel=5 / (2 * 60) ** 0.5)
    for other in (batch(5), batch(4, seed=1), batch(4, chain=1), batch(4, purpose="temperature")):
        assert not torch.isclose(one, other).any()


def test_a_run_on_augmented_rows_is_that_on_such_rows() -> None:
    """What does nothing changes no bit; what triples the inputs is the run on tripled inputs; data and generator stay."""
    before, state = X.clone(), torch.get_rng_state()
    assert torch.allclose(annealed(augment=untouched).draws, annealed(augment=None).draws, atol=1e-6)
    assert torch.allclose(annealed(augment=tripled).draws, annealed((3 * X, Y), augment=None).draws, atol=1e-6)
    assert not torch.isclose(annealed().draws, annealed(augment=None).draws).any()
    assert torch.equal(X, before) and torch.equal(torch.get_rng_state(), state)


def test_a_graph_is_given_the_rows_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card: warmed up as one, then what it would replay."""
    expected = annealed(num_chains=2)
    monkeypatch.setattr(steps, "has_graphs", lambda device: True)
    monkeypatch.setattr(steps, "captured", lambda call, device: [call() for _ in range(steps.WARM_UPS)] and call)
    run = annealed(num_chains=2)
    assert run.trace.attrs["program"] == "traced as a CUDA graph"
    assert torch.allclose(run.draws, expected.draws, atol=1e-6)


def test_the_step_is_sgd_on_the_augmented_batch() -> None:
    schedule = ps.PriorAnnealing(6, 0, 0, 0, learning_rate=1e-2)
    run = annealed(schedule=schedule, num_draws=6, num_chains=2)
    for chain in range(2):
        batches = run.spec.batches(0, chain, X.device)
        position, momentum = run.draws[chain, 0], run.draws[chain, 1] - run.draws[chain, 0]
        for step in range(2, 6):
            x, y = batches(step)
            gradient = x.T @ (x @ position_after(position, momentum) - y) / 20
            position = position_after(position, momentum)
            momentum = 0.9 * momentum - 1e-2 * gradient
            assert torch.allclose(position + momentum, run.draws[chain, step], atol=1e-6)


def position_after(position: Tensor, momentum: Tensor) -> Tensor:
    return position + momentum


def test_chains_have_rows_of_their_own_and_do_not_depend_on_their_number() -> None:
    three, one = annealed(num_chains=3), annealed(num_chains=1)
    assert torch.equal(three.draws[:1], one.draws)
    assert not torch.isclose(three.draws[0, -1], three.draws[1, -1]).any()


def test_a_prediction_and_a_refit_are_of_rows_as_they_are() -> None:
    def failing(x: Tensor, generator: torch.Generator) -> Tensor:
        assert allowed
        return x + 1.0

    allowed = True
    run = annealed(augment=failing)
    allowed = False
    w = run.draws[0]
    assert np.allclose(ps.predict(run, X[:5])["mean"], (w @ X[:5].T).mean(0), atol=1e-5)
    assert np.isfinite(ps.to_arviz(run, ["log_likelihood"]).log_likelihood["y"]).all()
    structure = ps.select(run)
    kept = structure.masks["w"]
    fit = ps.refit(run, structure, keep_slab=False, tolerance=1e-6)
    right = torch.linalg.lstsq(X[:, kept].double(), Y.double()[:, None]).solution[:, 0]
    assert torch.allclose(fit.values["w"][kept], right, atol=1e-6)
    with pytest.raises(AssertionError):  # by batches it goes on as the run did
        ps.refit(run, structure, schedule=ps.PriorAnnealing(2, 0, 0, 0), progress=False)


class Shift:
    """An augmentation that prints its place in memory."""

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return jitter(x, generator)


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


def test_it_is_resumed_to_the_same_bits_and_no_other_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, out = annealed(num_chains=2), tmp_path / "run.zarr"
    done: list[int] = []

    def is_due(keeper: Any) -> bool:
        done.append(1)
        if len(done) == 43:  # in the second chain
            raise Killed
        return len(done) % 4 == 0

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store.Store, "is_due", is_due)
        patch.setattr(store.Store, "close", lambda keeper: keeper._lock.close())
        annealed(num_chains=2, out=out)
    for other in (None, tripled, ps.ImageAugmentation()):
        with pytest.raises(ValueError, match=r"holds another run: its augment is jitter, here it is "):
            annealed(num_chains=2, out=out, resume=True, augment=other)
    found = annealed(num_chains=2, out=out, resume=True)
    assert torch.equal(found.positions, expected.positions)
    assert all(torch.equal(found.draws[c, d], expected.draws[c, d]) for c in range(2) for d in range(5))


def test_its_identity_holds_in_another_process(tmp_path: Path) -> None:
    """Objects at another place in memory are the same; other arguments are not."""
    pairs: list[Any] = [Shift(), Shift()], [functools.partial(jitter, scale=0.1), functools.partial(jitter, scale=0.1)]
    for number, (one, same) in enumerate(pairs):
        out = tmp_path / str(number)
        annealed(out=out, augment=one)
        annealed(out=out, augment=same, resume=True)
    with pytest.raises(ValueError, match=r"its augment is .*scale=0.1\), here it is .*scale=0.2\)"):
        annealed(out=out, augment=functools.partial(jitter, scale=0.2), resume=True)


@pytest.mark.parametrize(
    ("augment", "got"),
    [
        (lambda x, generator: x[:, :2], r"torch.float32 \(20, 2\)"),
        (lambda x, generator: x[:10], r"torch.float32 \(10, 3\)"),
        (lambda x, generator: x.double(), r"torch.float64 \(20, 3\)"),
        (lambda x, generator: x.numpy(), "ndarray"),
        (lambda x, generator: (x, x), "tuple"),
    ],
)
def test_it_returns_what_it_was_given(augment: Any, got: str) -> None:
    with pytest.raises(
        ValueError, match=rf"augment must return a tensor as it was given, torch.float32 \(20, 3\), got {got}"
    ):
        annealed(augment=augment)


def test_what_it_makes_infinite_is_its_own_fault() -> None:
    def failing(x: Tensor, generator: torch.Generator) -> Tensor:
        x[4] = float("nan")
        return x

    with pytest.raises(
        ps.NonFiniteError, match="augment gave NaN or infinity in row 4 of argument 0 of this batch: mend it"
    ):
        annealed(augment=failing)


def subsampling(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", ps.SpikeSlab(0.1, 0.1, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", N, subsample_size=20) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])


def test_it_needs_batches_of_rows_in_memory() -> None:
    with pytest.raises(ValueError, match="augment must be given batches of rows in memory, of a batch_size, got none"):
        annealed(batch_size=None)
    with pytest.raises(ValueError, match=r"augment must be given batches .* got a DataLoader"):
        annealed(DataLoader(TensorDataset(X, Y), 20, shuffle=True), batch_size=None)
    with pytest.raises(ValueError, match=r"augment must be given batches .* got a model that draws its own"):
        ps.anneal(subsampling, (X, Y), SCHEDULE, 20, 5, augment=jitter, progress=False)
