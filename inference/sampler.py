"""anneal(): the only loop, from a Pyro model and data to a Run."""

import contextlib
import json
import operator
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_sparse.inference import sghmc
from pyro_sparse.inference.inspection import Model, Specification, inspect, start, warn_of_scale
from pyro_sparse.inference.keeping import Keeping, check_keep, check_moves, prepared, settled
from pyro_sparse.inference.layout import Layout
from pyro_sparse.inference.minibatch import Augment, augment_name
from pyro_sparse.inference.moments import Moments
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.program import repays_compiling
from pyro_sparse.inference.run import Run, history_of
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
from pyro_sparse.inference.step import NonFiniteError, Step, Table, joined, step_maker
from pyro_sparse.inference.store import (
    FORMAT,
    IDENTITY,
    Checkpoint,
    Store,
    StoredDraws,
    check_folder,
    check_same,
    create,
    data_of,
    densities_of,
    difference,
    digest,
    is_run,
    model_of,
    num_bytes,
    read_identity,
    read_start,
    read_trace,
    write_empty,
)
from pyro_sparse.inference.trace import build_trace, disclosure, input_coords
from pyro_sparse.inference.warning import warn

TOGETHER = 200_000  # coordinates of all chains up to which they run in one program; above, it is no faster
INTEGERS = ("step", "num_kept")
STATISTICS = {  # of each draw, with their types
    name: "int64" if name in INTEGERS else "float64"
    for name in (*Controls._fields, "step", "loss", "num_kept", "kinetic_temperature", "minibatch_temperature")
}


