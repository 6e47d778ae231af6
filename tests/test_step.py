"""One step, whatever way it is computed: the same numbers, and what it may cost is counted, not timed."""

import logging
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_sparse as ps
from pyro_sparse.inference import sampler
from pyro_sparse.inference import step as steps
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.minibatch import Batches
from pyro_sparse.inference.potential import Potential

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="compiling on a CPU needs a C++ compiler")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X[:, 0] + 0.3 * torch.randn(60, generator=GENERATOR)
SCHEDULE = ps.PriorAnnealing(5, 10, 10, 5, 30, learning_rate=1e-3, weight_decay=0.1)


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A graph without a card: warmed up as one, then what it would replay."""
    for _ in range(steps.WARM_UPS):
        call()
    return call


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "has_graphs", lambda device: True)
    monkeypatch.setattr(steps, "captured", captured)


def annealed(schedule: ps.PriorAnnealing = SCHEDULE, **options: Any) -> ps.Run:
    torch.manual_seed(0)
    model = ps.normal_regression(ps.SparseNet([3, 4, 1]), 60)
    return ps.anneal(model, (X, Y), schedule, **({"batch_size": 20, "num_draws": 10, "progress": False} | options))


@pytest.mark.parametrize(
    ("options", "compiling"),
    [
        ({}, False),
        ({"num_chains": 2}, False),
        ({"batch_size": None}, False),
        pytest.param({"num_chains": 2}, True, marks=needs_compiler),
    ],
)
def test_a_graph_makes_the_same_run(
    options: dict[str, Any], compiling: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plain = annealed(**options)
    request.getfixturevalue("graphs")
    monkeypatch.setattr(sampler, "repays_compiling", lambda *counts: compiling)
    run = annealed(**options)
    kind = "compiled" if compiling else "traced"
    assert (plain.trace.attrs["program"], run.trace.attrs["program"]) == ("traced", f"{kind} as a CUDA graph")
    assert torch.allclose(run.draws, plain.draws, rtol=1e-4, atol=1e-6)
    for name, values in plain.trace["sample_stats"].data_vars.items():
        assert np.allclose(run.trace["sample_stats"][name], values, rtol=1e-3, equal_nan=True), name


def exploding(num_chains: int) -> steps.NonFiniteError:
    """A learning rate that lets the weights grow until they overflow."""
    schedule = ps.PriorAnnealing(2_000, 0, 0, 0, learning_rate=50.0)
    with pytest.raises(ps.NonFiniteError) as caught:
        annealed(schedule, num_chains=num_chains)
    return caught.value


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("way", ["graph", pytest.param("compiled", marks=needs_compiler)])
def test_every_way_keeps_the_last_finite_state(
    num_chains: int, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plain = exploding(num_chains)
    if way == "graph":
        request.getfixturevalue("graphs")
    monkeypatch.setattr(sampler, "repays_compiling", lambda *counts: way == "compiled")
    monkeypatch.setattr(steps, "_agree", lambda *arguments: True)  # of an explosion nothing agrees to rounding
    error = exploding(num_chains)
    assert plain.step > 0 and abs(error.step - plain.step) <= 2
    assert all(bool(value.isfinite().all()) for value in error.values.values())
    if way == "graph":  # the very same operations
        assert str(error) == str(plain) and error.step == plain.step
        assert all(torch.equal(error.values[name], value) for name, value in plain.values.items())


def test_a_graph_stays_at_the_first_step_that_is_not_finite_though_later_ones_would_be(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One row overflows, so that one batch in three does; no look falls on it."""
    y = Y.clone()
    y[7] = 1e30
    monkeypatch.setattr(steps, "_agree", lambda *arguments: True)
    errors = []
    for way in ("plain", "graph"):
        if way == "graph":
            request.getfixturevalue("graphs")
        with pytest.raises(ps.NonFiniteError, match="log density of 'y' became NaN or infinite") as caught:
            ps.anneal(
                ps.normal_regression(ps.SparseNet([3, 4, 1], prior=ps.SpikeSlab(0.1, 0.1, 1.0)), 60),
                (X, y),
                ps.PriorAnnealing(2_000, 0, 0, 0, learning_rate=1e-4),
                20,
                num_draws=1,
                progress=False,
            )
        errors.append(caught.value)
    assert errors[0].step == errors[1].step > 0


