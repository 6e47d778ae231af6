"""anneal(): the only loop, from a Pyro model and data to a Run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from pyro_sparse.inference.inspection import Model, Specification, inspect, start
from pyro_sparse.inference.minibatch import Batches
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.program import repays_compiling
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
from pyro_sparse.inference.step import NonFiniteError, Step, Table, joined, step_maker
from pyro_sparse.inference.trace import build_trace
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.spike_slab import SpikeSlab

TOGETHER = 200_000  # coordinates of all chains up to which they run in one program; above, it is no faster
STATISTICS = (*Controls._fields, "step", "loss", "num_kept", "minibatch_temperature")


@dataclass(frozen=True)
class Run:
    """What annealing leaves behind.

    Attributes:
        trace: DataTree with ``posterior`` and ``sample_stats``, dims (chain, draw, ...); its attrs disclose the target.
        spec: the model, its data and its layout.
        schedule, seed: as given.
        positions: (chain, coordinate), where each chain ended.
        draws: (chain, draw, coordinate) on the unconstrained scale.
        history: loss, kept weights and controls at some 200 evenly spaced steps of the whole way, dims (chain, step).
        input_names: of the columns of the first argument of the model; None where they have none.
    """

    spec: Specification
    schedule: PriorAnnealing
    seed: int
    positions: Tensor
    draws: Tensor
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

    def chain(self, number: int) -> "Run":
        """One of its chains, alone."""
        if not 0 <= number < len(self.positions):
            raise ValueError(f"number must be one of the {len(self.positions)} chains, counted from 0, got {number}")
        own = slice(number, number + 1)
        trace, history = self.trace.isel(chain=[number]), self.history.isel(chain=[number])
        return replace(self, positions=self.positions[own], draws=self.draws[own], trace=trace, history=history)

    def __repr__(self) -> str:
        chains, draws, _ = self.draws.shape
        phase = self.schedule.last_phase
        return f"Run({chains} chains, {draws} draws from the {phase} phase, {self.spec.layout.num_coordinates} coordinates)"


def anneal(
    model: Model,
    data: Any,
    schedule: PriorAnnealing | None = None,
    batch_size: int | None = None,
    num_draws: int = 100,
    num_chains: int = 1,
    seed: int = 0,
    input_names: Sequence[str] | None = None,
    progress: bool | str = True,
) -> Run:
    """Samples a Pyro model by prior annealing with minibatch SGHMC (Algorithm 1 of the paper, without the refit).

    Args:
        model: any Pyro model with continuous latent sites, called as ``model(*data)``.
        data: its arguments, tensors or arrays with the same number of rows; a single one may stand alone.
        schedule: a :class:`PriorAnnealing`; its defaults where left out.
        batch_size: rows a step; None is all of them, and needs no plate. A model that subsamples inside its plate has a
            size of its own.
        num_draws: draws kept, evenly spaced over the last phase.
        num_chains: independent annealing runs. Small ones run together, which costs little more than one, and stop
            together; batches and noise of a chain are those it has alone, its values the same to rounding. Where the schedule
            trains, chains after the first start from fresh random weights; without a train phase all start from the weights
            given.
        seed: of start values, batches and noise; the global generator is neither used nor changed.
        input_names: of the columns of the first argument.
        progress: whether to show a bar; a text stands in front of it.

    Raises:
        TypeError, ValueError: before the run, naming the argument, site or plate, the rule and the value.
        NonFiniteError: during it, naming step, site and remedy, and keeping the last finite state.
    """
    schedule = PriorAnnealing() if schedule is None else schedule
    available = schedule.length(schedule.last_phase)
    if not 1 <= num_draws <= available:
        raise ValueError(f"num_draws must lie in [1, {available}], the steps of the last phase, got {num_draws}")
    if not num_chains >= 1:
        raise ValueError(f"num_chains must be >= 1, got {num_chains}")
    spec = inspect(model, data, batch_size, seed)
    laws = {site.name: site.law for site in spec.layout.spike_slab_sites() if site.law is not None}
    schedule.check_stability(laws, spec.num_data)
    names = _checked_names(input_names, spec)
    starts = [start(spec, seed, chain, fresh=chain > 0 and schedule.train_steps > 0) for chain in range(num_chains)]
    position = starts[0]
    batches = _batches(spec, seed, 0, position)
    potential = Potential(spec, position, (batches(0), batches(1)))
    table = Table(schedule, position)
    ended: list[_Chain] = []
    label = progress if isinstance(progress, str) else ""
    together = _together(potential, starts, seed)
    groups = [[chain] for chain in range(num_chains)] if together is None else [list(range(num_chains))]
    potential, first = together or potential, _stacked([starts[chain] for chain in groups[0]])
    compiling = repays_compiling(schedule.num_steps * len(groups), first.numel())
    make = step_maker(potential, table, first, seed, groups[0], compiling)
    with tqdm(total=schedule.num_steps * len(groups), disable=not progress, unit="step", smoothing=0.02) as bar:
        for chains in groups:
            step = make(_stacked([starts[chain] for chain in chains]), chains)
            try:
                ended += _run_chains(step, table, spec, chains, num_draws, label, bar)
            except NonFiniteError as error:
                error.run = _run(spec, step.kind, schedule, seed, names, ended) if ended else None
                raise
    run = _run(spec, step.kind, schedule, seed, names, ended)
    _warn_of_heat(run)
    return run


@dataclass(frozen=True)
class _Chain:
    position: Tensor
    draws: Tensor
    statistics: dict[str, np.ndarray[Any, Any]]
    history: list[tuple[float, ...]]


def _together(potential: Potential, starts: list[Tensor], seed: int) -> Potential | None:
    """The potential of all chains at once; None where one after the other is as fast, or the only way."""
    if len(starts) == 1 or sum(len(start) for start in starts) > TOGETHER:
        return None
    batches = [_batches(potential.spec, seed, chain, starts[0]) for chain in range(len(starts))]
    first, second = (joined(batches, step) for step in (0, 1))
    return potential.of_chains(torch.stack(starts), (first, second))


def _stacked(parts: list[Tensor]) -> Tensor:
    """Chains in front, where there are several."""
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _run_chains(
    step: Step, table: Table, spec: Specification, chains: list[int], num_draws: int, label: str, bar: Any
) -> list[_Chain]:
    """One chain, or several at once."""
    one = _own(step.state.position, 0)
    recorders = [_Recorder(spec, table.schedule, num_draws, chain, label, one) for chain in chains]
    for number, controls in enumerate(table.controls):
        step(number)
        if recorders[0].is_due(number):
            losses, heats = step.losses(), [math.nan] * len(chains)
            if recorders[0].is_draw(number):
                heats = step.minibatch_temperatures(number)
            for chain, recorder in enumerate(recorders):
                position = _own(step.state.position, chain)
                recorder.look(number, controls, losses[chain], position, None if chain else bar)
                if recorder.is_draw(number):
                    recorder.draw(number, controls, position, heats[chain])
        bar.update()
    return [recorder.chain(_own(step.state.position, chain)) for chain, recorder in enumerate(recorders)]


def _own(position: Tensor, number: int) -> Tensor:
    """That of one chain."""
    return position if position.dim() == 1 else position[number]


class _Recorder:
    """Draws, their statistics, and the way of one chain as the progress bar shows it."""

    def __init__(
        self, spec: Specification, schedule: PriorAnnealing, num_draws: int, chain: int, label: str, like: Tensor
    ) -> None:
        self._schedule = schedule
        parts = [label] * bool(label) + [f"chain {chain + 1}"] * bool(chain)
        self._label = f"{', '.join(parts)}: " if parts else ""
        self._thresholds = spec.layout.thresholds(like)
        self._draw_steps = frozenset(_draw_steps(schedule, num_draws))
        self._period = max(1, schedule.num_steps // 200)
        self._loss, self._kept = math.nan, 0
        self._draws: list[Tensor] = []
        self._rows: list[tuple[float, ...]] = []
        self._history: list[tuple[float, ...]] = []

    def is_draw(self, step: int) -> bool:
        return step in self._draw_steps

    def is_due(self, step: int) -> bool:
        return step % self._period == 0 or step in self._draw_steps

    def look(self, step: int, controls: Controls, loss: float, position: Tensor, bar: Any) -> None:
        self._loss = loss
        self._kept = int((position.abs() > self._thresholds).sum())
        if bar is not None:  # of chains that run together the first speaks
            bar.set_description_str(f"{self._label}{self._schedule.phase(step)[0]:>6}", refresh=False)
            bar.set_postfix_str(f"loss {self._loss:.3f}, kept {self._kept:,}", refresh=False)
        if step % self._period == 0:
            self._history.append((step, *controls, self._loss, self._kept))

    def draw(self, step: int, controls: Controls, position: Tensor, heat: float) -> None:
        self._draws.append(position.clone())
        self._rows.append((*controls, step, self._loss, self._kept, heat))

    def chain(self, position: Tensor) -> _Chain:
        columns = zip(*self._rows, strict=True)
        statistics = {name: np.asarray(column) for name, column in zip(STATISTICS, columns, strict=True)}
        return _Chain(position, torch.stack(self._draws), statistics, self._history)


def _run(
    spec: Specification,
    program: str,
    schedule: PriorAnnealing,
    seed: int,
    names: tuple[str, ...] | None,
    chains: list[_Chain],
) -> Run:
    draws = torch.stack([chain.draws for chain in chains])
    statistics = {name: np.stack([chain.statistics[name] for chain in chains]) for name in STATISTICS}
    trace = build_trace(spec, schedule, draws, statistics, seed, program)
    path = np.array([chain.history for chain in chains])
    columns = {
        name: (("chain", "step"), path[:, :, 1 + i]) for i, name in enumerate((*Controls._fields, "loss", "num_kept"))
    }
    history = xr.Dataset(columns, coords={"chain": np.arange(len(chains)), "step": path[0, :, 0].astype(int)})
    return Run(spec, schedule, seed, torch.stack([chain.position for chain in chains]), draws, trace, history, names)


def _batches(spec: Specification, seed: int, chain: int, like: Tensor, purpose: str = "batches") -> Batches:
    return Batches(spec.num_data, spec.batch_size, seed, chain, like.device, purpose)


def _draw_steps(schedule: PriorAnnealing, num_draws: int) -> list[int]:
    length = schedule.length(schedule.last_phase)
    first = schedule.num_steps - length
    return [first + (number + 1) * length // num_draws - 1 for number in range(num_draws)]


def _checked_names(input_names: Sequence[str] | None, spec: Specification) -> tuple[str, ...] | None:
    if input_names is None:
        return None
    names = tuple(str(name) for name in input_names)
    columns = spec.data[0].shape[1] if spec.data and spec.data[0].dim() == 2 else 0
    if len(names) != columns or len(set(names)) != columns:
        raise ValueError(f"input_names must be {columns} different names, one a column of data[0], got {len(names)}")
    return names


def _warn_of_heat(run: Run) -> None:
    if run.schedule.last_phase != "sample":
        return
    nominal = run.schedule.sample_temperature
    heat = float(run.trace["sample_stats"]["minibatch_temperature"].mean())
    if heat > 0.1 * nominal:
        warn(
            f"minibatch noise adds about {heat:.3g} to the temperature {nominal:g} of the draws: lower learning_rate or "
            "raise batch_size; both temperatures are in sample_stats",
        )
