"""Draws and their statistics as an xarray DataTree in ArviZ's schema, which discloses the target they came from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.layout import group_of, named_dims
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.inference.structure import linear_chain


def build_trace(
    spec: Specification,
    schedule: PriorAnnealing,
    draws: Tensor,
    statistics: Mapping[str, np.ndarray[Any, Any]],
    seed: int,
    program: str,
    input_names: Sequence[str] | None,
) -> xr.DataTree:
    """The DataTree of draws (chain, draw, coordinate) and statistics (chain, draw): posterior and sample_stats."""
    index = {"chain": np.arange(draws.shape[0]), "draw": np.arange(draws.shape[1])}
    values = spec.layout.constrained(draws)
    dims = named_dims({name: value.shape[2:] for name, value in values.items()})
    arrays = {name: (("chain", "draw", *dims[name]), value.cpu().numpy()) for name, value in values.items()}
    parts: dict[str, dict[str, Any]] = {"posterior": {}}
    for site in spec.layout.sites:
        parts.setdefault(group_of(site), {})[site.name] = arrays[site.name]
    stats = {name: (("chain", "draw"), array) for name, array in statistics.items()}
    groups = {
        "posterior": xr.Dataset(parts.pop("posterior"), coords=index | input_coords(spec, input_names)),
        "sample_stats": xr.Dataset(stats, coords=index),
        **{name: xr.Dataset(part, coords=index) for name, part in parts.items()},
    }
    tree = xr.DataTree.from_dict(groups)
    attributes = disclosure(spec, schedule, seed) | {"program": program}
    for node in (tree, *tree.children.values()):
        node.attrs.update(attributes)
    return tree


def input_coords(spec: Specification, input_names: Sequence[str] | None) -> dict[str, np.ndarray[Any, Any]]:
    """The names of the inputs along the axes over them: of first layers, and of sparse coefficients of the inputs."""
    if input_names is None:
        return {}
    sites = [
        site for site in spec.layout.spike_slab_sites() if site.module is None and site.shape == (len(input_names),)
    ]
    for module in spec.readers:
        chain = linear_chain(module.module)
        sites += [spec.layout.of_module(module)[chain[0].weight]] if chain else []
    dims = named_dims({site.name: site.shape for site in spec.layout.sites})
    return {dims[site.name][-1]: np.array(input_names, dtype=object) for site in sites}


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
