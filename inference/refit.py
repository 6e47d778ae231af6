"""refit: maximum likelihood on the kept weights, Algorithm 1, step (iv), and what follows from it."""

import copy
import dataclasses
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from pyro_sparse.inference import structure as structures
from pyro_sparse.inference.channels import compact_channels
from pyro_sparse.inference.compaction import Compacted, compacted
from pyro_sparse.inference.descent import descend, short_schedule
from pyro_sparse.inference.family import FAMILIES, Family, Normal, Poisson
from pyro_sparse.inference.inspection import Model, Specification, inspect, loader_of
from pyro_sparse.inference.intervals import FisherInformation, fisher_information
from pyro_sparse.inference.keeping import with_laws
from pyro_sparse.inference.layout import Layout
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.response import Of, Response
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.inference.step import NonFiniteError
from pyro_sparse.inference.structure import Structure
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.layers import SparseModule, evaluating

_AT_A_KINK = (
    "A network with kinks (ReLU) may have its maximum at one, where no interval is known; activation='tanh' has none"
)
_UNDEFINED = (
    "structure must keep weights at which the model's log density and its gradient are finite, got NaN or infinity: without "
    "the others it is not defined, as weight_norm is not where all weights of a unit are zero"
)
ROUND = 50  # iterations between two evaluations of the metric
_INFORMATION = ("dispersion", "prediction_error", "degrees_of_freedom", "rank")
_SCALARS = ("loss", "converged", "distance", "num_iterations", "penalised", "by_batches")
MAX_METRIC = 5_000  # free coordinates up to which a dense metric is worth having
MAX_NUMBERS = 1e6  # of images that are used at once
MAX_WORK = 1e9  # rows times kept weights up to which all rows are used at once


