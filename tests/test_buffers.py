"""Statistics that a model moves itself (BatchNorm, averages): plain PyTorch's in every way to run, and part of each draw."""

import copy
import shutil
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
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference import potential, sampler, sghmc, store
from pyro_sparse.inference import step as steps
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.minibatch import Batches

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="compiling on a CPU needs a C++ compiler")

N, BATCH, RATE, DECAY = 60, 20, 0.05, 0.01
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
Y = X[:, 0] + 0.3 * torch.randn(N, generator=GENERATOR)
IMAGES = torch.randn(N, 1, 5, 5, generator=GENERATOR)
TRAIN = ps.PriorAnnealing(10, 0, 0, 0, learning_rate=RATE, weight_decay=DECAY)
WHOLE = ps.PriorAnnealing(5, 10, 10, 5, 20, learning_rate=1e-3)
Model = Callable[..., Any]


class Average(nn.Module):
    """Keeps an exponential average of what it is given, in place or as another tensor, which its output depends on."""

    def __init__(self, in_place: bool, is_read: bool = True) -> None:
        super().__init__()
        self.linear, self.in_place, self.is_read = nn.Linear(3, 1), in_place, is_read
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        else:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return self.linear(x - self.average if self.is_read else x)


def table_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def image_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)),
        *(nn.BatchNorm1d(3, momentum=0.3, affine=False), nn.Linear(3, 1)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "table": (table_network, X),
    "image": (image_network, IMAGES),
    "in place": (lambda: Average(True), X),
    "another tensor": (lambda: Average(False), X),
}


def sparse(module: nn.Module, twice: bool = False) -> tuple[ps.SparseModule, Model]:
    like = next(module.parameters())
    net = ps.sparsify(module, prior=ps.SpikeSlab(0.1, 0.1, 1.0, 0.5).to(like.detach()))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = (net(x) + net(x) if twice else net(x)).squeeze(-1)
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return net, model


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    return make().to(dtype), x.to(dtype), Y.to(dtype)


def annealed(model: Model, data: tuple[Tensor, Tensor], schedule: ps.PriorAnnealing = WHOLE, **options: Any) -> ps.Run:
    return ps.anneal(model, data, schedule, BATCH, **({"num_draws": 5, "progress": False} | options))


def trained(module: nn.Module, x: Tensor, y: Tensor, chain: int, twice: bool = False) -> list[dict[str, Tensor]]:
    """Parameters and buffers after each step of plain PyTorch on the batches of a chain."""
    module = copy.deepcopy(module).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=1 - TRAIN.friction, weight_decay=DECAY)
    batches, states = Batches(N, BATCH, 0, chain, torch.device("cpu")), []
    for number in range(TRAIN.num_steps):
        rows = batches(number)
        mean = (module(x[rows]) + module(x[rows]) if twice else module(x[rows])).squeeze(-1)
        optimiser.zero_grad()
        (0.5 * (y[rows] - mean).square().mean()).backward()
        optimiser.step()
        states.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    return states


