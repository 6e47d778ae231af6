"""What the paper compares its image networks with, and what a user would try, under the recipe of our own runs.

    python benchmarks/gpu/cifar_rivals.py --runs 20:0.1:1 --data DIR --folder RUNS --minutes 6 --output "$OUT/gpu_rivals.jsonl"
    python benchmarks/gpu/cifar_rivals.py --runs 20:0.2:1,32:0.1:1-3 --methods DPF SM --data DIR --folder RUNS
    python benchmarks/gpu/cifar_rivals.py --smoke --device cpu                        half a minute, random images
    python benchmarks/gpu/cifar_rivals.py --device cpu --data DIR --rows 5000 --runs 8:0.1:1 --width 8 --epochs 36

``--runs``, ``--data`` and what a machine without a network needs are as of gpu/cifar.py, whose images, augmentation, networks,
batches and metrics all methods share. The learning rate is divided by ten at 1/2 and 3/4 of the run, as in the paper;
``--drops 0.75`` are the rates of our own runs. Each method is a file in benchmarks/pruning, which says what it does. One JSON
line a method, network and share; methods that keep all weights run once a network, whatever the share. On a card forward
and backward are one CUDA graph. When ``--minutes`` are over the training is saved to ``--folder``, and the same command
goes on with it; what ``--output`` holds already is left out.
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, Row, append_row, is_done, read_rows
from gpu import cifar
from pruning.methods import DENSE, METHODS, TWO_DROPS, named, row_of, table
from pruning.training import OutOfTimeError, Problem, Recipe


def problem_of(
    task: cifar.Task, drops: tuple[float, ...], data: cifar.Data, folder: Path | None, deadline: float
) -> Problem:
    """The network, the images and the recipe of one of our runs."""

    def network(seed: int) -> nn.Module:
        return cifar.network(task.depth, task.width, seed).to(data.train[0].device)

    def logits(net: nn.Module, images: Tensor) -> Tensor:
        return cifar.logits_of(net, images, task.precision)

    recipe = Recipe(task.epochs, task.batch, cifar.RATE, drops, weight_decay=cifar.DECAY)
    about = dict(task.about(), setting="pruning")
    del about["seed"]
    own = None if folder is None else folder / "-".join(str(value) for value in about.values())
    return Problem(network, logits, data.train, task.augment, recipe, task.keep, own, deadline)


def tasks_of(runs: list[tuple[int, float, int]], methods: list[str], shared: Row) -> list[cifar.Task]:
    """One a method, network, share and seed; those that keep all weights once for all shares."""
    tasks = [
        cifar.Task(setting=method, depth=depth, keep=1.0 if method in DENSE else keep, seed=seed, **shared)
        for depth, keep, seed in runs
        for method in methods
    ]
    return list(dict.fromkeys(tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=cifar.parsed, help="depth:share:seeds, several after commas; 20:0.1:1, or 8:0.1:1"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epochs", type=int, help="300, in a smoke test 12")
    parser.add_argument("--drops", type=float, nargs="+", default=TWO_DROPS, help="shares of the run")
    parser.add_argument("--precision", choices=cifar.PRECISIONS, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--no-erasing", action="store_true", help="crops and flips alone")
    parser.add_argument("--data", type=Path, help="the folder of the images; random ones in a smoke test without it")
    parser.add_argument("--rows", type=int, help="of the training images; all where left out")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gpu_rivals")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of the whole command, but for a prediction on its way"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="ResNet-8 of width 8, 300 random images, 12 epochs")
    parser.add_argument("--width", type=int, help="16, in a smoke test 8")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_rivals.jsonl")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < math.inf:
        parser.error(f"--minutes must be > 0 and finite, got {arguments.minutes}")
    if arguments.data is None and not arguments.smoke:
        parser.error("--data must name the folder of the images, unless --smoke takes random ones")
    deadline = time.monotonic() + 60 * arguments.minutes
    smoke, device = arguments.smoke, arguments.device
    on_card = device.startswith("cuda")
    if on_card:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    precision = arguments.precision or ("bfloat16" if on_card else "float32")
    cifar.allow(precision)
    rows = arguments.rows
    data = cifar.load(arguments.data, rows, device) if arguments.data else cifar.random_data(rows or 300, device)
    shared: dict[str, Any] = {
        "epochs": arguments.epochs or (12 if smoke else 300),
        "width": arguments.width or (8 if smoke else 16),
        "precision": precision,
        "erase_prob": 0.0 if arguments.no_erasing else 0.5,
        "batch": min(128, len(data.train[0]) // 5),
    }
    runs = arguments.runs or [(8 if smoke else 20, 0.1, 1)]
    tasks = tasks_of(runs, arguments.methods, shared)
    card = torch.cuda.get_device_name(device) if on_card else "cpu"
    drops = tuple(arguments.drops)
    about = {"card": card, "smoke": smoke, "deterministic": True, "drops": named(drops)} | data.about()
    for name, right in {
        "--epochs must be >= 1": shared["epochs"] >= 1,
        "--runs must have shares in (0, 1]": all(0 < keep <= 1 for _, keep, _ in runs),
        "--rows must leave five batches": shared["batch"] >= 1,
    }.items():
        if not right:
            parser.error(name)
    for task in tasks:
        key = about | task.about() | {"kind": "predicted", "predictor": task.setting}
        if not is_done(arguments.output, key):
            append_row(
                arguments.output, key | made(task, drops, data, arguments.folder, deadline), "torchvision", "numpy"
            )
    for depth, keep in dict.fromkeys((depth, keep) for depth, keep, _ in runs):
        alike = (about | shared | {"depth": depth}).items()
        rows = [row for row in read_rows(arguments.output) if all(row.get(name) == value for name, value in alike)]
        print(f"ResNet-{depth}, {100 * keep:g} %\n\n{table([row for row in rows if row['keep'] in (keep, 1.0)])}")


def made(task: cifar.Task, drops: tuple[float, ...], data: cifar.Data, folder: Path, deadline: float) -> Row:
    """The row of one method; a fault of one costs no other."""
    if time.monotonic() > deadline:
        return {"kind": "left", "reason": "time is over"}
    begun = time.perf_counter()
    try:
        row = row_of(task.setting, problem_of(task, drops, data, folder, deadline), task.seed, data)
    except OutOfTimeError as stop:
        row = {"kind": "stopped", "reason": str(stop)}
    except Exception as error:
        row = {"kind": "failed", "error": cifar.said(error)}
    return row | {"seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    main()
