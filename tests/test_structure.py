"""A pruned network computes the same function, and keeps exactly what lies on a path from an input to an output."""

import copy
import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType

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


class Softened(nn.Linear):
    """A linear layer with a map of its own after it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(4 * super().forward(x))


class Halved(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def hooked(module: nn.Module, part: str = "") -> nn.Module:
    module.get_submodule(part).register_forward_hook(lambda _, inputs, output: output + F.softplus(output))
    return module


def with_own_forward(layer: nn.Linear) -> nn.Module:
    layer.__dict__["forward"] = MethodType(lambda own, x: F.softplus(F.linear(x, own.weight, own.bias)), layer)
    return layer


NO_CHAINS: dict[str, Callable[[], nn.Module]] = {
    "forward of a class": lambda: Softened(4, 1),
    "forward of an object": lambda: with_own_forward(nn.Linear(4, 1)),
    "forward of a class, inside": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), Softened(3, 1)),
    "hook": lambda: hooked(nn.Linear(4, 1)),
    "hook, inside": lambda: hooked(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), "0"),
    "hook of a map": lambda: hooked(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), "1"),
    "hook of all": lambda: hooked(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))),
    "parametrisation": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)),
    "map of a class": lambda: nn.Sequential(nn.Linear(4, 3), Halved(), nn.Linear(3, 1)),
}


@pytest.mark.parametrize("kind", NO_CHAINS)
def test_what_computes_more_than_linear_layers_is_no_chain(kind: str) -> None:
    module = NO_CHAINS[kind]().double()
    assert linear_chain(module) is None
    for seed in range(5):
        values, masks = masked(module, 0.5, seed)
        if kind == "parametrisation":  # of which zeros are no number
            values = {name: value + 0.1 for name, value in values.items()}
            masks = {name: torch.ones_like(mask) for name, mask in masks.items()}
        pruned, _ = prune(module, values, masks, (), (4,))
        assert torch.allclose(call(module, pruned), call(module, values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["forward of a class", "hook", "hook, inside", "hook of all", "parametrisation"])
def test_what_is_refitted_is_what_the_network_computes(kind: str) -> None:
    torch.manual_seed(0)
    net = ps.sparsify(NO_CHAINS[kind](), ps.SpikeSlab(0.9, 0.05, 1.0))
    x = X.float()
    schedule = ps.PriorAnnealing(50, 20, 20, 10, learning_rate=1e-2)
    run = ps.anneal(ps.normal_regression(net, 50), (x, x[:, 0]), schedule, num_draws=1, progress=False)
    found = ps.select(run)
    if (
        kind == "parametrisation"
    ):  # whose direction has any length: the spike takes all of it, or not, as rounding has it
        every = {name: torch.ones_like(mask) for name, mask in found.masks.items()}
        found = dataclasses.replace(found, masks=every, values=run.spec.layout.constrained(run.positions[0]))
    fit = ps.refit(run, found)
    own = copy.deepcopy(net.module)
    own.load_state_dict(fit.module().state_dict())
    with torch.no_grad():
        right = own(x).squeeze(-1)
        assert torch.allclose(fit.module()(x).squeeze(-1), right)
    mean = torch.from_numpy(ps.predict(fit, x)["mean"].values).float()
    assert torch.allclose(mean, right, atol=1e-4)
    rest = float((x[:, 0] - right).square().mean())
    assert rest < float(x[:, 0].square().mean())


def test_weights_without_which_the_network_is_not_defined_are_not_refitted() -> None:
    net = ps.sparsify(nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)), ps.SpikeSlab(0.9, 0.05, 1.0))
    schedule = ps.PriorAnnealing(2, 2, 2, 2)
    x = X.float()
    run = ps.anneal(ps.normal_regression(net, 50), (x, x[:, 0]), schedule, num_draws=1, progress=False)
    found = ps.select(run)
    directions = "parametrizations.weight.original1"
    masks = found.masks | {directions: torch.zeros_like(found.masks[directions])}
    values = found.values | {directions: torch.zeros_like(found.values[directions])}
    with pytest.raises(ValueError, match=r"structure must keep weights at which .* finite, got NaN"):
        ps.refit(run, dataclasses.replace(found, masks=masks, values=values))


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


class Residual(nn.Module):
    """A small convolutional network with one skip connection, on images (2, 5, 5)."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor] = torch.tanh, norm: Callable[[int], nn.Module] | None = None
    ):
        super().__init__()
        norm = norm or nn.BatchNorm2d
        self.conv0, self.norm0 = nn.Conv2d(2, 3, 3, padding=1, bias=False), norm(3)
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 3, 3, padding=1, bias=False), norm(3)
        self.last = nn.Linear(3, 2)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        first = self.activation(self.norm0(self.conv0(x)))
        inner = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(first)))))
        return self.last(self.activation(inner + first).mean((2, 3)))