@pytest.mark.parametrize(
    ("name", "way", "dtype", "twice"),
    [
        ("table", "traced", torch.float64, True),
        ("table", "eager", torch.float64, True),
        ("image", "traced", torch.float64, False),
        ("image", "eager", torch.float32, False),
        ("in place", "traced", torch.float64, True),
        ("another tensor", "traced", torch.float64, True),
        ("another tensor", "eager", torch.float32, False),
        ("table", "traced as a CUDA graph", torch.float64, True),
        ("image", "traced as a CUDA graph", torch.float32, False),
        pytest.param("table", "compiled", torch.float64, True, marks=needs_compiler),
        pytest.param("image", "compiled", torch.float32, False, marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_without_noise_and_prior_a_run_is_sgd_of_plain_pytorch(
    name: str, way: str, dtype: torch.dtype, twice: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """Weights and statistics after every step, of two chains that run together where they can."""
    if way == "eager":
        monkeypatch.setattr(potential, "traced", None)
    if way == "traced as a CUDA graph":  # without a card: warmed up as one, then what it would replay
        monkeypatch.setattr(steps, "has_graphs", lambda device: True)
        monkeypatch.setattr(steps, "captured", lambda call, device: [call() for _ in range(steps.WARM_UPS)] and call)
    monkeypatch.setattr(sampler, "repays_compiling", lambda *counts: way == "compiled")
    module, x, y = made(name, dtype)
    net, model = sparse(module, twice)
    before = copy.deepcopy(net.module.state_dict())
    run = annealed(model, (x, y), TRAIN, num_draws=TRAIN.num_steps, num_chains=2)
    assert run.trace.attrs["program"] == way
    assert len(recwarn) == (way == "eager")
    assert all(torch.equal(value, before[key]) for key, value in net.module.state_dict().items())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for chain in range(2):
        begun = run.spec.layout.constrained(start(run.spec, 0, chain, fresh=chain > 0))
        module.load_state_dict(begun, strict=False)
        assert chain or all(torch.equal(begun[key], before[key]) for key in begun)
        for draw, state in enumerate(trained(module, x, y, chain, twice)):
            values = run.spec.layout.constrained(run.draws[chain, draw])
            assert set(values) == {key for key in state if not key.endswith("num_batches_tracked")}
            for key, value in values.items():
                assert torch.allclose(value, state[key], tolerance, tolerance), (chain, draw, key)


def test_buffers_are_a_group_of_the_trace_and_no_part_of_the_posterior() -> None:
    module, x, y = made("table")
    _, model = sparse(module)
    run = annealed(model, (x, y), num_chains=2)
    buffers = run.trace["buffers"].to_dataset()
    assert set(buffers) == {"1.running_mean", "1.running_var"}
    assert buffers["1.running_var"].dims == ("chain", "draw", "1_out")
    assert not set(buffers) & set(run.trace["posterior"].to_dataset())
    right = run.spec.layout.constrained(run.draws)
    assert all(np.array_equal(buffers[name].values, right[name].numpy()) for name in buffers)
    assert run.trace["buffers"].attrs["phase"] == "sample"
    assert run.spec.layout.num_buffers == 8 and [s.kind for s in run.spec.layout.sites[-2:]] == ["buffer"] * 2


def test_what_stands_still_is_no_part_of_a_draw() -> None:
    module, x, y = made("table")
    net, model = sparse(module.eval())
    run = annealed(model, (x, y))
    assert run.spec.layout.num_buffers == 0 and "buffers" not in run.trace.children
    module[1].momentum = 0.0
    assert annealed(sparse(module.train())[1], (x, y)).spec.layout.num_buffers == 0
    assert not net.module.training


def test_they_are_at_rest_in_the_state() -> None:
    state = sghmc.State(torch.randn(2, 7), torch.randn(2, 7))
    new = sghmc.with_buffers(state, torch.ones(2, 3))
    assert torch.equal(new.position, torch.cat([state.position[:, :4], torch.ones(2, 3)], 1))
    assert torch.equal(new.momentum, torch.cat([state.momentum[:, :4], torch.zeros(2, 3)], 1))


def test_under_another_handler_nothing_is_moved() -> None:
    module, x, y = made("table")
    net, model = sparse(module)
    before = copy.deepcopy(net.module.state_dict())
    pyro.poutine.trace(model).get_trace(x, y)
    pyro.infer.Predictive(model, num_samples=2)(x)
    assert all(torch.equal(value, before[name]) for name, value in net.module.state_dict().items())


def test_only_steps_move_statistics() -> None:
    """Each draw evaluates two more batches for the temperature of minibatch noise."""
    module, x, y = made("table")
    runs = [annealed(sparse(module)[1], (x, y), num_draws=n) for n in (1, 20)]
    assert float(runs[1].trace["sample_stats"]["minibatch_temperature"].min()) > 0
    assert torch.equal(runs[0].positions, runs[1].positions)


def test_a_step_that_fails_moves_no_statistics() -> None:
    module, x, y = made("table")
    y = y.clone()
    y[7] = 1e30
    model = sparse(module)[1]
    with pytest.raises(ps.NonFiniteError) as caught:
        annealed(model, (x, y), TRAIN)
    failed = caught.value
    assert failed.step > 0
    before = annealed(
        model, (x, y), ps.PriorAnnealing(failed.step, 0, 0, 0, learning_rate=RATE, weight_decay=DECAY), num_draws=1
    )
    right = before.spec.layout.constrained(before.positions[0])
    assert all(torch.equal(failed.values[name], value) for name, value in right.items())


def test_temperatures_are_of_parameters_alone() -> None:
    """The same network without the average that nothing reads has the same statistics, to rounding."""
    torch.manual_seed(0)
    module = Average(True, is_read=False)
    runs = [annealed(sparse(m)[1], (X, Y), num_draws=10) for m in (module, module.linear)]
    assert [run.spec.layout.num_coordinates for run in runs] == [7, 4]
    found, right = (run.trace["sample_stats"].to_dataset() for run in runs)
    for name in right:
        assert np.allclose(found[name], right[name], rtol=1e-4), name


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


@pytest.mark.parametrize("sparse_draws", [pytest.param(False, marks=pytest.mark.slow), True])
def test_on_disk_statistics_are_whole_and_go_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse_draws: bool
) -> None:
    module, x, y = made("table")
    model, out = sparse(module)[1], tmp_path / "run.zarr"
    expected = annealed(model, (x, y), num_chains=2)
    done: list[int] = []

    def is_due(keeper: Any) -> bool:
        done.append(1)
        if len(done) == 33:
            raise Killed
        return len(done) % 4 == 0

    options: dict[str, Any] = {"num_chains": 2, "out": out, "sparse_draws": sparse_draws}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store.Store, "is_due", is_due)
        patch.setattr(store.Store, "close", lambda keeper: keeper._lock.close())
        annealed(model, (x, y), **options)
    run = annealed(model, (x, y), resume=True, **options)
    assert torch.equal(run.positions, expected.positions)
    for found in (run, ps.load(out, model, (x, y))):
        xr.testing.assert_identical(
            found.trace["buffers"].to_dataset().load().drop_attrs(), expected.trace["buffers"].to_dataset().drop_attrs()
        )
        for chain in range(2):
            for draw in range(5):
                right = expected.draws[chain, draw]
                right = expected.spec.layout.included(right) if sparse_draws else right
                assert torch.equal(found.draws[chain, draw], right)
                assert torch.equal(found.draws[chain, draw][-8:], expected.draws[chain, draw][-8:])


def test_a_kernel_of_pyros_driver_moves_them() -> None:
    module, x, y = made("table", torch.float64)
    net, model = sparse(module)
    spec = inspect(model, (x, y), BATCH, 0)
    kernel = ps.SGHMC(ps.annealed(prior_power=0.0)(model), RATE / N, 0.1, temperature=0.0, batch_size=BATCH)
    mcmc = pyro.infer.MCMC(kernel, num_samples=4, warmup_steps=0, disable_progbar=True)
    mcmc.run(x, y)
    samples = mcmc.get_samples()
    assert set(samples) == {site.name for site in spec.layout.sites}
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for number in range(4):
        rows = kernel._batches(number)
        optimiser.zero_grad()
        (0.5 * (y[rows] - module(x[rows]).squeeze(-1)).square().mean()).backward()
        optimiser.step()
        for name, value in module.state_dict().items():
            assert name.endswith("tracked") or torch.allclose(samples[name][number], value, 1e-10, 1e-12), name
    assert all(
        torch.equal(net.module.state_dict()[n], v) for n, v in made("table", torch.float64)[0].state_dict().items()
    )


@pytest.fixture(scope="module")
def run() -> ps.Run:
    pyro.clear_param_store()
    module, x, y = made("image")
    return annealed(sparse(module)[1], (x, y), num_draws=10, num_chains=2)


def outputs(run: ps.Run, x: Tensor) -> Tensor:
    """(chain, draw, row) of the plain module with the weights and statistics of each draw, in evaluation mode."""
    module, found = image_network().eval(), []
    for draw in run.draws.flatten(0, 1):
        module.load_state_dict(run.spec.layout.constrained(draw), strict=False)
        with torch.no_grad():
            found.append(module(x).squeeze(-1))
    return torch.stack(found).reshape(*run.draws.shape[:2], len(x))


def test_a_prediction_is_that_of_the_plain_module_with_the_statistics_of_each_draw(run: ps.Run) -> None:
    x = torch.randn(7, 1, 5, 5, generator=GENERATOR)
    right = outputs(run, x).flatten(0, 1).mean(0)
    assert np.allclose(ps.predict(run, x)["mean"], right, atol=1e-5)
    assert np.allclose(ps.predict(run, x[3:4])["mean"], right[3:4], atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:arviz")
def test_arviz_and_a_diagnosis_read_such_a_run(run: ps.Run, optional_import: Callable[[str], ModuleType]) -> None:
    az = optional_import("arviz")
    data = ps.to_arviz(run, ["log_likelihood"])
    right = dist.Normal(outputs(run, IMAGES), 1.0).log_prob(Y)
    assert np.allclose(data.log_likelihood["y"], right, atol=1e-4)
    assert not any("running" in name for name in az.summary(data).index)
    found = ps.diagnose(run)
    assert "running" not in str(found)


def test_a_plain_average_of_all_batches_is_refused() -> None:
    module, x, y = made("table")
    module[1].momentum = None
    with pytest.raises(
        ValueError, match=r"momentum of '1', a BatchNorm1d in training mode, must be a number .* got None"
    ):
        annealed(sparse(module)[1], (x, y))
    annealed(sparse(module.eval())[1], (x, y))


def test_a_module_that_is_not_wrapped_must_not_move_what_is_its_own() -> None:
    norm = nn.BatchNorm1d(3)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", ps.SpikeSlab(0.1, 0.1, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(norm(x) @ w, 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"changes a tensor of its own.*BatchNorm in training mode, say\) by ps.sparsify"
    ):
        annealed(model, (X, Y))
    norm.eval()
    annealed(model, (X, Y))
