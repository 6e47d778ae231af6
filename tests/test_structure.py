"""A pruned network computes the same function, and keeps exactly what lies on a path from an input to an output."""

import copy
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyro_sparse as ps
from pyro_sparse.inference.structure import Masks, compact, linear_chain, live_inputs, prune

SIZES = (4, 3, 3, 2)
X = 2 * torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network(activation: Callable[[], nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        parts += [nn.Linear(fan_in, fan_out, bias), activation()]
    return nn.Sequential(*parts[:-1]).double()


def masked(
    module: nn.Module, density: float, seed: int, fixed: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], Masks]:
    """Random masks and values that are zero outside of them."""
    generator = torch.Generator().manual_seed(seed)
    masks, values = {}, {}
    for name, p in module.named_parameters():
        masks[name] = (torch.rand(p.shape, generator=generator) < density) | (name in fixed)
        values[name] = masks[name] * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return values, masks


def call(module: nn.Module, values: dict[str, Tensor], x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(module, values, (x,))


def loaded(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    module = copy.deepcopy(module)
    module.load_state_dict(values)
    return module


def weights(masks: Masks) -> list[Tensor]:
    return [mask for mask in masks.values() if mask.dim() == 2]


def paths(masks: Masks) -> list[tuple[int, ...]]:
    """Every way from an input to an output over kept weights, as the units it passes."""
    edges = weights(masks)
    return [
        units
        for units in itertools.product(*(range(size) for size in SIZES))
        if all(
            bool(edge[after, before]) for edge, (before, after) in zip(edges, itertools.pairwise(units), strict=True)
        )
    ]


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_kept_lies_on_a_path_and_nothing_else(seed: int, bias: bool) -> None:
    module = network(nn.Tanh, bias)
    values, masks = masked(module, 0.35, seed)
    ways = paths(masks)
    kept = prune(module, values, masks, ())[1]
    for depth, mask in enumerate(weights(kept)):
        right = torch.zeros_like(mask)
        for way in ways:
            right[way[depth + 1], way[depth]] = True
        assert torch.equal(mask, right)
    for depth, mask in enumerate((m for m in kept.values() if m.dim() == 1), start=1):
        passed = {way[depth] for way in ways}
        is_last = depth == len(SIZES) - 1
        assert is_last or all(unit in passed for unit in mask.nonzero().flatten().tolist())
    right = torch.tensor([any(way[0] == column for way in ways) for column in range(SIZES[0])])
    assert torch.equal(live_inputs(module, masks, SIZES[0]), right)
    assert torch.equal(live_inputs(module, kept, SIZES[0]), right)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid, nn.ELU, lambda: nn.ReLU(inplace=True)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "fixed", [(), ("0.weight", "0.bias"), ("2.weight",), ("2.bias",), ("2.weight", "2.bias"), ("4.weight", "4.bias")]
)
def test_the_function_stays_and_a_second_pruning_changes_nothing(
    activation: Callable[[], nn.Module], bias: bool, fixed: tuple[str, ...]
) -> None:
    module = network(activation, bias)
    names = frozenset(fixed) & {name for name, _ in module.named_parameters()}
    for seed, density in itertools.product(range(5), (0.2, 0.5)):
        values, masks = masked(module, density, seed, names)
        before = {name: value.clone() for name, value in (values | masks).items()}
        pruned, kept = prune(module, values, masks, names)
        assert torch.allclose(call(module, pruned), call(module, values), rtol=1e-12, atol=1e-12)
        assert all(torch.equal(pruned[n] != 0, kept[n] & (pruned[n] != 0)) for n in kept)
        assert all(bool(kept[n].all()) and torch.equal(pruned[n], values[n]) for n in names)
        assert all(torch.equal(value, before[name]) for name, value in (values | masks).items())
        again, kept_again = prune(module, pruned, kept, names)
        assert all(torch.equal(kept[n], kept_again[n]) for n in kept)
        assert all(torch.allclose(again[n], pruned[n], rtol=1e-14, atol=0) for n in kept)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_in_single_precision_the_function_stays_to_a_millionth(activation: Callable[[], nn.Module]) -> None:
    module = network(activation).float()
    for seed in range(20):
        values, masks = masked(module, 0.3, seed)
        pruned, _ = prune(module, values, masks, ())
        assert torch.allclose(call(module, pruned, X.float()), call(module, values, X.float()), rtol=1e-6, atol=1e-6)
        assert all(value.dtype == torch.float32 for value in pruned.values())


def test_weights_without_a_way_in_or_out_are_dropped() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    first = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    values = {
        "0.weight": first,
        "0.bias": torch.tensor([0.5, 0.5, 0.0]),
        "2.weight": torch.tensor([[3.0, 0.0, 7.0]]),  # unit 1 has no way out, unit 2 none in
        "2.bias": torch.zeros(1),
    }
    pruned, kept = prune(module, values, {name: value != 0 for name, value in values.items()}, ())
    assert kept["0.weight"].tolist() == [[True, False], [False, False], [False, False]]
    assert kept["0.bias"].tolist() == [True, False, False]
    assert kept["2.weight"].tolist() == [[True, False, False]] and kept["2.bias"].tolist() == [False]
    assert pruned["0.bias"].tolist() == [0.5, 0, 0] and pruned["2.weight"].tolist() == [[3, 0, 0]]


@pytest.mark.parametrize("activation", [nn.Sigmoid, lambda: nn.ReLU(inplace=True)])
def test_constants_are_folded_through_several_layers(activation: Callable[[], nn.Module]) -> None:
    """With no weight on an input the whole network is one constant, which ends in the last bias."""
    module = network(activation)
    values, masks = masked(module, 1.0, 3)
    masks["0.weight"][:] = False
    values["0.weight"][:] = 0.0
    right = call(module, values)[0]
    pruned, kept = prune(module, values, masks, ())
    assert torch.allclose(pruned["4.bias"], right, rtol=1e-12)
    assert sum(int(mask.sum()) for mask in kept.values()) == SIZES[-1]
    assert not live_inputs(module, masks, SIZES[0]).any()


def test_a_constant_reaches_a_bias_that_was_pruned() -> None:
    module = nn.Sequential(nn.Linear(1, 2), nn.Sigmoid(), nn.Linear(2, 1)).double()
    values = {
        "0.weight": torch.tensor([[1.0], [0.0]]).double(),
        "0.bias": torch.zeros(2).double(),
        "2.weight": torch.tensor([[1.0, 4.0]]).double(),
        "2.bias": torch.zeros(1).double(),
    }
    pruned, kept = prune(module, values, {name: value != 0 for name, value in values.items()}, ())
    assert pruned["2.bias"].tolist() == [2.0] and kept["2.bias"].tolist() == [True]
    assert pruned["2.weight"].tolist() == [[1.0, 0.0]]


class Functional(nn.Module):
    """A chain written by hand."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 3), nn.Linear(3, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Skip(nn.Module):
    """A sum of two ways, which is no chain."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.first, self.second, self.direct = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(4, 1, bias=False)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x))) + self.direct(x)


class Tied(nn.Module):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


@pytest.mark.parametrize(
    "function",
    [torch.tanh, torch.relu, torch.sigmoid, F.tanh, F.relu, F.sigmoid, F.silu, F.gelu, lambda x: x.relu()],
)
def test_a_forward_of_functions_is_read_as_a_chain(function: Callable[[Tensor], Tensor]) -> None:
    module = Functional(function).double()
    chain = linear_chain(module)
    assert chain is not None
    names = [(layer.weight, layer.bias) for layer in chain]
    assert names == [("first.weight", "first.bias"), ("second.weight", "second.bias")]
    assert torch.equal(chain[0].activation(X), function(X))
    for seed in range(10):
        values, masks = masked(module, 0.3, seed)
        pruned, kept = prune(module, values, masks, ())
        assert torch.allclose(call(module, pruned), call(module, values), rtol=1e-12, atol=1e-12)
        edges = [kept["first.weight"], kept["second.weight"]]
        assert torch.equal(live_inputs(module, masks, 4), (edges[1].double() @ edges[0].double())[0] > 0)


@pytest.mark.parametrize(
    "function", [lambda x: torch.softmax(x, -1), lambda x: torch.tanh(2 * x), lambda x: x.cumsum(1)]
)
def test_other_functions_make_no_chain(function: Callable[[Tensor], Tensor]) -> None:
    module = Functional(function).double()
    assert linear_chain(module) is None
    values, masks = masked(module, 0.5, 0)
    pruned, _ = prune(module, values, masks, ())
    assert torch.allclose(call(module, pruned), call(module, values), rtol=1e-12, atol=1e-12)
    with pytest.raises(
        ValueError, match="must be linear layers and elementwise maps one after another, got Functional"
    ):
        compact(loaded(module, pruned))


@pytest.mark.parametrize("module", [Functional(torch.tanh).double(), Skip(nn.Tanh).double()])
def test_inputs_of_many_masks_are_those_of_each(module: nn.Module) -> None:
    alone = [masked(module, 0.3, seed)[1] for seed in range(6)]
    together = {name: torch.stack([masks[name] for masks in alone]).unflatten(0, (2, 3)) for name in alone[0]}
    together["second.bias"] = alone[0]["second.bias"]  # one of all, as where a parameter has no prior
    found = live_inputs(module, together, 4)
    assert found.shape == (2, 3, 4) and found.flatten(0, 1).unique(dim=0).shape[0] > 1
    for row, masks in zip(found.flatten(0, 1), alone, strict=True):
        assert torch.equal(row, live_inputs(module, masks, 4))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid, nn.Hardtanh, nn.Identity])