@dataclass(frozen=True, repr=False)
class Fit:
    """A refitted sparse model.

    Attributes:
        structure: which weights it keeps.
        values: of every site of the model, on its support; pruned weights are exactly zero.
        response: the observed site it predicts.
        loss: mean negative log-likelihood of the training rows; after a refit by batches that of its last batches, as trained
            (augmented, with dropout and the statistics of the batch).
        converged, distance, num_iterations: how the refit ended; the distance to the maximum is the largest derivative in
            the metric of the Fisher information, in standard errors; NaN, and not converged, where it was by batches.
        penalised: whether the slab's normal stayed in.
        by_batches: whether it was by SGD: then no intervals are known, which are those of a maximum.
    """

    structure: Structure
    values: dict[str, Tensor]
    response: Response
    loss: float
    converged: bool
    distance: float
    num_iterations: int
    penalised: bool
    by_batches: bool
    free: Tensor = field(repr=False)  # the coordinates that were fitted
    data: tuple[Tensor, ...] = field(repr=False)
    precision: Tensor = field(repr=False)  # of the prior of the free coordinates

    @property
    def layout(self) -> Layout:
        return self.response.spec.layout

    def values_at(self, free: Tensor) -> dict[str, Tensor]:
        """The value of every site of the model where the fitted coordinates are ``free``."""
        where = self.structure.kept(free).nonzero().flatten()
        return self.layout.constrained(self._buffers.to(free).scatter(0, where, free))

    @property
    def _buffers(self) -> Tensor:
        """(coordinate,) the position where all but the buffers is 0."""
        own = {site.name: self.values[site.name] for site in self.layout.sites if site.kind == "buffer"}
        return self.layout.flat(own, 0.0, self.free)

    def __getstate__(self) -> dict[str, Any]:
        # The small model is made of local functions, and made again when it is needed.
        return {name: value for name, value in self.__dict__.items() if name != "_small"}

    @cached_property
    def _small(self) -> tuple[Response, Compacted]:
        """The response on the small networks, which computes the same and costs less."""
        small = compacted(self.response.spec, self.structure.kept(self.free), self._buffers)
        return Response(small.spec, self.response.site), small

    @cached_property
    def family(self) -> Family:
        """Of the response.

        Raises:
            ValueError: where it is none that intervals are known for.
        """
        return self.response.family(self.values)

    def mean(self, law: Any) -> Tensor:
        """Mean of the response, or probabilities of its classes, under its law."""
        return self.family.mean(self.family.score(self.family.link(law)))

    def evaluate(self, of: Of, inputs: tuple[Tensor, ...]) -> Tensor:
        """``of(law)`` of the law of the response at every row of the inputs."""
        response, small = self._small
        return response.evaluate(of, small.values(self.free), inputs)

    def jacobian(self, of: Of, inputs: tuple[Tensor, ...]) -> Tensor:
        """Derivatives (rows, q, weights) of ``of(law)`` (rows, q) over the free coordinates that matter."""
        return self._all_derivatives(of, inputs)[..., self.matters]

    def average(self, of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The average (...) of ``of(law)`` over the rows of the inputs, and its derivatives (q, weights)."""
        response, small = self._small
        mean, gradient = response.average(of, small.values, self.free, inputs)
        return mean, gradient.reshape(-1, len(self.free))[:, self.matters]

    def _all_derivatives(self, of: Of, inputs: tuple[Tensor, ...]) -> Tensor:
        response, small = self._small
        return response.jacobian(of, small.values, self.free, inputs)

    @cached_property
    def _link_jacobian(self) -> Tensor:
        if self.by_batches:
            raise ValueError(
                "intervals and covariances are those of a maximum, which a refit by batches does not reach: end the schedule "
                "with sample_steps and average over draws, ps.predict(run, x)"
            )
        jacobian = self._all_derivatives(self.family.link, self.data)
        if not bool(jacobian.isfinite().all()):
            row = int((~jacobian.isfinite()).flatten(1).any(1).nonzero()[0])
            raise ValueError(
                f"the fitted model has no derivatives at row {row} of its data, so no interval is known. {_AT_A_KINK}; or end "
                "the schedule with sample_steps and average over draws, ps.predict(run, x)"
            )
        return jacobian

    @cached_property
    def matters(self) -> Tensor:
        """Which free coordinates belong to the link parameters: one noise scale for all rows does not.

        A kept weight that moves them at no training row (its input is constant, its unit dead) may do so at a new one.
        """
        moves = (self._link_jacobian != 0).flatten(0, 1).any(0)
        if len(self.response.spec.observed) > 1:  # the weight may belong to another response
            return moves
        weights = self.layout.flat(dict.fromkeys(self.structure.masks, True), False, self.free)
        return moves | weights[self.structure.kept(self.free)]

    @cached_property
    def information(self) -> FisherInformation:
        """The Fisher information of the kept weights.

        Raises:
            ValueError: where the response is none that intervals are known for, or the refit was by batches.
        """
        link, response = self.evaluate(self.family.link, self.data), self.response.observed(self.values)
        # In double precision, also where the model computes its link in single.
        jacobian = self._link_jacobian[..., self.matters]
        self.__dict__.pop("_link_jacobian")  # rows times weights: too large to be kept for nothing
        rooted = self.family.root(link).mT.to(jacobian) @ jacobian
        information = fisher_information(rooted, self.precision[self.matters], self.family.residuals(link, response))
        if isinstance(self.family, Poisson):
            _warn_of_overdispersion(*self.family.overdispersion(link, response, information.rank))
        if isinstance(self.family, Normal):
            inputs = self._inputs_read()
            if inputs.shape[1] < self.response.spec.num_data // 10:
                warn_of_varying_noise(*self.family.varying_noise(response - link[:, 0], torch.cat([link, inputs], 1)))
        return information

    def _inputs_read(self) -> Tensor:
        """(rows, inputs) the columns of the first argument that the networks read, where it is a matrix."""
        first = self.data[0] if self.data else self.free.new_zeros(self.response.spec.num_data, 0)
        reads = self.structure.reads
        return first[:, reads] if first.dim() == 2 and first.shape[1] == len(reads) else first.new_zeros(len(first), 0)

    @property
    def noise_variance(self) -> float:
        """sigma-hat squared, of a normal response with one scale for all rows.

        Raises:
            ValueError: for any other response.
        """
        if not isinstance(self.family, Normal):
            raise ValueError(f"only a normal response with one scale has a noise variance, got {self.family.name}")
        return self.information.dispersion * self.family.scale**2

    def _network(self, name: str | None) -> SparseModule:
        """One of the model's, by the name in front of its sites; "" of one without."""
        networks = {module.site_name("").removesuffix("."): module for module in self.layout.modules()}
        if not networks:
            raise ValueError("a model without a network (SparseNet, sparsify) has none to be taken out")
        if name is None and len(networks) == 1:
            name = next(iter(networks))
        if name not in networks:
            raise ValueError(f"name must be one of the model's networks {sorted(networks)}, got {name!r}")
        return networks[name]

    def module(self, name: str | None = None) -> nn.Module:
        """The network with its fitted weights, zeros in place: a plain module.

        Args:
            name: in front of its sites, where the model has several networks, as each SparseLinear of a PyroModule is one.

        Raises:
            ValueError: naming the networks.
        """
        sparse = self._network(name)
        module: nn.Module = copy.deepcopy(sparse.module)
        with torch.no_grad():
            own = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
            for part, site in self.layout.of_module(sparse).items():
                own[part].copy_(self.values[site.name])
        return module.eval()

    def compact(self, name: str | None = None) -> nn.Module:
        """The small dense network that computes the same.

        Of linear layers one after another it reads the selected inputs in order, ``x[:, input_indices]``. Any other network
        loses the channels that nothing reads, and reads what it read (see :func:`compact_channels`).

        Raises:
            ValueError: of a network that ``torch.fx`` cannot follow.
        """
        module = self.module(name)
        if structures.linear_chain(module) is not None:
            return structures.compact(module)
        shape = self.response.spec.input_shapes[self._network(name)]
        if shape is None:
            raise ValueError("the network must be given a tensor to be made small, got something else")
        return compact_channels(module, tuple(shape))

    def covariance(self) -> xr.DataArray:
        """Covariance of the kept weights, theorem 2.1, dims ("weight", "weight_"), labelled as in ``layer1.weight[3, 5]``."""
        factor = self.information.factor
        matrix = self.information.dispersion * (factor @ factor.T)
        kept = self.structure.kept(self.free).nonzero().flatten()[self.matters]
        labels = [
            f"{site.name}[{', '.join(str(i) for i in np.unravel_index(number, site.shape))}]"
            if site.shape
            else site.name
            for site in self.layout.sites
            for number in range(site.shape.numel())
        ]
        names = np.array(labels)[kept.cpu().numpy()]
        return xr.DataArray(
            matrix.cpu().numpy(), dims=("weight", "weight_"), coords={"weight": names, "weight_": names}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fit to a new or existing folder: ``fit.json`` and ``fit.npz``, read by :meth:`load`, no pickle.

        Raises:
            ValueError: of a response of no family that intervals are known for.
        """
        folder, spec = Path(path), self.response.spec
        family = {"name": self.family.name} | dataclasses.asdict(self.family)
        arrays = {f"value/{name}": value for name, value in self.values.items()}
        arrays |= {f"mask/{name}": mask for name, mask in self.structure.masks.items()}
        arrays |= {name: getattr(self, name) for name in ("free", "precision")}
        numbers = {}
        if not self.by_batches:
            information = self.information
            arrays |= {f"information/{name}": getattr(information, name) for name in ("factor", "scale", "leverages")}
            arrays |= {"matters": self.matters}
            numbers = {name: getattr(information, name) for name in _INFORMATION}
        arrays |= {name: getattr(self.structure, name) for name in ("input_probability", "reads")}
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            folder / "fit.npz", allow_pickle=False, **{name: array.cpu().numpy() for name, array in arrays.items()}
        )
        settings = {
            "fit": {name: getattr(self, name) for name in _SCALARS},
            "information": numbers,
            "structure": {"input_names": self.structure.input_names, "num_chains": self.structure.num_chains},
            "spec": {name: getattr(spec, name) for name in ("num_data", "batch_size", "subsamples_itself")}
            | {"plates": sorted(spec.plates)},
            "site": self.response.site,
            "family": family,
            "probe": self._probe(),
        }
        (folder / "fit.json").write_text(json.dumps(settings, indent=2))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model, data: Any) -> Self:
        """A saved fit, ready to predict.

        Args:
            path: the folder.
            model: the model it was saved from; its weights are taken from the folder.
            data: rows as those it was fitted to, any number >= 1: they show the model its shapes.

        Raises:
            ValueError: for a model of other sites, or one that computes something else of a row of ones.
        """
        folder = Path(path)
        settings = json.loads((folder / "fit.json").read_text())
        with np.load(folder / "fit.npz", allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}

        def group(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}

        known = settings["spec"] | {"plates": frozenset(settings["spec"]["plates"])}
        settings["fit"].setdefault("by_batches", False)
        batch_size = known["batch_size"] if settings["fit"]["by_batches"] else None
        rows = tuple(torch.as_tensor(item) for item in (data if isinstance(data, (tuple, list)) else (data,)))
        # The model may count on as many rows as it was fitted to: the first one stands for all.
        whole = tuple(item[:1].expand(known["num_data"], *item.shape[1:]) for item in rows)
        spec = dataclasses.replace(inspect(model, whole, batch_size, 0), data=rows, **known)
        spec = spec if settings["fit"]["by_batches"] else _in_double(spec)
        layout, values, masks = spec.layout, group("value/"), group("mask/")
        shapes = {site.name: site.shape for site in layout.sites}
        if shapes.keys() != values.keys() or any(
            value.shape != shapes[name] for name, value in values.items() if not layout[name].transform
        ):
            raise ValueError(f"model must have the sites of the saved fit, {sorted(values)}, got {sorted(shapes)}")
        names = settings["structure"]["input_names"]
        structure = Structure(
            masks,
            values,
            arrays["input_probability"],
            arrays["reads"],
            None if names is None else tuple(names),
            settings["structure"]["num_chains"],
            layout,
        )
        fit = cls(
            structure=structure,
            values=values,
            response=Response(spec, settings["site"]),
            free=arrays["free"],
            data=(),
            precision=arrays["precision"],
            **settings["fit"],
        )
        # What it would compute from the training rows, which are not saved.
        family = settings["family"]
        fit.__dict__["family"] = FAMILIES[family.pop("name")](**family)
        if not fit.by_batches:
            fit.__dict__["matters"] = arrays["matters"]
            fit.__dict__["information"] = FisherInformation(**(group("information/") | settings["information"]))
        there, here = (
            torch.tensor(probe or [], dtype=torch.float64) for probe in (settings.get("probe"), fit._probe())
        )
        if len(there) and not (len(here) == len(there) and torch.allclose(here, there, rtol=1e-3, atol=1e-4)):
            raise ValueError(
                f"model must be the one that was saved in {folder}, got one that computes {here.tolist()} of a row of ones in "
                f"place of {there.tolist()}"
            )
        return fit

    def _probe(self) -> list[float] | None:
        """What tells one model from another with the same sites: the link of a made-up row; None where there is none."""
        spec = self.response.spec
        if not spec.data or spec.subsamples_itself:
            return None
        rows = tuple(
            (torch.ones if item.is_floating_point() else torch.zeros)(1, *item.shape[1:]).to(item) for item in spec.data
        )
        try:
            link = self.evaluate(self.family.link, rows).flatten()
        except (RuntimeError, IndexError, ValueError):  # the made-up row may be none that the model takes
            return None
        return link.tolist() if bool(link.isfinite().all()) else None

    def __repr__(self) -> str:
        state = "by batches" if self.by_batches else "converged" if self.converged else "not converged"
        return f"Fit({self.structure.num_kept} of {self.structure.num_weights} weights, loss {self.loss:.4f}, {state})"

    def __str__(self) -> str:
        if self.by_batches:
            return f"{self.structure}\nrefit by {self.num_iterations:,} steps of SGD: mean loss {self.loss:.4f}"
        state = "converged" if self.converged else "not converged"
        return (
            f"{self.structure}\nrefit {state} after {self.num_iterations} iterations: mean loss {self.loss:.4f}, "
            f"{self.distance:.1e} standard errors from the maximum"
        )


def refit(
    run: Run,
    structure: Structure,
    keep_slab: bool = True,
    max_iterations: int = 2_000,
    tolerance: float = 0.1,
    site: str | None = None,
    data: Any = None,
    schedule: PriorAnnealing | None = None,
    progress: bool = True,
) -> Fit:
    """Maximises the likelihood over the kept weights from where the run ended: by full-batch L-BFGS, large networks by SGD.

    L-BFGS works in double precision where the model can be converted, in the metric of the Fisher information, and on the small
    networks that the kept weights leave. Sites without a spike-and-slab prior are fitted with their own priors. The
    likelihood alone often has no finite maximum (a tanh unit may saturate for ever, classes may be separable), so the
    slab's normal stays in, at a scale of at least 1: its weight vanishes as 1 / n.

    Args:
        run, structure: from :func:`anneal` and :func:`select`.
        keep_slab: False for plain maximum likelihood.
        max_iterations: of L-BFGS.
        tolerance: how far from the maximum it may stop, in standard errors of the weights, > 0.
        site: the response to predict, where the model has several.
        data: all rows in memory, for a run that took them from a DataLoader, to use them all at once.
        schedule: of a train phase alone, its batches and ``augment`` those of the run: asks for SGD. Without one SGD is taken,
            for ten epochs at the learning rate that the run ended with, where BatchNorm is in training mode, rows times kept
            weights exceed 10^9 or images hold more than 10^6 numbers. Of such a fit no intervals are known, and
            ``max_iterations`` and ``tolerance`` say nothing.
        progress: whether SGD shows a bar.

    Returns:
        A :class:`Fit`, which says whether it converged.

    Raises:
        ValueError: for a model that subsamples itself by a size that does not divide its rows: no set of its batches
            weighs every row once. For a run whose rows came from a DataLoader, without ``data``.
    """
    _check_given(run, structure, tolerance)
    if data is not None:
        is_batched = schedule is not None or run.spec.layout.num_buffers > 0
        augment = run.spec.augment if is_batched and loader_of(data) is None else None
        spec = inspect(run.spec.model, data, run.spec.batch_size if is_batched else None, run.seed, augment)
        run = dataclasses.replace(run, spec=with_laws(spec, run.priors))  # those of the run, also with keep
    if schedule is not None or _is_large(run, structure):
        return _refit_by_batches(run, structure, keep_slab, site, schedule, progress)
    if run.spec.loader is not None:
        raise ValueError("data must hold all rows in memory to refit a run that took them from a DataLoader, got None")
    start = run.spec.layout.unconstrained({name: value.double() for name, value in structure.values.items()})
    kept = structure.kept(start)
    small = compacted(_in_double(run.spec), kept, start)
    whole, start = start, start[kept]
    try:
        if not run.spec.data:
            raise RuntimeError("data from a closure stay in single precision")
        potential = _potential(small, start)
    except RuntimeError:  # the model computes with tensors of its own, which are not ours to convert
        small = compacted(_on_all_rows(run.spec), kept, whole)
        start = start.to(run.positions.dtype)
        potential = _potential(small, start)
    spec, batches = small.spec, _every_row_once(small.spec)
    precision = _slab_precision(run.spec.layout, start, kept)[kept] if keep_slab else torch.zeros_like(start)
    tempering = potential.tempering(0.0, 1.0, 0.0, start)

    def objective(free: Tensor) -> tuple[float, Tensor]:
        with evaluating(spec.layout.modules()):  # where the program is the model itself, run eagerly
            parts = [potential(small.position(free), tempering, indices) for indices in batches]
        loss = spec.num_data * torch.stack([part.mean_potential for part in parts]).mean()
        gradient = spec.num_data * torch.stack([part.mean_gradient for part in parts]).mean(0)
        loss = loss + 0.5 * (precision * free.square()).sum()
        return float(loss), small.of_free(gradient) + precision * free

    response = Response(spec, site)
    _check_defined(*objective(start))
    free, distance, iterations = start, math.inf, 0
    while iterations < max_iterations and distance > tolerance:
        metric = _metric(response, small, free, precision)
        steps = min(ROUND, max_iterations - iterations)
        free, distance, taken = _minimise(objective, free, metric, steps, tolerance)
        iterations += taken
        if not taken:
            break
    with evaluating(spec.layout.modules()):
        final = [potential(small.position(free), tempering, indices) for indices in batches]
    loss = -sum(float(p.log_prob[name]) for p in final for name in spec.observed) / spec.num_data / len(final)
    if not distance <= tolerance and max_iterations:  # or not a number, at a kink
        remedy = "Raise max_iterations" if iterations >= max_iterations else _AT_A_KINK
        warn(
            f"the refit stopped {distance:.1e} standard errors from the maximum after {iterations} iterations: its intervals "
            f"are not to be trusted. {remedy}; where a hierarchical scale runs to 0 there is no maximum: end the schedule with "
            "sample_steps and average over draws, ps.predict(run, x)",
        )
    large = dataclasses.replace(spec, model=run.spec.model, layout=run.spec.layout)
    fit = Fit(
        structure,
        {},
        Response(large, site),
        loss,
        distance <= tolerance,
        distance,
        iterations,
        keep_slab,
        False,
        free,
        spec.data,
        precision,
    )
    fit.values.update(fit.values_at(free))
    return fit


def _check_given(run: Run, structure: Structure, tolerance: float) -> None:
    if not isinstance(run, Run) or not isinstance(structure, Structure):
        got = f"a {type(run).__name__} and a {type(structure).__name__}"
        raise TypeError(f"run and structure must be a Run and a Structure of it, got {got}")
    shapes = {site.name: site.shape for site in run.spec.layout.spike_slab_sites()}
    if {name: mask.shape for name, mask in structure.masks.items() if name in shapes} != shapes:
        raise ValueError(
            f"structure must be one of the run, with masks of {sorted(shapes)}, got those of another model"
        )
    if not tolerance > 0:
        raise ValueError(f"tolerance must be > 0, got {tolerance}")


def _check_defined(loss: float, gradient: Tensor) -> None:
    if not (math.isfinite(loss) and bool(gradient.isfinite().all())):
        raise ValueError(_UNDEFINED)


def _is_large(run: Run, structure: Structure) -> bool:
    """Whether a refit goes by batches."""
    spec = run.spec
    if spec.layout.num_buffers > 0:
        return True
    if spec.batch_size is None or spec.subsamples_itself or not spec.data:
        return False
    is_image = spec.data[0].dim() > 2  # of which networks make more numbers than they hold
    numbers = spec.num_data * spec.data[0][0].numel()
    return spec.num_data * structure.num_kept > MAX_WORK or (is_image and numbers > MAX_NUMBERS)


def _refit_by_batches(
    run: Run, structure: Structure, keep_slab: bool, site: str | None, schedule: PriorAnnealing | None, progress: bool
) -> Fit:
    spec, response = run.spec, Response(run.spec, site)
    if schedule is None:
        schedule = short_schedule(run.schedule, max(1, spec.num_data // (spec.batch_size or spec.num_data)))
    if schedule.length("train") != schedule.num_steps:
        raise ValueError("schedule must have steps in its train phase alone to refit, got some in others")
    start = spec.layout.unconstrained(structure.values)
    kept = structure.kept(start)
    precision = _slab_precision(spec.layout, start, kept) if keep_slab else torch.zeros_like(start)
    try:
        position, loss = descend(spec, start, kept, schedule, precision, run.seed, progress)
    except NonFiniteError as error:
        if error.step > 0:
            raise
        raise ValueError(_UNDEFINED) from error
    values = spec.layout.constrained(position)
    numbers = loss, False, math.nan, schedule.num_steps, keep_slab, True
    return Fit(structure, values, response, *numbers, position[kept], spec.data, precision[kept])


def _minimise(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    start: Tensor,
    metric: Tensor,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, float, int]:
    """L-BFGS in the coordinates that ``metric`` makes round: where it ended, the largest derivative there, iterations.

    In the metric of the Fisher information one unit is a standard error.
    """
    from scipy.optimize import minimize

    root = torch.linalg.cholesky(metric)

    def whitened(u: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        loss, gradient = objective(position(u))
        return loss, torch.linalg.solve_triangular(root, gradient[:, None], upper=False)[:, 0].cpu().numpy()

    def position(u: np.ndarray[Any, Any]) -> Tensor:
        step = torch.from_numpy(u).to(start)[:, None]
        moved: Tensor = start + torch.linalg.solve_triangular(root.T, step, upper=True)[:, 0]
        return moved

    options = {"maxiter": iterations, "gtol": tolerance, "ftol": 0.0, "maxcor": 30}
    found = minimize(whitened, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=options)
    return position(found.x), float(np.abs(found.jac).max(initial=0.0)), int(found.nit)


def _metric(response: Response, small: Compacted, free: Tensor, precision: Tensor) -> Tensor:
    """The Fisher information of all rows at ``free`` where the family of the response is known, else their number."""
    data, num_data = response.spec.data, response.spec.num_data
    identity = num_data * torch.eye(len(free)).to(free)
    if not data or len(free) > MAX_METRIC:
        return identity
    try:
        family = response.family(small.values(free))
    except ValueError:
        return identity
    jacobian = response.jacobian(family.link, small.values, free, data)
    root = family.root(response.evaluate(family.link, small.values(free), data))
    rooted = (root.mT.to(jacobian) @ jacobian).flatten(0, 1)
    metric = rooted.T @ rooted + precision.diag()
    # A coordinate that moves no link parameter (a noise scale) has curvature of order 1 a row.
    return metric + (num_data * (rooted == 0).all(0) + 1e-9 * metric.diagonal().mean()).diag()


def _warn_of_overdispersion(ratio: float, deviations: float) -> None:
    if ratio > 1.2 and deviations > 3:
        warn(
            f"the counts vary {ratio:.2g} times as much about their rates as Poisson counts: intervals are too narrow. Add "
            "the inputs that are missing, or model log(1 + count) as a normal response",
        )


def warn_of_varying_noise(p_value: float, ratio: float) -> None:
    if p_value < 1e-3 and ratio > 2:
        warn(
            "the noise is clearly larger at some rows than at others: intervals of a new observation hold on average, but are "
            "too wide where it is small and too narrow where it is large. Give the model a scale for each row "
            "(family heteroscedastic)",
        )


def _potential(small: Compacted, free: Tensor) -> Potential:
    """The traced potential of all rows."""
    batches = _every_row_once(small.spec)
    with evaluating(small.spec.layout.modules()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model is run eagerly")  # which anneal has said already
        return Potential(small.spec, small.position(free), (batches[0], batches[-1]))


def _in_double(spec: Specification) -> Specification:
    data = tuple(d.double() if d.is_floating_point() else d for d in spec.data)
    return dataclasses.replace(_on_all_rows(spec), data=data)


def _on_all_rows(spec: Specification) -> Specification:
    return dataclasses.replace(spec, batch_size=spec.batch_size if spec.subsamples_itself else None)


def _slab_precision(layout: Layout, like: Tensor, kept: Tensor) -> Tensor:
    scales = {site.name: site.law.slab_scale.clamp(min=1.0) for site in layout.sites if site.law is not None}
    return layout.flat(scales, torch.inf, like) ** -2 * kept


def _every_row_once(spec: Specification) -> list[Tensor]:
    device = spec.data[0].device if spec.data else torch.device("cpu")
    rows = torch.arange(spec.num_data, device=device)
    if spec.batch_size is None:
        return [rows]
    if spec.num_data % spec.batch_size:
        raise ValueError(
            f"the model's subsample_size must divide its {spec.num_data} rows to be refitted, got {spec.batch_size}: "
            "change it, or hand the model its batches (subsample_size=len(x))"
        )
    return list(rows.split(spec.batch_size))
