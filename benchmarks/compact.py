"""What is left of a convolutional network without its dead channels: size and time on a CPU, one thread.

    python benchmarks/compact.py          ResNet-8 on scikit-learn's digits at four shares: some three minutes

Weights are pruned one by one, so that channels go only where all that reads or writes them has gone. Quoted are parameters,
bytes of the ``state_dict`` and the median time of a batch of 64 images, of ``fit.module()`` (zeros in place) and
``fit.compact()``.
"""

import argparse
import io
import statistics
import time
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Row, append_row
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_sparse as ps

BATCH, ROUNDS = 50, 40


def figures(net: nn.Module, images: Tensor) -> Row:
    """Of one network."""
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    times = []
    with torch.no_grad():
        for number in range(ROUNDS + 3):
            begun = time.perf_counter()
            net(images)
            times.append(1e3 * (time.perf_counter() - begun) * (number >= 3))
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return {"parameters": parameters, "bytes": file.tell(), "milliseconds": statistics.median(times[3:])}


def fitted(keep: float, epochs: int, x: Tensor, y: Tensor) -> ps.Fit:
    """A residual network at a share of its weights."""
    torch.manual_seed(0)
    net = ps.sparsify(ps.resnet(8, in_channels=1))

    def model(images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = net(images)
        with pyro.plate("data", len(x), subsample_size=len(images)):
            return pyro.sample("label", dist.Categorical(logits=logits), obs=labels)

    schedule = ps.PriorAnnealing.images(len(x) // BATCH, epochs)
    run = ps.anneal(model, (x, y), schedule, BATCH, num_draws=1, keep=keep, progress=False)
    return ps.refit(run, ps.select(run), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.05, 0.02, 0.01])
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS / "compact.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    images, labels = load_digits(return_X_y=True)
    x, y = torch.as_tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.as_tensor(labels)
    for keep in arguments.shares:
        fit = fitted(keep, arguments.epochs, x[:1200], y[:1200])
        module, small = fit.module(), fit.compact()
        with torch.no_grad():
            right = module(x[1200:])
            off = float((right - small(x[1200:])).abs().max() / right.abs().max())
        row = {
            "keep": keep,
            "kept": fit.structure.num_kept,
            "accuracy": float((right.argmax(1) == y[1200:]).float().mean()),
        }
        parts = {"module": figures(module, x[:64]), "compact": figures(small, x[:64])}
        append_row(arguments.output, row | {"epochs": arguments.epochs, "largest_difference": off} | parts)


if __name__ == "__main__":
    main()
