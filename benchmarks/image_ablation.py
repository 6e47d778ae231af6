"""How a sparse residual network is best trained: one part of the recipe changed at a time, on 5,000 real images, on a CPU.

    python benchmarks/image_ablation.py --data DIR                      all that is missing, about an hour on one core
    python benchmarks/image_ablation.py --data DIR --variants default "rate 0.01 from 1/2" --seeds 1-2
    python benchmarks/image_ablation.py --table                         benchmarks/results/image_ablation.md
    python benchmarks/image_ablation.py --smoke --output rows.jsonl     seconds, random images

``--data``, or else the variable PYRO_SPARSE_DATA, names the folder of CIFAR-10 that gpu/cifar.py reads; 5,000 of its test
images are predicted. ResNet-8 of width 8, batches of 128, a tenth of the weights kept, ``PriorAnnealing.images`` of 36
epochs, crops and flips. One row a variant and seed: of the average over sparse draws, of the selected network refitted for
three epochs, of the average over whole draws, and (``refreshed``) of the first with running statistics of BatchNorm of its
sparse networks, which is a variant of its own that every run has.
"""

import argparse
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Row, append_row, is_done, read_rows, seeds
from gpu import cifar
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference.keeping import LEAST_PROB, SLAB_DECAY

OUTPUT = RESULTS / "image_ablation.jsonl"
TRAIN_ROWS, TEST_ROWS, KEEP, REFIT_EPOCHS = 5_000, 5_000, 0.1, 3
PREDICTORS = {
    "average": "average of sparse draws",
    "refreshed": "the same, statistics anew",
    "refit": "refitted network",
    "whole": "average of whole draws",
}

Schedule = ps.PriorAnnealing


def with_rate(schedule: Schedule, rate: Callable[[float], float]) -> Schedule:
    """The same with a learning rate that is a function of the share of the run that is over."""

    class Rated(Schedule):
        def at(self, step: int) -> ps.Controls:
            return super().at(step)._replace(learning_rate=rate(step / self.num_steps))

    return Rated(**asdict(schedule))


def stepwise(*ends: tuple[float, float]) -> Callable[[Schedule], Schedule]:
    """0.1 at first, then other rates from given shares of the run on."""
    return lambda schedule: with_rate(
        schedule, lambda share: ([cifar.RATE] + [rate for begin, rate in ends if share >= begin])[-1]
    )


def cosine(schedule: Schedule) -> Schedule:
    """From 0.1 to the 0.01 of the sampling phase, which it reaches where that begins."""
    low = cifar.RATE / 10

    def rate(share: float) -> float:
        return low + (cifar.RATE - low) * (1 + math.cos(math.pi * min(share / 0.75, 1.0))) / 2

    return with_rate(schedule, rate)


def warmed(schedule: Schedule) -> Schedule:
    """The rate raised from nothing over the first twentieth of the run."""
    return with_rate(
        schedule, lambda share: schedule.at(int(share * schedule.num_steps)).learning_rate * min(20 * share, 1)
    )


def phases(*shares: float) -> Callable[[Schedule], Schedule]:
    """Other shares of the run for train, power and spike; the rate still drops where it did."""

    def changed(schedule: Schedule) -> Schedule:
        train, power, spike = (round(share * schedule.num_steps) for share in shares)
        sample = schedule.num_steps - train - power - spike
        return replace(schedule, train_steps=train, power_steps=power, spike_steps=spike, sample_steps=sample)

    return changed


def stiff(num_rows: int) -> ps.SpikeSlab:
    """The prior that a share is aimed at with, but for the probability of the slab."""
    slab = (SLAB_DECAY * num_rows) ** -0.5
    return ps.SpikeSlab(LEAST_PROB, 0.002 * slab, slab, 0.5 * slab)


@dataclass(frozen=True)
class Variant:
    """What a run does otherwise.

    Attributes:
        schedule: of the default one.
        law: the prior of a number of rows, where it does not follow from the share.
        flat: whether biases and BatchNorm have a flat prior, so that of the layers' weights fewer are kept, as many in all.
    """

    schedule: Callable[[Schedule], Schedule] = lambda schedule: schedule
    setting: str = "keep"
    erase_prob: float = 0.0
    law: Callable[[int], ps.SpikeSlab | None] = lambda num_rows: None
    flat: bool = False