def with_statistics(module: nn.Module, seed: int, zero_share: float = 0.3) -> nn.Module:
    """The module with random running statistics, of which some means are zero, in evaluation mode and double precision."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
            buffer *= torch.rand(buffer.shape, generator=generator) > zero_share
        if name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return module.double().eval()


def images(*shape: int) -> Tensor:
    return torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def same(first: Tensor, second: Tensor, tolerance: float = 1e-9) -> bool:
    return bool((first - second).abs().max() <= tolerance * second.abs().max())


Edge = tuple[str, tuple[int, ...], str, str]


def searched(module: Residual, masks: Masks) -> tuple[Masks, Masks]:
    """What lives in a Residual, by a search from node to node; and the masks in which its constants are folded."""
    masks = {name: mask.clone() for name, mask in masks.items()}
    way = [("x", "0", "a"), ("a", "1", "b"), ("b", "2", "c")]
    edges: list[Edge] = []
    reached = {"one", "x0", "x1"}

    def follow(*more: Edge) -> None:
        edges.extend(more)
        reached.update(head for name, index, tail, head in more if masks[name][index] and tail in reached)

    for before, layer, after in way:
        for index in itertools.product(*(range(size) for size in masks[f"conv{layer}.weight"].shape)):
            follow((f"conv{layer}.weight", index, f"{before}{index[1]}", f"conv{layer}_{index[0]}"))
        scale, shift = masks[f"norm{layer}.weight"], masks[f"norm{layer}.bias"]
        for channel, mean in enumerate(module.get_submodule(f"norm{layer}").running_mean):
            if f"conv{layer}_{channel}" not in reached and scale[channel] and mean != 0:
                shift[channel], scale[channel] = True, False
            follow((f"norm{layer}.weight", (channel,), f"conv{layer}_{channel}", f"{after}{channel}"))
            follow((f"norm{layer}.bias", (channel,), "one", f"{after}{channel}"))
    reached |= {f"c{channel}" for channel in range(3) if f"a{channel}" in reached}
    for index in itertools.product(range(2), range(3)):
        follow(("last.weight", index, f"c{index[1]}", f"out{index[0]}"))
    follow(*(("last.bias", (unit,), "one", f"out{unit}") for unit in range(2)))
    leads = {"out0", "out1"}
    live = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    for name, index, tail, head in reversed(edges):
        if masks[name][index] and head in leads:
            leads.add(tail)
            leads.update({f"a{tail[1:]}"} if tail.startswith("c") and not tail.startswith("conv") else ())
            live[name][index] = tail in reached
    return live, masks


@pytest.mark.parametrize("seed", range(20))
def test_with_a_skip_and_batch_norms_what_lives_is_what_a_search_finds(seed: int) -> None:
    module = with_statistics(Residual(torch.relu), seed)
    values, masks = masked(module, (0.1, 0.2, 0.3, 0.4)[seed % 4], seed)
    pruned, kept = prune(module, values, masks, (), (2, 5, 5))
    right, _ = searched(module, masks)
    for name in masks:
        assert torch.equal(kept[name], right[name]), name
    x = images(2, 5, 5)
    assert torch.allclose(call(module, pruned, x), call(module, values, x), rtol=1e-12, atol=1e-12)
    again, kept_again = prune(module, pruned, kept, (), (2, 5, 5))
    assert all(torch.equal(kept[n], kept_again[n]) and torch.equal(pruned[n], again[n]) for n in kept)


def test_each_dead_weight_can_be_removed_alone_and_each_live_one_acts() -> None:
    counts = [0, 0]
    for seed in (0, 1, 2):
        module = with_statistics(Residual(), seed)
        values, masks = masked(module, 0.3, seed)
        kept = prune(module, values, masks, (), (2, 5, 5))[1]
        x = images(2, 5, 5)
        before = call(module, values, x)
        for name, mask in masks.items():
            for index in (tuple(i.tolist()) for i in mask.nonzero()):
                without = values[name].clone()
                without[index] = 0.0
                moves = (call(module, values | {name: without}, x) - before).abs().max() > 1e-13
                folded = name.startswith("norm") and name.endswith("weight") and not kept[name][index]
                assert folded or bool(moves) == bool(kept[name][index]), (name, index)
                counts[bool(kept[name][index])] += 1
    assert min(counts) > 50


class Several(nn.Module):
    """Grouped convolutions, maxima and averages, and a linear layer on what is flattened, on images (2, 8, 8)."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.grouped, self.norm = nn.Conv2d(4, 8, 3, groups=2, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.hidden, self.flat, self.last = nn.Linear(32, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.activation(self.first(x)), 3, stride=2, padding=1)
        x = F.avg_pool2d(self.activation(self.norm(self.grouped(x))), 2, ceil_mode=True)
        x = torch.flatten(self.depthwise(x), 1)
        return self.last(self.activation(self.flat(self.hidden(x))))


