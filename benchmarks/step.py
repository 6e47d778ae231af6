"""What a step costs: this package's beside loops written by hand, interleaved in one process on one thread.

    python benchmarks/step.py                                     100-20-10-1 and 200-1000-100-10-1, a few minutes
    python benchmarks/step.py --sizes 2000-10000-100-10-1 --rounds 3
    python benchmarks/step.py --width                             a step over three decades of width, and of rows
    python benchmarks/step.py --table                             benchmarks/results/step.md and step.png

A round runs every method for a fixed number of steps; a row is the median step of all rounds. Batches of 500 of 10,000
rows. The methods: plain PyTorch (``SGD``: torch.optim.SGD; ``foreach``: torch.autograd.grad and torch._foreach updates),
both without prior or noise; ``eager Pyro``, the gradient alone, which handlers compute afresh each step; ``posteriors``,
SGHMC of that package; ``published shape``, a loop over tensors with the prior's gradient, noise and update of each; ours, the
steps of ``anneal`` between two calls of its progress bar, traced and compiled. Parts are timed alone: the pass through the
network, the prior's gradient, noise, update. Compiling is timed with an empty cache; the memory is the peak of a process that
does nothing else, less what it has before the first step.
"""

import argparse
import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import RESULTS, Row, append_row, read_rows
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference import sampler
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.minibatch import Batches, Noise
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.step import Step, Table, step_maker

OUTPUT = RESULTS / "step.jsonl"
NUM_ROWS, BATCH = 10_000, 500
RATE, FRICTION = 1e-3, 0.1
WIDTHS = (10, 30, 100, 300, 1_000, 3_000, 10_000)


class Problem:
    """One network, its data and its batches."""

    def __init__(
        self, sizes: list[int], num_rows: int = NUM_ROWS, batch: int = BATCH, like: Tensor | None = None
    ) -> None:
        torch.manual_seed(0)
        self.like = torch.empty(0) if like is None else like
        self.sizes, self.num_rows, self.batch = sizes, num_rows, batch
        self.x, self.y = torch.randn(num_rows, sizes[0]).to(self.like), torch.randn(num_rows).to(self.like)
        self.order = torch.randperm(num_rows).to(self.like.device)

    def net(self) -> ps.SparseNet:
        torch.manual_seed(0)
        return ps.SparseNet(self.sizes).to(self.like)

    def plain(self) -> nn.Module:
        return self.net().module

    def potential(self) -> tuple[Potential, Tensor]:
        """The traced potential of the model, and where its weights start."""
        model = ps.normal_regression(self.net(), self.num_rows)
        spec = inspect(model, (self.x, self.y), self.batch, 0)
        position = start(spec, 0, 0, False)
        batches = Batches(self.num_rows, self.batch, 0, 0, position.device)
        return Potential(spec, position, (batches(0), batches(1))), position

    def rows(self, step: int) -> tuple[Tensor, Tensor]:
        first = step * self.batch % (self.num_rows - self.batch + 1)
        chosen = self.order[first : first + self.batch]
        return self.x[chosen], self.y[chosen]

    def loss(self, module: nn.Module, step: int) -> Tensor:
        x, y = self.rows(step)
        return 0.5 * (module(x).squeeze(-1) - y).square().mean()


def timed(step: Callable[[int], Any], num_steps: int) -> list[float]:
    """Seconds of each step; the first two are left out."""
    times = []
    for number in range(num_steps + 2):
        begun = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - begun)
    return times[2:]


def sgd(problem: Problem) -> Callable[[int], None]:
    """torch.optim.SGD with momentum, on a card its fused kernel."""
    net = problem.plain()
    optimiser = torch.optim.SGD(net.parameters(), RATE, momentum=1 - FRICTION, fused=problem.like.is_cuda or None)

    def step(number: int) -> None:
        optimiser.zero_grad()
        problem.loss(net, number).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def foreach(problem: Problem) -> Callable[[int], None]:
    """The leanest loop: torch.autograd.grad and one call for all tensors."""
    net = problem.plain()
    parameters = list(net.parameters())
    momenta = [torch.zeros_like(p) for p in parameters]

    def step(number: int) -> None:
        gradients = torch.autograd.grad(problem.loss(net, number), parameters)
        with torch.no_grad():
            torch._foreach_mul_(momenta, 1 - FRICTION)
            torch._foreach_add_(momenta, gradients, alpha=-RATE)
            torch._foreach_add_(parameters, momenta)

    return step


