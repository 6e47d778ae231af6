"""What annealing leaves behind, in memory or on disk."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.checks import checked_data
from pyro_sparse.inference.inspection import Model, Specification, inspect, loader_of, start
from pyro_sparse.inference.keeping import prepared, settled
from pyro_sparse.inference.minibatch import Augment, augment_name
from pyro_sparse.inference.moments import Moments
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
from pyro_sparse.inference.store import (
    StoredDraws,
    check_same,
    data_of,
    densities_of,
    model_of,
    read_checkpoints,
    read_identity,
    read_trace,
)
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.spike_slab import SpikeSlab


@dataclass(frozen=True)
class Run:
    """What annealing leaves behind.

    Attributes:
        trace: DataTree with ``posterior`` and ``sample_stats``, dims (chain, draw, ...); its attrs disclose the target.
        spec: the model, its data and its layout.
        schedule, seed: as given.
        positions: (chain, coordinate), where each chain ended.
        draws: (chain, draw, coordinate) on the unconstrained scale, ``draws[chain, draw]``; of a run on disk each is read
            when it is asked for, and with ``sparse_draws`` weights that a draw does not include are 0.
        history: loss, kept weights and controls at some 200 evenly spaced steps of the whole way, dims (chain, step). May
            be empty of a run that was loaded before it was through: without a checkpoint, or shared out over processes.
        input_names: of the columns of the first argument of the model; None where they have none.
    """

    spec: Specification
    schedule: PriorAnnealing
    seed: int
    positions: Tensor
    draws: Tensor | StoredDraws
    trace: xr.DataTree
    history: xr.Dataset
    input_names: tuple[str, ...] | None = None

    @property
    def priors(self) -> dict[str, SpikeSlab]:
        """The law of every spike-and-slab site, those included that were derived from the data's size."""
        return {site.name: site.law for site in self.spec.layout.spike_slab_sites() if site.law is not None}

    @property
    def num_inputs(self) -> int | None:
        """Columns of the model's first argument; None where it is no matrix."""
        data = self.spec.data
        return data[0].shape[1] if data and data[0].dim() == 2 else None

    @property
    def is_sparse(self) -> bool:
        """Whether draws are without the weights that they do not include (``sparse_draws``)."""
        return "posterior_inclusion" in self.trace.children

    def chain(self, number: int) -> "Run":
        """One of its chains, alone."""
        if not 0 <= number < len(self.positions):
            raise ValueError(f"number must be one of the {len(self.positions)} chains, counted from 0, got {number}")
        own = slice(number, number + 1)
        trace, history = self.trace.isel(chain=[number]), self.history.isel(chain=own)
        draws = self.draws[own] if isinstance(self.draws, Tensor) else self.draws.of_chains(own)
        return replace(self, positions=self.positions[own], draws=draws, trace=trace, history=history)

    def __repr__(self) -> str:
        chains, draws, _ = self.draws.shape
        phase = self.schedule.last_phase
        return f"Run({chains} chains, {draws} draws from the {phase} phase, {self.spec.layout.num_coordinates} coordinates)"