VARIANTS = {
    "default": Variant(),
    "dense, SGD": Variant(setting="dense"),
    "the paper's rates: 0.01 from 1/2, 0.001 from 3/4": Variant(stepwise((1 / 2, 0.01), (3 / 4, 0.001))),
    "rate 0.01 from 1/2": Variant(stepwise((1 / 2, 0.01))),
    "rate 0.001 from 3/4": Variant(stepwise((3 / 4, 0.001))),
    "flat prior on biases and BatchNorm": Variant(flat=True),
    "phases 0.3, 0.35, 0.13, 0.22": Variant(phases(0.3, 0.35, 0.13)),
    "slab_prob 1e-9": Variant(law=stiff),
    "sampling at temperature 0.1": Variant(lambda schedule: replace(schedule, sample_temperature=0.1)),
    "sampling at temperature 1": Variant(lambda schedule: replace(schedule, sample_temperature=1.0)),
    "erasing": Variant(erase_prob=0.5),
    "rate warmed up": Variant(warmed),
    "cosine rate": Variant(cosine),
}


def is_layers(name: str, parameter: Tensor) -> bool:
    """Whether it is a weight of a convolution or a linear layer."""
    return parameter.dim() > 1


def model_of(task: cifar.Task, variant: Variant, num_rows: int) -> tuple[Callable[..., Any], float]:
    """The Pyro model, and the share of the weights with a prior that leaves ``task.keep`` of all."""
    net = cifar.network(task.depth, task.width, task.seed)
    law = cifar.LAW if variant.setting == "dense" else variant.law(num_rows)
    sparse = ps.sparsify(net, law, is_layers) if variant.flat else ps.sparsify(net, law)
    sizes = {name: part.numel() for name, part in net.named_parameters()}
    total, chosen = sum(sizes.values()), sum(sizes[name] for name in sparse.sparse_names)

    def model(images: Tensor, labels: Tensor | None = None) -> Any:
        logits = cifar.logits_of(sparse, images, task.precision)
        with pyro.plate("images", num_rows, subsample_size=len(images)):
            return pyro.sample("label", dist.Categorical(logits=logits), obs=labels)

    return model, (task.keep * total - (total - chosen)) / chosen


