"""Sparse structures: which weights act, which inputs they read, and the smaller network that computes the same."""

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_sparse.inference.layout import Layout
from pyro_sparse.models.images import Normalize

if TYPE_CHECKING:
    import pandas as pd

Masks = dict[str, Tensor]

NORMALISATIONS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
SMALL = 1e-6  # inputs and biases of a probe: sums of thousands stay where tanh is steep and ReLU6 open

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
    if is_hooked(module):  # torch.fx follows the forward of the class alone
        return None
    own = {name for name, _ in module.named_parameters()}
    if is_plain(module, (nn.Linear,)):
        alone = _layer(module, "")
        return [alone] if _names(alone) <= own else None
    try:
        # Of one that changes its buffers a copy, or what stands for them while it is traced would stay in it.
        graph = fx.symbolic_trace(
            copy.deepcopy(module).eval() if next(module.buffers(), None) is not None else module
        ).graph
    except Exception:  # control flow that torch.fx cannot follow: no chain that we could know
        return None
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
        if part is not None and is_hooked(part):
            return None
        if part is not None and is_plain(part, (nn.Linear,)):
            layer = _layer(part, f"{node.target}.")
            if not _names(layer) <= own:  # a weight used twice, or computed from others
                return None
            own -= _names(layer)
            layers.append(layer)
        else:
            activation = _elementwise(part, node)
            if activation is None or not layers:
                return None
            layers[-1].activation.append(activation)  # type: ignore[operator]
        previous = node
    return None


def is_plain(part: nn.Module, kinds: Collection[type[nn.Module]]) -> bool:
    """Whether a layer computes what one of these classes of PyTorch does, not what a class of the user's makes of it."""
    return any(
        isinstance(part, kind)
        and type(part).forward is kind.forward
        and getattr(type(part), "_conv_forward", None) is getattr(kind, "_conv_forward", None)
        for kind in kinds
    )


def is_hooked(part: nn.Module) -> bool:
    """Whether calling a layer does more than the forward of its class, to its arguments or to what it returns."""
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))


def _layer(part: nn.Module, prefix: str) -> Layer:
    return Layer(f"{prefix}weight", None if part.bias is None else f"{prefix}bias", nn.Sequential())


def _names(layer: Layer) -> set[str]:
    return {layer.weight} if layer.bias is None else {layer.weight, layer.bias}


def _elementwise(part: nn.Module | None, node: fx.Node) -> nn.Module | None:
    if part is not None:
        return copy.deepcopy(part).eval() if is_plain(part, ELEMENTWISE) else None
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
        return _Probe(module, masks, (num_inputs,), {}).live()[1]
    flat = {
        n: masks[n].expand(*leading, *masks[n].shape[masks[n].dim() - d :]).flatten(0, len(leading) - 1)
        for n, d in own.items()
    }
    each = [
        _Probe(module, {n: mask[i] for n, mask in flat.items()}, (num_inputs,), {}).live()[1]
        for i in range(leading.numel())
    ]
    return torch.stack(each).reshape(*leading, num_inputs)


def prune(
    module: nn.Module,
    values: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    fixed: Collection[str],
    input_shape: Sequence[int] | None = None,
) -> tuple[dict[str, Tensor], Masks]:
    """Values and masks of the network without what cannot act; in evaluation mode it computes the same function.

    A weight with no path from an input or bias, or with no path to an output, is dropped: in a convolutional network at
    the given size of its images, where a kernel's rim may see nothing but padding. A unit that no input reaches is a
    constant, folded into the next biases (in a chain of linear layers; in any other network it stays, but what a
    BatchNorm makes of a channel that is zero goes into its own bias). Paths are found by a probe with positive weights;
    where dropping what it calls dead changes the outputs (a network that subtracts before a ReLU, say), nothing is dropped.

    Args:
        values, masks: by parameter name; values are zero where their mask is False. Masks of ``fixed`` are all True. They
            may hold running statistics of BatchNorm by buffer name, among ``fixed``, in place of the module's own.
        fixed: names that are never pruned.
        input_shape: of one row of the network's first argument, (3, 32, 32) say; None is a row of a matrix, as wide as
            the first matrix of weights.

    Raises:
        ValueError: where the network takes no rows of that shape.
    """
    chain = linear_chain(module)
    if chain is None:
        return _prune_by_probe(module, dict(values), dict(masks), fixed, input_shape)
    values, masks = dict(values), dict(masks)
    _fold_constants(chain, values, masks, fixed)
    _drop_unread(chain, masks, fixed)
    return {name: value * masks[name] for name, value in values.items()}, masks


