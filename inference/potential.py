r"""A Pyro model as a plain tensor program: tempered potential and gradient on a flat position, traced once.

.. math::
    U(z) = -\Big[\sum_i \log p(y_i \mid T(z)) + \eta \sum_j \log \pi(\theta_j; u) + \log \text{every other prior}\Big]
           - \tau \log |J(z)|

where :math:`T` maps the unconstrained position to the supports and :math:`J` is its Jacobian: the temperature acts on the
density, never on the Jacobian. A batch estimates the likelihood by N / m times its sum.
"""

import copy
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyro
import torch
from pyro.distributions import Independent
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_sparse.inference.checks import Node
from pyro_sparse.inference.inspection import Specification, rows
from pyro_sparse.inference.program import Program, is_random, tidied, traced, varying_shape
from pyro_sparse.inference.warning import warn
from pyro_sparse.models import layers
from pyro_sparse.models.annealed import annealed, find_spike_slab
from pyro_sparse.models.layers import with_priors
from pyro_sparse.models.spike_slab import SpikeSlab

_SMALL = 50_000  # weights of a site: above it the operations' size takes the time

# Folders whose lines are never the model's own: this package's, Pyro's and PyTorch's.
_LIBRARIES = (__file__, layers.__file__, pyro.__file__, torch.__file__)
_NOT_THE_MODEL = ("<", *(f"{Path(file).parent}{os.sep}" for file in _LIBRARIES))


Batch = Tensor | tuple[Tensor, ...]  # row numbers of the data, or the rows themselves


class Tempering(NamedTuple):
    """The part of the controls that shapes the potential, as tensors that enter the program."""

    prior_power: Tensor
    spike_progress: Tensor
    temperature: Tensor


class Evaluation(NamedTuple):
    """Potential and gradient divided by the number of rows, and what they are made of."""

    mean_gradient: Tensor
    mean_potential: Tensor
    log_prob: dict[str, Tensor]  # scaled sum of every site
    buffers: Tensor  # as the model leaves them, flat

    def chain(self, number: int) -> "Evaluation":
        """That of one of several chains."""
        log_prob = {name: value[number] for name, value in self.log_prob.items()}
        return Evaluation(self.mean_gradient[number], self.mean_potential[number], log_prob, self.buffers[number])


