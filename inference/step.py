"""One step of one chain or of several at once: batch, gradient, prior, noise, momentum and position.

The arithmetic is written once and runs in three ways that agree to rounding: operation by operation; as one program of
PyTorch's compiler, which reads and writes every large array once; and on a CUDA device as a graph, with controls and state
in device tensors, so that the host waits for nothing between two looks at it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyro_sparse.inference import sghmc
from pyro_sparse.inference.minibatch import AugmentedBatches, Batches, LoaderBatches, Noise, stream
from pyro_sparse.inference.potential import Potential, Tempering, agree_but_for_rounding, first_line, nearby
from pyro_sparse.inference.program import compiled
from pyro_sparse.inference.schedule import Controls, PriorAnnealing
from pyro_sparse.inference.warning import warn

WARM_UPS = 3  # runs before a CUDA graph is captured


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
        self.run: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step, self.values)  # for processes that hand it on; without the runs


class Table:
    """Controls of every step, as numbers for the host and as rows of a tensor for the program, made once."""

    def __init__(self, schedule: PriorAnnealing, like: Tensor) -> None:
        self.schedule = schedule
        self.controls = [schedule.at(step) for step in range(schedule.num_steps)]
        self.rows = torch.tensor(self.controls, dtype=like.dtype, device=like.device)
        self.has_noise = any(controls.temperature > 0 for controls in self.controls)
        self.has_decay = any(controls.weight_decay > 0 for controls in self.controls)

    def set_spike_progress(self, steps: range, progress: float) -> None:
        """Changes that of some steps to come."""
        for step in steps:
            self.controls[step] = self.controls[step]._replace(spike_progress=progress)
        self.rows[steps.start : steps.stop, Controls._fields.index("spike_progress")] = progress

    def tempering(self, step: int) -> Tempering:
        return _tempering(Controls(*self.rows[step].unbind()))  # type: ignore[arg-type]


def _tempering(controls: Controls) -> Tempering:
    return Tempering(controls.prior_power, controls.spike_progress, controls.temperature)  # type: ignore[arg-type]


class Moved(NamedTuple):
    """The state after a step; of each chain the loss, and a number that is finite where all of the step is."""

    position: Tensor
    momentum: Tensor
    loss: Tensor
    finite: Tensor


class Arithmetic:
    """The step on given arrays: state, noise, what decays, a row of the table, and the potential's own arguments.

    Where ``kept`` is given, (coordinate,) booleans, no other coordinate is moved.
    """

    def __init__(self, potential: Potential, kept: Tensor | None = None) -> None:
        spec = potential.spec
        self._program, self._num_data, self._observed = potential.program, spec.num_data, spec.observed
        self._num_buffers, self._kept = spec.layout.num_buffers, kept
        self._priors = frozenset(site.name for site in spec.layout.spike_slab_sites())

    def __call__(
        self,
        position: Tensor,
        momentum: Tensor,
        noise: Tensor | None,
        decayed: Tensor | None,
        row: Tensor,
        *arguments: Tensor,
    ) -> Moved:
        controls = Controls(*row.unbind())  # type: ignore[arg-type]
        gradient, (_, log_prob, buffers) = self._program(position, *_tempering(controls), *arguments)
        if decayed is not None:
            gradient = gradient + controls.weight_decay * decayed * position
        if self._kept is not None:
            gradient = torch.where(self._kept, gradient, 0.0)
        new = sghmc.step(sghmc.State(position, momentum), gradient, noise, controls, self._num_data)
        if self._num_buffers:
            new = sghmc.with_buffers(new, buffers)
        loss = -_total(log_prob, self._observed) / self._num_data
        # The density of a spike-and-slab prior is left to its gradient: a compiler then need not compute it.
        others = tuple(name for name in log_prob if name not in self._priors)
        return Moved(*new, loss, _total(log_prob, others) + new.momentum.square().sum(-1))


def _total(log_prob: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.stack([log_prob[name] for name in names]).sum(0)


Way = Callable[..., Moved]


def overwriting(arithmetic: Arithmetic) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same, with the new state written over two arrays that are handed in first."""

    def write(position: Tensor, momentum: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        moved = arithmetic(*arguments)
        position.copy_(moved.position)
        momentum.copy_(moved.momentum)
        return moved.loss, moved.finite

    return write


def alternating(write: Callable[..., tuple[Tensor, Tensor]], like: Tensor) -> Way:
    """Writes each new state over that of the call before last: the one it starts from stays."""
    spare = [(torch.empty_like(like), torch.empty_like(like))]

    def way(position: Tensor, momentum: Tensor, *arguments: Any) -> Moved:
        new = spare.pop()
        spare.append((position, momentum))
        return Moved(*new, *write(*new, position, momentum, *arguments))

    return way


def guarded(arithmetic: Arithmetic) -> Callable[..., None]:
    """The same on arrays that stay where they are, which keep the last finite state, and how many steps led to it."""

    def move(
        num_done: Tensor, loss: Tensor, finite: Tensor, position: Tensor, momentum: Tensor, *arguments: Any
    ) -> None:
        moved = arithmetic(position, momentum, *arguments)
        going = finite.isfinite().all()
        finite.copy_(torch.where(going, moved.finite, finite))
        going = going & moved.finite.isfinite().all()
        for kept, new in ((position, moved.position), (momentum, moved.momentum), (loss, moved.loss)):
            kept.copy_(torch.where(going, new, kept))
        num_done.add_(going)

    return move


class Step:
    """The state of some chains and what moves it on: ``step(number)``, numbers counted from 0.

    Batches and noise are functions of seed, chain and number.

    Attributes:
        state: position and momentum, (coordinate,) or (chain, coordinate).
        kind: how it is computed: "eager", "traced", "compiled", or one of these "as a CUDA graph".
        is_free: whether any step can be asked for, not only one after the other.
    """

    def __init__(
        self,
        arithmetic: Callable[..., Any],
        kind: str,
        potential: Potential,
        table: Table,
        start: Tensor,
        seed: int,
        chains: list[int],
        noise: bool = True,
        decayed: Tensor | None = None,
    ) -> None:
        spec = potential.spec
        self.state, self.kind = sghmc.init(start), kind
        self._arithmetic, self._potential, self._table = arithmetic, potential, table
        self._seed, self._chains, self._is_noisy = seed, chains, noise
        self._batches, self._pairs = (
            [spec.batches(seed, chain, start.device, purpose) for chain in chains]
            for purpose in ("batches", "temperature")
        )
        self._noises = [Noise(seed, chain, start.device) for chain in chains]
        self._normals = torch.zeros_like(start) if table.has_noise else None
        self._decayed = decayed if decayed is not None else _decayed(potential, start) if table.has_decay else None
        self._loss = start.new_full(start.shape[:-1], math.nan)
        self.is_free = spec.loader is None

    def __call__(self, number: int) -> None:
        """One step.

        Raises:
            NonFiniteError: the state is still that before it.
        """
        with torch.no_grad(), self._random_numbers(number):
            moved = self._arithmetic(*self.arguments(number))
        if not all(map(math.isfinite, moved.finite.reshape(-1).tolist())):
            raise self._failure(number, moved.finite)
        self.state, self._loss = sghmc.State(moved.position, moved.momentum), moved.loss

    def restore(self, state: sghmc.State) -> None:
        """Goes on from another state."""
        self.state = sghmc.State(*(part.clone() for part in state))

    def losses(self) -> list[float]:
        """The mean negative log-likelihood of the last batch of each chain."""
        return self._loss.reshape(-1).tolist()

    def arguments(self, number: int) -> tuple[Any, ...]:
        """What the arithmetic is given at a step; the noise is drawn."""
        batch, row = joined(self._batches, number), self._table.rows[number]
        return (*self.state, self._noise(number), self._decayed, row, *self._potential.inputs(batch))

    def _noise(self, number: int) -> Tensor | None:
        """At temperature 0 whatever is there, since its factor is 0."""
        if self._normals is not None and self._is_noisy and self._table.controls[number].temperature > 0:
            for noise, normals in zip(self._noises, self._normals.view(len(self._chains), -1), strict=True):
                noise(number, normals)
        return self._normals

    def kinetic_temperatures(self, number: int) -> list[float]:
        """Of each chain (1 - friction / 2) mean(momentum²) / epsilon, whose expectation is the chain's own temperature.

        With batches that do not depend on the position it equals the configurational temperature, position times gradient,
        of any potential at any step size, once the chain has settled.
        """
        controls = self._table.controls[number]
        epsilon = controls.learning_rate / self._potential.spec.num_data
        squares = self._potential.spec.layout.parameters(self.state.momentum).double().square().mean(-1).reshape(-1)
        return [(1 - controls.friction / 2) * square / epsilon for square in squares.tolist()]

    def minibatch_temperatures(self, number: int) -> list[float]:
        """Of each chain the temperature that minibatch noise alone would give.

        It is learning_rate N Var(batch gradient) / (2 friction).
        """
        spec, controls = self._potential.spec, self._table.controls[number]
        if spec.batch_size is None or spec.num_data < 2 * spec.batch_size:
            return [0.0 if spec.batch_size is None else math.nan] * len(self._chains)
        # Two batches of one epoch, another epoch each time; of a loader, which goes on in order, this one and the next.
        first, batches = number * (spec.num_data // spec.batch_size), self._pairs
        if spec.loader is not None:
            first, batches = number, self._batches
        with self._random_numbers(number):
            one, other = (self._evaluate(number, joined(batches, first + i)).mean_gradient for i in (0, 1))
        variances = spec.layout.parameters(one - other).square().mean(-1).reshape(-1) / 2
        return [controls.learning_rate * spec.num_data * v / (2 * controls.friction) for v in variances.tolist()]

    def _evaluate(self, number: int, batch: Tensor | tuple[Tensor, ...]) -> Any:
        return self._potential(self.state.position, self._table.tempering(number), batch)

    @contextlib.contextmanager
    def _random_numbers(self, number: int) -> Iterator[None]:
        """For a model with dropout: the global generator as a function of (seed, chain, number), and restored after."""
        if not self._potential.draws_random_numbers:
            yield
            return
        device = self.state.position.device
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            torch.manual_seed((stream(self._seed, self._chains[0], "model") + number) % 2**32)
            yield

    def _failure(self, number: int, finite: Tensor) -> NonFiniteError:
        """What went wrong in a step from the present state, found by computing it again."""
        spec, controls = self._potential.spec, self._table.controls[number]
        batch = joined(self._batches, number)
        with self._random_numbers(number):
            evaluation = self._evaluate(number, batch)
        position = self.state.position
        if position.dim() > 1:
            failed = int(finite.isfinite().int().argmin())
            evaluation, position = evaluation.chain(failed), position[failed]
        bad = [name for name, value in evaluation.log_prob.items() if not bool(value.isfinite())]
        what = "log density"
        if not bad:
            parts = spec.layout.parts(evaluation.mean_gradient)
            squares = {site.name: float(part.square().sum()) for site, part in parts}
            # Each may be finite and their sum not.
            largest = max(squares, key=squares.__getitem__)
            bad = [name for name, square in squares.items() if not math.isfinite(square)] or [largest]
            what = "gradient"
        phase, since = self._table.schedule.phase(number)
        remedy = (
            "check the data and the model's start"
            if number == 0
            else f"lower learning_rate ({controls.learning_rate:g}) or scale the data to unit variance"
        )
        if what == "log density" and set(bad) & set(spec.observed):
            remedy += ", and see that no response is on the edge of its law's support (0 or 1 of Beta, say)"
        if isinstance(batch, tuple):
            remedy = _fault_of(batch, "augment" if spec.loader is None else "the DataLoader") or remedy
        return NonFiniteError(
            f"the {what} of {', '.join(repr(name) for name in bad)} became NaN or infinite at step {number} "
            f"({phase} step {since}): {remedy}; the state before it is in this error's `values`",
            number,
            {name: value.clone() for name, value in spec.layout.constrained(position).items()},
        )


def _fault_of(batch: tuple[Tensor, ...], giver: str) -> str | None:
    """What to mend in a batch of rows."""
    for place, part in enumerate(batch):
        if part.is_floating_point() and not bool(part.isfinite().all()):
            row = int((~part.isfinite()).reshape(len(part), -1).any(1).nonzero()[0])
            mend = "it" if giver == "augment" else "its dataset"
            return f"{giver} gave NaN or infinity in row {row} of argument {place} of this batch: mend {mend}"
    return None


def _decayed(potential: Potential, like: Tensor) -> Tensor:
    """1 at the coordinates that weight decay acts on, those of networks, and 0 at those of other latent sites."""
    layout = potential.spec.layout
    return layout.flat(
        {site.name: float(site.kind != "latent") for site in layout.sites}, 0.0, like.view(-1, like.shape[-1])[0]
    )


def joined(batches: Sequence[Batches | LoaderBatches | AugmentedBatches], number: int) -> Any:
    """Row numbers (row,), or (chain, row); all rows are the same for all chains. Of a loader, or augmented, rows themselves."""
    if len(batches) == 1 or (isinstance(batches[0], Batches) and batches[0].batch_size is None):
        return batches[0](number)
    return torch.stack([cast(Tensor, batch(number)) for batch in batches])


class GraphStep(Step):
    """The same with its arithmetic captured once and replayed: a step is a few calls of the host, which waits for none.

    The state stays as it is from the first step on that is not finite, and ``losses`` finds that out.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        device = self._loss.device
        self._first: int | None = None
        self._row = self._table.rows[0].clone()
        first = joined(self._batches, 0)
        self._batch: Any = tuple(map(torch.clone, first)) if isinstance(first, tuple) else first.clone()
        self._num_done, self._loss, self._finite = self.counters(self.state.position)
        start = [kept.clone() for kept in self._kept]
        self._replay = captured(self._once, device)
        for kept, value in zip(self._kept, start, strict=True):
            kept.copy_(value)

    @staticmethod
    def counters(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps done; of each chain the last loss, and whether all has been finite."""
        of_chains = like.new_zeros(like.shape[:-1])
        return torch.zeros((), dtype=torch.int64, device=like.device), of_chains, torch.zeros_like(of_chains)

    @property
    def _kept(self) -> tuple[Tensor, ...]:
        return (self._num_done, self._loss, self._finite, *self.state)

    def _once(self) -> None:
        self._arithmetic(*self._kept, self._normals, self._decayed, self._row, *self._potential.inputs(self._batch))

    def __call__(self, number: int) -> None:
        self._first = number if self._first is None else self._first
        self._row.copy_(self._table.rows[number])
        if self._potential.spec.batch_size is not None:
            new, held = joined(self._batches, number), self._batch
            for kept, part in zip(held, new, strict=True) if isinstance(held, tuple) else [(held, new)]:
                kept.copy_(part)
        self._noise(number)
        self._replay()

    def restore(self, state: sghmc.State) -> None:
        """Goes on from another state, in the arrays that the graph knows."""
        for kept, value in zip(self.state, state, strict=True):
            kept.copy_(value)

    def losses(self) -> list[float]:
        """As of a Step.

        Raises:
            NonFiniteError: of the first step that was not finite; the state is that before it.
        """
        if not bool(self._finite.isfinite().all()):
            raise self._failure((self._first or 0) + int(self._num_done), self._finite)
        return super().losses()


def has_graphs(device: torch.device) -> bool:
    """Whether work of the device can be captured and replayed."""
    return device.type == "cuda"


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What the call does, as a CUDA graph; it is run a few times first, as PyTorch asks for."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    return graph.replay


@dataclass(frozen=True)
class Maker:
    """Makes the Step of a group of chains, ``make(start, chains)``."""

    kind: str
    of: type[Step]
    way: Callable[..., Any]
    potential: Potential
    table: Table
    seed: int
    decayed: Tensor | None = None

    def __call__(self, start: Tensor, chains: list[int], noise: bool = True) -> Step:
        return self.of(self.way, self.kind, self.potential, self.table, start, self.seed, chains, noise, self.decayed)


def step_maker(
    potential: Potential,
    table: Table,
    start: Tensor,
    seed: int,
    chains: list[int],
    compiling: bool,
    kept: Tensor | None = None,
    decayed: Tensor | None = None,
) -> Maker:
    """How the steps of a group of chains are made: the fastest way that is to be had here and agrees with the plain one.

    A model that runs eagerly or draws random numbers is left alone: other ways would draw others.

    Args:
        kept: (coordinate,) booleans, those that are moved; all where it is None.
        decayed: (coordinate,) factors of the weight decay; 1 for the weights of networks where it is None.
    """
    arithmetic = Arithmetic(potential, kept)
    plain = Maker(potential.kind, Step, arithmetic, potential, table, seed, decayed)
    if potential.kind == "eager" or potential.draws_random_numbers:
        return plain
    example = plain(nearby(start), chains)

    def compiled_program() -> Maker:
        write = compiled(overwriting(arithmetic), (*map(torch.clone, example.state), *example.arguments(0)))
        return replace(plain, kind="compiled", way=alternating(write, start))

    def graph(compiling: bool) -> Maker:
        move, kind = guarded(arithmetic), "compiled" if compiling else potential.kind
        if compiling:
            counters = GraphStep.counters(start)
            move = compiled(move, (*counters, *map(torch.clone, example.state), *example.arguments(0)[2:]))
        return replace(plain, kind=f"{kind} as a CUDA graph", of=GraphStep, way=move)

    on_card = has_graphs(start.device) and potential.spec.loader is None  # whose batches are new tensors each time
    ways: list[tuple[str, Callable[[], Maker]]] = []
    if compiling:
        ways.append(("uncompiled", (lambda: graph(True)) if on_card else compiled_program))
    if on_card:
        ways.append(("without a CUDA graph", lambda: graph(False)))
    for without, way in ways:
        try:
            make = way()
            found, expected = (one(nearby(start), chains, noise=False) for one in (make, plain))
            if _agree(found, expected, table, potential.is_halved):
                return make
            warn(f"the model is run {without}, more slowly, as what was made of it does not compute the same")
        except NonFiniteError:  # the run itself will say so, of its own start
            return plain
        except Exception as error:  # no compiler on this machine, an operation that it does not know
            warn(f"the model is run {without}, more slowly, as {first_line(error)}")
    return plain


def _agree(found: Step, expected: Step, table: Table, halved: bool) -> bool:
    """Whether two ways make the same of a step at the start, in the middle and at the end of the schedule."""
    last = len(table.controls) - 1
    for number in sorted({0, last // 2, last} if expected.is_free else {0, min(1, last)}):
        found.restore(expected.state)  # or rounding would grow from one to the next
        for step in (expected, found):
            step(number)
        pairs = [*zip(found.state, expected.state, strict=True), (found._loss, expected._loss)]
        found.losses()
        if not all(agree_but_for_rounding(one, other, halved) for one, other in pairs):
            return False
    return True