def anneal(
    model: Model,
    data: Any,
    schedule: PriorAnnealing | None = None,
    batch_size: int | None = None,
    num_draws: int = 100,
    num_chains: int = 1,
    seed: int = 0,
    input_names: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    sparse_draws: bool = False,
    augment: Augment | None = None,
    keep: float | None = None,
    progress: bool | str = True,
) -> Run:
    """Samples a Pyro model by prior annealing with minibatch SGHMC (Algorithm 1 of the paper, without the refit).

    Args:
        model: any Pyro model with continuous latent sites, called as ``model(*data)``.
        data: its arguments, tensors or arrays with the same number of rows; a single one may stand alone. Or a DataLoader of
            them: its batches go to the default device, its random numbers (PyTorch's, workers included) are functions of the
            seed, and a run is resumed by going through the epoch it stopped in.
        schedule: a :class:`PriorAnnealing`; its defaults where left out.
        batch_size: rows a step; None is all of them, and needs no plate. A model that subsamples inside its plate has a
            size of its own.
        num_draws: draws kept, evenly spaced over the last phase.
        num_chains: independent annealing runs. Small ones run together, which costs little more than one, and stop
            together; batches and noise of a chain are those it has alone, its values the same to rounding. Where the schedule
            trains, chains after the first start from fresh random weights; without a train phase all start from the weights
            given. Where ``torch.distributed`` is set up, as under ``torchrun``, they are shared out over the processes, whose
            number must divide theirs, and every process returns them all.
        seed: of start values, batches and noise; the global generator is neither used nor changed.
        input_names: of the columns of the first argument.
        out: a folder that draws and statistics are written to as they come (Zarr, in ArviZ's schema), instead of memory. It
            can be opened at any moment, by xarray or :func:`load`.
        resume: go on with the run in ``out``, to the same bits as if it had never stopped; a new run where there is none.
        sparse_draws: for large networks on disk: of every draw only the weights that it includes (inclusion probability above
            1/2), zeros elsewhere, which take no room; and of all weights the exact mean, variance and inclusion probability
            over the draws of a chain, as the groups ``posterior_mean``, ``posterior_variance`` and ``posterior_inclusion``.
            What is computed of such draws, as by ``predict``, is of the networks without the weights left out.
        augment: ``augment(x, generator)`` returns the rows of a batch of the first argument changed at random, of the shape
            and type they had, as :class:`ImageAugmentation` does; its random numbers come from the generator it is given, on
            the device of ``x``, so that they are functions of the seed, chain and step. What is computed of a run, a
            prediction say, is of rows as they are.
        keep: the share of the weights to keep, in (0, 1): the spike then moves as makes the prior include as many (see
            :mod:`pyro_sparse.inference.keeping`), between the initial and the final spike scale of the prior, which is best
            left unset. One chain a run; ``run.priors`` holds the final prior that was reached.
        progress: whether to show a bar; a text stands in front of it.

    Raises:
        TypeError, ValueError: before the run, naming the argument, site or plate, the rule and the value.
        OSError: where ``out`` is taken, cannot be written, or is on a disk too small for the draws.
        NonFiniteError: during it, naming step, site and remedy, and keeping the last finite state.
        KeyboardInterrupt: with ``out`` once the present step is done and all that goes on is saved.
    """
    if resume and out is None:
        raise ValueError("out must name the folder of the run that resume=True goes on with, got None")
    if sparse_draws and out is None:
        raise ValueError("out must name a folder for sparse_draws=True, as draws in memory are whole, got None")
    schedule = PriorAnnealing() if schedule is None else schedule
    if not isinstance(schedule, PriorAnnealing):
        raise TypeError(f"schedule must be a PriorAnnealing, got {schedule!r}")
    num_draws, num_chains, seed = (
        _whole(name, value) for name, value in (("num_draws", num_draws), ("num_chains", num_chains), ("seed", seed))
    )
    batch_size = None if batch_size is None else _whole("batch_size", batch_size)
    available = schedule.length(schedule.last_phase)
    if not 1 <= num_draws <= available:
        raise ValueError(f"num_draws must lie in [1, {available}], the steps of the last phase, got {num_draws}")
    if not num_chains >= 1:
        raise ValueError(f"num_chains must be >= 1, got {num_chains}")
    rank, processes = _process()
    if num_chains % processes:
        raise ValueError(f"num_chains must be a multiple of the {processes} processes, got {num_chains}")
    spec = inspect(model, data, batch_size, seed, augment)
    warn_of_scale(spec, seed)
    if keep is not None:
        check_keep(keep, schedule, num_chains)
        spec = prepared(spec, keep, schedule)
        check_moves(spec.layout)
    laws = {site.name: site.law for site in spec.layout.spike_slab_sites() if site.law is not None}
    if keep is None:
        schedule.check_stability(laws, spec.num_data)
    if sparse_draws and not laws:
        raise ValueError("sparse_draws must be False for a model without a spike-and-slab site, got True")
    names = _checked_names(input_names, spec)
    chains = range(rank * num_chains // processes, (rank + 1) * num_chains // processes)
    starts = {chain: start(spec, seed, chain, fresh=chain > 0 and schedule.train_steps > 0) for chain in chains}
    position = starts[chains[0]]
    if position.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the model's weights must be float32 or float64, got {position.dtype}: autocast inside the model instead"
        )
    path, given = None if out is None else Path(out).absolute(), {}
    if path is not None or processes > 1:
        given = {"keep": keep} | _given(spec, position, schedule, seed, num_draws, num_chains, names)
        _check_alike(given)
    if path is not None:
        given |= {"sparse_draws": sparse_draws, "processes": processes}
        least, most = num_bytes(spec.layout, position, num_chains, num_draws, sparse_draws)
        check_folder(path, resume, given, least)
        if progress and rank == 0:
            tqdm.write(f"up to {_in_words(most)} go to {path}", file=sys.stderr)
    batches = spec.batches(seed, 0, position.device)
    potential = Potential(spec, position, (batches(0), batches(1)))
    table = Table(schedule, position)
    label = progress if isinstance(progress, str) else ""
    together = _together(potential, starts, seed)
    groups = [[chain] for chain in chains] if together is None else [list(chains)]
    potential, first = together or potential, _stacked([starts[chain] for chain in groups[0]])
    compiling = repays_compiling(schedule.num_steps * len(groups), first.numel(), first.is_cuda)
    make = step_maker(potential, table, first, seed, groups[0], compiling)
    keeper: Memory | Store = Memory(chains, num_draws, position)
    if path is not None:
        settings = given | _computed_by(potential, make.kind)
        attributes = disclosure(spec, schedule, seed) | {"program": make.kind}
        moments = Moments(spec.layout, position, num_chains) if sparse_draws else None
        _make_or_check(path, resume, spec.layout, position, settings, attributes, input_coords(spec, names), moments)
        keeper = Store(path, spec.layout, position, moments, part=f"-{rank}" if processes > 1 else "")
        # Weights that were drawn without a seed are other ones in each process: those of the first are taken.
        own = {site.name: site.module is not None or site.kind == "param" for site in spec.layout.sites}
        drawn, first_start = spec.layout.flat(own, False, position), read_start(path, position)
        for chain in chains:
            if chain == 0 or schedule.train_steps == 0:
                starts[chain] = torch.where(drawn, first_start, starts[chain])
    total = schedule.num_steps * len(groups)
    with contextlib.closing(keeper), _stoppable(out is not None) as stopped:
        keeping = None if keep is None else Keeping(keep, spec.layout, schedule, spec.num_data)
        way = _Way(spec, table, num_draws, chains, keeper, label, keeping)
        done, silent = way.num_steps_done(groups), not progress or rank > 0
        with tqdm(total=total, initial=done, disable=silent, unit="step", smoothing=0.02) as bar:
            for group in groups[way.num_groups_done(groups) :]:
                step = make(_stacked([starts[chain] for chain in group]), group)
                try:
                    way.run(step, group, bar, stopped)
                except NonFiniteError as error:
                    if path is not None:
                        error.add_note(f"the draws before it are in {path}, where load reads them")
                    if way.ended and processes == 1:  # others wait for nobody who has failed
                        error.run = _run(way, schedule, seed, names, make.kind)
                    raise
    run = _run(way, schedule, seed, names, make.kind)
    _warn_of_heat(run)
    if keep is not None:
        _warn_of_another_share(run, keep)
    return run


