"""Sparse structures: which weights act, which inputs they read, and the smaller network that computes the same."""

import copy
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pyro_sparse.inference.layout import Layout

Masks = dict[str, Tensor]

ELEMENTWISE = (
    *(nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh, nn.ReLU6),
    *(nn.Identity, nn.Dropout),
)
FUNCTIONS: dict[Any, type[nn.Module]] = {
    torch.tanh: nn.Tanh,
    functional.tanh: nn.Tanh,
    "tanh": nn.Tanh,
    torch.relu: nn.ReLU,
    functional.relu: nn.ReLU,
    "relu": nn.ReLU,
    torch.sigmoid: nn.Sigmoid,
    functional.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid,
    functional.silu: nn.SiLU,
    functional.gelu: nn.GELU,
}


@dataclass(frozen=True)
class Layer:
    """One linear layer of a chain, by the names of its parameters, and the elementwise map after it."""

    weight: str
    bias: str | None
    activation: nn.Module


def linear_chain(module: nn.Module) -> list[Layer] | None:
    """The layers of a network that is linear layers and elementwise maps one after another; None for any other."""
    if isinstance(module, nn.Linear):
        return [Layer("weight", None if module.bias is None else "bias", nn.Sequential())]
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception:  # control flow that torch.fx cannot follow: no chain that we could know
        return None
    own = {name for name, _ in module.named_parameters()}
    layers: list[Layer] = []
    previous = None
    for node in graph.nodes:
        if node.op == "output":
            return layers if layers and node.args == (previous,) else None
        if node.op == "placeholder" and previous is None:
            previous = node
            continue
        if node.all_input_nodes != [previous]:
            return None
        part = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(part, nn.Linear):
            layer = Layer(
                f"{node.target}.weight", None if part.bias is None else f"{node.target}.bias", nn.Sequential()
            )
            names = {layer.weight} | ({layer.bias} if layer.bias else set())
            if not names <= own:  # a weight used twice, or computed from others
                return None
            own -= names
            layers.append(layer)
        else:
            activation = _elementwise(part, node)
            if activation is None or not layers:
                return None
            layers[-1].activation.append(activation)  # type: ignore[operator]
        previous = node
    return None


def _elementwise(part: nn.Module | None, node: fx.Node) -> nn.Module | None:
    if part is not None:
        return copy.deepcopy(part).eval() if isinstance(part, ELEMENTWISE) else None
    plain = len(node.args) == 1 and not any(node.kwargs.values())  # relu(x, inplace=False) is plain
    return FUNCTIONS[node.target]() if plain and node.target in FUNCTIONS else None


_CHAINS: "WeakKeyDictionary[nn.Module, list[Layer] | None]" = WeakKeyDictionary()


def live_inputs(module: nn.Module, masks: Mapping[str, Tensor], num_inputs: int) -> Tensor:
    """Which inputs a live path leaves, (..., num_inputs) booleans, of masks (..., *shape) of one network or of many."""
    if module not in _CHAINS:  # asked of every draw: following the forward takes a millisecond
        _CHAINS[module] = linear_chain(module)
    chain = _CHAINS[module]
    if chain is None:
        return _probed_inputs(module, masks, num_inputs)
    reads: Tensor | None = None
    for layer in reversed(chain):
        mask = masks[layer.weight] if reads is None else masks[layer.weight] & reads[..., None]
        reads = mask.any(-2)
    assert reads is not None
    return reads


def _probed_inputs(module: nn.Module, masks: Mapping[str, Tensor], num_inputs: int) -> Tensor:
    own = {name: parameter.dim() for name, parameter in module.named_parameters()}
    leading = torch.broadcast_shapes(*(masks[name].shape[: masks[name].dim() - dim] for name, dim in own.items()))
    if not leading:
        return _probe(module, masks, num_inputs)[1]
    flat = {
        n: masks[n].expand(*leading, *masks[n].shape[masks[n].dim() - d :]).flatten(0, len(leading) - 1)
        for n, d in own.items()
    }
    each = [_probe(module, {n: mask[i] for n, mask in flat.items()}, num_inputs)[1] for i in range(leading.numel())]
    return torch.stack(each).reshape(*leading, num_inputs)


