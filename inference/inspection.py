"""One look at a Pyro model before it is run: its sites, its start, its plate, and whether they fit the data."""

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide.initialization import init_to_median
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from pyro_sparse.inference.checks import (
    Node,
    check_buffers,
    check_latents,
    check_plates,
    check_weight_of_few,
    checked_data,
    data_plates,
    is_latent,
    observed_sites,
    own_subsample_size,
    rows_of_closure,
    warn_of_columns,
    warn_of_responses,
    wrong_weight,
)
from pyro_sparse.inference.family import unwrapped
from pyro_sparse.inference.layout import Layout, Site, bijection
from pyro_sparse.inference.minibatch import (
    Augment,
    AugmentedBatches,
    Batches,
    LoaderBatches,
    row_major,
    rows_of,
    stream,
)
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.annealed import find_spike_slab
from pyro_sparse.models.layers import SparseModule, UnsetPrior, resolved_priors
from pyro_sparse.models.spike_slab import SpikeSlab

Model = Callable[..., Any]


class rows(Messenger):
    """Tells the data plates which rows they hold: serves ``subsample_size=len(x)``, ``as i: x[i]`` and pyro.subsample."""

    def __init__(self, indices: Tensor | None, plates: frozenset[str]) -> None:
        super().__init__()
        self.indices, self.plates = indices, plates

    def _pyro_sample(self, msg: Node) -> None:
        if self.indices is not None and msg["name"] in self.plates and isinstance(msg["fn"], _Subsample):
            msg["value"], msg["done"] = self.indices, True


@dataclass(frozen=True)
class Specification:
    """What a model is made of, and how batches of its data are handed to it."""

    model: Model
    data: tuple[Tensor, ...]
    num_data: int
    batch_size: int | None
    subsamples_itself: bool  # the model takes all rows and draws its own subset of them
    plates: frozenset[str]  # names of the plates over the rows
    layout: Layout
    priors: Mapping[str, SpikeSlab]  # those that were unset in the model, by site
    observed: tuple[str, ...]
    readers: tuple[SparseModule, ...]  # networks whose inputs are the columns of the first of the data
    input_shapes: Mapping[SparseModule, torch.Size | None]  # of one row of what a network is given
    example: tuple[Tensor, ...]  # rows that the model is run with to see its sites: few of large data
    loader: "DataLoader[Any] | None" = None  # where the data come from, of which ``data`` are then the first batch
    augment: Augment | None = None  # what is done to a batch of the first of the data
    responses: tuple[str, ...] = ()  # of the observed sites those that are no pyro.factor, where there are any

    def batches(
        self, seed: int, chain: int, device: torch.device, purpose: str = "batches"
    ) -> Batches | LoaderBatches | AugmentedBatches:
        """Those of a chain."""
        if self.loader is not None:
            return LoaderBatches(self.loader, seed, chain, device)
        batches = Batches(self.num_data, self.batch_size, seed, chain, device, purpose)
        return (
            batches
            if self.augment is None
            else AugmentedBatches(batches, self.data, self.augment, seed, chain, purpose)
        )

    @property
    def gives_rows(self) -> bool:
        """Whether batches are rows, of a loader or augmented, instead of their numbers."""
        return self.loader is not None or self.augment is not None


class _SubsamplesItselfError(Exception):
    """Of a model that must be given all rows."""


