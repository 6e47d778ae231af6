"""A step of a residual network beside one of plain PyTorch, on one thread.

    python benchmarks/image_step.py                    ResNet-20 with BatchNorm, batches of 128: some ten minutes
    python benchmarks/image_step.py --depth 8 --batch 16 --rounds 2

``SGD`` is a loop over ``torch.optim.SGD`` with momentum, no prior and no noise. Ours is the whole step: batch, gradient, prior,
noise, momentum, running statistics. The methods take turns, so that what else the machine does hits all of them; quoted are
medians, and ratios of medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, append_row
from torch import Tensor, nn

import pyro_sparse as ps
from pyro_sparse.inference.inspection import inspect, start
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.step import Table, step_maker

OUTPUT = RESULTS / "image_step.jsonl"
RATE, FRICTION, NUM_ROWS = 0.01, 0.1, 1_000
LAW = ps.SpikeSlab(1e-9, 6e-5**0.5, 0.2, 6e-4**0.5)

Step = Callable[[int], Any]


def data(like: Tensor) -> tuple[Tensor, Tensor]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_ROWS, 3, 32, 32, generator=generator)
    return images.to(like), torch.randint(10, (NUM_ROWS,), generator=generator).to(like.device)


def network(depth: int, width: int, like: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return ps.resnet(depth, width=width).to(like)


def sgd(net: nn.Module, images: Tensor, labels: Tensor, batch: int) -> Step:
    """torch.optim.SGD with momentum."""
    optimiser = torch.optim.SGD(net.parameters(), RATE, momentum=1 - FRICTION)

    def step(number: int) -> None:
        first = number * batch % (NUM_ROWS - batch + 1)
        optimiser.zero_grad()
        logits = net(images[first : first + batch])
        nn.functional.cross_entropy(logits, labels[first : first + batch]).backward()
        optimiser.step()

    return step


def ours(net: nn.Module, images: Tensor, labels: Tensor, batch: int, compiling: bool) -> tuple[Step, str]:
    """The step of a run, traced or compiled, and how it came to be computed."""
    sparse = ps.sparsify(net, LAW)

    def model(images: Tensor, labels: Tensor) -> None:
        logits = sparse(images)
        with pyro.plate("data", NUM_ROWS, subsample_size=len(images)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=labels)

    spec = inspect(model, (images, labels), batch, 0)
    position = start(spec, 0, 0, False)
    batches = spec.batches(0, 0, position.device)
    potential = Potential(spec, position, (batches(0), batches(1)))
    schedule = ps.PriorAnnealing(0, 100_000, 1, 1, learning_rate=RATE, friction=FRICTION, temperature=0.01)
    step = step_maker(potential, Table(schedule, position), position, 0, [0], compiling)(position, [0])
    return step, step.kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    like = torch.empty(0)
    images, labels = data(like)
    settings = {name: getattr(arguments, name) for name in ("depth", "width", "batch")}
    methods: dict[str, Step] = {
        "SGD": sgd(network(arguments.depth, arguments.width, like), images, labels, arguments.batch)
    }
    for name, compiling in (("ours, traced", False), ("ours, compiled", True)):
        begun = time.perf_counter()
        net = network(arguments.depth, arguments.width, like)
        methods[name], kind = ours(net, images, labels, arguments.batch, compiling)
        assert kind == name.removeprefix("ours, "), kind
        append_row(
            arguments.output, {"kind": "start", "method": name, "seconds": time.perf_counter() - begun} | settings
        )
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(arguments.rounds + 1):
        for name, step in methods.items():
            begun = time.perf_counter()
            step(number)
            if number:
                times[name].append(1e3 * (time.perf_counter() - begun))
    plain = statistics.median(times["SGD"])
    for name, found in times.items():
        middle = statistics.median(found)
        row = {"milliseconds": middle, "least": min(found), "of_sgd": middle / plain, "rounds": len(found)}
        append_row(arguments.output, {"kind": "step", "method": name} | row | settings)


if __name__ == "__main__":
    main()
