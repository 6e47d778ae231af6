"""What a run on disk costs beside one in memory: memory, writing, going on, reading.

    python benchmarks/runs.py                    all of it, some ten minutes on one thread
    python benchmarks/runs.py --kinds memory read
    python benchmarks/runs.py --smoke            a few small ones, to see that it runs
    python benchmarks/runs.py --table            benchmarks/results/runs.md

Every measurement has a process of its own; those that are compared take turns. ``memory``: the peak of a run with few and
with many draws over the same steps (VmHWM of Linux; of the steps alone, since what comes before them takes more). ``resume``:
steps a second, from the end of the first step on, of a run that goes on from a checkpoint, and of one that never stopped
over the same steps. ``write``: a run with draws of 10^6 weights every hundredth step, with ``out`` and without, and the part
of it spent in writing draws and checkpoints. ``many``: 10,000 draws of 5 weights. ``read``: ``load``, ``select`` and ``mipp``
of a run of each of these two shapes. CPU time is the process's own; wall time is that of a machine with other work.
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import RESULTS, Row, append_row, is_done, read_rows

import pyro_sparse as ps
from pyro_sparse.inference import sampler
from pyro_sparse.inference.store import Store

OUTPUT = RESULTS / "runs.jsonl"
NUM_ROWS, BATCH = 2_000, 100


class Size(NamedTuple):
    """A network, the steps of its sample phase, and how many draws are kept of them."""

    layers: tuple[int, ...]
    steps: int
    draws: tuple[int, ...]


Sizes = dict[str, Size]
FULL: Sizes = {
    "memory": Size((200, 1_000, 100, 10, 1), 1_000, (10, 1_000)),
    "resume": Size((200, 1_000, 100, 10, 1), 1_000, (100,)),
    "write": Size((1_000, 990, 10, 1), 1_000, (10,)),
    "many": Size((4, 1), 10_000, (10_000,)),
}
SMOKE: Sizes = {kind: Size((4, 3, 1), 60, draws) for kind, draws in {"memory": (2, 60), "many": (60,)}.items()} | {
    kind: Size((4, 3, 1), 60, (6,)) for kind in ("resume", "write")
}


class Moment(NamedTuple):
    """Seconds on the wall and of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Moment") -> "Moment":
        return Moment(self.wall - other.wall, self.cpu - other.cpu)

    def row(self, name: str) -> Row:
        return {f"{name}_wall": self.wall, f"{name}_cpu": self.cpu}


class Clock:
    """Stands for the progress bar: notes when each step ended, and calls something after the first and at some step."""

    def __init__(self, at: int = -1, call: Callable[[], None] = lambda: None) -> None:
        self.ends: list[Moment] = []
        self._at, self._call = at, call

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def update(self) -> None:
        self.ends.append(Moment.now())
        if len(self.ends) == self._at:
            self._call()

    def set_description_str(self, text: str, refresh: bool) -> None:
        """Shown to nobody."""

    set_postfix_str = set_description_str


def annealed(size: Size, num_draws: int, clock: Clock, out: Path | None = None, resume: bool = False) -> ps.Run:
    """A run of the size, the first steps of which are its other phases."""
    model, data = problem(size.layers)
    schedule = ps.PriorAnnealing(1, 1, 1, 1, size.steps, learning_rate=1e-4)
    bar = mock.Mock(side_effect=lambda **options: clock)
    with mock.patch.object(sampler, "tqdm", bar), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ps.anneal(model, data, schedule, BATCH, num_draws, out=out, resume=resume)


def problem(layers: tuple[int, ...]) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(NUM_ROWS, layers[0])
    return ps.normal_regression(ps.SparseNet(list(layers)), NUM_ROWS), (x, x[:, 0] + torch.randn(NUM_ROWS))


def num_weights(layers: tuple[int, ...]) -> int:
    return sum((before + 1) * after for before, after in itertools.pairwise(layers))