def published_shape(problem: Problem, num_steps: int) -> list[float]:
    """Tensor by tensor: the gradient of the loss, that of the log prior by hand, noise, momentum, position."""
    net = problem.plain()
    parameters = list(net.parameters())
    momenta = [torch.zeros_like(p) for p in parameters]
    log_odds, spike, slab = -10.0, 0.01**-2, 1.0  # precisions
    scale = (2 * FRICTION * RATE / problem.num_rows * 0.1) ** 0.5

    def step(number: int) -> None:
        net.zero_grad()
        problem.loss(net, number).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight, momentum in zip(parameters, momenta, strict=True):
                in_slab = torch.sigmoid(log_odds + 0.5 * (spike - slab) * weight.square())
                prior = weight * (slab * in_slab + spike * (1 - in_slab))
                assert weight.grad is not None
                gradient = weight.grad + prior / problem.num_rows
                momentum.mul_(1 - FRICTION).add_(gradient, alpha=-RATE).add_(torch.randn_like(weight), alpha=scale)
                weight.add_(momentum)

    return timed(step, num_steps)


def posteriors_sghmc(problem: Problem, num_steps: int) -> list[float]:
    """SGHMC of the package posteriors, on the log posterior of a normal prior."""
    import posteriors

    net = problem.plain()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def log_posterior(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        mean = torch.func.functional_call(net, parameters, (x,)).squeeze(-1)
        prior = posteriors.diag_normal_log_prob(parameters)
        return -0.5 * (mean - y).square().mean() + prior / problem.num_rows, torch.tensor([])

    transform = posteriors.sgmcmc.sghmc.build(log_posterior, lr=RATE, temperature=1 / problem.num_rows)
    state = [transform.init(parameters)]

    def step(number: int) -> None:
        state[0], _ = transform.update(state[0], problem.rows(number))

    return timed(step, num_steps)


def eager_pyro(problem: Problem, num_steps: int) -> list[float]:
    """The gradient alone, of the model run under handlers each time."""
    spec = inspect(ps.normal_regression(problem.net(), problem.num_rows), (problem.x, problem.y), problem.batch, 0)
    position = start(spec, 0, 0, False)
    potential, batches = Potential(spec), Batches(problem.num_rows, problem.batch, 0, 0, position.device)
    tempering = potential.tempering(1.0, 0.5, 0.1, position)
    return timed(lambda number: potential(position, tempering, batches(number)), num_steps)


class Enough(Exception):  # noqa: N818 - it is no error
    """As many steps as were asked for."""


class Bar:
    """A progress bar that notes when each step ended, and ends the run."""

    def __init__(self, num_steps: int) -> None:
        self.ends: list[float] = []
        self.num_steps = num_steps

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def update(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > self.num_steps + 2:
            raise Enough

    def set_description_str(self, text: str, refresh: bool) -> None:
        """Shown to nobody."""

    set_postfix_str = set_description_str


def ours(
    problem: Problem, num_steps: int, compiling: bool = False, temperature: float = 0.1, chains: int = 1
) -> list[float]:
    """The steps of ``anneal``, whole, in the power phase of a long run."""
    bar, run = Bar(num_steps), sampler._Way.run
    schedule = ps.PriorAnnealing(0, 20_000, 1, 1, learning_rate=RATE, friction=FRICTION, temperature=temperature)

    def checked(way: Any, step: Step, *arguments: Any) -> Any:
        assert step.kind == ("compiled" if compiling else "traced"), step.kind
        return run(way, step, *arguments)

    choice = mock.patch.object(sampler, "repays_compiling", lambda *counts: compiling)
    watched = mock.patch.object(sampler._Way, "run", checked)
    with mock.patch.object(sampler, "tqdm", lambda **options: bar), choice, watched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ps.anneal(
                ps.normal_regression(problem.net(), problem.num_rows),
                (problem.x, problem.y),
                schedule,
                problem.batch,
                num_draws=1,
                num_chains=chains,
            )
        except Enough:
            return [end - begun for begun, end in itertools.pairwise(bar.ends[2:])]
    raise AssertionError("unreachable: the bar ends the run")


def _parts(problem: Problem, num_steps: int) -> Iterator[tuple[str, list[float]]]:
    """Gradient, prior, noise and update, each alone on the flat vector."""
    net = problem.plain()
    parameters = list(net.parameters())
    yield "part: network", timed(lambda n: torch.autograd.grad(problem.loss(net, n), parameters), num_steps)
    weights = torch.nn.utils.parameters_to_vector(parameters).detach().requires_grad_()
    law = ps.SpikeSlab(1e-4, 0.01, 1.0, 0.1)
    yield "part: prior", timed(lambda n: torch.autograd.grad(law.log_prob(weights).sum(), weights), num_steps)
    position, momentum = weights.detach().clone(), torch.zeros_like(weights)
    gradient, normals = torch.randn_like(position), torch.empty_like(position)
    noise = Noise(0, 0, position.device)
    yield "part: noise", timed(lambda n: noise(n, normals), num_steps)

    def update(number: int) -> None:
        momentum.mul_(1 - FRICTION).add_(gradient, alpha=-RATE).add_(gradient, alpha=1e-6)
        position.add_(momentum)

    yield "part: update", timed(update, num_steps)


METHODS: dict[str, Callable[[Problem, int], list[float]]] = {
    "SGD": lambda problem, num_steps: timed(sgd(problem), num_steps),
    "foreach": lambda problem, num_steps: timed(foreach(problem), num_steps),
    "eager Pyro": eager_pyro,
    "posteriors": posteriors_sghmc,
    "published shape": published_shape,
    "ours, traced": ours,
    "ours, compiled": lambda problem, num_steps: ours(problem, num_steps, compiling=True),
    "ours, compiled, no noise": lambda problem, num_steps: ours(problem, num_steps, compiling=True, temperature=0.0),
    "ours, 16 chains": lambda problem, num_steps: ours(problem, num_steps, chains=16),
    "ours, compiled, 16 chains": lambda problem, num_steps: ours(problem, num_steps, compiling=True, chains=16),
}
FEW_CHAINS = 200_000  # coordinates of 16 chains above which they do not run together, and are not measured


def measure(sizes: list[int], rounds: int, seconds: float) -> None:
    """One row a method."""
    problem = Problem(sizes)
    num_weights = sum(p.numel() for p in problem.plain().parameters())
    num_steps = max(3, min(1_000, int(seconds / (2e-3 + 4e-8 * num_weights))))
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, method in METHODS.items():
            if name.endswith("16 chains") and 16 * num_weights > FEW_CHAINS:
                continue
            times.setdefault(name, []).extend(method(problem, num_steps))
        for name, found in _parts(problem, num_steps):
            times.setdefault(name, []).extend(found)
    key = {"sizes": "-".join(map(str, sizes)), "num_weights": num_weights, "rows": NUM_ROWS, "batch": BATCH}
    append_row(OUTPUT, {"kind": "compiling"} | key | {"seconds": compiling_seconds(problem)})
    for name in ("SGD", "posteriors", "ours, compiled"):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            row = {"method": name, "mebibytes": process.apply(peak_memory, (name, sizes))}
        append_row(OUTPUT, {"kind": "memory"} | key | row)
    for name, found in times.items():
        quartiles = statistics.quantiles(found, n=4)
        row = {"method": name, "milliseconds": 1e3 * quartiles[1], "iqr": 1e3 * (quartiles[2] - quartiles[0])}
        append_row(OUTPUT, {"kind": "step"} | key | row | {"num_steps": len(found), "rounds": rounds}, "posteriors")


def compiling_seconds(problem: Problem) -> float:
    """What compiling adds to the start of a run, with nothing in the compiler's cache."""
    from torch._inductor.utils import fresh_cache

    potential, position = problem.potential()
    table = Table(ps.PriorAnnealing(), position)
    with fresh_cache():
        begun = time.perf_counter()
        make = step_maker(potential, table, position, 0, [0], compiling=True)
        seconds = time.perf_counter() - begun
    assert make(position, [0]).kind == "compiled"
    return seconds


def peak_memory(method: str, sizes: list[int]) -> float:
    """Mebibytes that some steps of a method take beyond data and libraries; for a process of its own."""
    torch.set_num_threads(1)
    problem = Problem(sizes)
    before = _peak()
    METHODS[method](problem, 5)
    return (_peak() - before) / 1024


def _peak() -> int:
    """Kibibytes (Linux). What getrusage has was inherited from the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def growth(rounds: int) -> None:
    """A step over three decades of width, and of the number of rows, which must not matter."""
    settings = [([100, width, 1], NUM_ROWS) for width in WIDTHS] + [
        ([100, 100, 1], n) for n in (1_000, 10_000, 100_000)
    ]
    for sizes, num_rows in settings:
        problem = Problem(sizes, num_rows)
        num_weights = sum(p.numel() for p in problem.plain().parameters())
        found = [t for _ in range(rounds) for t in ours(problem, max(10, min(100, 10_000_000 // num_weights)))]
        row = {"kind": "growth", "sizes": "-".join(map(str, sizes)), "num_weights": num_weights, "rows": num_rows}
        append_row(OUTPUT, row | {"batch": BATCH, "milliseconds": 1e3 * statistics.median(found)})


def table(rows: list[Row]) -> str:
    """Each network's methods, in milliseconds and beside SGD."""
    lines = []
    for sizes in dict.fromkeys(row["sizes"] for row in rows if row["kind"] == "step"):
        found = {row["method"]: row for row in rows if row["kind"] == "step" and row["sizes"] == sizes}
        plain = found["SGD"]["milliseconds"]
        lines += [
            f"**{sizes}**, {found['SGD']['num_weights']:,} weights",
            "",
            "| | ms a step | of SGD's |",
            "|---|---|---|",
        ]
        for name, row in found.items():
            lines.append(f"| {name} | {row['milliseconds']:.3g} | {row['milliseconds'] / plain:.2f} |")
        lines.append("")
        others = [row for row in rows if row["sizes"] == sizes and row["kind"] in ("compiling", "memory")]
        saved = 1e-3 * (found["ours, traced"]["milliseconds"] - found["ours, compiled"]["milliseconds"])
        seconds = [row["seconds"] for row in others if row["kind"] == "compiling"]
        lines += [f"Compiling took {s:.0f} s and pays from {s / saved:,.0f} steps on." for s in seconds[-1:]]
        peaks = {row["method"]: row["mebibytes"] for row in others if row["kind"] == "memory"}
        if peaks:
            lines.append("Peak memory: " + ", ".join(f"{name} {peak:,.0f} MiB" for name, peak in peaks.items()) + ".")
        lines.append("")
    grown = [row for row in rows if row["kind"] == "growth"]
    if grown:
        lines += ["| network | rows | ms a step |", "|---|---|---|"]
        lines += [f"| {row['sizes']} | {row['rows']:,} | {row['milliseconds']:.3g} |" for row in grown]
    return "\n".join(lines) + "\n"


def picture(rows: list[Row]) -> None:
    """Steps beside each other, and their growth with the number of weights."""
    import matplotlib.pyplot as plt

    steps = [row for row in rows if row["kind"] == "step" and not row["method"].startswith("part")]
    grown = list(
        {row["num_weights"]: row for row in rows if row["kind"] == "growth" and row["rows"] == NUM_ROWS}.values()
    )
    if not steps or not grown:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    first = [row for row in steps if row["sizes"] == steps[0]["sizes"]][::-1]
    colours = ["C1" if row["method"].startswith("ours") else "0.6" for row in first]
    bars = left.barh([row["method"] for row in first], [row["milliseconds"] for row in first], color=colours)
    left.bar_label(bars, fmt="%.2g", padding=3)
    left.set(xlabel="milliseconds a step", title=steps[0]["sizes"])
    left.spines[["top", "right"]].set_visible(False)
    right.spines[["top", "right"]].set_visible(False)
    weights = [row["num_weights"] for row in grown]
    right.loglog(weights, [row["milliseconds"] for row in grown], "C1o-", label="ours, traced")
    last = grown[-1]["milliseconds"] / weights[-1]
    right.loglog(weights, [last * w for w in weights], "0.6", linestyle="--", label="proportional")
    right.set(xlabel="weights (100 inputs, one hidden layer)", ylabel="milliseconds a step", title="batches of 500")
    right.legend(frameon=False)
    figure.savefig(OUTPUT.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["100-20-10-1", "200-1000-100-10-1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="about so many a method and round")
    parser.add_argument("--width", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.width:
        growth(arguments.rounds)
    elif not arguments.table:
        for sizes in arguments.sizes:
            measure([int(size) for size in sizes.split("-")], arguments.rounds, arguments.seconds)
    rows = read_rows(OUTPUT)
    text = table(rows)
    OUTPUT.with_suffix(".md").write_text(text)
    picture(rows)
    print(text)


if __name__ == "__main__":
    main()