def test_a_network_with_a_skip_is_probed(activation: Callable[[], nn.Module]) -> None:
    module = Skip(activation).double()
    assert linear_chain(module) is None
    for seed in range(20):
        values, masks = masked(module, 0.35, seed)
        pruned, kept = prune(module, values, masks, ())
        assert torch.allclose(call(module, pruned), call(module, values), rtol=1e-12, atol=1e-12)
        way_out = masks["second.weight"][0]
        assert torch.equal(kept["first.weight"], masks["first.weight"] & way_out[:, None])
        assert torch.equal(kept["first.bias"], masks["first.bias"] & way_out)
        assert torch.equal(kept["direct.weight"], masks["direct.weight"])
        right = kept["first.weight"].any(0) | kept["direct.weight"][0]
        assert torch.equal(live_inputs(module, masks, 4), right)


def test_a_layer_used_twice_is_probed() -> None:
    module = Tied().double()
    for seed in range(30):
        values, masks = masked(module, 0.3, seed)
        pruned, _ = prune(module, values, masks, ())
        assert torch.allclose(call(module, pruned), call(module, values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Sigmoid])
def test_compact_computes_the_same_from_the_selected_inputs(
    activation: Callable[[], nn.Module], tmp_path: Path
) -> None:
    module = network(activation)
    for seed in range(20):
        values, masks = masked(module, 0.4, seed)
        pruned, kept = prune(module, values, masks, ())
        whole = loaded(module, pruned)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            small = compact(whole)
        reads = live_inputs(module, kept, SIZES[0])
        assert type(small) is nn.Sequential and all(type(p).__module__.startswith("torch.nn") for p in small)
        assert small[0].in_features == int(reads.sum())
        assert torch.allclose(small(X[:, reads]), whole(X), rtol=1e-12, atol=1e-12)
        assert sum(p.numel() for p in small.parameters()) <= sum(p.numel() for p in whole.parameters())
        torch.save(small.state_dict(), tmp_path / "small.pt")
        again = compact(whole)
        for p in again.parameters():
            nn.init.constant_(p, 9.0)
        again.load_state_dict(torch.load(tmp_path / "small.pt", weights_only=True))
        assert torch.equal(again(X[:, reads]), small(X[:, reads]))
    assert os.path.getsize(tmp_path / "small.pt") > 0