def fitted(task: cifar.Task, variant: Variant, data: cifar.Data) -> ps.Run:
    """The run."""
    num_rows = len(data.train[0])
    model, share = model_of(task, variant, num_rows)
    schedule = variant.schedule(task.schedule(num_rows))
    num_draws, keep = (1, None) if variant.setting == "dense" else (task.epochs // 4, share)
    return ps.anneal(
        *(model, data.train, schedule, task.batch, num_draws),
        **{"seed": task.seed, "augment": task.augment, "keep": keep, "progress": False},
    )


def refitted(run: ps.Run, images: Tensor, steps: int) -> tuple[np.ndarray[Any, Any], float]:
    """Probabilities of the selected network, and the share of all parameters that it keeps."""
    last, structure = run.schedule.at(run.schedule.num_steps - 1), ps.select(run)
    short = Schedule(steps, 0, 0, 0, learning_rate=last.learning_rate, friction=last.friction)
    fit = ps.refit(run, structure, schedule=short, progress=False)
    kept = run.spec.layout.parameters(structure.kept(run.positions[0]))
    return ps.predict(fit, images)["mean"].values, float(kept.double().mean())


def predictions(run: ps.Run, task: cifar.Task, data: cifar.Data) -> Row:
    """Accuracy, NLL, ECE and share kept of each predictor."""
    layout, images, row = run.spec.layout, data.test[0], {}

    def add(name: str, probs: np.ndarray[Any, Any], kept: float) -> None:
        found = cifar.measures(data, probs)
        row[name] = {key: round(found[key], 5) for key in ("accuracy", "nll", "ece")} | {"kept": round(kept, 5)}

    if task.setting == "dense":
        add("whole", cifar.probabilities(run, run.positions[0], images), 1.0)
        return row
    share = float(layout.parameters(layout.included(run.draws[0])).ne(0).double().mean())
    add("average", ps.predict(run, images, sparse=True)["mean"].values, share)
    add("refreshed", cifar.refreshed(task, run, data.train[0], images), share)
    add("refit", *refitted(run, images, REFIT_EPOCHS * (len(data.train[0]) // task.batch)))
    add("whole", ps.predict(run, images)["mean"].values, 1.0)
    return row


def run(name: str, task: cifar.Task, data: cifar.Data, output: Path) -> None:
    """One row, unless the output has it."""
    rows = {"train_rows": len(data.train[0]), "test_rows": len(data.test[0])}
    key = {"variant": name, "seed": task.seed, "epochs": task.epochs, "width": task.width, "data": data.source} | rows
    if is_done(output, key):
        return
    begun = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = fitted(task, VARIANTS[name], data)
        row: Row = {"loss": float(made.history["loss"][0, -1])}
        row |= {"anneal_seconds": round(time.process_time() - begun, 1)} | predictions(made, task, data)
    row["cpu_seconds"] = round(time.process_time() - begun, 1)
    laws = {(float(law.spike_scale), float(law.slab_prob)) for law in made.priors.values()}
    row |= {"spike_scale": max(scale for scale, _ in laws), "slab_prob": max(p for _, p in laws)} if laws else {}
    told = sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})
    append_row(output, key | row | {"warnings": told[:3]})


def table(rows: list[Row]) -> str:
    """Means over seeds, of runs of each length."""
    parts = []
    for epochs in sorted({row["epochs"] for row in rows}):
        parts += [f"**{epochs} epochs**", "", *_lines([row for row in rows if row["epochs"] == epochs]), ""]
    return "\n".join(parts)


def _lines(rows: list[Row]) -> list[str]:
    """Of runs of one length; differences are of the seeds that the default has too."""
    head = [f"{text}: accuracy, % / NLL / ECE" for text in PREDICTORS.values()]
    lines = [f"| | seeds | {' | '.join(head)} | more accurate than the default by | kept, % | CPU seconds |"]
    lines.append("|---" * 9 + "|")
    usual = {row["seed"]: row for row in rows if row["variant"] == "default"}
    for variant in VARIANTS:
        own = [row for row in rows if row["variant"] == variant]
        if own:
            cells = [_cell(own, name) for name in PREDICTORS]
            kept = np.mean([100 * row.get("average", row["whole"])["kept"] for row in own])
            seconds = np.mean([row["cpu_seconds"] for row in own])
            cells += [_gain(own, usual), f"{kept:.1f}", f"{seconds:.0f}"]
            lines.append(f"| {variant} | {len(own)} | {' | '.join(cells)} |")
    return lines


def _cell(rows: list[Row], predictor: str) -> str:
    if predictor not in rows[0]:
        return ""
    accuracy, nll, ece = (np.mean([row[predictor][key] for row in rows]) for key in ("accuracy", "nll", "ece"))
    return f"{100 * accuracy:.1f} / {nll:.3f} / {ece:.3f}"


def _gain(rows: list[Row], usual: dict[int, Row]) -> str:
    """Points, of each seed, averaged over the refreshed average and the refitted network."""
    if "refit" not in rows[0]:
        return ""
    names = ("refreshed", "refit")
    gains = [
        100 * np.mean([row[name]["accuracy"] - usual[row["seed"]][name]["accuracy"] for name in names])
        for row in rows
        if row["seed"] in usual
    ]
    return ", ".join(f"{gain:+.1f}" for gain in gains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=seeds, default=[1], help="such as 1-2")
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("PYRO_SPARSE_DATA"), help="the folder of the images"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="ResNet-8 of width 8, 300 random images, 12 epochs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    if arguments.data is None and not (arguments.smoke or arguments.table):
        parser.error("--data must name the folder of the images, unless --smoke takes random ones")
    torch.set_num_threads(1)
    if not arguments.table:
        run_all(arguments)
    text = table(read_rows(arguments.output))
    arguments.output.with_suffix(".md").write_text(text)
    print(text)


def run_all(arguments: argparse.Namespace) -> None:
    """What is missing, seed by seed."""
    smoke = arguments.smoke
    data = cifar.random_data(300, "cpu") if smoke else cifar.load(Path(arguments.data), None, "cpu")
    train, test = (tuple(part[:rows] for part in of) for of, rows in ((data.train, TRAIN_ROWS), (data.test, TEST_ROWS)))
    data = cifar.Data(train, test, None, data.source)
    shared = {"depth": 8, "keep": KEEP, "precision": "float32", "batch": 60 if smoke else 128}
    shared |= {"epochs": 12, "width": 8} if smoke else {"epochs": arguments.epochs, "width": 8}
    for seed in arguments.seeds:
        for name in arguments.variants:
            variant = VARIANTS[name]
            run(
                name,
                cifar.Task(variant.setting, seed=seed, erase_prob=variant.erase_prob, **shared),
                data,
                arguments.output,
            )


if __name__ == "__main__":
    main()
