"""Networks whose weights are spike-and-slab sites under any Pyro handler, and plain modules otherwise."""

import contextlib
import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.nn import PyroModule
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK, am_i_wrapped, effectful
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_sparse.models.annealed import replace_spike_slab
from pyro_sparse.models.defaults import default_prior
from pyro_sparse.models.spike_slab import SpikeSlab

Prior = SpikeSlab | Mapping[str, SpikeSlab] | None

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


class UnsetPrior(TorchDistribution):
    """Stands at the site of a weight whose prior is to be derived from the number of rows."""

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real

    def __init__(self, site: str, shape: torch.Size) -> None:
        self.site = site
        super().__init__(shape, validate_args=False)

    def expand(self, batch_shape: torch.Size | list[int] | tuple[int, ...], _instance: Any = None) -> Self:
        return type(self)(self.site, torch.Size(batch_shape))

    def _refuse(self, *_: Any, **__: Any) -> Tensor:
        raise ValueError(
            f"the prior of site '{self.site}' is unset: pass prior=ps.default_prior(module, num_data) to SparseNet, "
            "SparseLinear or sparsify (ps.anneal does so by itself, knowing the number of rows)"
        )

    sample = log_prob = _refuse


class with_priors(Messenger):
    """Gives unset priors their laws, or sites others: ``priors`` maps site names to SpikeSlab. Belongs inside ``annealed``."""

    def __init__(self, priors: Mapping[str, SpikeSlab]) -> None:
        super().__init__()
        self.priors = priors

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        law = self.priors.get(msg["name"])
        if law is None or msg["is_observed"]:
            return
        fn = getattr(msg["fn"], "base_dist", msg["fn"])
        if isinstance(fn, UnsetPrior):
            msg["fn"] = law.expand(fn.batch_shape).to_event(len(fn.batch_shape))
        else:
            msg["fn"] = replace_spike_slab(msg["fn"], lambda old: law.expand(old.batch_shape))