def structure(names: tuple[str, ...] | None) -> ps.Structure:
    """The structure of a network with three weights on paths and five elsewhere."""
    net = ps.SparseNet([3, 2, 1], prior=ps.SpikeSlab(0.1, 0.01, 1.0, 0.1))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.module.layer1.weight[0, :2] = torch.tensor([1.0, -1.0])
        net.module.layer1.weight[1, 2] = 1.0  # without a way out
        net.module.layer2.weight[0, 0] = 2.0
        net.module.layer2.bias[:] = 0.5

    def model(x: Tensor, y: Tensor) -> None:
        pyro.sample("y", dist.Normal(net(x).squeeze(-1), 1.0).to_event(1), obs=y)

    x = X[:, :3].float()
    schedule = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-12, temperature=0.0)
    run = ps.anneal(model, (x, net(x)[:, 0].detach()), schedule, num_draws=1, input_names=names, progress=False)
    return ps.select(run)


def test_a_structure_tells_its_story() -> None:
    found = structure(("age", "dose", "sex"))
    assert (found.num_weights, found.num_kept) == (11, 4) and found.sparsity == pytest.approx(7 / 11)
    assert found.selected_inputs == ["age", "dose"] and found.input_indices == [0, 1]
    text = str(found)
    assert "4 of 11 weights kept (63.6% pruned)" in text
    assert "2 of 3 inputs selected: age, dose" in text and "sex" not in text
    assert "layer1.weight (2 x 3): 2 kept, 1 of 2 units" in text and "layer2.bias (1): 1 kept" in text
    assert structure(None).selected_inputs == [0, 1]


