"""The smaller network that a pruned network with convolutions and skip connections leaves: without its dead channels."""

import copy
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_sparse.inference.structure import ELEMENTWISE, flat_outputs, is_hooked, is_plain

DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (*DENSE, _BatchNorm)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What works on each number alone; of two tensors; on each channel alone, zeros to zeros.
ELEMENTWISE_MODULES = (
    *ELEMENTWISE,
    *(nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.SELU, nn.CELU, nn.Softsign, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
ELEMENTWISE_NAMES = _words(
    "relu relu_ relu6 tanh sigmoid silu gelu elu leaky_relu softplus hardtanh hardswish hardsigmoid mish selu celu softsign "
    "dropout dropout2d clamp abs square sqrt exp neg pow contiguous clone detach float double add sub mul truediv div"
)
TOGETHER = _words("add add_ sub sub_ mul mul_ maximum minimum")
POOLING_MODULES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Upsample, nn.ZeroPad2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
POOLING_NAMES = _words(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d interpolate adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
)
REDUCTIONS = _words("mean sum amax amin")


def compact_channels(module: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """The network without its dead channels; in evaluation mode it computes the same function, to rounding.

    A channel goes where no layer reads it, by a weight that is not zero, or where it is zero for every input. Tensors that
    are added or multiplied, as by a skip connection, keep the same channels. Weights within the channels that stay keep
    their zeros. Channels go from linear and convolutional layers (not from grouped ones, but from depthwise ones), their
    BatchNorms, and through elementwise maps, pooling, concatenation and flattening; around any other operation, around a
    parameter used twice, and at inputs and outputs all stay. A layer keeps one channel at least.

    Args:
        module: such as ``Fit.module()``; it is left as it is.
        input_shape: of one row of its argument, (3, 32, 32) say.

    Returns:
        A ``torch.fx.GraphModule`` in evaluation mode, whose parameters have the names of the module's: it can be saved,
        fine-tuned, and exported as any module.

    Raises:
        TypeError: where ``module`` is none.
        ValueError: where torch.fx cannot follow its forward, or it takes no rows of that shape.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    network = _traced(copy.deepcopy(module).eval(), input_shape)
    channels = _Channels(network)
    for node, part in channels.layers:
        _shrink(part, channels.stay(node.all_input_nodes[0]), channels.stay(node))
    for node in channels.flattened:
        with network.graph.inserting_before(node):
            node.replace_all_uses_with(network.graph.call_function(torch.flatten, (node.args[0], 1)))
        network.graph.erase_node(node)
    network.recompile()
    return network


class _Tracer(fx.Tracer):
    """Layers are kept whole where a class of the user's inherits their forward."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_plain(m, LAYERS) or super().is_leaf_module(m, module_qualified_name)


def _traced(module: nn.Module, input_shape: Sequence[int]) -> fx.GraphModule:
    """The graph of a network, with the shape of each tensor for two rows in its nodes."""
    name = type(module).__name__
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever control flow on a proxy raises
        raise ValueError(f"module must be one that torch.fx can trace, got {name} ({error})") from error
    network = fx.GraphModule(module, graph, name).eval()
    like = next((p.detach() for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, *input_shape, generator=generator).to(like)
    with torch.no_grad():
        try:
            right = flat_outputs(module(rows.clone()))
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                "input_shape must be the shape of one row of the network's argument: "
                f"{name} refuses rows of {tuple(input_shape)} ({error})"
            ) from error
        found = flat_outputs(ShapeProp(network).propagate(rows))
    if not torch.allclose(found, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()), equal_nan=True):
        raise ValueError(f"module must be one that torch.fx can trace, got {name}, of which it makes another function")
    return network


class _Channels:
    """The channels (axis 1) of every tensor by number: those of equal numbers stay or go together.

    Attributes:
        numbers: of each tensor, (size of axis 1,).
        is_zero: of each tensor, the same shape: whether a channel is zero whatever the input.
        layers: that can be shrunk: their nodes and modules.
        reads: of each dense one, (out, in) whether it has a weight there that is not zero.
        flattened: nodes that are computed as ``flatten(x, 1)``, whatever sizes their arguments name.
    """

    def __init__(self, network: fx.GraphModule) -> None:
        self.network = network
        self.shapes: dict[fx.Node, torch.Size | None] = {
            node: getattr(node.meta.get("tensor_meta"), "shape", None) for node in network.graph.nodes
        }
        self.parent: list[int] = []  # of each number, in the forest of a union-find
        self.locked: list[int] = []
        self.numbers: dict[fx.Node, Tensor] = {}
        self.is_zero: dict[fx.Node, Tensor] = {}
        self.layers: list[tuple[fx.Node, nn.Module]] = []
        self.reads: dict[fx.Node, Tensor] = {}
        self.flattened: list[fx.Node] = []
        self.uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
        self.calls = Counter(n.target for n in network.graph.nodes if n.op in ("call_module", "get_attr"))
        for node in network.graph.nodes:
            if not (node.op.startswith("call") and self._follow(node)):
                self._lock(node)
        self.needed = self._needed()

    def stay(self, node: fx.Node) -> Tensor:
        """Which channels of a tensor stay."""
        return self.needed[self.numbers[node]]

    def _needed(self) -> Tensor:
        """By number: whether a channel is read on a way to an output or to an operation that is not known."""
        roots = torch.tensor([self._root(number) for number in range(len(self.parent))], dtype=torch.long)
        self.numbers = {node: roots[numbers] for node, numbers in self.numbers.items()}
        needed = torch.zeros(len(roots), dtype=torch.bool)
        needed[roots[self.locked]] = True
        before = -1
        while before != (before := int(needed.sum())):
            for node, reads in reversed(self.reads.items()):
                source = node.all_input_nodes[0]
                read = reads[needed[self.numbers[node]]].any(0) & ~self.is_zero[source]
                needed[self.numbers[source][read]] = True
        for numbers in self.numbers.values():  # convolutions cannot be without any channel
            if not needed[numbers].any():
                needed[numbers[:1]] = True
        return needed

    def _new(self, count: int) -> Tensor:
        start = len(self.parent)
        self.parent += range(start, start + count)
        return torch.arange(start, start + count)

    def _root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = number = self.parent[self.parent[number]]
        return number

    def _lock(self, node: fx.Node) -> None:
        """Nothing goes around an operation that is not known."""
        for source in node.all_input_nodes:
            self.locked += self.numbers[source].tolist() if source in self.numbers else []
        shape = self.shapes[node]
        if shape is not None and len(shape) > 1 and node.op != "output":
            self._set(node, self._new(shape[1]), torch.zeros(shape[1], dtype=torch.bool))
            self.locked += self.numbers[node].tolist()

    def _set(self, node: fx.Node, numbers: Tensor, is_zero: Tensor) -> bool:
        self.numbers[node], self.is_zero[node] = numbers, is_zero
        return True

    def _follow(self, node: fx.Node) -> bool:
        """Numbers the channels of what a node returns; False where the operation is not known."""
        tensors = [source for source in node.all_input_nodes if source in self.numbers]
        shape = self.shapes[node]
        if not tensors:
            return shape is None
        if shape is None:
            return _counts_rows(node)
        if node.op == "call_module":
            part = self.network.get_submodule(str(node.target))
            return len(node.all_input_nodes) == 1 and self._follow_module(node, tensors[0], part, shape)
        name = _name(node)
        if name in ("flatten", "view", "reshape", "squeeze"):
            return self._flatten(node, tensors[0], shape)
        if len(tensors) < len(node.all_input_nodes):
            return False
        if name == "cat":
            return self._concatenate(node, len(shape))
        if len(tensors) == 2:
            return name in TOGETHER and self._join(node, name, tensors[0], tensors[1], shape)
        return self._map(node, name, tensors[0])

    def _map(self, node: fx.Node, name: str, source: fx.Node) -> bool:
        numbers, is_zero = self.numbers[source], self.is_zero[source]
        if name in ELEMENTWISE_NAMES:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: torch.zeros(()))
            target: Any = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
            return self._set_elementwise(node, name, source, is_zero & bool(target(*args, **kwargs) == 0))
        if name in POOLING_NAMES or _keeps_channels(node, name, len(self.shapes[source] or ())):
            return self._set(node, numbers, is_zero)
        return False

    def _join(self, node: fx.Node, name: str, first: fx.Node, second: fx.Node, shape: torch.Size) -> bool:
        for source in (first, second):
            own = self.shapes[source]
            if own is None or len(own) != len(shape) or own[1] != shape[1]:
                return False
        for pair in zip(self.numbers[first].tolist(), self.numbers[second].tolist(), strict=True):
            self.parent[self._root(pair[0])] = self._root(pair[1])
        one, other = self.is_zero[first], self.is_zero[second]
        is_zero = one | other if "mul" in name else one & other
        return self._set_elementwise(node, name, first, is_zero)

    def _set_elementwise(self, node: fx.Node, name: str, source: fx.Node, is_zero: Tensor) -> bool:
        if name.endswith("_"):  # in place: who reads the source later reads the result
            self.is_zero[source] = is_zero
        return self._set(node, self.numbers[source], is_zero)

    def _concatenate(self, node: fx.Node, rank: int) -> bool:
        parts: Any = node.args[0] if node.args else None
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(parts, list | tuple) or dim % rank != 1:
            return False
        numbers, is_zero = ([of[part] for part in parts] for of in (self.numbers, self.is_zero))
        return self._set(node, torch.cat(numbers), torch.cat(is_zero))

    def _flatten(self, node: fx.Node, source: fx.Node, shape: torch.Size) -> bool:
        before = self.shapes[source]
        if before is None or shape != (before[0], before[1:].numel()):
            return False
        if node.op != "call_module":
            self.flattened.append(node)
        repeated = [of[source].repeat_interleave(before[2:].numel()) for of in (self.numbers, self.is_zero)]
        return self._set(node, *repeated)

    def _follow_module(self, node: fx.Node, source: fx.Node, part: Any, shape: torch.Size) -> bool:
        numbers, is_zero = self.numbers[source], self.is_zero[source]
        if is_hooked(part):  # whatever a hook makes of the channels
            return False
        if isinstance(part, ELEMENTWISE_MODULES):
            return self._set(node, numbers, is_zero & bool((part(torch.zeros([1] * len(shape))) == 0).all()))
        if isinstance(part, POOLING_MODULES):
            return self._set(node, numbers, is_zero)
        if isinstance(part, nn.Flatten):
            return self._flatten(node, source, shape)
        if not is_plain(part, LAYERS) or not self._is_alone(str(node.target), part):
            return False
        weight = part.weight.detach().cpu()
        bias = torch.zeros(len(weight)) if part.bias is None else part.bias.detach().cpu()
        if isinstance(part, _BatchNorm):
            if part.running_mean is None or part.running_var is None:
                return False
            of_zero = bias - weight * part.running_mean.cpu() / (part.running_var.cpu() + part.eps).sqrt()
            self._set(node, numbers, (bias == 0) & (weight == 0) | (of_zero == 0) & is_zero)
        elif len(shape) != weight.dim():
            return False
        elif getattr(part, "groups", 1) == 1:
            self.reads[node] = (weight != 0).flatten(2).any(2) if weight.dim() > 2 else weight != 0
            self._set(node, self._new(len(weight)), ~self.reads[node][:, ~is_zero].any(1) & (bias == 0))
        elif part.groups == part.in_channels == part.out_channels:
            self._set(node, numbers, (is_zero | (weight == 0).flatten(1).all(1)) & (bias == 0))
        else:
            return False
        self.layers.append((node, part))
        return True

    def _is_alone(self, name: str, part: nn.Module) -> bool:
        """Whether a layer is called once, and its parameters are nobody else's and computed from no others."""
        parameters = {f"{name}.{last}": p for last, p in part.named_parameters()}
        return (
            self.calls[name] == 1
            and f"{name}.weight" in parameters
            and all(self.uses[id(p)] == 1 and not self.calls[full] for full, p in parameters.items())
        )


def _name(node: fx.Node) -> str:
    """Of a method, or of a function of PyTorch or the operators; empty for any other."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if any(getattr(home, name, None) is node.target for home in (torch, functional, operator)) else ""


def _counts_rows(node: fx.Node) -> bool:
    """Whether ``x.size(0)`` or ``x.shape[0]`` is all that is asked."""
    if node.target == "size" and node.args[1:] == (0,):
        return True
    is_shape = (node.target == "size" and len(node.args) == 1) or (node.target is getattr and node.args[1] == "shape")
    return bool(is_shape) and all(user.target is operator.getitem and user.args[1:] == (0,) for user in node.users)


def _keeps_channels(node: fx.Node, name: str, rank: int) -> bool:
    """Whether an operation on the axes after the channels takes each channel to itself, and zeros to zeros."""
    argument: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("pad"))
    if name in REDUCTIONS and argument is not None:
        return all(axis % rank > 1 for axis in ([argument] if isinstance(argument, int) else argument))
    if name == "pad" and isinstance(argument, list | tuple):
        value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
        return len(argument) <= 2 * (rank - 2) and value in (None, 0)
    whole = slice(None, None, None)
    if name == "getitem" and isinstance(argument, tuple):
        return (
            len(argument) > 2 and argument[:2] == (whole, whole) and all(isinstance(i, slice | int) for i in argument)
        )
    return False


def _shrink(part: Any, before: Tensor, after: Tensor) -> None:
    """Leaves a layer the channels that stay of its input and of its output."""
    columns = before if isinstance(part, DENSE) and getattr(part, "groups", 1) == 1 else slice(None)
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        if tensor.dim() == 0:  # the number of batches
            continue
        small = tensor.detach()[after] if tensor.dim() == 1 else tensor.detach()[after][:, columns]
        setattr(part, name, nn.Parameter(small, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else small)
    sizes = {"out_features": after, "out_channels": after, "num_features": after}
    sizes |= {"in_features": before, "in_channels": before}
    if getattr(part, "groups", 1) > 1:
        sizes["groups"] = after
    for name, stay in sizes.items():
        if hasattr(part, name):
            setattr(part, name, int(stay.sum()))