def load(path: str | os.PathLike[str], model: Model, data: Any, augment: Augment | None = None) -> Run:
    """The run of a folder that ``anneal(..., out=path)`` wrote; of one that is not through, the draws that are complete.

    Nothing is executed that the folder holds.

    Args:
        model, data: those that were annealed.
        augment: that of the run, by which batches are changed where they are used again, by ``refit`` and ``diagnose``; code
            is not kept on disk. A warning says where it is missing or another one.

    Raises:
        FileNotFoundError: where there is nothing.
        ValueError: where the folder is no run, is one of another model or of other data, or holds no draw yet.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise FileNotFoundError(f"path must be the folder of a run, but there is no {path}")
    settings = read_identity(path)
    loader = loader_of(data)
    shapes = None if loader is not None else [list(tensor.shape) for tensor in checked_data(data)]
    if shapes is not None and shapes != [shape for _, *shape in settings["data"]]:
        raise ValueError(
            f"data must be those of the run in {path}, of shapes {[s[1:] for s in settings['data']]}, got {shapes}"
        )
    _check_augment(path, settings, augment)
    spec = inspect(model, data, settings["batch_size"] if loader is None else None, settings["seed"], augment)
    schedule, keep = PriorAnnealing.from_dict(settings["schedule"]), settings.get("keep")
    spec = spec if keep is None else prepared(spec, keep, schedule)
    like = start(spec, settings["seed"], 0, fresh=False)
    check_same(path, settings, data_of(spec) | model_of(spec) | {"log_density": densities_of(spec, like)})
    trace, num_draws, num_chains = read_trace(path), settings["num_draws"], settings["num_chains"]
    checkpoints = [one for one in read_checkpoints(path, like, settings["processes"]) if one is not None]
    history = [rows for checkpoint in checkpoints for rows in checkpoint.history]
    ended = torch.cat([checkpoint.ended for checkpoint in checkpoints]) if checkpoints else like.new_empty(0, len(like))
    if len(ended) == num_chains or (len(ended) and settings["processes"] == 1):
        positions, chains = ended, np.arange(len(ended))
        draws = StoredDraws(path, spec.layout, like, tuple(chains.tolist()), num_draws)
    else:
        try:
            steps = np.asarray(trace["sample_stats"].to_dataset()["step"])
        except Exception as error:  # whatever a decoder makes of damaged bytes
            raise ValueError(
                f"{path} must say which draws are complete, but 'sample_stats/step' cannot be read: {error}"
            ) from error
        complete = (steps >= 0).cumprod(1).sum(1)
        chains = np.flatnonzero(complete)
        if not len(chains):
            raise ValueError(f"{path} must hold a draw to be loaded, got none yet: go on with resume=True")
        num_draws = int(complete[chains].min())
        draws = StoredDraws(path, spec.layout, like, tuple(chains.tolist()), num_draws)
        positions = torch.stack([draws[place, num_draws - 1] for place in range(len(chains))])
    if any(checkpoint.moments for checkpoint in checkpoints):  # which are whole also where a process was killed
        moments = Moments(spec.layout, like, num_chains)
        for checkpoint in checkpoints:
            moments.restore(checkpoint.moments)
        trace = trace.assign({name: xr.DataTree(dataset) for name, dataset in moments.datasets().items()})
    trace = trace.isel(chain=chains, draw=slice(num_draws))
    if keep is not None:
        spec = settled(spec, float(trace["sample_stats"].to_dataset()["spike_progress"][0, -1]))
        draws = StoredDraws(path, spec.layout, like, tuple(chains.tolist()), num_draws)
    names = settings["input_names"]
    return Run(
        spec,
        schedule,
        settings["seed"],
        positions,
        draws,
        trace,
        history_of(history[: len(positions)] if settings["processes"] == 1 or len(ended) == num_chains else []),
        None if names is None else tuple(names),
    )


def _check_augment(path: Path, settings: Mapping[str, Any], augment: Augment | None) -> None:
    """Warns where batches would be other ones than those of the run."""
    there, here = settings.get("augment"), augment_name(augment)
    if there == here:
        return
    then, now = ("not augmented" if name is None else f"augmented by {name}" for name in (there, here))
    remedy = "leave augment out" if there is None else f"load(..., augment={there})"
    warn(
        f"batches of the run in {path} were {then}, and what refit and diagnose do by batches is {now}: for the same as in the "
        f"run, {remedy}"
    )


def history_of(rows: list[np.ndarray[Any, Any]]) -> xr.Dataset:
    """Rows (chain, step, column) by name."""
    columns = (*Controls._fields, "loss", "num_kept")
    path = np.stack(rows) if rows else np.empty((0, 0, 1 + len(columns)))
    variables = {name: (("chain", "step"), path[:, :, 1 + i]) for i, name in enumerate(columns)}
    steps = path[0, :, 0].astype(int) if len(path) else np.empty(0, dtype=int)
    return xr.Dataset(variables, coords={"chain": np.arange(len(path)), "step": steps})