def test_kept_is_a_flat_mask_over_the_position() -> None:
    found = structure(None)
    flat = found.kept(torch.zeros(11))
    right = torch.cat([found.masks[site.name].flatten() for site in found.layout.sites])
    assert flat.dtype == torch.bool and torch.equal(flat, right)


def test_a_way_out_through_a_layer_that_is_never_pruned_must_go_on_from_there() -> None:
    module = network()
    values, masks = masked(module, 1.0, 0, frozenset(["2.weight", "2.bias"]))
    masks["4.weight"][:] = False
    values["4.weight"][:] = 0.0
    pruned, kept = prune(module, values, masks, ("2.weight", "2.bias"))
    assert not kept["0.weight"].any() and not kept["0.bias"].any() and kept["2.weight"].all()
    assert not live_inputs(module, kept, SIZES[0]).any()
    whole = loaded(module, pruned)
    assert torch.equal(compact(whole)(X[:, :0]), whole(X))


def test_shared_and_computed_weights_make_no_chain() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    shared[2].weight = shared[0].weight
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 1))
    assert linear_chain(shared) is None and linear_chain(computed) is None


def test_with_biases_keeps_those_of_live_units_and_outputs() -> None:
    kept = structure(None)
    module = kept.layout.modules()[0].module
    chain = linear_chain(module)
    assert chain is not None
    wide = kept.with_biases()
    for layer in chain:
        assert layer.bias is not None
        assert torch.equal(wide.masks[layer.weight], kept.masks[layer.weight])
        live = torch.ones_like(kept.masks[layer.bias]) if layer is chain[-1] else kept.masks[layer.weight].any(1)
        assert torch.equal(wide.masks[layer.bias], kept.masks[layer.bias] | live)
    assert wide.num_kept > kept.num_kept and wide.selected_inputs == kept.selected_inputs