def _process() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _check_alike(given: dict[str, Any]) -> None:
    """Whether all processes run the same: networks that are made without a seed differ, and so do priors derived from them.

    Raises:
        ValueError: in all of them, naming what differs.
    """
    first, *others = _gathered(given)
    for rank, other in enumerate(others, 1):
        found = difference(first, other)
        if found is not None:
            name, there, here = found
            raise ValueError(
                f"all processes must be given the same model, data and settings, but {name} is {there} in the first and {here} "
                f"in number {rank}, counted from 0: seed before networks and data are made (torch.manual_seed)"
            )


def _whole(name: str, value: Any) -> int:
    """A whole number, of whatever library."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None


def _given(
    spec: Specification,
    position: Tensor,
    schedule: PriorAnnealing,
    seed: int,
    num_draws: int,
    num_chains: int,
    names: tuple[str, ...] | None,
) -> dict[str, Any]:
    """What a run must have been given by whoever goes on with it."""
    return {
        "format": FORMAT,
        **data_of(spec),
        **model_of(spec),
        "log_density": densities_of(spec, position),
        "schedule": asdict(schedule),
        **{"seed": seed, "num_draws": num_draws, "num_chains": num_chains},
        "input_names": None if names is None else list(names),
        "augment": augment_name(spec.augment),
        **{"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()},
    }


def _computed_by(potential: Potential, kind: str) -> dict[str, Any]:
    """The program that must be the same for the same bits."""
    graph = potential.program if isinstance(potential.program, torch.fx.GraphModule) else None
    return {"program": kind, "program_hash": digest([] if graph is None else [graph.code, *graph.buffers()])}


def _make_or_check(
    path: Path,
    resume: bool,
    layout: Layout,
    like: Tensor,
    settings: dict[str, Any],
    attributes: dict[str, Any],
    coords: Any,
    moments: Moments | None,
) -> None:
    """The folder of a new run, made by the first process, or of one to go on with."""
    rank, processes = _process()
    is_there = resume and is_run(path)
    if is_there:
        check_same(path, read_identity(path), settings)
    if processes > 1:
        torch.distributed.barrier()  # all have looked
    if not is_there and rank == 0:
        attributes = attributes | {IDENTITY: json.dumps(settings)}
        size = settings["num_chains"], settings["num_draws"]
        create(path, lambda new: write_empty(new, layout, like, STATISTICS, attributes, coords, *size, moments))
    if processes > 1:
        torch.distributed.barrier()


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


@contextlib.contextmanager
def _stoppable(gently: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, for runs that end with the step they are in; pressed twice, it acts at once."""
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not gently or not callable(before) or threading.current_thread() is not threading.main_thread():
        yield lambda: False  # nor where the signal is ignored, or another program's
        return

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


