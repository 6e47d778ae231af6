"""A step on a card: loops written by hand and ours, beside what the card can move and multiply.

    python benchmarks/gpu/step.py --output "$OUT/step.jsonl"             three networks, some three minutes
    python benchmarks/gpu/step.py --smoke --device cpu                   seconds, a tiny network, no graph

For each network first the error of the gradient in single precision, with TF32 and with bfloat16 autocast against double
precision; then milliseconds a step of ``SGD`` and ``foreach`` (see benchmarks/step.py; no prior, no noise) and of ours:
``plain`` (operation by operation, the host waits once a step), ``graph`` (the traced program as a CUDA graph) and ``compiled
graph``. Of each the bytes and operations that the work needs, in shares of a copy and of a product measured on this card. One
JSON line a figure, so that a run cut off leaves what it reached; ``--minutes`` ends it between two figures.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, Row, append_row
from step import FRICTION, RATE, Problem, foreach, sgd

import pyro_sparse as ps
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.minibatch import Batches
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.step import Arithmetic, Step, Table, has_graphs, step_maker

NETWORKS = ("100-20-10-1", "200-1000-100-10-1", "2000-10000-100-10-1")
NEEDED = 11  # reads and writes of a weight in a step: network 2, prior 3, update 6


def wait(like: Tensor) -> None:
    """For the card to end its work."""
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)


def seconds(call: Callable[[int], Any], like: Tensor, budget: float) -> float:
    """Of one call, over as many as fit; the median of five rounds after a warm-up."""
    for number in range(3):
        call(number)
    wait(like)
    begun = time.perf_counter()
    call(3)
    wait(like)
    each = max(1, min(1_000, int(budget / 5 / max(time.perf_counter() - begun, 1e-6))))
    rounds = []
    for number in range(5):
        begun = time.perf_counter()
        for step in range(each):
            call(4 + number * each + step)
        wait(like)
        rounds.append((time.perf_counter() - begun) / each)
    return sorted(rounds)[2]


def ceilings(like: Tensor, smoke: bool) -> Row:
    """Bytes a second of a copy, and multiplications and additions a second of a product, as this card does them."""
    size = 1 << (20 if smoke else 28)
    one, other = torch.empty(size, device=like.device), torch.empty(size, device=like.device)
    row: Row = {"bytes": 8 * size / seconds(lambda n: one.copy_(other), like, 0.5)}
    width = 256 if smoke else 8_192
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        a = torch.randn(width, width, device=like.device, dtype=dtype)
        row[name] = 2 * width**3 / seconds(lambda n, a=a: a @ a, like, 0.5)  # type: ignore[misc]
    torch.set_float32_matmul_precision("highest")
    return row


def gradient(problem: Problem, autocast: bool = False) -> Tensor:
    """Of the mean potential at the start of the weights, prior and all."""
    net = problem.net()

    def model(x: Tensor, y: Tensor) -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            mean = net(x).squeeze(-1)
        with pyro.plate("data", problem.num_rows, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean.to(y), 1.0), obs=y)

    spec = inspect(model, (problem.x, problem.y), problem.batch, 0)
    position = start(spec, 0, 0, False)
    batches = Batches(problem.num_rows, problem.batch, 0, 0, position.device)
    potential = Potential(spec, position, (batches(0), batches(1)))
    assert potential.kind == "traced", potential.reason
    return potential(position, potential.tempering(1.0, 0.5, 0.1, position), batches(0)).mean_gradient


def precision(sizes: list[int], rows: int, batch: int, like: Tensor) -> Row:
    """Relative errors of the gradient's direction and length, each against double precision."""
    right = gradient(Problem(sizes, rows, batch, like.double()))
    errors: Row = {}
    for name, level, autocast in (
        ("float32", "highest", False),
        ("tf32", "high", False),
        ("bfloat16", "highest", True),
    ):
        torch.set_float32_matmul_precision(level)
        found = gradient(Problem(sizes, rows, batch, like), autocast).double()
        errors[name] = float((found - right).norm() / right.norm())
    torch.set_float32_matmul_precision("highest")
    return errors


def ours(problem: Problem) -> Iterator[tuple[str, Step]]:
    """Operation by operation, as a graph, and compiled."""
    potential, position = problem.potential()
    table = Table(ps.PriorAnnealing(0, 100_000, 1, 1, learning_rate=RATE, friction=FRICTION), position)
    yield "plain", Step(Arithmetic(potential), "traced", potential, table, position, 0, [0])
    for name, compiling in (("graph", False), ("compiled graph", True)):
        step = step_maker(potential, table, position, 0, [0], compiling)(position, [0])
        wanted = ("compiled" if compiling else "traced") + has_graphs(position.device) * " as a CUDA graph"
        assert step.kind == wanted, step.kind
        yield name, step


def figures(sizes: list[int], rows: int, batch: int, like: Tensor, budget: float) -> Iterator[Row]:
    """One row a method."""
    problem = Problem(sizes, rows, batch, like)
    weights = sum(p.numel() for p in problem.plain().parameters())
    needed = {"weights": weights, "bytes": 4 * NEEDED * weights, "operations": 6 * weights * batch}
    for name, make in (("SGD", sgd), ("foreach", foreach)):
        yield needed | {"method": name, "milliseconds": 1e3 * seconds(make(problem), like, budget)}
    for name, step in ours(problem):
        row = needed | {"method": name, "milliseconds": 1e3 * seconds(step, like, budget)}
        yield row | {"loss": step.losses()[0]}  # all steps so far were finite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--smoke", action="store_true", help="a tiny network, hundredths of a second a figure")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_step.jsonl")
    arguments = parser.parse_args()
    networks = ["20-8-1"] if arguments.smoke else arguments.networks
    rows, batch, budget = (100, 20, 0.05) if arguments.smoke else (10_000, 500, 2.0)
    if arguments.smoke:
        torch.set_num_threads(1)
    like = torch.empty(0, device=arguments.device)
    card = torch.cuda.get_device_name(like.device) if like.device.type == "cuda" else "cpu"
    begun = time.monotonic()

    def report(kind: str, row: Row) -> None:
        append_row(arguments.output, {"kind": kind, "card": card, "smoke": arguments.smoke} | row)
        if time.monotonic() - begun > 60 * arguments.minutes:
            raise SystemExit(f"{arguments.minutes:g} minutes are over")

    found = ceilings(like, arguments.smoke)
    report("ceilings", found)
    for network in networks:
        sizes = [int(size) for size in network.split("-")]
        report("precision", {"network": network} | precision(sizes, rows, batch, like))
        for level in ("highest",) if arguments.smoke else ("highest", "high"):
            torch.set_float32_matmul_precision(level)
            for row in figures(sizes, rows, batch, like, budget):
                spent = row["milliseconds"] / 1e3
                product = found["tf32" if level == "high" else "float32"]
                shares = {
                    "of_bytes": row["bytes"] / spent / found["bytes"],
                    "of_product": row["operations"] / spent / product,
                }
                report("step", {"network": network, "matmul": level} | row | shares)


if __name__ == "__main__":
    main()