def gradients(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    outputs = torch.func.functional_call(module, leaves, (x,))
    total = (outputs * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(7))).sum()
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()), materialize_grads=True), strict=True))


def layer_norm(num_channels: int) -> nn.Module:
    return nn.LayerNorm([num_channels, 5, 5])


def group_norm(num_channels: int) -> nn.Module:
    return nn.GroupNorm(num_channels if num_channels % 2 else 2, num_channels)


def instance_norm(num_channels: int) -> nn.Module:
    return nn.InstanceNorm2d(num_channels, affine=True)


def batch_statistics(num_channels: int) -> nn.Module:
    return nn.BatchNorm2d(num_channels, track_running_stats=False)


CONVOLUTIONAL: dict[str, tuple[Callable[[Callable[[Tensor], Tensor]], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (2, 5, 5)),
    "several": (Several, (2, 8, 8)),
    "layer norm": (lambda activation: Residual(activation, layer_norm), (2, 5, 5)),
    "group norm": (lambda activation: Residual(activation, group_norm), (2, 5, 5)),
    "instance norm": (lambda activation: Residual(activation, instance_norm), (2, 5, 5)),
    "batch statistics": (lambda activation: Residual(activation, batch_statistics), (2, 5, 5)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONAL)
@pytest.mark.parametrize("activation", [torch.tanh, torch.relu, F.relu6, F.gelu])
def test_what_the_function_depends_on_is_kept_in_any_network(kind: str, activation: Callable[[Tensor], Tensor]) -> None:
    make, shape = CONVOLUTIONAL[kind]
    dropped = 0
    for seed, density in itertools.product(range(3), (0.05, 0.2, 0.5)):
        module = with_statistics(make(activation), seed)
        values, masks = masked(module, density, seed)
        unread, reader = ("flat", "last") if kind == "several" else ("norm1", "conv2")
        masks[f"{reader}.weight"][:, 0] = False
        values[f"{reader}.weight"][:, 0] = 0.0
        pruned, kept = prune(module, values, masks, (), shape)
        x = images(*shape)
        assert same(call(module, pruned, x), call(module, values, x))
        assert not kept[f"{unread}.weight"][0].any()
        dropped += int(masks[f"{unread}.weight"][0].sum())
        acts = {name: (g != 0) & kept[name] for name, g in gradients(module, pruned, x).items()}
        needed = {name: (g.abs() > 1e-9) & masks[name] for name, g in gradients(module, values, x).items()}
        for name, mask in kept.items():
            is_scale = f"{name.removesuffix('weight')}running_mean" in dict(module.named_buffers())
            assert is_scale or not (needed[name] & ~mask).any(), name
            if activation is torch.tanh and kind in ("residual", "several"):
                assert torch.equal(acts[name], mask), name  # nothing else is kept
    assert dropped > 0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh])