def _prune_by_probe(
    module: nn.Module,
    values: dict[str, Tensor],
    masks: Masks,
    fixed: Collection[str],
    input_shape: Sequence[int] | None,
) -> tuple[dict[str, Tensor], Masks]:
    if input_shape is None:
        input_shape = next((p.shape[1:2] for p in module.parameters() if p.dim() > 1), (1,))
    folded, kept = dict(values), dict(masks)
    live = _fold_batch_norms(module, folded, kept, fixed, input_shape).live()[0]
    kept = {name: mask & live[name] if name in live and name not in fixed else mask for name, mask in kept.items()}
    pruned = {name: value * kept[name] for name, value in folded.items()}
    if _compute_the_same(module, values, pruned, input_shape):
        return pruned, kept
    return values, masks


def _compute_the_same(
    module: nn.Module, first: Mapping[str, Tensor], second: Mapping[str, Tensor], input_shape: Sequence[int]
) -> bool:
    twin = _double(module)
    generator = torch.Generator().manual_seed(0)
    of_any_sign = torch.randn(4, *input_shape, dtype=torch.float64, generator=generator)
    of_images = torch.rand(4, *input_shape, dtype=torch.float64, generator=generator)
    rows = torch.cat([of_any_sign, of_images])
    with torch.no_grad():
        right, found = (
            flat_outputs(
                torch.func.functional_call(twin, {n: v.detach().cpu().double() for n, v in values.items()}, (rows,))
            )
            for values in (first, second)
        )
    return bool(((right - found).abs() <= 1e-6 * right.abs().max()).all())  # False of NaN


def _double(module: nn.Module) -> nn.Module:
    """A copy in double precision that is evaluated on the CPU."""
    return copy.deepcopy(module).cpu().double().eval()


def _unchanged(x: Tensor) -> Tensor:
    return x


def flat_outputs(outputs: Any) -> Tensor:
    """All numbers of a network's outputs, be they one tensor or several."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([leaf.flatten() for leaf in leaves])


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


def _fold_batch_norms(
    module: nn.Module, values: dict[str, Tensor], masks: Masks, fixed: Collection[str], input_shape: Sequence[int]
) -> "_Probe":
    """Of a channel that is zero a BatchNorm makes the constant b - w mean / sqrt(var + eps): into b with it, without w.

    Changes ``values`` and ``masks``, and returns the probe of what they are then.
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    while True:
        probe, stays = _Probe(module, masks, input_shape, values), True
        for name, is_zero in probe.zero_channels().items():
            part = module.get_submodule(name)
            weight, bias = (f"{name}.{last}".removeprefix(".") for last in ("weight", "bias"))
            if not {weight, bias} <= masks.keys() - set(fixed) or max(uses[id(p)] for p in part.parameters()) > 1:
                continue
            mean, variance = (
                values.get(f"{name}.{last}".removeprefix("."), getattr(part, last)).double()
                for last in ("running_mean", "running_var")
            )
            shift = -values[weight].double() * mean / (variance + part.eps).sqrt()
            goes = is_zero.to(shift.device) & masks[weight] & (shift != 0)
            shifted = (values[bias].double() + shift).to(values[bias].dtype)
            values[bias] = torch.where(goes, shifted, values[bias])
            masks[bias], masks[weight] = masks[bias] | goes, masks[weight] & ~goes
            values[weight] = values[weight] * masks[weight]
            stays = stays and not bool(goes.any())
        if stays:
            return probe


