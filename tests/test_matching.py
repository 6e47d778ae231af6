"""Matched chains compute what they computed, as close to one representative as units can be moved."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference.matching import Matching

LAW = ps.SpikeSlab(0.1, 0.1, 1.0, 0.5)
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
START = ps.PriorAnnealing(1, 0, 0, 0, 3, learning_rate=1e-9)


def model_of(net: Any, noise: float = 1.0) -> Any:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model


def run_of(net: Any, x: Tensor = X, **options: Any) -> ps.Run:
    """A run of two chains with three draws each, of which the first chain is the best."""
    run = ps.anneal(model_of(net), (x, x[:, 0]), START, None, 3, 2, progress=False, **options)
    run.trace["sample_stats"]["loss"].load().values[:] = [[0.0], [1.0]]
    return run


def with_draws(run: ps.Run, draws: Tensor) -> ps.Run:
    """The same with draws (chain, draw, coordinate) set by hand."""
    return dataclasses.replace(run, draws=draws, positions=draws[:, -1].clone())


def random_run(net: Any) -> ps.Run:
    run = run_of(net)
    return with_draws(run, torch.randn(2, 3, run.positions.shape[1], dtype=torch.float64))


def network(sizes: list[int], activation: str) -> ps.SparseNet:
    return ps.SparseNet(sizes, activation, LAW).double()


def scrambled(run: ps.Run, position: Tensor, flips: bool) -> Tensor:
    """The same function with its hidden units in another order, and signs where it may be."""
    values = {site.name: part.clone() for site, part in run.spec.layout.parts(position)}
    depth = sum(name.endswith("weight") for name in values)
    for layer in range(1, depth):
        weight, bias, following = f"layer{layer}.weight", f"layer{layer}.bias", f"layer{layer + 1}.weight"
        order = torch.randperm(len(values[weight]))
        signs = (
            (2.0 * torch.randint(0, 2, (len(order),)) - 1).to(position)
            if flips
            else torch.ones(len(order)).to(position)
        )
        values[weight] = values[weight][order] * signs[:, None]
        values[bias] = values[bias][order] * signs
        values[following] = values[following][:, order] * signs
    return torch.cat([part.reshape(-1) for part in values.values()])


def outputs(net: ps.SparseModule, run: ps.Run, position: Tensor) -> Tensor:
    values = {str(site.parameter): part for site, part in run.spec.layout.parts(position)}
    return torch.func.functional_call(net.module, values, (X,))


@pytest.mark.parametrize("activation", ["tanh", "relu", "softplus"])
@pytest.mark.parametrize("sizes", [[3, 5, 1], [3, 6, 4, 2, 1]])
def test_every_draw_computes_what_it_computed(activation: str, sizes: list[int]) -> None:
    net = network(sizes, activation)
    run = random_run(net)
    found = ps.matched(run)
    for chain, draw in itertools.product(range(2), range(3)):
        expected = outputs(net, run, run.draws[chain, draw])
        assert torch.allclose(outputs(net, run, found.draws[chain, draw]), expected, atol=1e-12)
    assert not torch.equal(found.draws, run.draws)
    for name, values in run.spec.layout.constrained(found.draws).items():
        assert np.array_equal(found.trace["posterior"][name].values, values.numpy())
    assert torch.equal(found.positions, found.draws[:, -1])
    assert torch.equal(found.positions[0], run.positions[0])  # the representative


def test_parameters_without_a_prior_move_along() -> None:
    net = ps.sparsify(network([3, 5, 1], "tanh").module, LAW, where=lambda name, _: name == "layer2.weight")
    run = random_run(net)
    assert {site.kind for site in run.spec.layout.sites} == {"param", "spike_slab"}
    found = ps.matched(run)
    assert torch.allclose(outputs(net, run, found.draws[1, 0]), outputs(net, run, run.draws[1, 0]), atol=1e-12)
    assert not torch.equal(found.draws[1, 0], run.draws[1, 0])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_one_hidden_layer_is_as_close_as_it_can_be(activation: str) -> None:
    """Against all 3! orders and 2³ signs."""
    run = random_run(network([3, 3, 1], activation))
    signs = list(itertools.product((-1, 1), repeat=3)) if activation == "tanh" else [(1, 1, 1)]
    for position, found in zip(run.draws[1], ps.matched(run).draws[1], strict=True):
        values = {site.name: part for site, part in run.spec.layout.parts(position)}
        distances = []
        for order, sign in itertools.product(itertools.permutations(range(3)), signs):
            flip = torch.tensor(sign).double()
            first = values["layer1.weight"][list(order)] * flip[:, None], values["layer1.bias"][list(order)] * flip
            moved = (*first, values["layer2.weight"][:, list(order)] * flip, values["layer2.bias"])
            distances.append((torch.cat([part.reshape(-1) for part in moved]) - run.positions[0]).square().sum())
        assert torch.isclose((found - run.positions[0]).square().sum(), torch.stack(distances).min())


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("sizes", [[3, 4, 1], [10, 30, 20, 10, 1]])
def test_scrambled_copies_come_back(activation: str, sizes: list[int]) -> None:
    run = run_of(network(sizes, activation), torch.randn(20, sizes[0], dtype=torch.float64))
    truth = run.positions[0]
    errors = 0.3 * truth.std() * torch.randn(2, 3, len(truth), dtype=torch.float64)
    copies = [[scrambled(run, truth + error, activation == "tanh") for error in chain] for chain in errors]
    draws = torch.stack([torch.stack(chain) for chain in copies])
    draws[0, -1], errors[0, -1] = truth, 0
    found = ps.matched(with_draws(run, draws))
    assert torch.allclose(found.draws, truth + errors, atol=1e-12)


def test_sparse_copies_come_back() -> None:
    """Where few weights lead to a unit, each of the two ways gets stuck at times."""
    run = run_of(network([10, 20, 20, 20, 1], "tanh"), torch.randn(20, 10, dtype=torch.float64))
    truth = run.positions[0]
    errors = 0.1 * truth.std() * torch.randn(2, 3, len(truth), dtype=torch.float64)
    truth = truth * (torch.rand(len(truth)) < 0.2)
    errors[0, -1] = 0
    draws = torch.stack([torch.stack([scrambled(run, truth + error, True) for error in chain]) for chain in errors])
    draws[0, -1] = truth
    found = ps.matched(with_draws(run, draws)).draws - truth
    assert found.square().mean() < 1.01 * errors.square().mean()


def test_equal_and_dead_units_end() -> None:
    run = run_of(network([3, 6, 6, 1], "tanh"))
    for draws in (torch.zeros_like(run.draws), torch.ones_like(run.draws)):
        assert torch.equal(ps.matched(with_draws(run, draws)).draws, draws)
        values = {site.name: part for site, part in run.spec.layout.parts(draws[0, 0])}
        assert not Matching.of(with_draws(run, draws))._sweep(values)


def test_other_networks_are_left_as_they_are() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x + torch.tanh(self.first(x)))  # type: ignore[no-any-return]

    run = run_of(ps.sparsify(Residual(), LAW))
    with pytest.warns(UserWarning, match="'first.weight' are not matched, as it is not linear layers and elementwise"):
        assert ps.matched(run) is run


def test_a_network_with_buffers_beside_stays_with_them() -> None:
    net = network([3, 5, 1], "tanh")
    parts = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    beside = ps.sparsify(parts, LAW, name="beside")
    run = run_of(lambda x: net(x) + beside(x))
    draws = torch.randn(2, 3, run.positions.shape[1], dtype=torch.float64)
    draws[..., -run.spec.layout.num_buffers :] = run.draws[..., -run.spec.layout.num_buffers :]  # type: ignore[index]
    run = with_draws(run, draws)
    with pytest.warns(UserWarning, match=r"'beside.0.weight' are not matched"):
        found = ps.matched(run)
    xr.testing.assert_identical(found.trace["buffers"].to_dataset(), run.trace["buffers"].to_dataset())
    assert set(found.trace["buffers"]) == {f"beside.1.running_{name}" for name in ("mean", "var")}
    assert set(found.trace["posterior"]) == set(run.trace["posterior"])
    values = {site.name: part for site, part in run.spec.layout.parts(found.draws[:])}  # type: ignore[index]
    before = {site.name: part for site, part in run.spec.layout.parts(draws)}
    for name, array in found.trace["posterior"].items():
        assert np.array_equal(array.values, values[str(name)].numpy())
        assert torch.equal(values[str(name)], before[str(name)]) == (name in ("layer2.bias",) or "beside" in str(name))


def test_units_with_priors_of_their_own_are_left_as_they_are() -> None:
    own = ps.SpikeSlab(torch.tensor([[0.1], [0.2]]).double(), 0.1, 1.0, 0.5)
    net = ps.SparseNet(
        [3, 2, 1], prior={"layer1.weight": own, "layer1.bias": LAW, "layer2.weight": LAW, "layer2.bias": LAW}
    )
    run = run_of(net.double())
    with pytest.warns(UserWarning, match="are not matched, as the prior tells its units apart"):
        assert ps.matched(run) is run
    by_input = ps.SpikeSlab(torch.tensor([0.1, 0.2, 0.3]).double(), 0.1, 1.0, 0.5)  # the same for every unit
    net = ps.SparseNet(
        [3, 2, 1], prior={"layer1.weight": by_input, "layer1.bias": LAW, "layer2.weight": LAW, "layer2.bias": LAW}
    ).double()
    run = random_run(net)
    assert not torch.equal(ps.matched(run).draws, run.draws)


def test_a_model_without_hidden_units_has_nothing_to_match() -> None:
    run = run_of(ps.SparseLinear(3, 1, prior=LAW).double())
    assert ps.matched(run) is run


def test_draws_on_disk_are_matched_as_they_are_read(tmp_path: Path) -> None:
    net = network([3, 5, 4, 1], "tanh")
    stored, kept = run_of(net, out=tmp_path / "run.zarr"), run_of(net)
    found, expected = ps.matched(stored), ps.matched(kept)
    assert not isinstance(found.draws, Tensor) and found.draws.shape == (2, 3, kept.positions.shape[1])
    for chain, draw in itertools.product(range(2), range(3)):
        assert torch.equal(found.draws[chain, draw], expected.draws[chain, draw])
    assert torch.equal(found.chain(1).draws[0, -1], expected.draws[1, -1])
    assert torch.equal(found.positions, expected.positions) and not torch.equal(found.positions, stored.positions)
    assert list(found.trace.children) == ["sample_stats"] and found.trace.attrs == stored.trace.attrs
    for name, values in ps.mipp(expected).items():
        assert np.array_equal(ps.mipp(found)[name], values)


def test_pooled_inclusion_finds_the_weights_of_a_known_network() -> None:
    """Three units that read inputs 0 and 1, 2 and 3, and 4: chains find them in other places, matched in one."""
    truth = torch.tensor([[1.5, -1.0, 0, 0, 0, 0], [0, 0, 1.2, 1.2, 0, 0], [0, 0, 0, 0, 2.0, 0]])
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(400, 6, generator=generator)
    y = torch.tanh(x @ truth.T) @ torch.tensor([1.5, -2.0, 1.0]) + 0.3 * torch.randn(400, generator=generator)
    net = ps.SparseNet([6, 3, 1])
    schedule = ps.PriorAnnealing(400, 400, 600, 300)
    run = ps.anneal(model_of(net, 0.3), (x, y), schedule, None, 10, 4, seed=4, progress=False)

    def right(pooled: np.ndarray[Any, Any]) -> bool:
        orders = (truth[list(order)].numpy() != 0 for order in itertools.permutations(range(3)))
        return any(pooled[acts].min() > 0.9 and pooled[~acts].max() < 0.1 for acts in orders)

    assert all(right(chain) for chain in ps.mipp(run)["layer1.weight"].values), "a chain has not found the truth"
    assert not right(ps.mipp(run).mean("chain")["layer1.weight"].values)
    found = ps.mipp(ps.matched(run))
    assert right(found.mean("chain")["layer1.weight"].values)
    assert np.array_equal(found["input"], ps.mipp(run)["input"])