def test_through_many_layers_nothing_vanishes_and_nothing_saturates(activation: Callable[[], nn.Module]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.activation = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), activation()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.activation(self.norm(self.conv(x)))

    def layer() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), activation())

    def stem() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 5, 1), nn.Conv2d(5, 4, 1))

    for blocks in ([Block() for _ in range(50)], [layer() for _ in range(160)]):
        module = nn.Sequential(stem(), *blocks, nn.Flatten())
        masks = {name: torch.ones(p.shape, dtype=torch.bool) for name, p in module.named_parameters()}
        masks["0.1.weight"][:, 4] = False
        for one_way in (False, True):
            for name, mask in masks.items():
                if one_way and name.startswith("0.0"):
                    mask[1:4] = False
                elif one_way:
                    mask[1:] = False
                    mask.reshape(len(mask), -1)[:, mask[0, 0].numel() if mask.dim() > 1 else 1 :] = False
            values = {name: 0.1 * masks[name] * torch.ones(mask.shape) for name, mask in masks.items()}
            right = masks | {name: masks[name].clone() for name in ("0.0.weight", "0.0.bias")}
            for name in ("0.0.weight", "0.0.bias"):
                right[name][4] = False  # nobody reads it
            kept = prune(module, values, masks, (), (4, 3, 3))[1]
            assert all(torch.equal(kept[name], mask) for name, mask in right.items())


def test_a_batch_norm_of_a_channel_that_is_zero_keeps_its_constant_in_its_bias() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1)).double().eval()
    module[1].running_mean.copy_(torch.tensor([2.0, 3.0]))
    module[1].running_var.copy_(torch.tensor([4.0, 9.0]))
    module[1].eps = 1e-16  # which the variances swallow
    values = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    values["0.weight"][1] = 0.0
    values["1.bias"][1] = 0.5
    masks = {name: value != 0 for name, value in values.items()}
    pruned, kept = prune(module, values, masks, (), (1, 2, 2))
    assert pruned["1.bias"].tolist() == [1.0, -0.5] and pruned["1.weight"].tolist() == [1.0, 0.0]
    assert kept["1.weight"].tolist() == [True, False] and kept["1.bias"].all() and kept["2.weight"].all()
    assert same(call(module, pruned, images(1, 2, 2)), call(module, values, images(1, 2, 2)), 1e-14)
    module[1].running_mean.zero_()  # then there is no constant
    kept = prune(
        module, values | {"1.bias": torch.zeros(2).double()}, masks | {"1.bias": ~masks["1.bias"]}, (), (1, 2, 2)
    )[1]
    assert kept["1.weight"].tolist() == [True, False] and kept["2.weight"].flatten().tolist() == [True, False]


@pytest.mark.parametrize("fixed", ["1.bias", "1.weight"])
def test_a_constant_that_no_bias_can_take_stays_with_its_scale(fixed: str) -> None:
    module = with_statistics(
        nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), nn.BatchNorm2d(3), nn.Conv2d(3, 1, 1)), 0, 0.0
    )
    values, masks = masked(module, 1.0, 0)
    for name, index in (("0.weight", 1), ("2.weight", (0, 2))):  # channel 1 is zero, nobody reads channel 2
        values[name][index], masks[name][index] = 0.0, False
    pruned, kept = prune(module, values, masks, (fixed,), (1, 2, 2))
    assert kept["0.weight"].flatten().tolist() == [True, False, False]
    assert all(torch.equal(pruned[name][:2], value[:2]) for name, value in values.items())
    assert all(kept[f"1.{last}"].tolist() == [True, True, fixed == f"1.{last}"] for last in ("weight", "bias"))


