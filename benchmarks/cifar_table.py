"""The paper's two image tables with our rows beside its own, from what gpu/cifar.py and gpu/cifar_rivals.py wrote:
benchmarks/results/cifar.md.

    python benchmarks/cifar_table.py                      of benchmarks/results/gpu_cifar*.jsonl
    python benchmarks/cifar_table.py --seeds 1-3          and what is missing of three runs each

Means over seeds, standard deviations in brackets where there are several. Runs that were not the paper's 300 epochs, not in
bfloat16, without erasing or on fewer images have lines of their own, which say so. What is missing is listed with the commands
that make it.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from common import RESULTS, Row, read_rows, seeds
from pruning.methods import DENSE

NETWORKS = ((20, 0.2), (20, 0.1), (32, 0.1), (32, 0.05))
OURS = {
    "average": "average over sparse draws",
    "refreshed": "average over sparse draws, statistics anew",
    "anneal": "selected and refitted",
    "whole": "average over whole draws",
}
COUNTERPARTS = {"average": "BNN_average", "anneal": "BNN_anneal", "dense": "dense"}
PRUNED = ("BNN_BIC", "SM", "DSR", "DPF")
PLAIN = {"width": 16, "epochs": 300, "precision": "bfloat16", "erase_prob": 0.5, "train_rows": 50_000}
PLAIN |= {"svhn_rows": 26_032}
NAMED = {
    "width": "width {}",
    "epochs": "{} epochs",
    "precision": "{}",
    "erase_prob": "erasing {}",
    "train_rows": "{} images",
    "svhn_rows": "{} of SVHN",
}

# Accuracy and kept ratio of the paper's table 2, in per cent, by network in the order of NETWORKS.
ACCURACY = {
    "dense": ("92.93", "92.93", "93.76", "93.76"),
    "BNN_average": ("92.53 [19.85]", "91.65 [9.88]", "93.12 [9.99]", "91.30 [4.77]"),
    "BNN_anneal": ("92.30 [19.80]", "91.28 [9.95]", "92.63 [9.97]", "91.17 [4.88]"),
    "BNN_BIC": ("92.27", "91.27", "92.74", "91.21"),
    "SM": ("91.54", "89.76", "91.54", "88.68"),
    "DSR": ("91.78", "87.88", "91.41", "84.12"),
    "DPF": ("92.17", "90.88", "92.42", "90.94"),
}
# NLL, JS-distance and ECE of its table of calibration.
CALIBRATION = {
    "dense": (("0.2276", "7.91", "0.0263"),) * 2 + (("0.2042", "6.77", "0.0261"),) * 2,
    "BNN_average": (
        ("0.2323", "7.70", "0.0173"),
        ("0.2528", "9.96", "0.0113"),
        ("0.2116", "9.45", "0.0132"),
        ("0.2587", "7.01", "0.0100"),
    ),
    "BNN_anneal": (
        ("0.2441", "6.44", "0.0233"),
        ("0.2618", "10.13", "0.0175"),
        ("0.2218", "8.54", "0.0192"),
        ("0.2676", "6.84", "0.0149"),
    ),
    "DPF": (
        ("0.2874", "7.73", "0.0391"),
        ("0.2833", "7.57", "0.0294"),
        ("0.2677", "7.87", "0.0364"),
        ("0.2921", "6.40", "0.0276"),
    ),
}


def measured(folder: Path) -> list[Row]:
    """All rows but those of smoke tests; of a figure that was measured twice the last."""
    paths = [path for stem in ("gpu_cifar", "gpu_rivals") for path in sorted(folder.glob(f"{stem}*.jsonl"))]
    rows = [row for path in paths for row in read_rows(path) if not row["smoke"]]
    names = ("kind", "card", "setting", "depth", "keep", "seed", "predictor", "method", "batch", "drops", *PLAIN)
    return list({tuple(row.get(name) for name in names): row for row in rows}.values())


def mean_sd(rows: Iterable[Row], name: str, digits: int, factor: float = 1.0) -> str:
    """Mean (sd) over rows; a dash where none has it."""
    values = [factor * row[name] for row in rows if row.get(name) is not None]
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def departures(row: Row) -> str:
    """What of a run is not as in the paper."""
    parts = [
        NAMED[name].format(row[name]) for name, usual in PLAIN.items() if name != "svhn_rows" and row[name] != usual
    ]
    parts += ["rates as ours"] * (row.get("drops") == "0.75")
    return ", ".join(parts)


def lines_of(rows: list[Row], setting: str, predictor: str) -> dict[str, list[list[Row]]]:
    """By what departs from the paper the rows of each network; dense ones stand under every share."""
    some = [
        row
        for row in rows
        if (row["kind"], row.get("setting"), row.get("predictor")) == ("predicted", setting, predictor)
    ]
    found: dict[str, list[list[Row]]] = {}
    for how in sorted({departures(row) for row in some}):
        alike = [row for row in some if departures(row) == how]
        found[how] = [
            [row for row in alike if row["depth"] == depth and (setting in DENSE or row["keep"] == keep)]
            for depth, keep in NETWORKS
        ]
    return found


def table(head: str, lines: Iterable[tuple[str, Iterable[str]]]) -> str:
    names = [f"ResNet-{depth}, {100 * keep:g} %" for depth, keep in NETWORKS]
    text = [f"| {head} | {' | '.join(names)} |", "|---" * 5 + "|"]
    return "\n".join(text + [f"| {name} | {' | '.join(cells)} |" for name, cells in lines])


def accuracy_cell(rows: list[Row]) -> str:
    kept = mean_sd(rows, "kept", 2, 100.0)
    return "-" if not rows else mean_sd(rows, "accuracy", 2, 100.0) + f" [{kept}]" * (not kept.startswith("100.00"))


def calibration_cell(rows: list[Row]) -> str:
    digits = {"nll": 4, "js_distance": 2, "ece": 4}
    return " / ".join(mean_sd(rows, name, number) for name, number in digits.items()) if rows else "-"


def beside(
    rows: list[Row], cell: Callable[[list[Row]], str], paper: dict[str, tuple[str, ...]]
) -> list[tuple[str, Iterable[str]]]:
    """What was measured, each line before its counterpart of the paper, then the paper's others."""
    lines: list[tuple[str, Iterable[str]]] = []
    left = dict(paper)
    for predictor in ("dense", *OURS, *PRUNED, *DENSE[1:]):
        for how, cells in lines_of(rows, "keep" if predictor in OURS else predictor, predictor).items():
            name = OURS.get(predictor, predictor) + (f", {how}" if how else "")
            lines.append((f"**{name}**", [cell(some) for some in cells]))
        counterpart = COUNTERPARTS.get(predictor, predictor)
        if counterpart in left:
            lines.append((f"{counterpart}, paper", left.pop(counterpart)))
    return lines