class Memory:
    """Keeps draws and statistics of some chains where no folder was named; has the methods of a Store."""

    def __init__(self, chains: range, num_draws: int, like: Tensor) -> None:
        self._first = chains[0]
        self._draws = like.new_empty(len(chains), num_draws, len(like))
        self._rows = np.full((len(chains), num_draws), None, dtype=object)

    def write(self, chain: int, draw: int, position: Tensor, row: Mapping[str, float]) -> None:
        self._draws[chain - self._first, draw] = position
        self._rows[chain - self._first, draw] = row

    def is_due(self) -> bool:
        return False

    def settle(self, layout: Layout) -> None:
        """Whole draws do not hang on the final prior."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing outlives the process."""

    def checkpoint(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is held."""

    def draws(self, num_chains: int) -> Tensor:
        """(chain, draw, coordinate) of the first chains."""
        return self._draws[:num_chains]

    def statistics(self, num_chains: int) -> dict[str, np.ndarray[Any, Any]]:
        """(chain, draw) each."""
        rows = self._rows[:num_chains].tolist()
        return {name: np.array([[row[name] for row in chain] for chain in rows]) for name in STATISTICS}


class _Way:
    """The chains of a process on their way: what has ended, what is kept, what the bar shows."""

    def __init__(
        self,
        spec: Specification,
        table: Table,
        num_draws: int,
        chains: range,
        keeper: "Memory | Store",
        label: str,
        keeping: Keeping | None,
    ) -> None:
        self._keeping = keeping
        self.spec, self.chains, self.keeper, self.num_draws = spec, chains, keeper, num_draws
        self._table, self._label = table, label
        self._given, self._thresholds = spec, cast(Tensor | None, None)
        self._draw_of = {step: draw for draw, step in enumerate(_draw_steps(table.schedule, num_draws))}
        self._period = max(1, table.schedule.num_steps // 200)
        self.ended: list[Tensor] = []
        self.history: list[list[tuple[float, ...]]] = [[] for _ in chains]
        self._checkpoint = keeper.checkpoint()
        if self._checkpoint is not None:
            self.ended = list(self._checkpoint.ended.unbind())
            self.history[: len(self._checkpoint.history)] = [
                [tuple(row) for row in rows.tolist()] for rows in self._checkpoint.history
            ]

        if keeping is not None and self._checkpoint is not None and self.ended:
            self._move_spike(keeping.end, self._checkpoint.spike_progress)
        if isinstance(keeper, Store) and self._checkpoint is not None:
            self._check_draws(keeper, self._checkpoint.number)

    def _beyond(self, like: Tensor, number: int) -> Tensor:
        """What a weight must exceed to count as kept: at the final spike, or at the present one where that is looked for."""
        if self._thresholds is None:
            progress = self._table.controls[number].spike_progress
            spec = self.spec if self._keeping is None else settled(self._given, progress)
            self._thresholds = spec.layout.thresholds(like)
        return self._thresholds

    def _check_draws(self, keeper: Store, number: int) -> None:
        """Whether the draws that led to the checkpoint are on disk."""
        steps = list(self._draw_of)
        ended, begun = len(self.ended), len([rows for rows in self.history if rows])
        for place, chain in enumerate(self.chains[:begun]):
            keeper.check_draws(chain, [step for step in steps if place < ended or step < number])

    def num_groups_done(self, groups: list[list[int]]) -> int:
        return len([chains for chains in groups if chains[-1] - self.chains[0] < len(self.ended)])

    def num_steps_done(self, groups: list[list[int]]) -> int:
        number = 0 if self._checkpoint is None else self._checkpoint.number
        return self.num_groups_done(groups) * len(self._table.controls) + number

    def run(self, step: Step, chains: list[int], bar: Any, stopped: Callable[[], bool]) -> None:
        """The chains that run together, to their end or from where they were."""
        first, checkpoint = 0, self._checkpoint
        if checkpoint is not None and checkpoint.number > 0:
            first = checkpoint.number
            step.restore(sghmc.State(checkpoint.position, checkpoint.momentum))
        self._checkpoint = None
        if self._keeping is not None and checkpoint is not None and first > 0:
            self._move_spike(first, checkpoint.spike_progress)
        for number in range(first, len(self._table.controls)):
            if self._keeping is not None and self._keeping.is_due(number):
                step.losses()  # which on a card finds out whether all is finite
                self._move_spike(number, self._keeping.progress(number, step.state.position))
            step(number)
            if number % self._period == 0 or number in self._draw_of:
                self._look(step, number, chains, bar)
            bar.update()
            asked = stopped()
            if asked or self.keeper.is_due():
                step.losses()  # which on a card finds out whether all is finite
                self._save(number + 1, step)
            if asked:
                draws = sum(at <= number for at in self._draw_of)
                reads = "load reads them, " if draws or self.ended else ""
                raise KeyboardInterrupt(
                    f"stopped after step {number + 1:,} of {len(self._table.controls):,} with {draws} draws of this chain on "
                    f"disk: {reads}resume=True goes on"
                )
        self.ended += [_own(step.state.position, number).clone() for number in range(len(chains))]
        self._save(0, step)

    def _move_spike(self, number: int, progress: float) -> None:
        """From a step on, until it moves again; the last move settles the prior."""
        assert self._keeping is not None
        self._thresholds = None
        self._table.set_spike_progress(range(number, self._keeping.until(number)), progress)
        if number >= self._keeping.end:
            self.spec = settled(self._given, progress)
            self.keeper.settle(self.spec.layout)

    def _save(self, number: int, step: Step) -> None:
        like = _own(step.state.position, 0)
        ended = torch.stack(self.ended) if self.ended else like.new_empty(0, len(like))
        history = [np.array(rows) for rows in self.history if rows]
        progress = self._table.controls[number - 1].spike_progress  # of the step before; at the end, of the last
        self.keeper.save(Checkpoint(ended, number, *step.state, history, spike_progress=progress))

    def _look(self, step: Step, number: int, chains: list[int], bar: Any) -> None:
        """What the bar, the history and, where it is one, the draw say of a step."""
        thresholds = self._beyond(_own(step.state.position, 0), number)
        controls, draw = self._table.controls[number], self._draw_of.get(number)
        losses = step.losses()
        kinetic, heats = (
            ([], []) if draw is None else (step.kinetic_temperatures(number), step.minibatch_temperatures(number))
        )
        for place, chain in enumerate(chains):
            position, loss = _own(step.state.position, place), losses[place]
            kept = int((position.abs() > thresholds).sum())
            if place == 0:  # of chains that run together the first speaks
                parts = [self._label] * bool(self._label) + [f"chain {chain + 1}"] * (chain > 0)
                phase = f"{self._table.schedule.phase(number)[0]:>6}"
                bar.set_description_str(": ".join([", ".join(parts), phase][not parts :]), refresh=False)
                found = f", kept {kept:,}" * (controls.prior_power > 0)  # without a prior nothing is dropped yet
                bar.set_postfix_str(f"loss {loss:.3f}{found}", refresh=False)
            if number % self._period == 0:
                self.history[chain - self.chains[0]].append((number, *controls, loss, kept))
            if draw is not None:
                row = dict(zip(STATISTICS, (*controls, number, loss, kept, kinetic[place], heats[place]), strict=True))
                self.keeper.write(chain, draw, position, row)


def _own(position: Tensor, number: int) -> Tensor:
    """That of one chain."""
    return position if position.dim() == 1 else position[number]


def _run(way: _Way, schedule: PriorAnnealing, seed: int, names: tuple[str, ...] | None, kind: str) -> Run:
    """The chains that have ended, of all processes."""
    spec, keeper, count = way.spec, way.keeper, len(way.ended)
    positions = torch.cat(_gathered(torch.stack(way.ended)))
    history = history_of(
        [rows for part in _gathered([np.array(rows) for rows in way.history[:count]]) for rows in part]
    )
    draws: Tensor | StoredDraws
    if isinstance(keeper, Memory):
        parts, own = _gathered(keeper.draws(count)), _gathered(keeper.statistics(count))
        draws = parts[0] if len(parts) == 1 else torch.cat(parts)
        statistics = {name: np.concatenate([part[name] for part in own]) for name in STATISTICS}
        trace = build_trace(spec, schedule, draws, statistics, seed, kind, names)
    else:
        draws = StoredDraws(keeper.path, spec.layout, positions[0], tuple(range(len(positions))), way.num_draws)
        trace = read_trace(keeper.path).isel(chain=slice(len(positions)))
    return Run(spec, schedule, seed, positions, draws, trace, history, names)


def _gathered(own: Any) -> list[Any]:
    """What each process has of something, a tensor or plain values, in their order."""
    _, processes = _process()
    if processes == 1:
        return [own]
    parts: list[Any] = [None] * processes
    torch.distributed.all_gather_object(parts, own.cpu() if isinstance(own, Tensor) else own)
    return [part.to(own) for part in parts] if isinstance(own, Tensor) else parts


def _together(potential: Potential, starts: Mapping[int, Tensor], seed: int) -> Potential | None:
    """The potential of all chains at once; None where one after the other is as fast, or the only way."""
    if len(starts) == 1 or potential.spec.gives_rows or sum(map(len, starts.values())) > TOGETHER:
        return None
    batches = [potential.spec.batches(seed, chain, position.device) for chain, position in starts.items()]
    first, second = (joined(batches, step) for step in (0, 1))
    return potential.of_chains(torch.stack(list(starts.values())), (first, second))


def _stacked(parts: list[Tensor]) -> Tensor:
    """Chains in front, where there are several."""
    return parts[0] if len(parts) == 1 else torch.stack(parts)


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


def _warn_of_another_share(run: Run, keep: float) -> None:
    weights = [(site.law, part) for site, part in run.spec.layout.parts(run.positions[0]) if site.law is not None]
    included = sum(int((part.abs() > law.inclusion_threshold).sum()) for law, part in weights)
    share = included / sum(part.numel() for _, part in weights)
    if abs(share - keep) > 0.003:
        warn(
            f"{100 * share:.2f} % of the weights are kept instead of {100 * keep:g} %: give the power and spike phases more "
            "steps, lower learning_rate in what follows, or leave the prior unset"
        )


def _warn_of_heat(run: Run) -> None:
    if run.schedule.last_phase != "sample":
        return
    nominal = run.schedule.sample_temperature
    heat = float(run.trace["sample_stats"]["minibatch_temperature"].mean())
    if heat > 0.1 * nominal:
        warn(
            f"minibatch noise adds up to {heat:.3g} to the temperature {nominal:g} of the draws: lower learning_rate or "
            "raise batch_size; both temperatures are in sample_stats",
        )
