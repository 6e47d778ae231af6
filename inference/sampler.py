"""anneal(): the only loop, from a Pyro model and data to a Run."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from pyro_sparse.inference import sghmc
from pyro_sparse.inference.inspection import Model, Specification, inspect, start
from pyro_sparse.inference.minibatch import Batches, Noise, stream
from pyro_sparse.inference.potential import Evaluation, Potential, Tempering
from pyro_sparse.inference.program import repays_compiling
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
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


class NonFiniteError(ArithmeticError):
    """The potential or its gradient became NaN or infinite.

    Attributes:
        step: counted from 0; the state before it is kept.
        values: the last finite value of every site of the chain that failed.
        run: the Run of the chains that had ended before; None where there were none.
    """

    def __init__(self, message: str, step: int, values: dict[str, Tensor]) -> None:
        super().__init__(message)
        self.step, self.values = step, values
        self.run: Run | None = None


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
    table = _Table(schedule, position)
    ended: list[_Chain] = []
    label = progress if isinstance(progress, str) else ""
    together = _together(potential, starts, seed)
    groups = [[chain] for chain in range(num_chains)] if together is None else [list(range(num_chains))]
    potential, first = together or potential, _stacked([starts[chain] for chain in groups[0]])
    if repays_compiling(schedule.num_steps * len(groups), first.numel()):
        of_group = [_batches(spec, seed, chain, position) for chain in groups[0]]
        potential = potential.compiled(first, (_batch(of_group, 0), _batch(of_group, 1)))
    with tqdm(total=schedule.num_steps * len(groups), disable=not progress, unit="step", smoothing=0.02) as bar:
        for chains in groups:
            start_of_all = _stacked([starts[chain] for chain in chains])
            try:
                ended += _run_chains(potential, table, start_of_all, seed, chains, num_draws, label, bar)
            except NonFiniteError as error:
                error.run = _run(potential, schedule, seed, names, ended) if ended else None
                raise
    run = _run(potential, schedule, seed, names, ended)
    _warn_of_heat(run)
    return run


class _Table:
    """Controls of every step, as numbers for the sampler and as tensors for the program, made once."""

    def __init__(self, schedule: PriorAnnealing, like: Tensor) -> None:
        self.schedule = schedule
        self.controls = [schedule.at(step) for step in range(schedule.num_steps)]
        rows = [(c.prior_power, c.spike_progress, c.temperature) for c in self.controls]
        self._tensors = torch.tensor(rows, dtype=like.dtype, device=like.device)

    def tempering(self, step: int) -> Tempering:
        return Tempering(*self._tensors[step].unbind())


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
    first, second = (_batch(batches, step) for step in (0, 1))
    return potential.of_chains(torch.stack(starts), (first, second))


def _stacked(parts: list[Tensor]) -> Tensor:
    """Chains in front, where there are several."""
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _batch(batches: list[Batches], step: int) -> Tensor:
    """Row numbers (row,), or (chain, row); all rows are the same for all chains."""
    return batches[0](step) if batches[0].batch_size is None else _stacked([batch(step) for batch in batches])


def _run_chains(
    potential: Potential,
    table: _Table,
    start: Tensor,
    seed: int,
    chains: list[int],
    num_draws: int,
    label: str,
    bar: Any,
) -> list[_Chain]:
    """One chain, or several at once: position, momentum, batches and noise then have the chains in front."""
    spec, schedule = potential.spec, table.schedule
    state = sghmc.init(start)
    noises = [Noise(seed, chain, start.device) for chain in chains]
    batches = [_batches(spec, seed, chain, start) for chain in chains]
    heats = [_batches(spec, seed, chain, start, "temperature") for chain in chains]
    one = start[0] if len(chains) > 1 else start
    decayed = spec.layout.flat({s.name: float(s.kind != "latent") for s in spec.layout.sites}, 0.0, one)
    recorders = [_Recorder(spec, schedule, num_draws, chain, label, one) for chain in chains]
    for step, controls in enumerate(table.controls):
        tempering = table.tempering(step)
        with _random_numbers(potential, seed, chains[0], step, start.device):
            evaluation = potential(state.position, tempering, _batch(batches, step))
        _check_finite(evaluation, state, spec, controls, schedule, step)
        gradient = evaluation.mean_gradient
        if controls.weight_decay:
            gradient = gradient + controls.weight_decay * decayed * state.position
        normals = _stacked([noise(step, one) for noise in noises]) if controls.temperature > 0 else None
        state = sghmc.step(state, gradient, normals, controls, spec.num_data)
        if recorders[0].is_due(step):
            for number, recorder in enumerate(recorders):
                own = evaluation if len(chains) == 1 else evaluation.chain(number)
                recorder.look(step, controls, own, _own(state.position, number), None if number else bar)
        if recorders[0].is_draw(step):
            with _random_numbers(potential, seed, chains[0], step, start.device):
                temperatures = _minibatch_temperature(potential, state.position, tempering, controls, heats, step)
            for number, recorder in enumerate(recorders):
                recorder.draw(step, controls, _own(state.position, number), temperatures[number])
        bar.update()
    return [recorder.chain(_own(state.position, number)) for number, recorder in enumerate(recorders)]


def _own(position: Tensor, number: int) -> Tensor:
    """That of one chain."""
    return position if position.dim() == 1 else position[number]


class _Recorder:
    """Draws, their statistics, and the way of one chain as the progress bar shows it."""

    def __init__(
        self, spec: Specification, schedule: PriorAnnealing, num_draws: int, chain: int, label: str, like: Tensor
    ) -> None:
        self._spec, self._schedule = spec, schedule
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

    def look(self, step: int, controls: Controls, evaluation: Evaluation, position: Tensor, bar: Any) -> None:
        self._loss = _loss(evaluation, self._spec)
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
    potential: Potential, schedule: PriorAnnealing, seed: int, names: tuple[str, ...] | None, chains: list[_Chain]
) -> Run:
    spec, draws = potential.spec, torch.stack([chain.draws for chain in chains])
    statistics = {name: np.stack([chain.statistics[name] for chain in chains]) for name in STATISTICS}
    trace = build_trace(spec, schedule, draws, statistics, seed, potential.kind)
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


def _loss(evaluation: Evaluation, spec: Specification) -> float:
    """Mean negative log-likelihood of the batch."""
    return -sum(float(evaluation.log_prob[name]) for name in spec.observed) / spec.num_data


def _minibatch_temperature(
    potential: Potential,
    position: Tensor,
    tempering: Tempering,
    controls: Controls,
    batches: list[Batches],
    step: int,
) -> list[float]:
    """Of each chain the temperature that minibatch noise alone would give.

    It is learning_rate N Var(batch gradient) / (2 friction).
    """
    spec = potential.spec
    if spec.batch_size is None or spec.num_data < 2 * spec.batch_size:
        return [0.0 if spec.batch_size is None else math.nan] * len(batches)
    first = step * (spec.num_data // spec.batch_size)  # two batches of one epoch, another epoch each time
    gradients = [potential(position, tempering, _batch(batches, number)).mean_gradient for number in (first, first + 1)]
    variances = (gradients[0] - gradients[1]).square().mean(-1).reshape(-1) / 2
    return [controls.learning_rate * spec.num_data * v / (2 * controls.friction) for v in variances.tolist()]


@contextlib.contextmanager
def _random_numbers(potential: Potential, seed: int, chain: int, step: int, device: torch.device) -> Iterator[None]:
    """For a model with dropout: the global generator as a function of (seed, chain, step), and restored after."""
    if not potential.draws_random_numbers:
        yield
        return
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed((stream(seed, chain, "model") + step) % 2**32)
        yield


def _check_finite(
    evaluation: Evaluation,
    state: sghmc.State,
    spec: Specification,
    controls: Controls,
    schedule: PriorAnnealing,
    step: int,
) -> None:
    gradient, position = evaluation.mean_gradient, state.position
    if gradient.dim() == 1 and math.isfinite(float(evaluation.mean_potential + gradient.dot(gradient))):
        return
    if gradient.dim() > 1:
        finite = (evaluation.mean_potential + gradient.square().sum(-1)).isfinite()
        if bool(finite.all()):
            return
        failed = int(finite.int().argmin())
        evaluation, position = evaluation.chain(failed), position[failed]
        gradient = evaluation.mean_gradient
    bad = [name for name, value in evaluation.log_prob.items() if not bool(value.isfinite())]
    what = "log density"
    if not bad:
        squares = {site.name: float(part.square().sum()) for site, part in spec.layout.parts(gradient)}
        # Each may be finite and their sum not.
        bad = [name for name, square in squares.items() if not math.isfinite(square)] or [
            max(squares, key=squares.__getitem__)
        ]
        what = "gradient"
    phase, since = schedule.phase(step)
    remedy = (
        "check the data and the model's start"
        if step == 0
        else f"lower learning_rate ({controls.learning_rate:g}) or scale the data to unit variance"
    )
    raise NonFiniteError(
        f"the {what} of {', '.join(repr(name) for name in bad)} became NaN or infinite at step {step} "
        f"({phase} step {since}): {remedy}; the state before it is in this error's `values`",
        step,
        {name: value.clone() for name, value in spec.layout.constrained(position).items()},
    )


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