def readings(rows: list[Row]) -> list[tuple[str, Iterable[str]]]:
    """Share kept and accuracy at the paper's own priors, by how its variances are read."""
    named = {"paper-text": "as the text has them", "paper-scripts": "as the scripts have them"}
    lines: list[tuple[str, Iterable[str]]] = [
        (f"{text}, {OURS[predictor]}" + (f", {how}" if how else ""), [accuracy_cell(some) for some in cells])
        for setting, text in named.items()
        for predictor in ("average", "anneal")
        for how, cells in lines_of(rows, setting, predictor).items()
    ]
    return [*lines, *((f"{name}, paper", ACCURACY[name]) for name in ("BNN_average", "BNN_anneal"))]


def costs(rows: list[Row]) -> str:
    """Of the rivals: seconds of an epoch of one training, trainings, memory."""
    head = ["", "card", "precision", "trainings", "seconds an epoch of each", "state of one, MiB", "peak, GiB"]
    text = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in (row for row in rows if row["kind"] == "predicted" and "num_trainings" in row):
        name = f"ResNet-{row['depth']}, {row['setting']}" + f", {100 * row['keep']:g} %" * (row["keep"] < 1)
        name += f", seed {row['seed']}" + f", {departures(row)}" * bool(departures(row))
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "-"
        figures = f"{row['num_trainings']} | {row['seconds_an_epoch']:.3f} | {row['state_mib']:.1f} | {peak}"
        text.append(f"| {name} | {row['card']} | {row['precision']} | {figures} |")
    return "\n".join(text)