@pytest.mark.parametrize("fixed", [set(), {"norm1.bias"}])
def test_running_statistics_may_come_with_the_values(fixed: set[str]) -> None:
    module = with_statistics(Residual(), 0, 0.0)
    values, masks = masked(module, 0.9, 1, frozenset(fixed))
    masks["conv1.weight"][1], values["conv1.weight"][1] = False, 0.0
    masks["norm1.weight"][1], values["norm1.weight"][1] = True, 2.0
    masks["conv2.weight"][:, 3], values["conv2.weight"][:, 3] = False, 0.0
    right, right_kept = prune(module, values, masks, fixed, (2, 5, 5))
    assert bool(right_kept["norm1.weight"][1]) == bool(fixed) and not right_kept["conv1.weight"][3].any()
    statistics = {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name}
    assert statistics
    bare = Residual().double().eval()  # with means 0 and variances 1
    every = masks | {name: torch.ones_like(value, dtype=torch.bool) for name, value in statistics.items()}
    pruned, kept = prune(bare, values | statistics, every, fixed | set(statistics), (2, 5, 5))
    assert all(torch.equal(pruned[name], value) for name, value in (right | statistics).items())
    assert all(torch.equal(kept[name], mask) for name, mask in right_kept.items())
    assert all(bool(kept[name].all()) for name in statistics)


def test_a_batch_norm_called_twice_is_folded_only_where_both_channels_are_zero() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 3, 1, bias=False), nn.Conv2d(1, 3, 1, bias=False)
            self.norm, self.last = nn.BatchNorm2d(3), nn.Conv2d(3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.norm(self.first(x))) * self.norm(self.second(x)))

    module = with_statistics(Twice(), 0, 0.0)
    values, masks = masked(module, 1.0, 0)
    for name, channels in (("first", [0, 1]), ("second", [0, 2])):
        masks[f"{name}.weight"][channels] = False
        values[f"{name}.weight"][channels] = 0.0
    pruned, kept = prune(module, values, masks, (), (1, 2, 2))
    assert kept["norm.weight"].tolist() == [False, True, True]
    assert same(call(module, pruned, images(1, 2, 2)), call(module, values, images(1, 2, 2)), 1e-13)


def test_weights_that_two_batch_norms_share_stay() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)
    )
    module[4].weight, module[4].bias = module[1].weight, module[1].bias
    module = with_statistics(module, 0, 0.0)
    values, masks = masked(module, 1.0, 0)
    values["0.weight"][1], masks["0.weight"][1] = 0.0, False
    values["3.weight"][:, 2], masks["3.weight"][:, 2] = 0.0, False
    pruned, kept = prune(module, values, masks, (), (1, 2, 2))
    assert not kept["2.weight"][2].any()
    assert all(torch.equal(kept[name][:2], mask[:2]) for name, mask in masks.items())
    assert all(torch.equal(pruned[name][:2], value[:2]) for name, value in values.items())


@pytest.mark.parametrize(
    "maximum",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, 3, ceil_mode=True),
        nn.AdaptiveMaxPool2d(1),
        *(nn.AdaptiveMaxPool2d((2, 1)), lambda x: x.amax((2, 3)), lambda x: torch.amax(x, -1, keepdim=True)),
        lambda x: torch.maximum(x[:, :1], x[:, 1:]),
        lambda x: F.max_pool2d(x, 2, stride=1),
    ],
)
def test_a_maximum_may_be_any_of_its_numbers(maximum: Callable[[Tensor], Tensor]) -> None:
    """Of images of 2 x 2 each corner sees another part of the kernel."""

    class Maximal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.LazyLinear(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(maximum(torch.relu(self.conv(x))[:, :2]).flatten(1))

    module = Maximal().double()
    module(images(1, 2, 2))
    values = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    masks = {name: value != 0 for name, value in values.items()}
    kept = prune(module, values, masks, (), (1, 2, 2))[1]
    assert not kept["conv.weight"][2].any() and not kept["conv.bias"][2]  # which is not read
    assert kept["conv.weight"][:2].all() and kept["conv.bias"][:2].all() and kept["last.weight"].all()


def test_a_kernel_s_rim_that_sees_nothing_but_padding_is_dropped() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(3, 1)).double()
    values, masks = masked(module, 1.0, 0)
    kept = prune(module, values, masks, (), (2, 1, 1))[1]["0.weight"]
    assert kept[:, :, 1, 1].all() and int(kept.sum()) == 6