def test_where_no_graph_can_be_captured_the_plain_step_runs_and_says_so(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(call: Callable[[], None], device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(steps, "captured", failing)
    with pytest.warns(UserWarning, match="run without a CUDA graph, more slowly, as RuntimeError: operation") as caught:
        run = annealed()
    assert len(caught) == 1 and caught[0].filename == __file__
    assert run.trace.attrs["program"] == "traced"


class Counter(TorchDispatchMode):
    """Operations, and how often a number was read from a tensor, for which the host of a CUDA device would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return sum(name.startswith(("_local_scalar_dense", "is_nonzero", "nonzero")) for name in self.names)


def parts(sizes: list[int], batch: int) -> tuple[Potential, steps.Table, Tensor]:
    """A regression on 1,000 rows, in its potential, with a table that has noise and no weight decay."""
    torch.manual_seed(0)
    x, y = torch.randn(1_000, sizes[0]), torch.randn(1_000)
    spec = inspect(ps.normal_regression(ps.SparseNet(sizes), 1_000), (x, y), batch, 0)
    position = start(spec, 0, 0, False)
    batches = Batches(1_000, batch, 0, 0, position.device)
    return (
        Potential(spec, position, (batches(0), batches(1))),
        steps.Table(ps.PriorAnnealing(10, 10, 10, 10), position),
        position,
    )


def test_the_host_waits_once_a_step_and_never_within_a_graph(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    potential, table, position = parts([100, 20, 10, 1], 500)
    plain = steps.Step(steps.Arithmetic(potential), "traced", potential, table, position, 0, [0])
    graph = steps.step_maker(potential, table, position, 0, [0], False)(position, [0])
    waits, read = [], Tensor.tolist
    for step in (plain, graph):
        with Counter() as counter:
            monkeypatch.setattr(
                Tensor, "tolist", lambda tensor, c=counter: [c.names.append("nonzero"), read(tensor)][1]
            )
            for number in range(20):
                step(number)
        waits.append(counter.waits)
    assert waits == [20, 0] and graph.kind == "traced as a CUDA graph"


def test_the_operations_of_a_step_are_few() -> None:
    """206 at the time of writing, 139 of them launches on a card; before the priors shared one law they were 372."""
    potential, table, position = parts([100, 20, 10, 1], 500)
    plain = steps.Step(steps.Arithmetic(potential), "traced", potential, table, position, 0, [0])
    with torch.no_grad():
        graph = make_fx(steps.Arithmetic(potential))(*plain.arguments(0))
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    schemas = [call.target._schema for call in calls if isinstance(call.target, torch._ops.OpOverload)]
    launches = [schema for schema in schemas if not any(result.alias_info for result in schema.returns)]
    assert len(calls) <= 215 and len(launches) <= 145


@needs_compiler
def test_a_compiled_step_passes_over_the_weights_as_often_as_it_must(caplog: pytest.LogCaptureFixture) -> None:
    """In numbers a weight, for a batch so small that only weights count.

    The network reads a weight and writes its gradient, the update reads weight, momentum, noise and gradient and writes
    two, its prior is added on the way, which reads one more and writes and reads the sum: 11, and the compiler counts two
    products over the whole vector where they read a part. A prior computed apart adds ten.
    """
    from torch._inductor import config, metrics

    potential, table, position = parts([400, 1_000, 1], 4)
    plain = steps.Step(steps.Arithmetic(potential), "traced", potential, table, position, 0, [0])
    arguments = (*map(torch.clone, plain.state), *plain.arguments(0))
    caplog.set_level(logging.INFO, "torch._inductor.metrics")
    caplog.set_level(logging.INFO, "torch._inductor")
    metrics.reset()
    with config.patch(force_disable_caches=True):  # which a monkeypatch would leave deleted
        steps.compiled(steps.overwriting(steps.Arithmetic(potential)), arguments)
    assert 8 * 4 * position.numel() < metrics.num_bytes_accessed < 16 * 4 * position.numel()