def prune(
    module: nn.Module, values: Mapping[str, Tensor], masks: Mapping[str, Tensor], fixed: Collection[str]
) -> tuple[dict[str, Tensor], Masks]:
    """Values and masks of the network without what cannot act; it computes the same function.

    A weight with no path from an input or bias, or with no path to an output, is dropped. A unit that no input reaches is
    a constant, folded into the next biases (in a chain of linear layers; in any other network it stays).

    Args:
        values, masks: by parameter name; values are zero where their mask is False. Masks of ``fixed`` are all True.
        fixed: parameters that are never pruned.
    """
    chain = linear_chain(module)
    if chain is None:
        live = _probe(module, masks, None)[0]
        kept = {name: mask if name in fixed else mask & live[name] for name, mask in masks.items()}
        return {name: value * kept[name] for name, value in values.items()}, kept
    values, masks = dict(values), dict(masks)
    _fold_constants(chain, values, masks, fixed)
    _drop_unread(chain, masks, fixed)
    return {name: value * masks[name] for name, value in values.items()}, masks


def _fold_constants(chain: list[Layer], values: dict[str, Tensor], masks: Masks, fixed: Collection[str]) -> None:
    num_inputs = masks[chain[0].weight].shape[1]
    device = masks[chain[0].weight].device
    varies = torch.ones(num_inputs, dtype=torch.bool, device=device)
    constant = torch.zeros(num_inputs, dtype=torch.float64, device=device)
    for layer in chain:
        weight = values[layer.weight].double() * masks[layer.weight]
        shift = (weight * ~varies) @ constant
        can_take = layer.bias is not None and layer.bias not in fixed
        if layer.weight in fixed or (bool((shift != 0).any()) and not can_take):
            varies = torch.ones_like(varies)  # nowhere to fold the constants: they stay
            shift = torch.zeros_like(shift)
        bias = torch.zeros_like(shift)
        if layer.bias is not None:
            bias = values[layer.bias].double() * masks[layer.bias] + shift
            values[layer.bias] = bias.to(values[layer.bias].dtype)
            masks[layer.bias] = masks[layer.bias] | (shift != 0)
        masks[layer.weight] = masks[layer.weight] & varies
        varies = masks[layer.weight].any(1)
        with torch.no_grad():
            constant = layer.activation(bias.clone())  # which may work in place


def _drop_unread(chain: list[Layer], masks: Masks, fixed: Collection[str]) -> None:
    read: Tensor | None = None
    for layer in reversed(chain):
        live = masks[layer.weight] if read is None else masks[layer.weight] & read[:, None]
        if layer.weight not in fixed:
            masks[layer.weight] = live
        if read is not None and layer.bias is not None and layer.bias not in fixed:
            masks[layer.bias] = masks[layer.bias] & read
        read = live.any(0)


def _probe(module: nn.Module, masks: Mapping[str, Tensor], num_inputs: int | None) -> tuple[Masks, Tensor]:
    """Liveness in any network: with positive weights and inputs nothing cancels, so a zero gradient means no path.

    Inputs and biases are small, so that nothing saturates.
    """
    generator = torch.Generator().manual_seed(0)

    def positive(shape: torch.Size) -> Tensor:
        return 0.5 + 0.5 * torch.rand(shape, dtype=torch.float64, generator=generator)

    twin = copy.deepcopy(module).cpu().double().eval()
    fan_in = {n: max(1, p[0].numel()) if p.dim() > 1 else 100 for n, p in twin.named_parameters()}
    weights = {n: positive(p.shape) * masks[n].cpu() / fan_in[n] for n, p in twin.named_parameters()}
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    columns = num_inputs or next(p.shape[1] for p in twin.parameters() if p.dim() > 1)
    inputs = (0.01 * positive(torch.Size([8, columns]))).requires_grad_()
    outputs = torch.func.functional_call(twin, weights, (inputs,))
    output = (outputs * positive(outputs.shape)).sum()
    gradients = torch.autograd.grad(output, [*weights.values(), inputs], allow_unused=True, materialize_grads=True)
    live = {n: (g != 0).to(masks[n].device) & masks[n] for n, g in zip(weights, gradients[:-1], strict=True)}
    return live, (gradients[-1] != 0).any(0)