class SparseModule(PyroModule):
    """A module whose chosen parameters are spike-and-slab sample sites under any Pyro handler.

    With no handler active, calling it is the plain forward with its parameters, which are also the start values of
    sampling; ``module`` is always the plain module. Parameters, buffers, ``state_dict``, ``to`` and ``train`` are those
    of the plain module, and the hyper-parameters of the prior move with it. A second call inside one trace reuses the
    weights drawn by the first. Parameters without a prior are ``pyro.param`` sites.

    Source: the network of equation (1), the prior of equation (3) of the paper.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        prior: Prior = None,
        where: Callable[[str, nn.Parameter], bool] = lambda name, parameter: True,
        name: str = "",
    ) -> None:
        super().__init__(name)
        # Not a registered child: Pyro would make a param site of every start value beside its sample site.
        self.__dict__["module"] = module
        parameters = dict(module.named_parameters())
        self.sparse_names = tuple(n for n, p in parameters.items() if where(n, p))
        self.priors: dict[str, SpikeSlab] = _priors_by_name(prior, self.sparse_names)
        for site, law in self.priors.items():
            _check_fits(site, law, parameters[site])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not am_i_wrapped():
            return self.module(*args, **kwargs)
        given = args[0] if args else None
        values = {name: self._value(name, p, given) for name, p in self.module.named_parameters()}
        floating = next(iter(values.values())).dtype
        uncounted = _uncounted(self.module)
        buffers = {
            name: self._buffer(name, b, floating) for name, b in self.module.named_buffers() if name not in uncounted
        }
        state: Any = values | buffers | dict.fromkeys(uncounted)
        result = torch.func.functional_call(self.module, state, args, kwargs)
        for name, buffer in buffers.items():
            if state[name] is not buffer:  # the module has set another tensor in its place
                buffer.copy_(state[name].detach())
        return result

    def _buffer(self, name: str, buffer: Tensor, floating: torch.dtype) -> Tensor:
        """A copy of a buffer, or what a handler makes of it: the network is left as it was."""
        if not buffer.is_floating_point():
            return buffer.clone()
        owner: Any = {"sparse_module": self, "sparse_parameter": name}
        return _buffer_site(buffer, floating, name=self.site_name(name), infer=owner)

    def site_name(self, parameter: str) -> str:
        """The full name of a parameter's sample site."""
        return f"{self._pyro_name}.{parameter}" if self._pyro_name else parameter

    def site_law(self, parameter: str) -> TorchDistribution:
        """The law of a parameter's sample site, which raises when used where the prior is unset."""
        shape = self.module.get_parameter(parameter).shape
        law = self.priors.get(parameter) or UnsetPrior(self.site_name(parameter), shape)
        return cast(TorchDistribution, law.expand(shape).to_event(len(shape)))

    def _value(self, parameter: str, start: nn.Parameter, given: Any) -> Tensor:
        site = self.site_name(parameter)
        drawn = _already_drawn(site)
        if drawn is not None:
            flat = drawn["type"] == "param" and any(item is start for item in drawn["args"])
            if not flat and drawn["infer"].get("sparse_module") is not self:
                raise ValueError(f"two networks use the site name '{site}': give one of them a name=")
            return cast(Tensor, drawn["value"])
        if parameter not in self.sparse_names:
            return pyro.param(site, start)
        plates = [handler.name for handler in _PYRO_STACK if isinstance(handler, IndepMessenger)]
        if plates:  # which would count the prior once a row
            raise ValueError(
                f"the network of site '{site}' is called inside plate '{plates[0]}': call it outside, as its weights are "
                "shared by all rows and particles (take a batch's rows in one `with plate as i:`, observe in a second)"
            )
        infer: Any = {"sparse_module": self, "sparse_parameter": parameter, "sparse_input": given}
        value = pyro.sample(site, self.site_law(parameter), infer=infer)
        if value.shape != start.shape:
            raise ValueError(
                f"site '{site}' drew a value of shape {tuple(value.shape)} for a weight of {tuple(start.shape)}: "
                "networks take one draw at a time, so use no outer plate, vectorize_particles or parallel=True"
            )
        return value

    # What follows makes the hidden module look registered to torch.nn, and only to it.

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield "module", self.module

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name, module in self.module.named_modules():
            module._load_from_state_dict(state_dict, f"{prefix}{name}." if name else prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        probe = fn(next(iter(self.module.parameters()), torch.empty(0)).detach().new_empty(0))
        self.priors = {name: law.to(probe) for name, law in self.priors.items()}
        return self

    def __repr__(self) -> str:
        sizes = {name: parameter.numel() for name, parameter in self.module.named_parameters()}
        covered = sum(sizes[name] for name in self.sparse_names)
        weights = f"{covered:,} of {sum(sizes.values()):,} weights"
        return f"{type(self).__name__}({len(self.sparse_names)} spike-and-slab sites, {weights}, {self.module})"


@effectful(type="buffer")
def _buffer_site(buffer: Tensor, floating: torch.dtype) -> Tensor:
    """A buffer as a site of a type of its own, which the handlers of Pyro pass by."""
    return buffer.to(floating, copy=True)


def _uncounted(module: nn.Module) -> list[str]:
    """Counters of batches, on which nothing depends: statistics of a fixed momentum do without."""
    norms = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    counted = [name for name, part in norms if part.momentum is not None and part.num_batches_tracked is not None]
    return [f"{name}.num_batches_tracked" if name else "num_batches_tracked" for name in counted]


@contextlib.contextmanager
def evaluating(modules: Iterable[SparseModule]) -> Iterator[None]:
    """Networks in evaluation mode (no dropout), and back in the mode they were in."""
    parts = [(part, part.training) for module in modules for part in module.module.modules()]
    try:
        for part, _ in parts:
            part.training = False
        yield
    finally:
        for part, training in parts:
            part.training = training


def _already_drawn(site: str) -> dict[str, Any] | None:
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, TraceMessenger) and site in handler.trace.nodes:
            return cast(dict[str, Any], handler.trace.nodes[site])
    return None


def _priors_by_name(prior: Prior, names: Sequence[str]) -> dict[str, SpikeSlab]:
    if prior is None:
        return {}
    if isinstance(prior, SpikeSlab):
        return dict.fromkeys(names, prior)
    if not isinstance(prior, Mapping):
        raise TypeError(
            f"prior must be a SpikeSlab, a mapping from parameter names to SpikeSlab, or None, got {prior!r}"
        )
    unknown = sorted(set(prior) - set(names))
    if unknown:
        raise ValueError(f"prior must name sparse parameters of the module, {list(names)}, got {unknown}")
    for name, law in prior.items():
        if not isinstance(law, SpikeSlab):
            raise TypeError(f"prior of '{name}' must be a SpikeSlab, got {type(law).__name__}")
    return dict(prior)