class values_at(Messenger):
    """Hands every latent site its value, and a distribution that does not validate: validation cannot be traced."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.buffers: dict[str, Tensor] = {}

    def _pyro_buffer(self, msg: Node) -> None:
        """A copy, which the network may advance, once for all of its calls in one run of the model."""
        name = msg["name"]
        if name in self.values:
            msg["value"] = self.buffers.setdefault(name, self.values[name].detach().clone())
            msg["done"] = True

    def _pyro_sample(self, msg: Node) -> None:
        msg["fn"] = _unvalidated(msg["fn"])
        if msg["is_observed"] or msg["done"] or isinstance(msg["fn"], _Subsample):
            return
        # A response that is to be predicted takes its mean: nothing is ever drawn.
        value = self.values[msg["name"]] if msg["name"] in self.values else msg["fn"].mean
        msg["value"], msg["done"] = value, True

    def _pyro_param(self, msg: Node) -> None:
        if msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True


def _unvalidated(fn: Any) -> Any:
    if not isinstance(fn, torch.distributions.Distribution):
        return fn
    # A shallow copy without calling the constructor, which would validate again.
    new = object.__new__(type(fn))
    new.__dict__.update(fn.__dict__)
    new._validate_args = False
    for name, part in fn.__dict__.items():
        if isinstance(part, torch.distributions.Distribution):
            new.__dict__[name] = _unvalidated(part)
    return new


class Potential:
    """Mean potential, its gradient and log densities of one model: ``potential(position, tempering, indices)``.

    With a position and two batches the program is traced at construction and compared with the eager model on them and on
    two controls; where tracing fails or the two differ, the eager model is used and ``reason`` says which site or line is
    at fault. Without them the model is run eagerly.
    """

    def __init__(
        self, spec: Specification, position: Tensor | None = None, indices: tuple[Batch, Batch] | None = None
    ) -> None:
        self.spec = spec
        self.reason: str | None = None
        self.program: Program = self._eager
        self._random = True
        if position is not None and indices is not None:
            self._trace(position, indices)

    def _trace(self, position: Tensor, indices: tuple[Batch, Batch]) -> None:
        example = self._arguments(position, self.tempering(0.5, 0.5, 0.5, position), indices[0])
        with _quiet(), _same_random_numbers(position):
            self._run_first(*example)
        varying = len(example) if self.spec.batch_size else 1 + len(Tempering._fields)  # all rows are always the same
        try:
            # On a card BatchNorm of cuDNN is an operation of its own, which a compiler cannot join with what is around it.
            with _quiet(), _same_random_numbers(position), torch.backends.cudnn.flags(enabled=False):
                graph = traced(self._eager, example)
            culprit = varying_shape(graph, varying)
            graph = tidied(graph)
        except Exception as error:  # whatever a model can raise while it is traced: it runs eagerly instead
            self.reason = f"it cannot be traced: {first_line(error)}"
        else:
            self._random = any(is_random(node) for node in graph.graph.nodes)
            self.program = graph
            self.reason = culprit or self._difference(graph, position, indices)
        if self.reason is not None:
            self.program, self._random = self._eager, True
            warn(f"the model is run eagerly, several times slower, as {self.reason}")

    def _run_first(self, *example: Tensor) -> None:
        """A model that fails by itself raises its own error here."""
        try:
            self._eager(*example)
        except (RuntimeError, IndexError) as error:
            if "out of bounds" in str(error):
                sites = ", ".join(f"'{name}'" for name in self.spec.observed)
                raise ValueError(
                    f"classes of {sites} must be 0, 1, ... up to the number of probabilities less one: {first_line(error)}"
                ) from error
            if "mutate a captured Tensor" not in str(error):
                raise
            raise ValueError(
                f"the model changes a tensor of its own, which would be no part of a draw: wrap the module it belongs to (one "
                f"with BatchNorm in training mode, say) by ps.sparsify(module, where=...): {first_line(error)}"
            ) from error

    def of_chains(self, positions: Tensor, indices: tuple[Tensor, Tensor]) -> "Potential | None":
        """The same for several chains at once: positions (chain, coordinate), indices of two steps (chain, row).

        None where the model is run eagerly or draws random numbers, or where the program differs from one chain alone.
        """
        if self.reason is not None or self._random:
            return None
        several = copy.copy(self)
        tempering = self.tempering(0.25, 0.75, 0.125, positions)
        arguments = self._arguments(positions, tempering, indices[0])
        by_chain = self.spec.batch_size is not None
        data = [0 if by_chain and not self.spec.subsamples_itself else None] * len(self.spec.data)
        in_dims = (0, None, None, None, 0 if by_chain else None, *data)
        try:
            with _quiet(), torch.no_grad():
                graph = traced(torch.func.vmap(self.program, in_dims), arguments)
            several.program = tidied(graph)
            moved = nearby(positions)
            together = several(moved, tempering, indices[1])
        except Exception:  # an operation that has no form for several chains
            return None
        alone = [self(z, tempering, i) for z, i in zip(moved, indices[1].expand(len(moved), -1), strict=True)]
        expected = torch.stack([one.mean_gradient for one in alone])
        same = agree_but_for_rounding(together.mean_gradient, expected, self.is_halved)
        return several if same else None

    @property
    def is_halved(self) -> bool:
        """Whether any of it is computed in half precision, as under autocast."""
        return _is_halved(self.program)

    @property
    def kind(self) -> str:
        """How it is computed: "eager" or "traced"."""
        return "traced" if isinstance(self.program, torch.fx.GraphModule) else "eager"

    def __call__(self, position: Tensor, tempering: Tempering, indices: Batch) -> Evaluation:
        with torch.no_grad():
            return self._run(self.program, position, tempering, indices)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether an evaluation may use the global generator (dropout): the caller then seeds it for each step."""
        return self._random

    @staticmethod
    def tempering(prior_power: float, spike_progress: float, temperature: float, like: Tensor) -> Tempering:
        return Tempering(*like.new_tensor([prior_power, spike_progress, temperature]).unbind())

    def _run(self, program: Program, position: Tensor, tempering: Tempering, indices: Batch) -> Evaluation:
        gradient, (potential, log_prob, buffers) = program(*self._arguments(position, tempering, indices))
        return Evaluation(gradient, potential, log_prob, buffers)

    def _arguments(self, position: Tensor, tempering: Tempering, indices: Batch) -> tuple[Tensor, ...]:
        return (position, *tempering, *self.inputs(indices))

    def inputs(self, indices: Batch) -> tuple[Tensor, ...]:
        """The last arguments of the program: row numbers, and the model's own at those."""
        spec = self.spec
        if isinstance(indices, tuple):  # of a loader, which gives the rows themselves: any numbers will do
            return (torch.arange(len(indices[0]), device=indices[0].device), *indices)
        whole = spec.subsamples_itself or spec.batch_size is None
        return (indices, *(spec.data if whole else (_rows(d, indices) for d in spec.data)))

    def _eager(self, position: Tensor, power: Tensor, progress: Tensor, temperature: Tensor, *rest: Tensor) -> Any:
        tempering = Tempering(power, progress, temperature)

        def mean_potential(z: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor], Tensor]]:
            value, log_prob, buffers = self._mean_potential(z, tempering, *rest)
            return value, (value, log_prob, buffers)

        gradient, (_, aux) = torch.func.grad_and_value(mean_potential, has_aux=True)(position)
        return gradient, aux

    def _mean_potential(
        self, position: Tensor, tempering: Tempering, indices: Tensor, *data: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        values, log_jacobian = self.spec.layout.constrained_with_log_jacobian(position)
        handler = values_at(values)
        log_prob = self.log_prob(handler, tempering, indices, *data)
        jacobian = tempering.temperature * log_jacobian
        potential = -torch.stack([*log_prob.values(), position.new_zeros(())]).sum() - jacobian
        return potential / self.spec.num_data, log_prob, self.spec.layout.buffers(values | handler.buffers, position)

    def log_prob(
        self, values: "dict[str, Tensor] | values_at", tempering: Tempering, indices: Tensor, *data: Tensor
    ) -> dict[str, Tensor]:
        """The tempered log density of every site at given values, each summed and scaled as the model says."""
        model = annealed(tempering.prior_power, tempering.spike_progress)(
            with_priors(self.spec.priors)(self.spec.model)
        )
        nodes = trace_with(model, values, indices, self.spec.plates, data)
        small = {name: node for name, node in nodes.items() if _is_small_prior(node)}
        joint = _joint_log_prob(small) if small else {}
        return {
            name: joint[name] if name in joint else _log_prob(node)
            for name, node in nodes.items()
            if not node["infer"].get("_deterministic")
        }

    def _difference(self, graph: Program, position: Tensor, indices: tuple[Batch, Batch]) -> str | None:
        controls = [self.tempering(0.25, 0.75, 0.125, position), self.tempering(1.0, 1.0, 0.0, position)]
        moved = nearby(position)
        # On a CPU the same operations round alike; a card has several algorithms for one, some of them in no fixed order.
        halved, on_card = _is_halved(graph), position.is_cuda
        tolerance = _rounding(position, halved) if on_card else _tolerance(position)

        def same(found: Tensor, expected: Tensor) -> bool:
            return agree_but_for_rounding(found, expected, halved) if on_card else agree(found, expected)

        for batch, tempering in zip(indices, controls, strict=True):
            with _same_random_numbers(position), _quiet(), torch.no_grad():
                eager = self._run(self._eager, moved, tempering, batch)
            try:
                with _same_random_numbers(position), torch.no_grad():
                    found = self._run(graph, moved, tempering, batch)
            except Exception as error:  # a size that was another on the rows it was traced on
                return f"the traced program fails on other rows: {first_line(error)}"
            for name, expected in eager.log_prob.items():
                if not torch.allclose(found.log_prob[name], expected, rtol=tolerance, atol=tolerance, equal_nan=True):
                    return f"the traced program differs from it at site '{name}'"
            if not same(found.mean_gradient, eager.mean_gradient):
                return "the gradient of the traced program differs from it"
            if len(eager.buffers) and not same(found.buffers, eager.buffers):
                return "the buffers that the traced program leaves differ from its own"
        return None


def nearby(position: Tensor) -> Tensor:
    """Away from the start, where weights of zero and equal units could hide a difference."""
    return position + 0.01 * torch.linspace(-1, 1, position.numel()).to(position).view_as(position)


def _tolerance(like: Tensor) -> float:
    return max(1e3 * torch.finfo(like.dtype).eps, 1e-10)


def _rounding(like: Tensor, halved: bool) -> float:
    return 0.1 if halved else float(15 * torch.finfo(like.dtype).eps ** 0.5)


def _is_halved(program: Program) -> bool:
    code = program.code if isinstance(program, torch.fx.GraphModule) else ""
    return "torch.bfloat16" in code or "torch.float16" in code


def agree(found: Tensor, expected: Tensor) -> bool:
    tolerance = _tolerance(expected)
    scale = float((expected.abs().max() * tolerance).nan_to_num(0.0, 0.0))
    return torch.allclose(found, expected, tolerance, scale, equal_nan=True)


def agree_but_for_rounding(found: Tensor, expected: Tensor, halved: bool = False) -> bool:
    """Whether two ways of computing the same, operation for operation or not, made the same of it.

    A network of twenty layers with BatchNorm loses three digits of single precision, since a ReLU may go the other way; one
    that is computed in half precision all but one.
    """
    tolerance = _rounding(expected, halved)
    known = expected.isfinite()
    off = float((found - expected)[known].norm())
    same = bool((found.isfinite() == known).all())
    return same and off <= tolerance * float(expected[known].norm()) + torch.finfo(expected.dtype).tiny


def _rows(data: Tensor, indices: Tensor) -> Tensor:
    """(row, ...) of one batch, (chain, row, ...) of several."""
    return data.index_select(0, indices.reshape(-1)).reshape(*indices.shape, *data.shape[1:])


def _log_prob(node: Node) -> Tensor:
    return cast(Tensor, scale_and_mask(node["fn"].log_prob(node["value"]), node["scale"], node["mask"]).sum())


def _is_small_prior(node: Node) -> bool:
    """Whether a site is a spike-and-slab one for which the number of operations counts, not their size."""
    law = node["fn"]
    while isinstance(law, Independent):
        law = law.base_dist
    plain = isinstance(law, SpikeSlab) and not node["is_observed"] and node["mask"] is None
    return plain and node["value"].numel() <= _SMALL


def _joint_log_prob(nodes: dict[str, Node]) -> dict[str, Tensor]:
    """The log densities of several spike-and-slab sites as one law of all weights: 25 operations in all, not for each."""
    laws = [cast(SpikeSlab, find_spike_slab(node["fn"])) for node in nodes.values()]
    values = [node["value"] for node in nodes.values()]
    log_prob = SpikeSlab.joined(laws, values).log_prob(torch.cat([value.reshape(-1) for value in values]))
    numbers = np.repeat(np.arange(len(values)), [value.numel() for value in values])
    site = torch.as_tensor(numbers, device=log_prob.device)
    sums = log_prob.new_zeros(len(laws)).index_add(0, site, log_prob)
    scaled = sums * torch.stack([torch.as_tensor(node["scale"]).to(sums) for node in nodes.values()])
    return dict(zip(nodes, scaled.unbind(), strict=True))


def trace_with(
    model: Callable[..., Any],
    values: dict[str, Tensor] | values_at,
    indices: Tensor | None,
    plates: frozenset[str],
    data: tuple[Tensor | None, ...],
) -> dict[str, Node]:
    """The sample sites of one run of the model at given values, on given rows; plates left out."""
    handler = values if isinstance(values, values_at) else values_at(values)
    with _quiet(), pyro.poutine.trace() as tracer, rows(indices, plates), handler:
        model(*data)
    nodes = {n: v for n, v in tracer.trace.nodes.items() if v["type"] == "sample"}
    return {n: cast(Node, v) for n, v in nodes.items() if not isinstance(v["fn"], _Subsample)}


class _quiet:
    """Pyro's and PyTorch's validation off, and annealed's warning about models without a sparse site."""

    def __enter__(self) -> None:
        self._validation = pyro.validation_enabled(False)
        self._validation.__enter__()
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.filterwarnings("ignore", message="annealed met no spike-and-slab site")

    def __exit__(self, *error: Any) -> None:
        self._warnings.__exit__(*error)
        self._validation.__exit__(*error)


class _same_random_numbers:
    def __init__(self, like: Tensor) -> None:
        self._fork = torch.random.fork_rng([like.device.index or 0] if like.is_cuda else [])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(0)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_MODEL)]
    return f"{text} (in {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else text


__all__ = ["Evaluation", "Potential", "Tempering", "trace_with"]