@dataclass(frozen=True, repr=False)
class Structure:
    """Which weights a network keeps: masks by site, True = kept, and the values that a refit starts from.

    Attributes:
        masks: of every spike-and-slab site.
        values: of every site of the model, on its support, zero where pruned, constants folded into biases.
        input_probability: (num_inputs,) share of draws, or of chains after cooling, in which a live path leaves an input.
        reads: (num_inputs,) booleans, the inputs that a live path of this structure leaves.
        input_names: of the inputs; None where they have none.
        num_chains: independent annealing runs behind ``input_probability``.
    """

    masks: Masks
    values: dict[str, Tensor]
    input_probability: Tensor
    reads: Tensor
    input_names: tuple[str, ...] | None
    num_chains: int
    layout: Layout = field(repr=False)

    @property
    def num_weights(self) -> int:
        """Spike-and-slab weights in all."""
        return sum(mask.numel() for mask in self.masks.values())

    @property
    def num_kept(self) -> int:
        """Weights kept."""
        return sum(int(mask.sum()) for mask in self.masks.values())

    @property
    def sparsity(self) -> float:
        """Share of weights pruned, in [0, 1]."""
        return 1 - self.num_kept / self.num_weights

    @property
    def input_indices(self) -> list[int]:
        """Columns of the selected inputs, counted from 0."""
        return [int(i) for i in self.reads.nonzero()]

    @property
    def selected_inputs(self) -> list[str] | list[int]:
        """Names of the selected inputs, or their columns where they have no names."""
        return self.input_indices if self.input_names is None else [self.input_names[i] for i in self.input_indices]

    def with_biases(self) -> "Structure":
        """The same structure with the biases of its live units and of the outputs kept.

        Which weights connect is a choice, where a unit stands is estimated: a truth that is sparse in the inputs as they
        are is not so after centring them at their sample means, whose error belongs in the intervals. For chains of
        linear layers; other networks are left as they are.
        """
        masks = dict(self.masks)
        for module in self.layout.modules():
            sites = {name: site.name for name, site in self.layout.of_module(module).items()}
            chain = linear_chain(module.module) or []
            for layer in chain:
                bias = sites[layer.bias] if layer.bias is not None else None
                if bias in masks:
                    weight = masks.get(sites[layer.weight])
                    live = torch.ones_like(masks[bias]) if weight is None or layer is chain[-1] else weight.any(1)
                    masks[bias] = masks[bias] | live
        return dataclasses.replace(self, masks=masks)

    def without_inputs(self) -> "Structure":
        """The same networks with no weight kept: what is left where no input is."""
        masks = {name: torch.zeros_like(mask) for name, mask in self.masks.items()}
        values = {n: torch.zeros_like(v) if n in masks else v for n, v in self.values.items()}
        return dataclasses.replace(self, masks=masks, values=values, reads=torch.zeros_like(self.reads))

    def kept(self, like: Tensor) -> Tensor:
        """A flat mask over the position: kept weights and every coordinate that is never pruned."""
        return self.layout.flat(self.masks, True, like)

    def __repr__(self) -> str:
        return f"Structure({self.num_kept} of {self.num_weights} weights, inputs {self.selected_inputs})"

    def __str__(self) -> str:
        lines = [f"{self.num_kept:,} of {self.num_weights:,} weights kept ({self.sparsity:.1%} pruned)"]
        if len(self.reads):
            names = [str(name) for name in self.selected_inputs]
            text = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            lines.append(f"{len(names)} of {len(self.reads)} inputs selected: {text or 'none'}")
            if self.num_chains > 1 and names:
                shares = [
                    f"{n}: {float(self.input_probability[i]):.0%}"
                    for n, i in zip(names, self.input_indices, strict=True)
                ]
                lines.append(f"how often in {self.num_chains} runs: {', '.join(shares[:12])}")
        for name, mask in self.masks.items():
            shape = " x ".join(str(size) for size in mask.shape) or "1"
            units = f", {int(mask.flatten(1).any(1).sum())} of {len(mask)} units" if mask.dim() > 1 else ""
            lines.append(f"  {name} ({shape}): {int(mask.sum()):,} kept{units}")
        return "\n".join(lines)


def compact(module: nn.Module) -> nn.Sequential:
    """The small dense network of a pruned chain of linear layers: live units only, reading the selected inputs in order.

    Raises:
        ValueError: where ``module`` is no chain of linear layers and elementwise maps.
    """
    chain = linear_chain(module)
    if chain is None:
        raise ValueError(
            f"module must be linear layers and elementwise maps one after another, got {type(module).__name__}"
        )
    parameters = dict(module.named_parameters())
    units = [torch.ones_like(parameters[chain[-1].weight][:, 0], dtype=torch.bool)]
    for layer in reversed(chain):
        units.insert(0, ((parameters[layer.weight] != 0) & units[0][:, None]).any(0))
    parts: list[nn.Module] = []
    for layer, columns, rows in zip(chain, units[:-1], units[1:], strict=True):
        weight = parameters[layer.weight].detach()[rows][:, columns]
        linear = nn.Linear(
            1, 1, layer.bias is not None, device="meta"
        )  # initialises nothing, and there may be no units
        linear.out_features, linear.in_features = weight.shape
        linear.weight = nn.Parameter(weight)
        if layer.bias is not None:
            linear.bias = nn.Parameter(parameters[layer.bias].detach()[rows])
        parts += [linear, *copy.deepcopy(layer.activation).children()]
    return nn.Sequential(*parts)
