"""All methods by name, the row of one, and the table of many."""

import statistics
import time
from collections.abc import Callable

import torch
from common import Row
from gpu import cifar
from pruning import bic, dense, dpf, dropout, dsr, ensemble, sparse_momentum, swag
from pruning.training import Fitted, Problem, probabilities

METHODS: dict[str, Callable[[Problem, int], Fitted]] = {
    "dense": dense.fit,
    "DPF": dpf.fit,
    "SM": sparse_momentum.fit,
    "DSR": dsr.fit,
    "BNN_BIC": bic.fit,
    "MC dropout": dropout.fit,
    "deep ensemble": ensemble.fit,
    "SWAG": swag.fit,
}
OURS = {
    "average": "ours, average over sparse draws",
    "refreshed": "the same, statistics anew",
    "anneal": "ours, selected and refitted",
    "whole": "ours, average over whole draws",
    "stiff average": "ours under a stiffer prior, average",
    "stiff anneal": "ours under a stiffer prior, refitted",
}
TWO_DROPS, ONE_DROP = (0.5, 0.75), (0.75,)  # of the learning rate: the paper's, and that of our runs
DENSE = ("dense", "MC dropout", "deep ensemble", "SWAG")  # which keep all weights, whatever the share


def row_of(name: str, problem: Problem, seed: int, data: cifar.Data) -> Row:
    """What a method keeps, how well it predicts, and what it costs.

    ``seconds_an_epoch`` is of one training; ``state_mib`` is the memory that one keeps between two steps, the images apart;
    ``cpu_seconds`` are of all trainings and the prediction.

    Raises:
        OutOfTimeError: at the deadline, after saving what was on its way.
    """
    if problem.train[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
    fitted = METHODS[name](problem, seed)
    trained = fitted.trainings
    row: Row = {"kept": fitted.kept, "num_trainings": len(trained), "note": fitted.note}
    row["seconds_an_epoch"] = sum(one.seconds for one in trained) / (len(trained) * problem.recipe.epochs)
    row["state_mib"] = max(one.state_bytes() for one in trained) / 2**20
    if problem.train[0].is_cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    begun = time.process_time()
    images = data.test[0] if data.unfamiliar is None else torch.cat([data.test[0], data.unfamiliar])
    row |= cifar.measures(data, probabilities(problem, fitted, images).cpu().numpy())
    row["cpu_seconds"] = round(sum(one.cpu_seconds for one in trained) + time.process_time() - begun, 1)
    return row


def table(rows: list[Row]) -> str:
    """Means over seeds, standard deviations in brackets, of the rows of one network at each of the rates."""
    quality = {"kept": (100, 2), "accuracy": (100, 2), "nll": (1, 4), "ece": (1, 4), "js_distance": (1, 2)}
    costs = {"seconds_an_epoch": (1, 3), "num_trainings": (1, 0), "state_mib": (1, 2), "cpu_seconds": (1, 0)}
    heads = ["", "seeds", "kept, %", "accuracy, %", "NLL", "ECE", "JS-distance"]
    heads += ["seconds an epoch", "trainings", "state, MiB", "CPU seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    cases = [(name, drops) for name in [*OURS, *METHODS] for drops in (named(TWO_DROPS), named(ONE_DROP))]
    for predictor, drops in cases:
        key = {"kind": "predicted", "predictor": predictor, "drops": drops}
        own = [row for row in rows if all(row.get(k) == value for k, value in key.items())]
        if own:
            cells = [_mean_sd(own, name, *how) for name, how in quality.items()]
            cells += [_mean_sd(own, name, *how).split(" ")[0] for name, how in costs.items()]
            name = OURS.get(predictor, predictor + ", rates as ours" * (drops == named(ONE_DROP)))
            lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def named(drops: tuple[float, ...]) -> str:
    """In a row."""
    return ", ".join(map(str, drops))


def _mean_sd(rows: list[Row], name: str, factor: float, digits: int) -> str:
    values = [factor * row[name] for row in rows if row.get(name) is not None]
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