def test_a_network_that_the_probe_cannot_follow_is_left_whole() -> None:
    module = Functional(lambda x: torch.relu(x - 0.5)).double()
    module.first.bias = None
    values, masks = masked(module, 0.9, 0)
    masks["second.bias"][:], values["second.bias"][:] = False, 0.0
    pruned, kept = prune(module, values, masks, ())
    assert call(module, values).std() > 0.1
    assert all(
        torch.equal(kept[name], mask) and torch.equal(pruned[name], values[name]) for name, mask in masks.items()
    )


def test_what_is_fixed_stays_though_it_is_dead() -> None:
    module = Skip().double()
    values, masks = masked(module, 1.0, 0)
    masks["second.weight"][:], values["second.weight"][:] = False, 0.0
    kept = prune(module, values, masks, ("first.weight",))[1]
    assert kept["first.weight"].all() and not kept["first.bias"].any() and kept["direct.weight"].all()


def test_prune_leaves_the_module_and_what_it_is_given() -> None:
    module = with_statistics(Residual(), 0).train()
    values, masks = masked(module, 0.1, 0)
    before = {n: t.clone() for n, t in (module.state_dict() | {f"v{n}": v for n, v in values.items()}).items()}
    before |= {f"m{name}": mask.clone() for name, mask in masks.items()}
    prune(module, values, masks, (), (2, 5, 5))
    after = module.state_dict() | {f"v{n}": v for n, v in values.items()} | {f"m{n}": m for n, m in masks.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(part.training and "forward" not in part.__dict__ for part in module.modules())


@pytest.mark.parametrize("shape", [None, (3, 5, 5), (2,)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...] | None) -> None:
    module = Residual().double()
    values, masks = masked(module, 1.0, 0)
    with pytest.raises(ValueError, match=r"input_shape must be the shape of one row .*: Residual refuses rows of \("):
        prune(module, values, masks, (), shape)


def test_a_table_counts_weights_and_channels_of_each_site_and_of_all() -> None:
    found = structure(None)
    table = found.table()
    assert list(table.index) == [*found.masks, "all"]
    assert list(table.columns) == ["shape", "weights", "kept", "ratio", "live", "channels"]
    first = next(name for name in found.masks if name.endswith("layer1.weight"))
    assert table.loc[first].tolist() == ["2 x 3", 6, 2, pytest.approx(1 / 3), 1, 2]
    bias = next(name for name in found.masks if name.endswith("layer1.bias"))
    assert table.loc[bias, ["live", "channels"]].isna().all() and table.loc[bias, "weights"] == 2
    assert table.loc["all"].tolist() == ["", 11, 4, pytest.approx(4 / 11), 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_images_that_are_normalised_first_change_nothing_of_what_lives(seed: int) -> None:
    """Small positive inputs, by which paths are found, would be negative after it."""
    torch.manual_seed(seed)
    body = ps.resnet(8, width=4)
    values = {name: p.detach() for name, p in body.named_parameters()}
    masks = {name: torch.rand(p.shape) < 0.15 for name, p in body.named_parameters()}
    values = {name: value * masks[name] for name, value in values.items()}
    _, right = prune(body, values, masks, (), (3, 16, 16))
    front = nn.Sequential(ps.Normalize([0.5, 0.4, 0.3], [0.2, 0.2, 0.3]), body)
    own = {f"1.{name}": value for name, value in values.items()}
    _, found = prune(front, own, {f"1.{name}": mask for name, mask in masks.items()}, (), (3, 16, 16))
    assert sum(int(mask.sum()) for mask in right.values()) < sum(int(mask.sum()) for mask in masks.values())
    assert all(torch.equal(found[f"1.{name}"], mask) for name, mask in right.items())
