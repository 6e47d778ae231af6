"""Draws and their statistics as an xarray DataTree in ArviZ's schema, which discloses the target they came from."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.schedule import PriorAnnealing


def build_trace(
    spec: Specification,
    schedule: PriorAnnealing,
    draws: Tensor,
    statistics: Mapping[str, np.ndarray[Any, Any]],
    seed: int,
    program: str,
) -> xr.DataTree:
    """The DataTree of draws (chain, draw, coordinate) and statistics (chain, draw): posterior and sample_stats."""
    index = {"chain": np.arange(draws.shape[0]), "draw": np.arange(draws.shape[1])}
    values = spec.layout.constrained(draws)
    posterior = {
        name: (("chain", "draw", *(f"{name}_dim_{axis}" for axis in range(value.dim() - 2))), value.cpu().numpy())
        for name, value in values.items()
    }
    stats = {name: (("chain", "draw"), array) for name, array in statistics.items()}
    groups = {
        "posterior": xr.Dataset(posterior, coords=index),
        "sample_stats": xr.Dataset(stats, coords=index),
    }
    tree = xr.DataTree.from_dict(groups)
    attributes = disclosure(spec, schedule, seed) | {"program": program}
    for node in (tree, tree["posterior"], tree["sample_stats"]):
        node.attrs.update(attributes)
    return tree


def disclosure(spec: Specification, schedule: PriorAnnealing, seed: int) -> dict[str, Any]:
    """What the draws target, as attributes that any store can hold."""
    last = schedule.at(schedule.num_steps - 1)
    return {
        "inference_library": "pyro_sparse",
        "inference_library_version": package_version(),
        "torch_version": torch.__version__,
        "pyro_version": pyro.__version__,
        "phase": schedule.last_phase,
        "is_posterior": int(schedule.last_phase == "sample"),
        "temperature": last.temperature,
        "prior_power": last.prior_power,
        "spike_progress": last.spike_progress,
        "num_data": spec.num_data,
        "batch_size": spec.batch_size or spec.num_data,
        "seed": seed,
        "schedule": json.dumps(asdict(schedule)),
    }


def package_version() -> str:
    """The installed version of this package."""
    try:
        return version("pyro-sparse")
    except PackageNotFoundError:
        return "unknown"


def to_arviz(run: Any) -> Any:
    """What the installed ArviZ reads: the run's DataTree for ArviZ 1.x, an InferenceData for 0.23.

    Args:
        run: a :class:`Run`, or a DataTree such as its ``trace``.

    Raises:
        ImportError: where ArviZ is not installed.
    """
    import arviz

    tree = run if isinstance(run, xr.DataTree) else run.trace
    if int(arviz.__version__.split(".")[0]) >= 1:
        return tree
    return arviz.InferenceData.from_datatree(tree)