class _Averages(TorchFunctionMode):
    """Averages in place of maxima, whose gradient would see one of their inputs alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "amax":
            return torch.mean(*args, **kwargs)
        if name == "maximum":
            return torch.add(*args, **kwargs)
        if name.startswith("adaptive_max_pool") and not kwargs.get("return_indices"):
            return getattr(functional, name.replace("max", "avg"))(*args[:2])
        if name.startswith("max_pool"):
            names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
            given = dict(zip(names, args[1:], strict=False)) | kwargs
            has_gaps = any(gap != 1 for gap in tree_leaves(given.pop("dilation", 1)))
            if not given.pop("return_indices", False) and not has_gaps:
                return getattr(functional, name.replace("max", "avg"))(args[0], **given)
        return func(*args, **kwargs)


def _positive_norm(part: Any, source: Tensor | float, x: Tensor) -> Tensor:
    """What a normalisation layer reads and scales, without the division and with nothing subtracted."""
    if isinstance(part, nn.LayerNorm):
        x = (x + x.mean(tuple(range(-len(part.normalized_shape), 0)), keepdim=True)) / 2
        return x * (1 if part.weight is None else part.weight) + (0 if part.bias is None else part.bias)
    if not isinstance(part, _BatchNorm):
        grouped = x.unflatten(1, (getattr(part, "num_groups", x.shape[1]), -1)).flatten(2)
        x = (grouped + grouped.mean(2, keepdim=True)).reshape(x.shape) / 2
    scale, shift, source = (
        t.reshape(-1, *[1] * (x.dim() - 2)) if isinstance(t, Tensor) else t or 0.0
        for t in (1.0 if part.weight is None else part.weight, part.bias, source)
    )
    return (x + source) * scale + shift


class _Probe:
    """Liveness in any network: with positive weights and inputs nothing cancels, so a zero gradient means no path.

    Inputs and biases are small, so that nothing saturates; the weights of a unit sum to less than one and what normalises
    only scales, so that nothing overflows, and double precision holds the products of a hundred layers. A running mean
    that is not zero makes a BatchNorm a source, as a bias does.
    """

    def __init__(
        self, module: nn.Module, masks: Mapping[str, Tensor], input_shape: Sequence[int], values: Mapping[str, Tensor]
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def positive(shape: Sequence[int]) -> Tensor:
            return 0.5 + 0.5 * torch.rand(tuple(shape), dtype=torch.float64, generator=generator)

        self.twin, self.masks, self.positive = _double(module), masks, positive
        scales = set()
        for name, part in self.twin.named_modules():
            if isinstance(part, NORMALISATIONS):
                mean = values.get(f"{name}.running_mean".removeprefix("."), getattr(part, "running_mean", None))
                source = 0.0 if mean is None else SMALL * positive(mean.shape) * (mean != 0).cpu()
                part.__dict__["forward"] = functools.partial(_positive_norm, part, source)
                scales.add(f"{name}.weight".removeprefix("."))
            elif isinstance(part, Normalize):  # whose shift would make positive inputs negative ones
                part.__dict__["forward"] = _unchanged
        self.weights = {}
        for name, parameter in self.twin.named_parameters():
            weight = positive(parameter.shape) * masks[name].cpu()
            if parameter.dim() > 1:
                weight /= 2 * masks[name].cpu().flatten(1).sum(1).clamp(min=1).reshape(-1, *[1] * (weight.dim() - 1))
            elif name not in scales:
                weight *= SMALL if name.endswith("bias") else 0.01
            self.weights[name] = weight.requires_grad_()
        num_rows = 8 if len(input_shape) == 1 else 1
        self.inputs = (SMALL * positive([num_rows, *input_shape])).requires_grad_()

    def outputs(self) -> Tensor:
        try:
            with _Averages():
                return flat_outputs(torch.func.functional_call(self.twin, self.weights, (self.inputs,)))
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                "input_shape must be the shape of one row of the network's first argument: "
                f"{type(self.twin).__name__} refuses rows of {tuple(self.inputs.shape[1:])} ({error})"
            ) from error

    def zero_channels(self) -> dict[str, Tensor]:
        """By the name of each BatchNorm, (num_features,) whether its input is zero wherever it is called."""
        found: dict[str, Tensor] = {}

        def look(name: str, part: nn.Module, args: tuple[Tensor, ...]) -> None:
            is_zero = (args[0].transpose(0, 1).flatten(1) == 0).all(1)
            found[name] = found[name] & is_zero if name in found else is_zero

        norms = [
            (n, p) for n, p in self.twin.named_modules() if isinstance(p, _BatchNorm) and p.running_mean is not None
        ]
        handles = [part.register_forward_pre_hook(functools.partial(look, name)) for name, part in norms]
        if norms:
            with torch.no_grad():
                self.outputs()
        for handle in handles:
            handle.remove()
        return found

    def live(self) -> tuple[Masks, Tensor]:
        """Which weights lie on a path, by parameter name, and which numbers of a row a path leaves."""
        leaves = [*self.weights.values(), self.inputs]
        with torch.enable_grad():  # callers that go through draws record no gradients
            outputs = self.outputs()
            total = (outputs * self.positive(outputs.shape)).sum()
            gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        live = {
            name: (gradient != 0).to(self.masks[name].device) & self.masks[name]
            for name, gradient in zip(self.weights, gradients[:-1], strict=True)
        }
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
        """A flat mask over the position: kept weights and every coordinate that is never pruned, but no buffer."""
        buffers = {site.name: False for site in self.layout.sites if site.kind == "buffer"}
        return self.layout.flat(self.masks | buffers, True, like)

    def table(self) -> "pd.DataFrame":
        """What is kept of each site, and of all in the last line.

        Returns:
            One line a site, with columns ``shape``, ``weights``, ``kept``, ``ratio`` (kept / weights), and of those with
            output channels or units (matrices and kernels) how many of these keep a weight, ``live``, of ``channels``.
        """
        import pandas as pd

        lines = [
            {
                "site": name,
                "shape": " x ".join(str(size) for size in mask.shape) or "1",
                "weights": mask.numel(),
                "kept": int(mask.sum()),
                "live": int(mask.flatten(1).any(1).sum()) if mask.dim() > 1 else None,
                "channels": len(mask) if mask.dim() > 1 else None,
            }
            for name, mask in self.masks.items()
        ]
        table = pd.DataFrame(lines).set_index("site").astype({"live": "Int64", "channels": "Int64"})
        table.loc["all"] = {"shape": "", **table.drop(columns="shape").sum()}
        table.insert(3, "ratio", table["kept"] / table["weights"])
        return table

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
                lines.append(f"inclusion probability over {self.num_chains} runs: {', '.join(shares[:12])}")
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