def _check_fits(name: str, law: SpikeSlab, parameter: nn.Parameter) -> None:
    try:
        law.expand(parameter.shape)
    except RuntimeError:
        fits = False
    else:
        fits = torch.broadcast_shapes(law.batch_shape, parameter.shape) == parameter.shape
    if not fits:
        shapes = f"{tuple(parameter.shape)}, got {tuple(law.batch_shape)}"
        raise ValueError(f"prior of '{name}' must broadcast to the parameter's shape {shapes}")


def sparsify(
    module: nn.Module,
    prior: Prior = None,
    where: Callable[[str, nn.Parameter], bool] = lambda name, parameter: True,
    name: str = "",
) -> SparseModule:
    """A copy of ``module`` whose parameters are spike-and-slab sites; its weights are kept as start values.

    Args:
        module: any module, pretrained or not; it is left as it is.
        prior: one SpikeSlab for all parameters, a mapping from parameter names, or None: derived from the network and
            the number of rows by ``anneal`` (see ``default_prior``).
        where: ``where(name, parameter)`` says which parameters get the prior; the others have a flat one and are
            never pruned.
        name: prefix of the site names, needed where two bare networks stand in one model.

    Raises:
        TypeError: where ``module`` is no module or already sparse.
        ValueError: where no parameter is chosen, or a prior does not fit its parameter.
    """
    if not isinstance(module, nn.Module) or isinstance(module, SparseModule):
        raise TypeError(f"module must be a plain torch.nn.Module, got {type(module).__name__}")
    sparse = SparseModule(copy.deepcopy(module), prior, where, name)
    if not sparse.sparse_names:
        raise ValueError("where must choose at least one parameter of the module, got none")
    return sparse


class SparseLinear(SparseModule):
    """``torch.nn.Linear`` with spike-and-slab weights and biases; see :class:`SparseModule` and :func:`sparsify`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, prior: Prior = None, name: str = ""):
        super().__init__(nn.Linear(in_features, out_features, bias), prior, name=name)


class SparseConv2d(SparseModule):
    """``torch.nn.Conv2d`` with spike-and-slab weights and biases; see :class:`SparseModule` and :func:`sparsify`.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, groups, bias: as of ``torch.nn.Conv2d``.
        prior, name: as in :func:`sparsify`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        groups: int = 1,
        bias: bool = True,
        prior: Prior = None,
        name: str = "",
    ) -> None:
        module = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias)
        super().__init__(module, prior, name=name)


class SparseNet(SparseModule):
    """A fully connected network with spike-and-slab weights and biases.

    Args:
        sizes: widths from the inputs to the outputs, at least two, each >= 1: ``[100, 20, 10, 1]``.
        activation: between the layers, one of ``tanh`` (the paper's), ``relu``, ``sigmoid``, ``gelu``, ``silu``,
            ``elu``, ``softplus``.
        prior, name: as in :func:`sparsify`.

    Its sites are named ``layer1.weight``, ``layer1.bias``, ``layer2.weight`` and so on.
    """

    def __init__(self, sizes: Sequence[int], activation: str = "tanh", prior: Prior = None, name: str = "") -> None:
        if len(sizes) < 2 or any(not size >= 1 for size in sizes):
            raise ValueError(f"sizes must list at least two widths >= 1, got {list(sizes)}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for depth, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes), start=1):
            if depth > 1:
                layers[f"activation{depth - 1}"] = ACTIVATIONS[activation]()
            layers[f"layer{depth}"] = nn.Linear(fan_in, fan_out)
        super().__init__(nn.Sequential(layers), prior, name=name)


def resolved_priors(module: SparseModule, num_data: int) -> dict[str, SpikeSlab]:
    """The laws of the module's unset priors by full site name, from :func:`default_prior`."""
    unset = [name for name in module.sparse_names if name not in module.priors]
    laws = default_prior(module, num_data) if unset else {}
    return {module.site_name(name): laws[name] for name in unset}