class _of_few_rows(Messenger):
    """Finds out whether a model that is given few rows draws its own subset of them."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def _pyro_sample(self, msg: Node) -> None:
        plate = msg["fn"]
        if isinstance(plate, _Subsample) and plate.subsample_size not in (None, plate.size, self.num_rows):
            raise _SubsamplesItselfError


def _first_look(
    model: Model, data: tuple[Tensor, ...], batch_size: int | None, seed: int
) -> tuple[dict[str, Node], tuple[Tensor, ...]]:
    """The nodes of one run, and the rows it was given: twice a batch, unless all rows are fewer or the model needs them."""
    few = 2 * (batch_size or 0)
    if data and 0 < few < len(data[0]):
        example = tuple(item[:few] for item in data)
        with contextlib.suppress(_SubsamplesItselfError):
            return trace_at_start(_of_few_rows(few)(model), example, seed, 0), example
    return trace_at_start(model, data, seed, 0), data


def inspect(
    model: Model, data: Any, batch_size: int | None, seed: int, augment: Augment | None = None
) -> Specification:
    """Runs the model on two batches at once and on one, or on all rows where there are no batches, and raises where they do
    not fit.

    Raises:
        TypeError, ValueError: naming the argument, site or plate, the rule and the value.
    """
    if batch_size is not None and not isinstance(batch_size, Integral):
        raise TypeError(f"batch_size must be a whole number, got {batch_size!r}")
    loader = loader_of(data)
    if loader is not None:
        if batch_size is not None:
            raise ValueError(f"batch_size must be None for a DataLoader, which has its own, got {batch_size}")
        data = LoaderBatches(loader, seed, 0, torch.get_default_device())(0)
        _warn_of_unseen_rows(loader)
    tensors = checked_data(data)
    try:
        nodes, example = _first_look(model, tensors, batch_size, seed)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("dtype", "scalar type", "should be the same")):
            raise
        types = [str(t.dtype).removeprefix("torch.") for t in tensors]
        raise ValueError(
            f"data must have the floating type of the model's parameters, got {types} (for uint8 images see ps.Normalize): "
            f"{error}"
        ) from error
    observed = observed_sites(nodes)
    num_data = len(tensors[0]) if tensors else rows_of_closure(observed)
    is_few = bool(tensors) and len(example[0]) < num_data
    if loader is not None:
        num_data, batch_size = rows_of(loader), num_data
    if batch_size is not None and not 1 <= batch_size <= num_data:
        raise ValueError(f"batch_size must lie in [1, {num_data}], the number of rows, or be None, got {batch_size}")
    plates = data_plates(observed, num_data)
    own_size = None if loader is not None or is_few else own_subsample_size(observed, plates)
    if own_size is not None and batch_size not in (None, own_size):
        raise ValueError(f"batch_size must be None or {own_size}, the model's own subsample_size, got {batch_size}")
    batch = own_size or batch_size
    if batch_size is not None and loader is None:
        tensors = tuple(row_major(tensor) for tensor in tensors)
    if is_few:
        check_weight_of_few(observed, num_data, len(example[0]), batch_size or 1)
    check_plates(observed, plates, num_data, on_batches=batch is not None)
    if own_size is None and batch_size is not None and loader is None:
        if not tensors:
            raise ValueError("batch_size must be None for a model that reads its data from outside of its arguments")
        _check_scale_on_batch(model, example, seed, observed, plates, num_data, batch_size)
    if augment is not None and (loader is not None or own_size is not None or batch_size is None):
        got = "a DataLoader" if loader is not None else "none" if batch_size is None else "a model that draws its own"
        raise ValueError(f"augment must be given batches of rows in memory, of a batch_size, got {got}")
    check_latents(nodes, plates if batch else frozenset())
    modules = list({id(m): m for m in (n["infer"].get("sparse_module") for n in nodes.values()) if m}.values())
    check_buffers(modules)
    priors = {site: law for module in modules for site, law in resolved_priors(module, num_data).items()}
    layout = Layout(tuple(_site(node, priors, modules) for node in nodes.values() if is_latent(node)))
    reserved = [s.name for s in layout.sites if "/" in s.name or s.name in ("chain", "draw", "input", "column")]
    if reserved:
        raise ValueError(
            f"site names must not contain '/' nor be chain, draw, input or column, as in a trace, got {reserved}"
        )
    if not layout.sites:
        raise ValueError("model must have a latent site to sample, got none")
    responses = [name for name, node in observed.items() if not isinstance(unwrapped(node["fn"]), dist.Unit)]
    given = {module: _given_to(module, nodes) for module in modules}
    readers = tuple(module for module in modules if _reads_the_first(given[module], example))
    shapes = {module: x.shape[1:] if isinstance(x, Tensor) else None for module, x in given.items()}
    return Specification(
        *(model, tensors, num_data, batch, own_size is not None, plates, layout, priors, tuple(observed), readers),
        *(shapes, example, loader, augment, tuple(responses or observed)),
    )


def warn_of_scale(spec: Specification, seed: int) -> None:
    """Where data are far from the scale that the prior supposes which an unset one stands for."""
    if not spec.priors:
        return
    nodes = trace_at_start(spec.model, spec.example, seed, 0)
    warn_of_responses({name: nodes[name] for name in spec.responses})
    if spec.readers:
        warn_of_columns(spec.data[0])


def start(spec: Specification, seed: int, chain: int, fresh: bool) -> Tensor:
    """The position a chain starts from.

    Weights of networks start from their parameters, or, with ``fresh``, from a new random initialisation of them; other
    spike-and-slab sites from N(0, initial_spike_scale²), other latents from their prior's median.
    """
    nodes = trace_at_start(spec.model, spec.example, seed, chain, fresh)
    values = {site.name: nodes[site.name]["value"].detach() for site in spec.layout.sites}
    dtypes = {value.dtype for value in values.values()}
    if len(dtypes) > 1:
        raise ValueError(f"all sites must have one floating type, got {sorted(str(d) for d in dtypes)}")
    position = spec.layout.unconstrained(values)
    if not bool(position.isfinite().all()):
        bad = [site.name for site, part in spec.layout.parts(position) if not bool(part.isfinite().all())]
        raise ValueError(f"start values must be finite, got NaN or infinity at sites {bad}")
    return position.clone()


class _Start(Messenger):
    def __init__(self, fresh: bool) -> None:
        super().__init__()
        self.fresh: bool = fresh
        self._reset_modules: dict[int, torch.nn.Module] = {}
        self._buffers: dict[str, tuple[Any, Tensor, Tensor]] = {}

    def _module(self, module: SparseModule) -> torch.nn.Module:
        if not self.fresh:
            return module.module
        if id(module) not in self._reset_modules:
            self._reset_modules[id(module)] = _reinitialised(module.module)
        return self._reset_modules[id(module)]

    def _pyro_buffer(self, msg: Node) -> None:
        name, infer = msg["name"], msg["infer"]
        if name not in self._buffers:
            buffer = self._module(infer["sparse_module"]).get_buffer(infer["sparse_parameter"])
            self._buffers[name] = infer, *(buffer.to(msg["args"][1], copy=True) for _ in range(2))
        msg["value"], msg["done"] = self._buffers[name][2], True

    def moved_buffers(self) -> dict[str, Node]:
        """Those that the model has changed, at their start."""
        return {
            name: {"type": "buffer", "name": name, "fn": None, "value": before, "infer": infer}
            for name, (infer, before, after) in self._buffers.items()
            if not torch.equal(before, after)
        }

    def _pyro_sample(self, msg: Node) -> None:
        if msg["is_observed"] or msg["done"] or isinstance(msg["fn"], _Subsample) or msg["value"] is not None:
            return
        law = find_spike_slab(msg["fn"])
        owner = msg["infer"].get("sparse_module")
        if owner is not None:
            value = self._module(owner).get_parameter(msg["infer"]["sparse_parameter"]).detach().clone()
        elif law is not None:
            scale = law.initial_spike_scale.detach()
            value = torch.randn(law.batch_shape, dtype=scale.dtype, device=scale.device) * scale
        elif msg["fn"].has_enumerate_support or getattr(msg["fn"].support, "is_discrete", False):
            raise ValueError(f"site '{msg['name']}' is discrete: enumerate or marginalise it; gradients need none such")
        else:
            value = init_to_median(msg).detach().clone()
        msg["value"] = value.requires_grad_()


def trace_at_start(
    model: Model, data: tuple[Tensor, ...], seed: int, chain: int, fresh: bool = False
) -> dict[str, Node]:
    """The nodes of one run of the model at the start of a chain; the global generator and param store are left alone."""
    store = pyro.get_param_store()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # where the model may be
    with torch.random.fork_rng(list(devices)), store.scope(state=store.get_state()), pyro.poutine.trace() as tracer:
        torch.manual_seed(stream(seed, chain, "start"))
        with _Start(fresh) as at_start:
            model(*data)
    nodes = {name: cast(Node, n) for name, n in tracer.trace.nodes.items() if n["type"] in ("sample", "param")}
    return {name: n for name, n in nodes.items() if not isinstance(n["fn"], _Subsample)} | at_start.moved_buffers()


def _reinitialised(module: torch.nn.Module) -> torch.nn.Module:
    fresh = copy.deepcopy(module)
    for part in fresh.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh


def loader_of(data: Any) -> "DataLoader[Any] | None":
    """The DataLoader that the data are, alone or as the only argument; None for anything else."""
    only = data[0] if isinstance(data, (tuple, list)) and len(data) == 1 else data
    return only if isinstance(only, DataLoader) else None


def _warn_of_unseen_rows(loader: "DataLoader[Any]") -> None:
    left = rows_of(loader) % (loader.batch_size or 1)
    if left and isinstance(loader.sampler, SequentialSampler):
        warn(
            f"the last {left} rows are never seen, as batches are full and the DataLoader does not shuffle: shuffle=True"
        )


def _check_scale_on_batch(
    model: Model,
    data: tuple[Tensor, ...],
    seed: int,
    observed: Mapping[str, Node],
    plates: frozenset[str],
    num_data: int,
    batch_size: int,
) -> None:
    indices = torch.arange(batch_size, device=data[0].device)
    conditioned = rows(indices, plates)(model)
    on_batch = trace_at_start(conditioned, tuple(d[:batch_size] for d in data), seed, 0)
    for name, node in observed.items():
        ratio = float(on_batch[name]["scale"]) / float(node["scale"]) * num_data / len(data[0])
        if not math.isclose(ratio, num_data / batch_size, rel_tol=1e-6):
            plate = next(frame.name for frame in node["cond_indep_stack"] if frame.name in plates)
            raise wrong_weight(plate, name, num_data, batch_size, ratio)


def _given_to(module: SparseModule, nodes: Mapping[str, Node]) -> Any:
    """The first argument of the first call of a network."""
    infers = [node["infer"] for node in nodes.values() if node["type"] == "sample"]
    return next(infer["sparse_input"] for infer in infers if infer.get("sparse_module") is module)


def _reads_the_first(given: Any, data: tuple[Tensor, ...]) -> bool:
    """Whether a network reads the columns of the first of the data: not those of another, nor what another network made."""
    if not data or not isinstance(given, Tensor) or given.requires_grad or given.shape[1:] != data[0].shape[1:]:
        return False
    return _same(given, data[0]) or not any(_same(given, other) for other in data[1:])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _site(node: Node, priors: Mapping[str, SpikeSlab], modules: list[SparseModule]) -> Site:
    name, value = node["name"], node["value"].detach()
    if node["type"] == "buffer":
        return Site(
            name, "buffer", value.shape, None, None, *(node["infer"][k] for k in ("sparse_module", "sparse_parameter"))
        )
    owner = node["infer"].get("sparse_module") if node["infer"] else None
    parameter = node["infer"].get("sparse_parameter") if owner else None
    if node["type"] == "param":
        owner, parameter = _owner_of_param(name, modules)
        given = node["args"][1] if len(node["args"]) > 1 else None
        if owner is None and isinstance(given, torch.nn.Parameter):
            raise ValueError(
                f"'{name}' is a torch.nn.Parameter registered with Pyro, which a sampler cannot move: "
                "wrap its module by ps.sparsify(module, where=...), which may leave it without a sparse prior"
            )
        transform = bijection(node["kwargs"].get("constraint", torch.distributions.constraints.real))
        law = None
    else:
        law = _final_law(name, node, priors)
        transform = None if law is not None else bijection(node["fn"].support)
    kind = "param" if node["type"] == "param" else "latent" if law is None else "spike_slab"
    shape = value.shape if transform is None else transform.inv(value).shape
    return Site(name, kind, torch.Size(shape), transform, law, owner, parameter)


def _owner_of_param(name: str, modules: list[SparseModule]) -> tuple[SparseModule | None, str | None]:
    for module in modules:
        for parameter, _ in module.module.named_parameters():
            if module.site_name(parameter) == name:
                return module, parameter
    return None, None


def _final_law(name: str, node: Node, priors: Mapping[str, SpikeSlab]) -> SpikeSlab | None:
    shape = node["value"].shape
    if isinstance(getattr(node["fn"], "base_dist", node["fn"]), UnsetPrior):
        return priors[name].expand(shape)
    law = find_spike_slab(node["fn"])
    if law is None:
        return None
    for argument in law.arg_constraints:
        if getattr(law, argument).requires_grad:
            raise ValueError(
                f"{argument} of site '{name}' must be a number or a constant tensor, got one that is sampled"
            )
    return law.at(1.0).expand(shape)