def speeds(rows: list[Row]) -> str:
    text = ["| | card | precision | seconds an epoch | seconds until the first step |", "|---|---|---|---|---|"]
    for row in (row for row in rows if row["kind"] == "epoch"):
        name = f"ResNet-{row['depth']}, {row['method']}"
        figures = f"{row['seconds']:.3f} | {row['start_seconds']:.0f}"
        text.append(f"| {name} | {row['card']} | {row['precision']} | {figures} |")
    return "\n".join(text)


def missing(rows: list[Row], wanted: list[int]) -> list[str]:
    """Commands for what no full run is there of, one a setting."""
    wholes = [row for row in rows if row["kind"] == "predicted" and not departures(row)]
    commands = []
    for setting in ("keep", "dense", "paper-text", "paper-scripts", *PRUNED, *DENSE[1:]):
        rival = setting in PRUNED or setting in DENSE[1:]
        predictor = setting if rival or setting == "dense" else "anneal"
        networks = [(depth, 1.0) for depth in (20, 32)] if setting in DENSE else list(NETWORKS)
        there = {
            (row["depth"], row["keep"], row["seed"])
            for row in wholes
            if (row["setting"], row["predictor"]) == (setting, predictor)
        }
        left = [(d, k, s) for s in wanted for d, k in networks if (d, k, s) not in there]
        if left:
            runs = ",".join(f"{depth}:{keep:g}:{seed}" for depth, keep, seed in left)
            what = f'cifar_rivals.py --methods "{setting}"' if rival else f"cifar.py --setting {setting}"
            stages = "" if rival else " --stages run"
            commands.append(f"python benchmarks/gpu/{what} --runs {runs}{stages} --data DIR --folder RUNS")
    return commands


def report(rows: list[Row], wanted: list[int]) -> str:
    """The whole page."""
    predicted = [row for row in rows if row["kind"] == "predicted"]
    cards = ", ".join(sorted({row["card"] for row in rows})) or "no card yet"
    data = ", ".join(sorted({row["data"] for row in predicted})) or "none yet"
    out = sorted({row["svhn_rows"] for row in predicted if row["svhn_rows"] != PLAIN["svhn_rows"]})
    fewer = (
        f" The JS-distance is against {' or '.join(map(str, out))} images of SVHN, not all 26,032, where it reads higher."
        * bool(out)
    )
    parts = [
        f"CIFAR-10, mean (sd) over seeds; {cards}; images: {data}. The share kept, of all parameters, "
        f"those of BatchNorm and biases too, stands in square brackets, in per cent.{fewer}",
        "## Accuracy [kept], in per cent",
        table("", beside(rows, accuracy_cell, ACCURACY)),
        "## NLL / JS-distance / ECE",
        table("", beside(rows, calibration_cell, {n: tuple(map(" / ".join, c)) for n, c in CALIBRATION.items()})),
        "## The paper's own priors: accuracy [kept]",
        table("", readings(rows)),
        "## A step",
        speeds(rows),
        "## What the rivals cost",
        costs(rows),
    ]
    commands = missing(rows, wanted)
    if commands:
        parts += ["## Missing", "```sh\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=seeds, default=[1], help="that are wanted of each")
    arguments = parser.parse_args()
    text = report(measured(arguments.results), arguments.seeds)
    (arguments.results / "cifar.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
