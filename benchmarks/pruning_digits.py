"""Pruned, dense and averaged networks for scikit-learn's digits under one recipe, ours among them; no download.

    python benchmarks/pruning_digits.py                     all that is missing of three seeds, 13 minutes
    python benchmarks/pruning_digits.py --more              a stiffer prior for ours, our rates for others: 7 more
    python benchmarks/pruning_digits.py --methods DPF ours --seeds 1
    python benchmarks/pruning_digits.py --table             benchmarks/results/pruning_digits.md
    python benchmarks/pruning_digits.py --smoke --output rows.jsonl

600 of the 1,797 digits to learn from, the same for all seeds, 1,197 to predict; ResNet-8 of width 8 with BatchNorm (19,810
parameters), a tenth of them kept, 100 epochs of batches of 50, no augmentation. The learning rate is divided by ten at 1/2
and 3/4 of the run, as in the paper, of our runs at 3/4 alone, and with ``--more`` so too for five of the others.
JS-distance: between entropies for these digits and for the same ones turned by a quarter. It shows that the methods run and
what they cost; a tenth of a network for an easy problem says little about which is best, and 1,197 digits have a standard
error of 0.4 points of accuracy.
"""

import argparse
import time
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Row, append_row, is_done, read_rows, seeds
from gpu import cifar
from pruning.methods import METHODS, ONE_DROP, TWO_DROPS, named, row_of, table
from pruning.training import Problem, Recipe
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import pyro_sparse as ps

OUTPUT = RESULTS / "pruning_digits.jsonl"
KEEP, BATCH, RATE, DECAY = 0.1, 50, 0.1, 5e-4
BOTH_RATES = ("dense", "DPF", "SM", "DSR", "BNN_BIC")  # that are also trained at the rates of our runs


def digits() -> cifar.Data:
    """Images (rows, 1, 8, 8) in 0..1."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, train_size=600, random_state=0, stratify=labels)
    x, x_new = (torch.as_tensor(part).float().reshape(-1, 1, 8, 8) / 16 for part in parts[:2])
    y, y_new = (torch.as_tensor(part) for part in parts[2:])
    return cifar.Data((x, y), (x_new, y_new), x_new.rot90(1, (2, 3)).contiguous(), "digits")


def network(seed: int) -> nn.Module:
    """With fresh weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return ps.resnet(8, width=8, in_channels=1)


def ours(seed: int, data: cifar.Data, epochs: int, stiff: bool = False) -> dict[str, Row]:
    """The row of the average and of the refitted network, from one run; ``stiff``: at the paper's probability of the slab."""
    slab = (DECAY * len(data.train[0])) ** -0.5
    prior = ps.SpikeSlab(1e-9, 0.002 * slab, slab, 0.5 * slab) if stiff else None
    sparse = ps.sparsify(network(seed), prior)

    def model(images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = sparse(images)
        with pyro.plate("data", len(data.train[0]), subsample_size=len(images)):
            return pyro.sample("label", dist.Categorical(logits=logits), obs=labels)

    schedule = ps.PriorAnnealing.images(len(data.train[0]) // BATCH, epochs)
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        run = ps.anneal(model, data.train, schedule, BATCH, epochs // 4, seed=seed, keep=KEEP, progress=False)
        seconds = (time.perf_counter() - begun) / epochs
        structure = ps.select(run)
        fit = ps.refit(run, structure, progress=False)
    images = torch.cat([data.test[0], data.unfamiliar]) if data.unfamiliar is not None else data.test[0]
    draws = run.draws[0]
    # Position, momentum, gradient, noise and the draws, in single precision.
    state = 4 * (4 + len(draws)) * run.spec.layout.num_coordinates / 2**20
    shared: Row = {"num_trainings": 1, "seconds_an_epoch": seconds, "state_mib": state}
    kept = float(run.spec.layout.parameters(run.spec.layout.included(draws[0])).ne(0).double().mean())
    average = shared | {"kept": kept, "note": f"{len(draws)} draws"}
    average |= cifar.measures(data, ps.predict(run, images, sparse=True)["mean"].values)
    one = float(run.spec.layout.parameters(structure.kept(run.positions[0])).double().mean())
    refitted = shared | {"kept": one, "note": ""} | cifar.measures(data, ps.predict(fit, images)["mean"].values)
    prefix = "stiff " * stiff
    return {prefix + "average": average, prefix + "anneal": refitted}


def run(
    method: str, seed: int, drops: tuple[float, ...], data: cifar.Data, epochs: int, folder: Path | None, output: Path
) -> None:
    """The rows of one method, seed and rates, unless the output has them."""
    own = {"ours": ["average", "anneal"], "stiff": ["stiff average", "stiff anneal"]}
    names = own.get(method, [method])
    keys = [
        {"kind": "predicted", "predictor": name, "seed": seed, "epochs": epochs, "drops": named(drops)}
        for name in names
    ]
    if all(is_done(output, key) for key in keys):
        return
    begun = time.process_time()
    if method in own:
        found = ours(seed, data, epochs, method == "stiff")
    else:
        recipe = Recipe(epochs, BATCH, RATE, drops, weight_decay=DECAY)
        problem = Problem(network, lambda net, images: net(images), data.train, None, recipe, KEEP, folder)
        found = {method: row_of(method, problem, seed, data)}
    spent = {"cpu_seconds": round(time.process_time() - begun, 1)}
    for key in keys:
        append_row(output, key | spent | found[key["predictor"]])


def cases(methods: list[str], more: bool) -> list[tuple[str, tuple[float, ...]]]:
    """Methods and their rates; "stiff" are our own runs under a stiffer prior."""
    usual = [(method, ONE_DROP if method == "ours" else TWO_DROPS) for method in methods]
    others = [("stiff", ONE_DROP)] * ("ours" in methods)
    others += [(method, ONE_DROP) for method in methods if method in BOTH_RATES]
    return usual + others * more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=["ours", *METHODS], default=["ours", *METHODS])
    parser.add_argument("--more", action="store_true", help="rates of our runs for others, a stiffer prior for ours")
    parser.add_argument("--seeds", type=seeds, default=[1, 2, 3], help="such as 1-3")
    parser.add_argument("--table", action="store_true", help="only write the table of what is there")
    parser.add_argument("--smoke", action="store_true", help="12 epochs, one seed")
    parser.add_argument("--folder", type=Path, help="for trainings, which a stopped command then need not repeat")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = digits()
    if arguments.smoke and arguments.output == OUTPUT:
        parser.error("--output must name another file for the short runs of --smoke")
    epochs = 12 if arguments.smoke else 100
    for seed in [] if arguments.table else arguments.seeds[: 1 if arguments.smoke else None]:
        for method, drops in cases(arguments.methods, arguments.more):
            run(method, seed, drops, data, epochs, arguments.folder, arguments.output)
    text = table([row for row in read_rows(arguments.output) if row["epochs"] == epochs])
    arguments.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