def memory(size: Size, num_draws: int, out: Path | None) -> Row:
    """Mebibytes at the most: of the process up to the end of the run, and during its steps."""
    row: Row = {}

    def forget() -> None:
        row.update(before_steps=_mebibytes("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
        row.update(at_first_step=_mebibytes("VmHWM"))

    annealed(size, num_draws, Clock(1, forget), out)
    return row | {"steps": _mebibytes("VmHWM")}


def _mebibytes(name: str) -> float:
    """Of memory (Linux). What getrusage has was inherited from the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def stopped(size: Size, num_draws: int, out: Path) -> Row:
    """A run of which Ctrl-C was pressed in the middle."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # off where a shell runs it with &
    clock = Clock(size.steps // 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with contextlib.suppress(KeyboardInterrupt):
        annealed(size, num_draws, clock, out)
    return {"steps": len(clock.ends)}


def second_half(size: Size, num_draws: int, out: Path, resume: bool) -> Row:
    """Steps a second of those that a stopped run has still to do, from the end of the first of them on."""
    clock = Clock()
    annealed(size, num_draws, clock, out, resume)
    ends = clock.ends[-(size.steps + 4 - size.steps // 2) :]
    taken, count = ends[-1] - ends[0], len(ends) - 1
    return {"steps_per_wall_second": count / taken.wall, "steps_per_cpu_second": count / taken.cpu}


def written(size: Size, num_draws: int, out: Path | None) -> Row:
    """Seconds from the first step to the end, and those of them that writing draws and checkpoints took."""
    clock, spent = Clock(), {name: Moment(0, 0) for name in ("write", "save", "close")}

    def timed(name: str) -> Any:
        method = getattr(Store, name)

        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            begun = Moment.now()
            try:
                return method(*arguments)
            finally:
                spent[name] = Moment(*map(sum, zip(spent[name], Moment.now() - begun, strict=True)))

        return mock.patch.object(Store, name, call)

    with timed("write"), timed("save"), timed("close"):
        annealed(size, num_draws, clock, out)
    total = Moment.now() - clock.ends[0]
    return total.row("total") | {key: v for name, moment in spent.items() for key, v in moment.row(name).items()}


def many(size: Size, num_draws: int, out: Path | None) -> Row:
    """The whole of a run: start, steps and end."""
    begun = Moment.now()
    annealed(size, num_draws, Clock(), out)
    row = (Moment.now() - begun).row("total")
    return row if out is None else row | {"megabytes": _size(out) / 1e6}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read(size: Size, out: Path) -> Row:
    """Seconds of load, select and mipp, and the memory that they took at the most."""
    model, data = problem(size.layers)
    before, row, run = _mebibytes("VmHWM"), {}, None
    for name in ("load", "select", "mipp"):
        begun = Moment.now()
        found = ps.load(out, model, data) if name == "load" else getattr(ps, name)(run)
        run = found if name == "load" else run
        row |= (Moment.now() - begun).row(name)
    return row | {"mebibytes": _mebibytes("VmHWM") - before}


def apart(function: Callable[..., Row], *arguments: Any) -> Row:
    """What it returns in a process of its own, on one thread."""
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,)) as process:
        return process.apply(function, arguments)


@contextlib.contextmanager
def folder(where: str | None) -> Iterator[Path]:
    """One for runs, gone afterwards."""
    with tempfile.TemporaryDirectory(dir=where) as name:
        yield Path(name)


def measure(sizes: Sizes, kinds: list[str], rounds: int, where: str | None, output: Path) -> None:
    """One row a measurement; those that are there are left out."""
    for number in range(rounds):
        for kind in kinds:
            with folder(where) as home:
                for key, make in PLANS[kind](sizes, number % 2 == 1, home):
                    key = {"kind": kind, "round": number} | key
                    if not is_done(output, key):
                        append_row(output, key | make())


Plan = Iterator[tuple[Row, Callable[[], Row]]]  # what identifies each measurement of a kind, and how it is made


def _key(size: Size, num_draws: int, **more: str) -> Row:
    shape = {"layers": "-".join(map(str, size.layers)), "num_weights": num_weights(size.layers)}
    return shape | {"num_steps": size.steps, "num_draws": num_draws} | more


def _in_memory_and_on_disk(function: Callable[..., Row], size: Size, turned: bool, home: Path) -> Plan:
    places: list[tuple[str, Path | None]] = [("memory", None), ("disk", home / "run")]
    for num_draws in size.draws:
        for kept, out in places[:: -1 if turned else 1]:
            yield _key(size, num_draws, kept=kept), functools.partial(apart, function, size, num_draws, out)
            shutil.rmtree(home / "run", ignore_errors=True)


def _resume_plan(sizes: Sizes, turned: bool, home: Path) -> Plan:
    size = sizes["resume"]
    (num_draws,) = size.draws

    def resumed() -> Row:
        apart(stopped, size, num_draws, home / "stopped")
        return apart(second_half, size, num_draws, home / "stopped", True)

    def fresh() -> Row:
        return apart(second_half, size, num_draws, home / "fresh", False)

    for make in (resumed, fresh)[:: -1 if turned else 1]:
        yield _key(size, num_draws, run=make.__name__), make


def _read_plan(sizes: Sizes, turned: bool, home: Path) -> Plan:
    for kind in ("many", "memory"):
        size, out = sizes[kind], home / kind

        def make(size: Size = size, out: Path = out) -> Row:
            apart(many, size, size.draws[-1], out)
            return apart(read, size, out)

        yield _key(size, size.draws[-1], shape=kind), make
        shutil.rmtree(out, ignore_errors=True)


PLANS: dict[str, Callable[[Sizes, bool, Path], Plan]] = {
    "memory": lambda sizes, turned, home: _in_memory_and_on_disk(memory, sizes["memory"], turned, home),
    "resume": _resume_plan,
    "write": lambda sizes, turned, home: _in_memory_and_on_disk(written, sizes["write"], turned, home),
    "many": lambda sizes, turned, home: _in_memory_and_on_disk(many, sizes["many"], turned, home),
    "read": _read_plan,
}


def table(rows: list[Row]) -> str:
    """Medians of all rounds, and what is compared beside each other."""
    parts = [_memory_table, _resume_table, _write_table, _many_table, _read_table]
    return "\n\n".join(part for make in parts if (part := make(rows))) + "\n"


def _median(rows: list[Row], column: str, **key: Any) -> float:
    found = [row[column] for row in rows if key.items() <= row.items()]
    return statistics.median(found) if found else float("nan")


def _lines(title: str, header: list[str], body: list[list[str]]) -> str:
    lines = [title, "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in body])


def _of(rows: list[Row], kind: str) -> tuple[list[Row], str]:
    own = [row for row in rows if row["kind"] == kind]
    rounds = len({row["round"] for row in own})
    what = f"{own[0]['layers']}, {own[0]['num_weights']:,} weights, {own[0]['num_steps']:,} steps" if own else ""
    return own, f"{what}; median of {rounds}"


def _memory_table(rows: list[Row]) -> str:
    own, what = _of(rows, "memory")
    body, draws = [], sorted({row["num_draws"] for row in own})
    for kept, name in (("memory", "in memory"), ("disk", "on disk")):
        before = [_median(own, "at_first_step", kept=kept, num_draws=n) for n in draws]
        peaks = [_median(own, "steps", kept=kept, num_draws=n) for n in draws]
        grown = [f"{peak:,.0f} ({peak - first:+,.0f})" for first, peak in zip(before, peaks, strict=True)]
        body.append([name, *grown, *(f"{peaks[-1] / peaks[0]:.3f}" for _ in peaks[:1])])
    header = ["", *(f"{n:,} draws" for n in draws), "ratio"]
    return _lines(f"**Peak memory of the steps, MiB (and since the first)** ({what})", header, body) if own else ""


def _resume_table(rows: list[Row]) -> str:
    own, what = _of(rows, "resume")
    body = []
    for clock in ("wall", "cpu"):
        column = f"steps_per_{clock}_second"
        pairs = [
            [_median(own, column, run=name, round=number) for name in ("fresh", "resumed")]
            for number in sorted({row["round"] for row in own})
        ]
        ratio = statistics.median(resumed / fresh for fresh, resumed in pairs) if pairs else float("nan")
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        body.append([f"a {clock} second", *(f"{m:.1f}" for m in medians), f"{ratio:.3f}"])
    header = ["steps", "never stopped", "resumed", "median ratio"]
    return _lines(f"**Speed after going on** ({what})", header, body) if own else ""


def _write_table(rows: list[Row]) -> str:
    own, what = _of(rows, "write")
    body = []
    for clock in ("wall", "cpu"):
        without, with_ = (_median(own, f"total_{clock}", kept=kept) for kept in ("memory", "disk"))
        disk = [row for row in own if row["kept"] == "disk"]
        shares = [
            statistics.median(sum(row[f"{name}_{clock}"] for name in names) / row[f"total_{clock}"] for row in disk)
            for names in (["write", "close"], ["save"], ["write", "save", "close"])
            if disk
        ]
        body.append([clock, f"{without:.1f}", f"{with_:.1f}", *(f"{100 * share:.2f} %" for share in shares)])
    header = ["seconds", "in memory", "on disk", "of it draws", "of it checkpoints", "of it both"]
    title = f"**Writing {own[0]['num_draws']} draws** ({what})" if own else ""
    return _lines(title, header, body) if own else ""


def _many_table(rows: list[Row]) -> str:
    own, what = _of(rows, "many")
    body = [
        [clock, *(f"{_median(own, f'total_{clock}', kept=kept):.1f}" for kept in ("memory", "disk"))]
        for clock in ("wall", "cpu")
    ]
    if not own:
        return ""
    megabytes = _median([row for row in own if "megabytes" in row], "megabytes")
    title = f"**{own[0]['num_draws']:,} draws** ({what}); {megabytes:.2f} MB on disk"
    return _lines(title, ["seconds", "in memory", "on disk"], body)


def _read_table(rows: list[Row]) -> str:
    own, _ = _of(rows, "read")
    body = []
    for layers, draws in dict.fromkeys((row["layers"], row["num_draws"]) for row in own):
        same = [row for row in own if (row["layers"], row["num_draws"]) == (layers, draws)]
        seconds = [f"{_median(same, f'{name}_cpu'):.2f}" for name in ("load", "select", "mipp")]
        peak = f"{_median(same, 'mebibytes'):,.0f}"
        body.append([f"{draws:,} draws of {same[0]['num_weights']:,} weights", *seconds, peak])
    header = ["", "load", "select", "mipp", "memory, MiB"]
    return _lines("**Reading a run from disk, CPU seconds**", header, body) if own else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["memory", "resume", "write", "many", "read"]
    parser.add_argument("--kinds", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", help="where runs are written, on the disk to be measured; the system's own for files"
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        sizes, rounds = (SMOKE, 1) if arguments.smoke else (FULL, arguments.rounds)
        measure(sizes, arguments.kinds, rounds, arguments.folder, arguments.output)
    text = table(read_rows(arguments.output))
    arguments.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
